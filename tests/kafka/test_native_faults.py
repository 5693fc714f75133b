"""NativeProducer under faults: the broker paused or killed, the caller interrupted at any moment, ACLs missing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from types import FrameType
from typing import Any, Self

import pyarrow as pa
import pytest
from confluent_kafka.admin import NewTopic

from dualwrite.devcluster import DevCluster
from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerUnavailableError,
    DeliveryError,
    DualWriteError,
    InvalidTransitionError,
)
from dualwrite.kafka.base import GroupMetadata
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.inspect import describe_topics
from dualwrite.kafka.librdkafka.topic_admin import admin_client
from dualwrite.kafka.native import accumulator
from dualwrite.kafka.native.native_producer import ALLOWED, NativeProducer, ProducerState
from dualwrite.state import ConsumedOffset
from fixtures.acls import Operation, Resource, grant
from fixtures.broker import make_topic, read_topic, read_values, started
from fixtures.leaders import coordinator_of
from fixtures.logins import login_as
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned

NewName = Callable[[str], str]
NewProducer = Callable[..., NativeProducer]
IMPATIENT = {"socket.timeout.ms": 500, "socket.connection.setup.timeout.ms": 500}


@pytest.fixture(scope="module")
def frail() -> Iterator[DevCluster]:
    """A broker that the tests of this module may break; each test restores it. A pause does not end its session."""
    with started(config={"broker.session.timeout.ms": "9000"}) as cluster:
        yield cluster


@pytest.fixture
def new_native(frail: DevCluster, new_name: NewName) -> Iterator[NewProducer]:
    """Creates producers on `frail` or another cluster, ready to begin, each with its own coordinator; closes them."""
    with ExitStack() as opened:

        def new(cluster: DevCluster = frail, *, delivery_timeout: float = 60.0, **settings: Any) -> NativeProducer:
            config = KafkaConfig.of({"bootstrap.servers": cluster.bootstrap_servers, **settings})
            producer = NativeProducer(config, new_name("id"), two_phase=True, delivery_timeout=delivery_timeout)
            opened.callback(producer.close)
            producer.init_transactions(timeout=LIMIT)
            return producer

        yield new


@contextmanager
def paused(cluster: DevCluster) -> Iterator[None]:
    time.sleep(0.01)  # right after a transaction, a producer checks whether its markers are written
    cluster.pause()
    try:
        yield
    finally:
        cluster.resume()


def commit_one(producer: NativeProducer, topic: str, value: bytes) -> None:
    producer.begin_transaction()
    producer.send(topic, value)
    producer.commit_transaction(timeout=LIMIT)


# --- a broker that does not answer ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timeouts", "partitions"),
    thinned(product(["patient", "impatient"], [1, 100]), kept=[("impatient", 1)]),
)
def test_a_full_buffer_blocks_until_the_delivery_timeout_and_holds_no_more_than_its_size(
    frail: DevCluster, new_native: NewProducer, new_name: NewName, timeouts: str, partitions: int
) -> None:
    """Regardless of the size of the socket buffers and the number of partitions."""
    settings = IMPATIENT if timeouts == "impatient" else {"socket.connection.setup.timeout.ms": 500}
    buffer_kib = 4_096
    producer = new_native(delivery_timeout=1.5, **{"queue.buffering.max.kbytes": buffer_kib}, **settings)
    topic = new_name("topic")
    make_topic(frail, topic, partitions)
    commit_one(producer, topic, b"before")
    producer.begin_transaction()
    taken = 0
    with paused(frail):
        with pytest.raises(DeliveryError, match="buffer stayed full"):  # noqa: PT012  (when it is full)
            for number in range(10_000):
                producer.send(topic, bytes(20_000), partition=number % partitions)
                taken += 1
        assert taken * 20_000 <= buffer_kib * 1024
        with pytest.raises(DeliveryError, match="buffer stayed full"):
            producer.prepare_transaction(timeout=LIMIT)
    producer.abort_transaction(timeout=LIMIT)
    commit_one(producer, topic, b"after")
    assert sorted(value or b"" for value in read_values(frail.bootstrap_servers, topic)) == [b"after", b"before"]


def test_a_prepare_that_is_not_answered_fails_in_time_and_the_transaction_can_be_aborted(
    frail: DevCluster, new_native: NewProducer, new_name: NewName
) -> None:
    producer, topic = new_native(), new_name("topic")
    commit_one(producer, topic, b"before")
    producer.begin_transaction()
    producer.send(topic, b"lost")
    with paused(frail):
        producer.send(topic, b"lost, too")
        with pytest.raises(DeliveryError, match=r"within 0\.5 s"):
            producer.prepare_transaction(timeout=0.5)
    producer.abort_transaction(timeout=LIMIT)
    commit_one(producer, topic, b"after")
    assert read_values(frail.bootstrap_servers, topic) == [b"before", b"after"]


@pytest.mark.slow
def test_a_topic_that_cannot_be_looked_up_fails_the_message_but_not_the_transaction(
    frail: DevCluster, new_native: NewProducer, new_name: NewName
) -> None:
    producer, topic, other = new_native(delivery_timeout=1, **IMPATIENT), new_name("topic"), new_name("other")
    commit_one(producer, topic, b"before")
    producer.begin_transaction()
    producer.send(topic, b"kept")
    with paused(frail), pytest.raises(BrokerUnavailableError, match=other):
        producer.send(other, b"not taken")
    producer.send(other, b"taken")
    producer.commit_transaction(timeout=LIMIT)
    assert read_values(frail.bootstrap_servers, topic) == [b"before", b"kept"]
    assert read_values(frail.bootstrap_servers, other) == [b"taken"]


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_whose_answer_is_lost_is_proven_by_the_same_commit(
    frail: DevCluster, new_native: NewProducer, new_name: NewName, arrives: bool
) -> None:
    producer, topic = new_native(**IMPATIENT), new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"v")
    state = producer.prepare_transaction(timeout=LIMIT)
    assert state is not None
    with paused(frail), pytest.raises(BrokerUnavailableError):
        producer.commit_transaction(timeout=0.5)
    assert producer.state is ProducerState.UNCERTAIN
    assert producer.must_be_replaced
    if arrives:  # for certain: by another client that sends the same request
        coordinator = WireTransactionCoordinator(KafkaConfig.of(frail.bootstrap_servers))
        assert coordinator.end_transaction(
            producer.kafka_transactional_id, producer_id=state.producer_id, epoch=state.epoch, commit=True
        ).proven
        coordinator.close()
    producer.commit_transaction(timeout=LIMIT)
    assert not producer.must_be_replaced
    commit_one(producer, topic, b"next")
    assert read_values(frail.bootstrap_servers, topic) == [b"v", b"next"]


@pytest.mark.slow
def test_a_transaction_whose_abort_was_not_answered_cannot_be_committed(
    frail: DevCluster, new_native: NewProducer, new_name: NewName
) -> None:
    """It would commit what has been sent so far, and lose the rest."""
    producer, topic = new_native(**IMPATIENT), new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"sent")
    producer.send(topic, b"not sent yet")
    with paused(frail), pytest.raises(BrokerUnavailableError):
        producer.abort_transaction(timeout=0.5)
    assert producer.must_be_replaced
    with pytest.raises(InvalidTransitionError, match="abort_transaction"):
        producer.commit_transaction(timeout=LIMIT)
    producer.abort_transaction(timeout=LIMIT)
    commit_one(producer, topic, b"next")
    assert read_values(frail.bootstrap_servers, topic) == [b"next"]


# --- every call in every state ------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[NativeProducer], Any]] = {
    "init_transactions": lambda p: p.init_transactions(timeout=LIMIT),
    "adopt": lambda p: p.adopt(1, 2, timeout_ms=1_000),
    "create": lambda p: p.create(timeout=LIMIT),
    "begin_transaction": lambda p: p.begin_transaction(),
    "send": lambda p: p.send("never", b"v"),
    "send_many": lambda p: p.send_many("never", [b"v"]),
    "send_columns": lambda p: p.send_columns("never", pa.array([b"v"])),
    "send_offsets_to_transaction": lambda p: p.send_offsets_to_transaction(
        [ConsumedOffset("never", 0, 1)], GroupMetadata("never")
    ),
    "prepare_transaction": lambda p: p.prepare_transaction(timeout=LIMIT),
    "commit_transaction": lambda p: p.commit_transaction(timeout=LIMIT),
    "abort_transaction": lambda p: p.abort_transaction(timeout=LIMIT),
    "complete_prepared_transaction": lambda p: p.complete_prepared_transaction(None, timeout=LIMIT),
}


def end_without_an_answer(cluster: DevCluster, end: Callable[..., None]) -> None:
    with paused(cluster), pytest.raises(BrokerUnavailableError):
        end(timeout=0.5)


def fence(cluster: DevCluster, producer: NativeProducer) -> None:
    with ExitStack() as opened:
        other = NativeProducer(KafkaConfig.of(cluster.bootstrap_servers), producer.kafka_transactional_id, two_phase=True)
        opened.callback(other.close)
        other.init_transactions(timeout=LIMIT)
    with pytest.raises(DualWriteError):
        producer.commit_transaction(timeout=LIMIT)


def brought_to(state: ProducerState, cluster: DevCluster, kafka_id: str, topic: str) -> NativeProducer:
    """A producer brought into this state by the calls that lead there."""
    config = KafkaConfig.of({"bootstrap.servers": cluster.bootstrap_servers, **IMPATIENT})
    producer = NativeProducer(config, kafka_id, two_phase=True)
    if state is ProducerState.UNINITIALIZED:
        return producer
    producer.init_transactions(timeout=LIMIT)
    if state is ProducerState.READY:
        return producer
    producer.begin_transaction()
    producer.send(topic, b"v")
    if state is ProducerState.IN_TRANSACTION:
        return producer
    producer.prepare_transaction(timeout=LIMIT)
    if state is ProducerState.UNCERTAIN:
        end_without_an_answer(cluster, producer.commit_transaction)
    elif state is ProducerState.ABORTING:
        end_without_an_answer(cluster, producer.abort_transaction)
    elif state is ProducerState.FENCED:
        fence(cluster, producer)
    elif state is ProducerState.CLOSED:
        producer.close()
    return producer


@pytest.mark.parametrize("state", ProducerState)
def test_a_call_that_a_state_does_not_allow_is_refused_by_name_and_changes_nothing(
    frail: DevCluster, new_name: NewName, state: ProducerState
) -> None:
    assert set(CALLS) == {call for calls in ALLOWED.values() for call in calls} - {"close"}
    producer = brought_to(state, frail, new_name("id"), new_name("topic"))
    assert producer.state is state
    identity = producer.identity
    for name, call in CALLS.items():
        if name not in ALLOWED[state]:
            with pytest.raises(InvalidTransitionError) as caught:
                call(producer)
            assert (caught.value.state, caught.value.allowed) == (state, ALLOWED[state])
            assert f"{name}()" in str(caught.value)
            assert (producer.state, producer.identity) == (state, identity)
    producer.close()
    producer.close()
    assert producer.state is ProducerState.CLOSED
    with pytest.raises(InvalidTransitionError, match="is closed"):
        producer.send("never", b"v")


# --- interrupts in any call -----------------------------------------------------------------------------------------------


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th call inside the native producer: where CPython would for a signal, but reproducibly.

    CPython checks for signals when a Python function begins, and when a C function has returned.
    """

    def __init__(self, count: int) -> None:
        self._left = count
        self.place: str | None = None

    def __enter__(self) -> Self:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event in ("call", "c_return") and ("/kafka/native/" in name or "/kafka/client/broker_connection.py" in name):
            self._left -= 1
            if self._left == 0:
                self.place = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.setprofile(None)
                raise KeyboardInterrupt


