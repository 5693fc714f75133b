"""Conformance of refused messages: a clear error, no partial commit, and the producer can continue."""

from __future__ import annotations

import time
from typing import Any, Final

import pytest

from dualwrite.errors import (
    DeliveryError,
    InvalidMessageError,
    MessageRefusedError,
    MessageTooLargeError,
    PrepareError,
    ProducerFencedError,
    UnknownTopicError,
)
from dualwrite.state import TransactionStatus
from dualwrite.testing import TIMEOUT
from dualwrite.testing.producers.scene import ProducerScene, prepare_and_commit

WRONG_MESSAGES: Final[tuple[dict[str, Any], ...]] = (
    {"value": 5},
    {"value": {"a": 1}},
    {"value": "\ud800"},
    {"value": b"", "key": 5},
    {"value": b"", "key": ["a"]},
    {"value": b"", "headers": {"a": 1}},
    {"value": b"", "headers": {1: "a"}},
    {"value": b"", "headers": {None: "a"}},
    {"value": b"", "headers": {"\ud800": "a"}},
    {"value": b"", "headers": ["a"]},
    {"value": b"", "headers": 5},
    {"value": b"", "partition": -1},
    {"value": b"", "partition": 2**31},
    {"value": b"", "partition": "0"},
    {"value": b"", "partition": True},
    {"value": b"", "timestamp": -1},
    {"value": b"", "timestamp": 2**63},
    {"value": b"", "timestamp": 1.5},
    {"value": b"", "topic": "no such name"},
    {"value": b"", "topic": "."},
    {"value": b"", "topic": "x" * 250},
    {"value": b"", "topic": ""},
    {"value": b"", "topic": b"bytes"},
    {"value": b"", "topic": None},
    {"value": b"", "topic": ["unhashable"]},
)
"""Arguments of `send` that every producer must refuse."""

_LIMIT: Final = 2_000


