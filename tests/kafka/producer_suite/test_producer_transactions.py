"""The producers' suite: visibility of messages, the result of prepare, time limits, interrupts."""

from __future__ import annotations

import _thread
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from producer_scene import ProducerScene, commit_one, prepare_and_commit

from dualwrite.errors import TransactionTimeoutError
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.state import Place, PreparedTxnState, TransactionStatus
from fixtures.pace import LIMIT

_TRANSACTION_TIMEOUT: Final = min(LIMIT / 20, 30.0)
"""Seconds: short, to wait for its end, and long enough for a slow machine to prepare before most of it is over."""
_PARTITIONS: Final = (2, 0, 0, 2, 1)
"""Of the messages of a transaction, in the order in which they are sent."""

_ENOUGH = 10_000
"""Rounds of sending: about a gigabyte, during which the interrupt must arrive unless the process ignores SIGINT."""


def test_the_producer_fulfils_its_protocol(scene: ProducerScene) -> None:
    """The producer has all methods and properties of the Protocol."""
    assert isinstance(scene.make(scene.new_name("id"), {}), TransactionalProducer)


# --- visibility -------------------------------------------------------------------------------------------------------


def test_messages_become_visible_at_the_commit(scene: ProducerScene) -> None:
    """Not while they are sent, nor after prepare."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic)
    producer.begin_transaction()
    for number in range(100):
        producer.send(topic, str(number))
    assert scene.values(topic) == []
    producer.prepare_transaction(timeout=LIMIT)
    assert scene.values(topic) == []
    producer.check_time_left()
    producer.commit_transaction(timeout=LIMIT)
    assert scene.values(topic) == [b"%d" % number for number in range(100)]
    assert not producer.must_be_replaced


def test_a_transaction_may_be_committed_without_being_prepared(scene: ProducerScene) -> None:
    """`commit_transaction` then waits for all acknowledgements."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    producer.begin_transaction()
    for number in range(100):
        producer.send(topic, str(number))
    producer.commit_transaction(timeout=LIMIT)
    assert scene.values(topic) == [b"%d" % number for number in range(100)]


def test_messages_of_an_aborted_transaction_are_not_visible(scene: ProducerScene) -> None:
    """Aborted while messages are in flight, and after prepare; the producer stays usable."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    producer.begin_transaction()
    for _ in range(2_000):
        producer.send(topic, b"x" * 1_000)
    producer.abort_transaction(timeout=LIMIT)
    producer.begin_transaction()
    producer.send(topic, b"prepared")
    producer.prepare_transaction(timeout=LIMIT)
    producer.abort_transaction(timeout=LIMIT)
    assert not producer.must_be_replaced
    commit_one(producer, topic, b"kept")
    assert scene.values(topic) == [b"kept"]


def test_messages_of_consecutive_transactions_are_in_order(scene: ProducerScene) -> None:
    """Each transaction begins while the markers of the one before may not be written yet."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic)
    for number in range(20):
        producer.begin_transaction()
        producer.send(topic, f"{number} a")
        producer.send(topic, f"{number} b")
        prepare_and_commit(producer)
    assert scene.values(topic) == [f"{n} {x}".encode() for n in range(20) for x in "ab"]


def test_an_empty_transaction_has_no_state_and_ends_either_way(scene: ProducerScene) -> None:
    """Nothing was sent, so no request to the coordinator is needed."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    for prepared in (True, False):
        for end in (producer.commit_transaction, producer.abort_transaction):
            producer.begin_transaction()
            if prepared:
                assert producer.prepare_transaction(timeout=LIMIT) is None
            end(timeout=LIMIT)
    assert not producer.must_be_replaced
    commit_one(producer, topic, b"v")
    assert scene.values(topic) == [b"v"]


# --- prepare ----------------------------------------------------------------------------------------------------------


def test_the_prepared_state_names_the_transaction_that_the_coordinator_describes(scene: ProducerScene) -> None:
    """Its text can be parsed, and gives the same state."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"v")
    state = producer.prepare_transaction(timeout=LIMIT)
    assert state is not None
    found = scene.describe(producer)
    assert found.status is TransactionStatus.ONGOING
    assert found.partitions == {(topic, 0)}
    start = None if scene.case.epoch_per_transaction else found.start_time_ms
    assert state == PreparedTxnState(found.producer_id, found.epoch, start)
    assert PreparedTxnState.parse(str(state)) == state
    producer.abort_transaction(timeout=LIMIT)