def one_by_one(producer: NativeProducer, topic: str, some: list[bytes]) -> None:
    for value in some:
        producer.send(topic, value)


SENDS: dict[str, Callable[[NativeProducer, str, list[bytes]], None]] = {
    "send": one_by_one,
    "send_many": lambda producer, topic, some: producer.send_many(topic, some),
    "send_columns": lambda producer, topic, some: producer.send_columns(topic, pa.array(some)),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SENDS)
def test_an_interrupt_at_any_moment_of_sending_neither_repeats_nor_loses_a_committed_message(
    frail: DevCluster, new_native: NewProducer, new_name: NewName, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What may be visible after the commit: every accepted message, in order, each at most once."""
    monkeypatch.setattr(accumulator, "WORTHWHILE_BYTES", 0)
    producer, topic = new_native(**{"batch.size": 300}), new_name("topic")
    make_topic(frail, topic)
    producer.begin_transaction()
    SENDS[how](producer, topic, [])  # imports what it needs: thousands of calls, which are no part of sending
    producer.commit_transaction(timeout=LIMIT)
    expected: list[tuple[list[bytes], list[bytes]]] = []  # accepted before, perhaps accepted
    count, refused = 0, 0
    while True:
        count += 1 if count < 150 else 5
        producer.begin_transaction()
        before = [b"%d before %d" % (count, n) for n in range(3)]
        during = [b"%d during %d " % (count, n) + bytes(60) for n in range(6)]
        producer.send_many(topic, before)
        interrupt = InterruptAt(count)
        try:
            with interrupt:
                SENDS[how](producer, topic, during)
        except KeyboardInterrupt:
            pass
        try:
            producer.commit_transaction(timeout=3)
            expected.append((before, during))
        except DualWriteError:
            refused += 1
            producer.abort_transaction(timeout=LIMIT)
        if interrupt.place is None:
            break
    assert refused
    seen = read_values(frail.bootstrap_servers, topic)
    for before, during in expected:
        mine, seen = split_off(seen, before[0].split()[0] + b" ")
        assert mine[: len(before)] == before
        assert mine[len(before) :] == during[: len(mine) - len(before)]
    assert seen == []


def split_off(found: list[bytes | None], prefix: bytes) -> tuple[list[bytes], list[bytes | None]]:
    """The leading values that have the prefix, and the rest."""
    mine = []
    for value in found:
        if value is None or not value.startswith(prefix):
            break
        mine.append(value)
    return mine, found[len(mine) :]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["prepare_transaction", "commit_transaction", "abort_transaction"])
def test_an_interrupt_at_any_moment_of_ending_leaves_a_correct_state(
    frail: DevCluster, new_native: NewProducer, new_name: NewName, call: str
) -> None:
    """Any call that the state then allows ends the transaction, and it is visible if and only if a commit returned."""
    producer, topic = new_native(), new_name("topic")
    make_topic(frail, topic)
    expected: list[bytes] = []
    count = 0
    while True:
        count += 1
        sent = [b"%d %d" % (count, n) for n in range(3)]
        producer.begin_transaction()
        producer.send_many(topic, sent)
        interrupt = InterruptAt(count)
        try:
            with interrupt:
                getattr(producer, call)(timeout=LIMIT)
        except KeyboardInterrupt:
            pass
        if producer.state is ProducerState.READY:
            committed = call == "commit_transaction"
        else:
            committed = call != "abort_transaction" and "commit_transaction" in ALLOWED[producer.state]
            try:
                (producer.commit_transaction if committed else producer.abort_transaction)(timeout=LIMIT)
            except DeliveryError:  # interrupted while messages were in flight
                committed = False
                producer.abort_transaction(timeout=LIMIT)
        if committed:
            expected += sent
        if interrupt.place is None:
            break
    assert read_values(frail.bootstrap_servers, topic) == expected


# --- a broker that dies -------------------------------------------------------------------------------------------------
# `guarded` is back when the session of the killed broker has ended: after 2 s, as is usual in a development cluster.


@pytest.mark.slow
def test_a_broker_that_is_killed_while_messages_are_sent_gets_each_of_them_once(
    guarded: DevCluster, new_native: NewProducer, new_name: NewName
) -> None:
    producer, topic = new_native(guarded, **{"queue.buffering.max.kbytes": 4_096}), new_name("topic")
    make_topic(guarded, topic, 3)
    again = threading.Event()

    def kill_and_start() -> None:
        guarded.kill()
        guarded.start()
        again.set()

    producer.begin_transaction()
    killing = threading.Thread(target=kill_and_start)
    number = 0
    while not again.is_set() or number < 30_000:
        producer.send(topic, b"%d" % number + bytes(500), partition=number % 3)
        number += 1
        if number == 10_000:
            killing.start()
    killing.join()
    assert producer.prepare_transaction(timeout=LIMIT) is not None
    producer.commit_transaction(timeout=LIMIT)
    found = [int((value or b"").partition(b"\0")[0]) for value in read_values(guarded.bootstrap_servers, topic)]
    assert found == [*range(0, number, 3), *range(1, number, 3), *range(2, number, 3)]


@pytest.mark.slow
def test_a_broker_that_is_killed_after_prepare_commits_what_was_prepared(
    guarded: DevCluster, new_native: NewProducer, new_name: NewName
) -> None:
    producer, topic = new_native(guarded), new_name("topic")
    make_topic(guarded, topic, 3)
    sent = [b"%d" % number for number in range(1_000)]
    producer.begin_transaction()
    for value in sent:
        producer.send(topic, value, partition=1)
    producer.prepare_transaction(timeout=LIMIT)
    guarded.kill()
    guarded.start(wait=False)
    producer.commit_transaction(timeout=LIMIT)
    commit_one(producer, topic, b"next")
    found = read_topic(guarded.bootstrap_servers, topic)
    assert [message.value() for message in found if message.partition() == 1 and message.value() != b"next"] == sent
    assert len(found) == len(sent) + 1


@pytest.mark.soak  # in CI: a leader that drops packets, in test_deadlines
def test_a_partition_that_has_lost_its_leader_does_not_stop_messages_to_the_others(
    three_brokers: DevCluster, new_native: NewProducer, new_name: NewName
) -> None:
    servers, topic = three_brokers.bootstrap_servers, new_name("topic")
    producer = new_native(three_brokers)
    coordinator = coordinator_of(servers, producer.kafka_transactional_id)
    lost = next(node for node in (1, 2, 3) if node != coordinator)
    admin = admin_client({"bootstrap.servers": servers}, LIMIT)
    admin.create_topics([NewTopic(topic, 2, replica_assignment=[[coordinator], [lost]])])[topic].result(LIMIT)

    def commit_next(value: bytes) -> None:
        producer.begin_transaction()
        producer.send(topic, value, partition=0)
        producer.commit_transaction(timeout=LIMIT)

    commit_next(b"before")
    three_brokers.kill(lost)
    try:
        until(lambda: describe_topics(servers, [topic])[0].without_leader, "partition 1 has no leader")
        producer.begin_transaction()
        producer.send(topic, b"never stored", partition=1)
        with pytest.raises(DeliveryError):
            producer.prepare_transaction(timeout=0.5)
        producer.abort_transaction(timeout=LIMIT)
        commit_next(b"after")
    finally:
        three_brokers.start(lost)
    assert read_values(servers, topic) == [b"before", b"after"]


# --- ACLs -----------------------------------------------------------------------------------------------------------------


def until_granted(call: Callable[[], Any]) -> None:
    """Retry while the permission is missing: a new ACL takes a moment to reach the broker."""

    def granted() -> bool:
        try:
            call()
        except BrokerAuthorizationError:
            return False
        return True

    until(granted, "what was granted", pause=0.05)


@pytest.mark.slow
def test_a_missing_acl_is_reported_with_the_grant_that_is_needed(guarded: DevCluster, new_name: NewName) -> None:
    topic, group, kafka_id = new_name("topic"), new_name("group"), new_name("id")
    make_topic(guarded, topic)
    offsets = [ConsumedOffset(topic, 0, 5)]
    producer = NativeProducer(KafkaConfig.of(login_as(guarded, "writer")), kafka_id)
    try:
        with pytest.raises(BrokerAuthorizationError, match="grant the principal Describe"):
            producer.init_transactions(timeout=LIMIT)
        grant(guarded, "writer", Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, kafka_id)
        with pytest.raises(BrokerAuthorizationError, match="grant the principal Write on the transactional ids"):
            producer.init_transactions(timeout=LIMIT)
        grant(guarded, "writer", Operation.WRITE, Resource.TRANSACTIONAL_ID, kafka_id)
        until_granted(lambda: producer.init_transactions(timeout=LIMIT))

        producer.begin_transaction()
        with pytest.raises(BrokerAuthorizationError, match="on the topic"):
            producer.send(topic, b"lost")
        grant(guarded, "writer", Operation.DESCRIBE, Resource.TOPIC, topic)
        with pytest.raises(BrokerAuthorizationError, match="on the topic"):  # noqa: PT012  (in either call)
            until_granted(lambda: producer.send(topic, b"lost"))
            producer.prepare_transaction(timeout=LIMIT)
        producer.abort_transaction(timeout=LIMIT)
        grant(guarded, "writer", Operation.WRITE, Resource.TOPIC, topic)
        grant(guarded, "writer", Operation.READ, Resource.TOPIC, topic)

        producer.begin_transaction()
        with pytest.raises(BrokerAuthorizationError, match="Read on the consumer group"):
            producer.send_offsets_to_transaction(offsets, GroupMetadata(group), timeout=LIMIT)
        producer.abort_transaction(timeout=LIMIT)
        grant(guarded, "writer", Operation.READ, Resource.GROUP, group)

        def whole_transaction() -> None:
            producer.begin_transaction()
            try:
                producer.send(topic, b"seen")
                producer.send_offsets_to_transaction(offsets, GroupMetadata(group), timeout=LIMIT)
                producer.commit_transaction(timeout=LIMIT)
            except BrokerAuthorizationError:
                producer.abort_transaction(timeout=LIMIT)
                raise

        until_granted(whole_transaction)
    finally:
        producer.close()
    assert read_values(guarded.bootstrap_servers, topic) == [b"seen"]
