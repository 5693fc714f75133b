"""The producers' suite: every message arrives exactly once, unchanged and in order."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import pytest
from producer_scene import ProducerScene, SeenMessage, prepare_and_commit

from dualwrite.errors import InvalidMessageError, UnknownTopicError

_SENT_AT: Final = 1_700_000_000_000
_PARTITIONS: Final = 3
_MANY: Final = 3_000
_LARGE: Final = 8_000
_TWICE: Final = [("a", b"1"), ("a", None), ("b", b"2"), ("a", b""), ("a", b"1")]

GIVEN_AND_SEEN: Final[tuple[tuple[dict[str, Any], tuple[Any, Any, Any]], ...]] = (
    ({"value": b"bytes", "key": b"key"}, (b"key", b"bytes", [])),
    ({"value": "größe", "key": "schlüssel"}, ("schlüssel".encode(), "größe".encode(), [])),
    ({"value": bytearray(b"array"), "key": memoryview(b"view")}, (b"view", b"array", [])),
    ({"value": None}, (None, None, [])),
    ({"value": None, "key": b"tombstone"}, (b"tombstone", None, [])),
    ({"value": b"", "key": b""}, (b"", b"", [])),
    ({"value": b"v", "headers": []}, (None, b"v", [])),
    ({"value": b"v", "headers": {}}, (None, b"v", [])),
    ({"value": b"v", "headers": {"größe": "ß", "none": None}}, (None, b"v", [("größe", "ß".encode()), ("none", None)])),
    ({"value": b"v", "headers": _TWICE}, (None, b"v", _TWICE)),
    ({"value": b"x" * 500_000, "key": b"k" * 10_000}, (b"k" * 10_000, b"x" * 500_000, [])),
)
"""Arguments of `send`, and the key, value and headers that a consumer must get."""

_COUNT: Final = 25_000
_INNER: Final = 3_000


def test_a_message_arrives_as_it_was_given(scene: ProducerScene) -> None:
    """All types of keys, values and headers, each message with its own timestamp."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, retention_ms="-1")  # the timestamps are old enough to be cleaned up at any moment
    producer.begin_transaction()
    for number, (given, _) in enumerate(GIVEN_AND_SEEN):
        producer.send(topic, **given, timestamp=_SENT_AT - 1000 * number)
    prepare_and_commit(producer)
    wanted = [
        SeenMessage(0, key, value, headers, _SENT_AT - 1000 * number)
        for number, (_, (key, value, headers)) in enumerate(GIVEN_AND_SEEN)
    ]
    assert scene.read(topic) == wanted


def test_a_message_without_a_timestamp_has_the_time_of_sending(scene: ProducerScene) -> None:
    """By the producer's clock, which is also the test's."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    producer.begin_transaction()
    before = time.time_ns() // 1_000_000
    producer.send(topic, b"v")
    after = time.time_ns() // 1_000_000
    prepare_and_commit(producer)
    (message,) = scene.read(topic)
    assert before <= message.timestamp_ms <= after


def test_a_timestamp_of_0_is_sent_or_refused(scene: ProducerScene) -> None:
    """The beginning of 1970 is never replaced by the time of sending."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, retention_ms="-1")  # the timestamps are old enough to be cleaned up at any moment
    producer.begin_transaction()
    wanted = [0, _SENT_AT]
    try:
        producer.send(topic, b"oldest", timestamp=0)
    except InvalidMessageError:
        wanted = [_SENT_AT]
    producer.send(topic, b"other", timestamp=_SENT_AT)
    prepare_and_commit(producer)
    assert [message.timestamp_ms for message in scene.read(topic)] == wanted


def test_a_message_goes_to_the_given_partition(scene: ProducerScene) -> None:
    """Regardless of its key; includes the first and the last partition."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, _PARTITIONS)
    producer.begin_transaction()
    for partition in (2, 0, 1, 2, 0):
        producer.send(topic, str(partition), key=b"one key", partition=partition)
    prepare_and_commit(producer)
    assert [(m.partition, m.value) for m in scene.read(topic)] == [(0, b"0")] * 2 + [(1, b"1")] + [(2, b"2")] * 2


def test_messages_with_the_same_key_have_the_same_partition(scene: ProducerScene) -> None:
    """Across transactions and producers."""
    topic = scene.new_name("topic")
    scene.make_topic(topic, _PARTITIONS)
    keys = [f"key {n}" for n in range(20)]
    for _ in range(2):
        producer = scene.new_producer()
        for _ in range(2):
            producer.begin_transaction()
            for key in keys:
                producer.send(topic, b"v", key=key)
            prepare_and_commit(producer)
    found = defaultdict(set)
    for message in scene.read(topic):
        found[message.key].add(message.partition)
    assert len(found) == len(keys)
    assert all(len(partitions) == 1 for partitions in found.values())
    assert len(set.union(*found.values())) == _PARTITIONS


def test_messages_without_a_key_are_spread_and_none_is_lost(scene: ProducerScene) -> None:
    """The producer chooses how they are spread."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, _PARTITIONS)
    sent = [b"%d" % n for n in range(1000)]
    producer.begin_transaction()
    for value in sent:
        producer.send(topic, value)
    prepare_and_commit(producer)
    assert sorted(scene.values(topic), key=lambda value: int(value or b"-1")) == sent