def test_every_transaction_has_its_own_state(scene: ProducerScene) -> None:
    """Whether it is committed or aborted."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    states = []
    for end in (producer.commit_transaction, producer.abort_transaction) * 3:
        producer.begin_transaction()
        producer.send(topic, b"v")
        states.append(producer.prepare_transaction(timeout=LIMIT))
        end(timeout=LIMIT)
    assert None not in states
    assert len(set(states)) == len(states)


def test_the_delivery_shows_where_the_messages_are(scene: ProducerScene) -> None:
    """`delivery`: each partition, or the topic's first message and the other partitions; None before `prepare_transaction`.

    The offsets are known: at its end a transaction gets one marker in each of its partitions.
    """
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, 3)
    offsets = Counter[int]()
    for end in (producer.commit_transaction, producer.abort_transaction) * 2:
        producer.begin_transaction()
        for partition in _PARTITIONS:
            producer.send(topic, b"v", partition=partition)
        assert producer.delivery is None, "before prepare_transaction()"
        producer.prepare_transaction(timeout=LIMIT)
        assert producer.delivery is not None
        assert producer.delivery.messages == len(_PARTITIONS)
        first, counts = _PARTITIONS[0], Counter(_PARTITIONS)
        others = tuple(sorted(counts.keys() - {first}))
        assert set(producer.delivery.places) in (
            {Place(topic, partition, offsets[partition], messages) for partition, messages in counts.items()},
            {Place(topic, first, offsets[first], len(_PARTITIONS), in_topic=True, others=others)},
        )
        end(timeout=LIMIT)
        offsets.update([*_PARTITIONS, *counts])
    producer.begin_transaction()
    producer.prepare_transaction(timeout=LIMIT)
    assert producer.delivery is None, "of a transaction without messages"
    producer.commit_transaction(timeout=LIMIT)


def test_a_prepared_transaction_can_be_committed_by_its_state(scene: ProducerScene) -> None:
    """As recovery does when the producer is gone."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    producer.begin_transaction()
    for number in range(100):
        producer.send(topic, str(number))
    state = producer.prepare_transaction(timeout=LIMIT)
    assert state is not None
    producer.close()
    result = scene.coordinator.end_transaction(
        producer.kafka_transactional_id, producer_id=state.producer_id, epoch=state.epoch, commit=True
    )
    assert result.proven
    assert scene.values(topic) == [b"%d" % number for number in range(100)]


def test_closing_ends_no_transaction(scene: ProducerScene) -> None:
    """Prepared or not; closing twice is allowed."""
    for prepared in (True, False):
        producer = scene.new_producer()
        producer.begin_transaction()
        producer.send(scene.new_name("topic"), b"v")
        if prepared:
            producer.prepare_transaction(timeout=LIMIT)
        else:
            scene.send_until_ongoing(producer, scene.new_name("topic"))
        producer.close()
        producer.close()
        assert producer.must_be_replaced
        assert scene.describe(producer).status is TransactionStatus.ONGOING
        scene.end_by_another_process(producer, commit=False)


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_transaction_that_may_time_out_is_not_committed(scene: ProducerScene) -> None:
    """`prepare_transaction`, and `check_time_left` after it, raise TransactionTimeoutError; then it is aborted."""
    if scene.case.two_phase:
        pytest.skip("nothing times out under two-phase commit")
    topic = scene.new_name("topic")
    scene.make_topic(topic)
    prepared, late = (scene.new_producer(transaction_timeout_ms=int(_TRANSACTION_TIMEOUT * 1000)) for _ in range(2))
    for producer in (prepared, late):
        producer.begin_transaction()
        producer.check_time_left()
        producer.send(topic, b"v")
    prepared.prepare_transaction(timeout=LIMIT)
    prepared.check_time_left()
    time.sleep(0.85 * _TRANSACTION_TIMEOUT)
    with pytest.raises(TransactionTimeoutError):
        prepared.check_time_left()
    with pytest.raises(TransactionTimeoutError, match=r"transaction\.timeout\.ms") as caught:
        late.prepare_transaction(timeout=LIMIT)
    assert caught.value.transactional_id == late.kafka_transactional_id
    for producer in (prepared, late):
        scene.abort(producer)
    assert scene.values(topic) == []


def test_a_two_phase_transaction_does_not_time_out(scene: ProducerScene) -> None:
    """By its timeout, the coordinator never aborts the transaction on its own."""
    if not scene.case.two_phase:
        pytest.skip("without two-phase commit transactions time out")
    producer = scene.new_producer()
    producer.begin_transaction()
    producer.send(scene.new_name("topic"), b"v")
    producer.prepare_transaction(timeout=LIMIT)
    assert scene.describe(producer).timeout_ms == 2**31 - 1
    producer.check_time_left()
    producer.abort_transaction(timeout=LIMIT)


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finaliser, see below
def test_after_an_interrupt_while_sending_the_transaction_can_be_aborted(scene: ProducerScene) -> None:
    """Ctrl-C at ten different moments; messages sent before are not visible, and the next transaction is complete."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic)
    for number in range(10):
        producer.begin_transaction()
        with pytest.raises(KeyboardInterrupt), _interrupt_after(0.003 * number) as rounds:  # noqa: PT012  (it may come anywhere)
            for _ in range(_ENOUGH):
                producer.send(topic, b"x" * 20_000)
                producer.send_many(topic, [b"x" * 1_000] * 100)
                rounds.append(None)
        producer = scene.abort(producer)
        producer.begin_transaction()
        producer.send(topic, b"%d a" % number)
        producer.send(topic, b"%d b" % number)
        prepare_and_commit(producer)
    assert scene.values(topic) == [b"%d %b" % (n, x) for n in range(10) for x in (b"a", b"b")]


@contextmanager
def _interrupt_after(seconds: float) -> Iterator[list[None]]:
    """Interrupt the main thread, which appends to the list in each round of its work.

    Python only prints an interrupt that is raised in a finaliser, so it is repeated if the work continues for three rounds.
    """
    rounds: list[None] = []
    over = threading.Event()

    def interrupt() -> None:
        over.wait(seconds)
        while not over.is_set():
            seen = len(rounds)
            _thread.interrupt_main()
            while len(rounds) < seen + 3 and not over.is_set():
                over.wait(0.001)

    thread = threading.Thread(target=interrupt, daemon=True)
    try:
        thread.start()  # the interrupt may arrive before this returns
        yield rounds
    finally:
        over.set()
        thread.join()