class RefusalConformance:
    """Messages that are refused because of their type, their size, or the topic."""

    def test_after_an_invalid_message_the_transaction_continues(self, scene: ProducerScene) -> None:
        """Before the first message of the transaction, and after it."""
        producer, topic = scene.new_producer(), scene.new_name("topic")
        producer.begin_transaction()
        for value in (b"one", b"two"):
            for message in WRONG_MESSAGES:
                arguments = {"topic": topic, **message}
                with pytest.raises(InvalidMessageError):
                    producer.send(arguments.pop("topic"), **arguments)
            producer.send(topic, value)
        assert prepare_and_commit(producer) is not None
        assert scene.values(topic) == [b"one", b"two"]

    def test_after_an_invalid_message_among_many_the_transaction_continues(self, scene: ProducerScene) -> None:
        """How many messages before it were accepted is unspecified; those arrive once and in order."""
        producer, topic = scene.new_producer(), scene.new_name("topic")
        scene.make_topic(topic)
        values: list[Any] = [str(number) for number in range(10)]

        def broken() -> Any:
            yield from values
            raise LookupError

        producer.begin_transaction()
        for many, error in (([*values, 5], InvalidMessageError), (broken(), LookupError)):
            with pytest.raises(error):
                producer.send_many(topic, many)
        with pytest.raises(InvalidMessageError, match="1 keys for 10 values"):
            producer.send_many(topic, values, keys=["too few"])
        producer.send(topic, b"end")
        prepare_and_commit(producer)
        *seen, end = scene.values(topic)
        assert end == b"end"
        following = 0
        for number in (int(value or b"-1") for value in seen):
            assert number in (following, 0)
            following = number + 1

    def test_a_missing_partition_is_reported(self, scene: ProducerScene) -> None:
        """By `send` or `prepare_transaction`; after the abort, no message of the transaction is visible."""
        producer, topic = scene.new_producer(), scene.new_name("topic")
        scene.make_topic(topic)
        producer.begin_transaction()
        producer.send(topic, b"lost")
        with pytest.raises(UnknownTopicError, match="partition"):  # noqa: PT012  (in either call)
            producer.send(topic, b"lost", partition=77)
            producer.prepare_transaction(timeout=TIMEOUT)
        self._check_next_transaction(scene, producer, topic)

    def test_a_message_above_the_producers_own_limit_is_refused_at_once(self, scene: ProducerScene) -> None:
        """The error names the setting."""
        producer, topic = scene.new_producer(message_max_bytes=10_000), scene.new_name("topic")
        producer.begin_transaction()
        producer.send(topic, b"x" * 9_000)
        with pytest.raises(MessageTooLargeError, match=r"message\.max\.bytes"):
            producer.send(topic, b"x" * 10_001)
        self._check_next_transaction(scene, producer, topic)

    def test_a_message_above_the_topics_limit_fails_the_transaction_before_it_is_committed(self, scene: ProducerScene) -> None:
        """`prepare_transaction` fails at the latest, so before the database commits."""
        producer, topic = scene.new_producer(), scene.new_name("topic")
        scene.make_topic(topic, max_message_bytes=str(_LIMIT))
        producer.begin_transaction()
        with pytest.raises(MessageTooLargeError, match=r"max\.message\.bytes"):  # noqa: PT012  (in any of the calls)
            producer.send(topic, b"small")
            producer.send(topic, b"x" * 2 * _LIMIT)
            producer.send(topic, b"small")
            producer.prepare_transaction(timeout=TIMEOUT)
        self._check_next_transaction(scene, producer, topic, delivery_failed=True)

    def test_a_commit_without_prepare_does_not_ignore_a_failed_delivery(self, scene: ProducerScene) -> None:
        """There is no partial commit."""
        producer, topic, other = scene.new_producer(), scene.new_name("topic"), scene.new_name("other")
        scene.make_topic(topic, max_message_bytes=str(_LIMIT))
        producer.begin_transaction()
        with pytest.raises(MessageTooLargeError):  # noqa: PT012  (in any of the calls)
            producer.send(other, b"lost")
            producer.send(topic, b"x" * 2 * _LIMIT)
            producer.commit_transaction(timeout=TIMEOUT)
        self._check_next_transaction(scene, producer, other, delivery_failed=True)

    def test_after_a_failed_delivery_send_and_prepare_fail(self, scene: ProducerScene) -> None:
        """With the reason of the failure, each time."""
        producer, topic, other = scene.new_producer(), scene.new_name("topic"), scene.new_name("other")
        scene.make_topic(topic, max_message_bytes=str(_LIMIT))
        producer.begin_transaction()
        producer.send(topic, b"x" * 2 * _LIMIT)
        deadline = time.monotonic() + TIMEOUT
        with pytest.raises(MessageTooLargeError):  # noqa: PT012  (when the answer has arrived)
            while time.monotonic() < deadline:
                producer.send(other, b"later")
        for _ in range(2):
            with pytest.raises(MessageTooLargeError):
                producer.prepare_transaction(timeout=TIMEOUT)
        self._check_next_transaction(scene, producer, other, delivery_failed=True)

    @pytest.mark.parametrize(
        ("settings", "timestamp", "name"),
        [
            ({"cleanup_policy": "compact"}, None, "INVALID_RECORD"),  # does not accept messages without a key
            ({"message_timestamp_after_max_ms": "1000"}, 2**42, "INVALID_TIMESTAMP"),  # in the year 2109
        ],
    )
    def test_a_message_refused_by_the_topic_fails_the_transaction_and_is_not_retriable(
        self, scene: ProducerScene, settings: dict[str, str], timestamp: int | None, name: str
    ) -> None:
        """The broker would refuse the same message every time."""
        producer, topic = scene.new_producer(), scene.new_name("topic")
        scene.make_topic(topic, 1, **settings)
        producer.begin_transaction()
        with pytest.raises(MessageRefusedError) as caught:  # noqa: PT012  (in either call)
            producer.send(topic, b"lost", timestamp=timestamp)
            producer.prepare_transaction(timeout=TIMEOUT)
        assert (caught.value.name, caught.value.retriable) == (name, False)
        self._check_next_transaction(scene, producer, topic, delivery_failed=True)

    def test_a_batch_that_is_too_large_for_the_topic_is_split(self, scene: ProducerScene) -> None:
        """The batch is split until its parts are accepted."""
        if not scene.capabilities.splits_batches:
            pytest.skip("this producer does not split batches")
        producer, topic = scene.new_producer(), scene.new_name("topic")
        scene.make_topic(topic, max_message_bytes=str(_LIMIT))
        sent = [b"%d" % number for number in range(5_000)]
        producer.begin_transaction()
        for value in sent:
            producer.send(topic, value, partition=0)
        prepare_and_commit(producer)
        assert scene.values(topic) == sent

    def test_a_missing_topic_is_reported_by_name(self, strict_scene: ProducerScene) -> None:
        """On a broker that does not create topics; the transaction can be aborted, and the next one is complete."""
        scene = strict_scene
        producer, missing, there = scene.new_producer(), scene.new_name("missing"), scene.new_name("there")
        scene.make_topic(there)
        producer.begin_transaction()
        producer.send(there, b"lost")
        with pytest.raises(UnknownTopicError, match=missing) as caught:  # noqa: PT012  (in either call)
            producer.send(missing, b"v")
            producer.prepare_transaction(timeout=TIMEOUT)
        assert "create it" in str(caught.value)
        self._check_next_transaction(scene, producer, there)

    @pytest.fixture
    def strict_scene(self) -> ProducerScene:
        """A scene on a broker that does not create topics automatically; override it if you have one."""
        pytest.skip("needs a broker that does not create topics automatically")

    @staticmethod
    def _check_next_transaction(scene: ProducerScene, failed: Any, topic: str, *, delivery_failed: bool = False) -> None:
        """Abort the transaction; check that the next one succeeds, and that only its message is visible in the topic."""
        if delivery_failed and not scene.capabilities.epoch_per_transaction:
            assert failed.must_be_replaced, "a delivery has failed, and the next transaction would have the same epoch"
        producer = scene.abort(failed)
        producer.begin_transaction()
        producer.send(topic, b"next", key=b"k")
        prepare_and_commit(producer)
        assert scene.values(topic) == [b"next"]


