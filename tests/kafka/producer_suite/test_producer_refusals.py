"""The producers' suite: a refused message is a clear error and no partial commit, and the producer can continue."""

from __future__ import annotations

import time
from typing import Any, Final

import pytest
from producer_scene import ProducerScene, prepare_and_commit

from dualwrite.errors import (
    InvalidMessageError,
    MessageRefusedError,
    MessageTooLargeError,
    UnknownTopicError,
)
from fixtures.pace import LIMIT

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


def test_after_an_invalid_message_the_transaction_continues(scene: ProducerScene) -> None:
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


def test_after_an_invalid_message_among_many_the_transaction_continues(scene: ProducerScene) -> None:
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


def test_a_missing_partition_is_reported(scene: ProducerScene) -> None:
    """By `send` or `prepare_transaction`; after the abort, no message of the transaction is visible."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic)
    producer.begin_transaction()
    producer.send(topic, b"lost")
    with pytest.raises(UnknownTopicError, match="partition"):  # noqa: PT012  (in either call)
        producer.send(topic, b"lost", partition=77)
        producer.prepare_transaction(timeout=LIMIT)
    scene.check_next_transaction(producer, topic)


def test_a_message_above_the_producers_own_limit_is_refused_at_once(scene: ProducerScene) -> None:
    """The error names the setting."""
    producer, topic = scene.new_producer(message_max_bytes=10_000), scene.new_name("topic")
    producer.begin_transaction()
    producer.send(topic, b"x" * 9_000)
    with pytest.raises(MessageTooLargeError, match=r"message\.max\.bytes"):
        producer.send(topic, b"x" * 10_001)
    scene.check_next_transaction(producer, topic)


def test_a_message_above_the_topics_limit_fails_the_transaction_before_it_is_committed(scene: ProducerScene) -> None:
    """`prepare_transaction` fails at the latest, so before the database commits."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, max_message_bytes=str(_LIMIT))
    producer.begin_transaction()
    with pytest.raises(MessageTooLargeError, match=r"max\.message\.bytes"):  # noqa: PT012  (in any of the calls)
        producer.send(topic, b"small")
        producer.send(topic, b"x" * 2 * _LIMIT)
        producer.send(topic, b"small")
        producer.prepare_transaction(timeout=LIMIT)
    scene.check_next_transaction(producer, topic, delivery_failed=True)


def test_a_commit_without_prepare_does_not_ignore_a_failed_delivery(scene: ProducerScene) -> None:
    """There is no partial commit."""
    producer, topic, other = scene.new_producer(), scene.new_name("topic"), scene.new_name("other")
    scene.make_topic(topic, max_message_bytes=str(_LIMIT))
    producer.begin_transaction()
    with pytest.raises(MessageTooLargeError):  # noqa: PT012  (in any of the calls)
        producer.send(other, b"lost")
        producer.send(topic, b"x" * 2 * _LIMIT)
        producer.commit_transaction(timeout=LIMIT)
    scene.check_next_transaction(producer, other, delivery_failed=True)


def test_after_a_failed_delivery_send_and_prepare_fail(scene: ProducerScene) -> None:
    """With the reason of the failure, each time."""
    producer, topic, other = scene.new_producer(), scene.new_name("topic"), scene.new_name("other")
    scene.make_topic(topic, max_message_bytes=str(_LIMIT))
    producer.begin_transaction()
    producer.send(topic, b"x" * 2 * _LIMIT)
    deadline = time.monotonic() + LIMIT
    with pytest.raises(MessageTooLargeError):  # noqa: PT012  (when the answer has arrived)
        while time.monotonic() < deadline:
            producer.send(other, b"later")
    for _ in range(2):
        with pytest.raises(MessageTooLargeError):
            producer.prepare_transaction(timeout=LIMIT)
    scene.check_next_transaction(producer, other, delivery_failed=True)


@pytest.mark.parametrize(
    ("settings", "timestamp", "name"),
    [
        ({"cleanup_policy": "compact"}, None, "INVALID_RECORD"),  # does not accept messages without a key
        ({"message_timestamp_after_max_ms": "1000"}, 2**42, "INVALID_TIMESTAMP"),  # in the year 2109
    ],
)
def test_a_message_refused_by_the_topic_fails_the_transaction_and_is_not_retriable(
    scene: ProducerScene, settings: dict[str, str], timestamp: int | None, name: str
) -> None:
    """The broker would refuse the same message every time."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, 1, **settings)
    producer.begin_transaction()
    with pytest.raises(MessageRefusedError) as caught:  # noqa: PT012  (in either call)
        producer.send(topic, b"lost", timestamp=timestamp)
        producer.prepare_transaction(timeout=LIMIT)
    assert (caught.value.name, caught.value.retriable) == (name, False)
    scene.check_next_transaction(producer, topic, delivery_failed=True)


def test_a_batch_that_is_too_large_for_the_topic_is_split(scene: ProducerScene) -> None:
    """The batch is split until its parts are accepted."""
    if not scene.case.splits_batches:
        pytest.skip("this producer does not split batches")
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, max_message_bytes=str(_LIMIT))
    sent = [b"%d" % number for number in range(5_000)]
    producer.begin_transaction()
    for value in sent:
        producer.send(topic, value, partition=0)
    prepare_and_commit(producer)
    assert scene.values(topic) == sent


def test_a_missing_topic_is_reported_by_name(strict_scene: ProducerScene) -> None:
    """On a broker that does not create topics; librdkafka itself would report it only after 30 s. The session continues."""
    scene = strict_scene
    producer, missing, there = scene.new_producer(), scene.new_name("missing"), scene.new_name("there")
    scene.make_topic(there)
    producer.begin_transaction()
    producer.send(there, b"lost")
    with pytest.raises(UnknownTopicError, match=f"(?s){missing}.*create it"):
        producer.send(missing, b"v")
    producer.abort_transaction(timeout=LIMIT)
    assert not producer.must_be_replaced
    producer.begin_transaction()
    producer.send(there, b"next")
    prepare_and_commit(producer)
    assert scene.values(there) == [b"next"]
    assert scene.values(missing) == []