def test_many_batches_to_several_topics_keep_the_order_of_each_partition(scene: ProducerScene) -> None:
    """Tens of megabytes, in two transactions."""
    producer = scene.new_producer()
    topics = [scene.new_name("topic") for _ in range(2)]
    for topic in topics:
        scene.make_topic(topic, _PARTITIONS)
    sent: dict[tuple[str, int], list[bytes]] = defaultdict(list)
    filling = b"." * _LARGE
    for part in range(2):
        producer.begin_transaction()
        for number in range(part * _MANY // 2, (part + 1) * _MANY // 2):
            topic, partition = topics[number % 2], number % 7 % _PARTITIONS
            value = b"%d" % number + filling
            producer.send(topic, value, partition=partition)
            sent[topic, partition].append(value)
        prepare_and_commit(producer)
    for topic in topics:
        found = defaultdict(list)
        for message in scene.read(topic):
            found[topic, message.partition].append(message.value)
        wanted = {place: values for place, values in sent.items() if place[0] == topic}
        assert {place: _numbers(values) for place, values in found.items()} == {
            place: _numbers(values) for place, values in wanted.items()
        }
        assert found == wanted


def _numbers(values: Any) -> list[bytes]:
    return [value.partition(b".")[0] for value in values]


def test_many_values_arrive_once_and_in_order(scene: ProducerScene) -> None:
    """Values of all types that `send` accepts, in several batches, between messages that were sent one by one."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic)
    values: list[bytes | str | None] = [b"%06d" % number + bytes(number % 300) for number in range(_COUNT)]
    values[10], values[11], values[12] = None, "größe", b""
    producer.begin_transaction()
    producer.send(topic, b"before")
    producer.send_many(topic, iter(values))
    producer.send_many(topic, [])
    producer.send(topic, b"after")
    prepare_and_commit(producer)
    wanted = [b"before", *(value.encode() if isinstance(value, str) else value for value in values), b"after"]
    assert [message.value for message in scene.read(topic)] == wanted


def test_keys_choose_the_same_partitions_as_with_send(scene: ProducerScene) -> None:
    """A given timestamp applies to all messages of the call."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, 3, retention_ms="-1")  # the timestamp is old enough to be cleaned up at any moment
    keys = [b"key-%d" % number for number in range(50)]
    producer.begin_transaction()
    producer.send_many(topic, keys, keys=keys)
    producer.send_many(topic, keys, keys=keys, timestamp=_SENT_AT)
    for key in keys:
        producer.send(topic, key, key=key)
    prepare_and_commit(producer)
    messages = scene.read(topic)
    assert len({(message.key, message.partition) for message in messages}) == len(keys)
    assert len(messages) == len(keys) * 3
    assert sum(message.timestamp_ms == _SENT_AT for message in messages) == len(keys)


def test_a_given_partition_applies_to_all_messages(scene: ProducerScene) -> None:
    """A partition that does not exist is refused."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic, 3)
    producer.begin_transaction()
    producer.send_many(topic, [b"1", b"2"], partition=2)
    prepare_and_commit(producer)
    assert [(message.partition, message.value) for message in scene.read(topic)] == [(2, b"1"), (2, b"2")]
    producer.begin_transaction()
    with pytest.raises(UnknownTopicError):
        producer.send_many(topic, [b"1"], partition=3)
    scene.abort(producer)


def test_after_an_error_of_send_many_the_transaction_can_be_aborted(scene: ProducerScene) -> None:
    """An invalid value, too few keys, an iterable that raises."""

    def broken() -> Iterator[bytes]:
        yield b"1"
        raise ZeroDivisionError

    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic)
    producer.begin_transaction()
    with pytest.raises(InvalidMessageError):
        producer.send_many(topic, [b"1", 2])  # type: ignore[list-item]  # what is tested
    with pytest.raises(ZeroDivisionError):
        producer.send_many(topic, broken())
    with pytest.raises(InvalidMessageError, match="1 keys for 2 values"):
        producer.send_many(topic, [b"1", b"2"], keys=[b"k"])
    with pytest.raises(InvalidMessageError, match="1 keys and more values"):
        producer.send_many(topic, [b"1", b"2"], keys=iter([b"k"]))
    with pytest.raises(InvalidMessageError, match="1 values and more keys"):
        producer.send_many(topic, iter([b"1"]), keys=[b"k", b"k"])
    producer = scene.abort(producer)
    producer.begin_transaction()
    producer.send_many(topic, [b"good"])
    prepare_and_commit(producer)
    assert [message.value for message in scene.read(topic)] == [b"good"]


def test_an_iterable_may_send_messages_itself(scene: ProducerScene) -> None:
    """No message is lost."""
    producer, topic = scene.new_producer(), scene.new_name("topic")
    scene.make_topic(topic)

    def sending() -> Iterator[bytes]:
        for number in range(_INNER):
            producer.send(topic, b"inner %d" % number + bytes(1000))
            yield b"outer %d" % number

    producer.begin_transaction()
    producer.send_many(topic, sending())
    prepare_and_commit(producer)
    seen = [message.value or b"" for message in scene.read(topic)]
    assert len(seen) == len(set(seen)) == 2 * _INNER
    outer = [value for value in seen if value.startswith(b"outer")]
    assert outer == [b"outer %d" % number for number in range(_INNER)]