class FencingConformance:
    """Transactions that another process ends, as recovery does, and ids that are taken over."""

    def test_a_prepared_transaction_aborted_by_another_process_cannot_be_committed(self, scene: ProducerScene) -> None:
        """EndTxn v5 of another process fences the producer."""
        producer, topic = scene.new_producer(), scene.new_name("topic")
        producer.begin_transaction()
        producer.send(topic, b"lost")
        producer.prepare_transaction(timeout=TIMEOUT)
        scene.end_by_another_process(producer, commit=False)
        with pytest.raises(ProducerFencedError) as caught:
            producer.commit_transaction(timeout=TIMEOUT)
        assert caught.value.transactional_id == producer.kafka_transactional_id
        assert producer.must_be_replaced
        assert scene.values(topic) == []

    def test_a_prepared_transaction_committed_by_another_process_stays_committed(self, scene: ProducerScene) -> None:
        """`commit_transaction` returns, or raises ProducerFencedError."""
        producer, topic = scene.new_producer(), scene.new_name("topic")
        producer.begin_transaction()
        producer.send(topic, b"kept")
        producer.prepare_transaction(timeout=TIMEOUT)
        scene.end_by_another_process(producer, commit=True)
        try:
            producer.commit_transaction(timeout=TIMEOUT)
        except ProducerFencedError:
            assert producer.must_be_replaced
        assert scene.values(topic) == [b"kept"]

    def test_a_prepared_transaction_committed_by_another_process_cannot_be_aborted(self, scene: ProducerScene) -> None:
        """The message is visible, so `abort_transaction` must not return normally."""
        producer, topic = scene.new_producer(), scene.new_name("topic")
        producer.begin_transaction()
        producer.send(topic, b"kept")
        producer.prepare_transaction(timeout=TIMEOUT)
        scene.end_by_another_process(producer, commit=True)
        with pytest.raises(ProducerFencedError):
            producer.abort_transaction(timeout=TIMEOUT)
        assert producer.must_be_replaced
        assert scene.values(topic) == [b"kept"]

    def test_a_transaction_aborted_by_another_process_cannot_be_prepared(self, scene: ProducerScene) -> None:
        """Once the abort markers are written; later messages of the transaction are not stored either.

        Three times, since a client with background threads may notice it at different moments.
        """
        for _ in range(3):
            producer, topic = scene.new_producer(), scene.new_name("topic")
            scene.make_topic(topic)
            producer.begin_transaction()
            scene.send_until_ongoing(producer, topic)
            scene.end_by_another_process(producer, commit=False)
            scene.describe(producer, lambda found: found.status is TransactionStatus.COMPLETE_ABORT)
            with pytest.raises((PrepareError, ProducerFencedError, DeliveryError)):  # noqa: PT012  (in any of the calls)
                producer.send(topic, b"lost, too")
                producer.prepare_transaction(timeout=TIMEOUT)
            producer = scene.abort(producer)
            producer.begin_transaction()
            producer.send(topic, b"next")
            prepare_and_commit(producer)
            assert scene.values(topic) == [b"next"]

    def test_a_producer_whose_id_was_taken_over_is_fenced(self, scene: ProducerScene) -> None:
        """The takeover aborts its prepared transaction; it can't commit, and must be replaced."""
        kafka_id, topic = scene.new_name("id"), scene.new_name("topic")
        old = scene.new_producer(kafka_id)
        old.begin_transaction()
        old.send(topic, b"old")
        old.prepare_transaction(timeout=TIMEOUT)
        new = scene.new_producer(kafka_id)
        with pytest.raises(ProducerFencedError):
            old.commit_transaction(timeout=TIMEOUT)
        assert old.must_be_replaced
        new.begin_transaction()
        new.send(topic, b"new")
        prepare_and_commit(new)
        assert scene.values(topic) == [b"new"]

    def test_an_idle_producer_whose_id_was_taken_over_is_fenced_in_its_next_transaction(self, scene: ProducerScene) -> None:
        """None of its messages become visible, and its successor is not affected."""
        kafka_id, topic = scene.new_name("id"), scene.new_name("topic")
        old = scene.new_producer(kafka_id)
        old.begin_transaction()
        old.send(topic, b"before")
        prepare_and_commit(old)
        new = scene.new_producer(kafka_id)
        new.begin_transaction()
        new.send(topic, b"new")
        with pytest.raises((ProducerFencedError, DeliveryError)):  # noqa: PT012  (in any of the calls)
            old.begin_transaction()
            old.send(topic, b"old")
            old.prepare_transaction(timeout=TIMEOUT)
        prepare_and_commit(new)
        assert scene.values(topic) == [b"before", b"new"]
