"""Conformance of `send_many`: the same result as repeated calls of `send`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from dualwrite.errors import InvalidMessageError, UnknownTopicError
from dualwrite.testing.producers.scene import ProducerScene, prepare_and_commit

_COUNT: Final = 25_000
_INNER: Final = 3_000
_SENT_AT: Final = 1_700_000_000_000


class SendManyConformance:
    """Many messages in one call."""

    def test_many_values_arrive_once_and_in_order(self, scene: ProducerScene) -> None:
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

    def test_keys_choose_the_same_partitions_as_with_send(self, scene: ProducerScene) -> None:
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

    def test_a_given_partition_applies_to_all_messages(self, scene: ProducerScene) -> None:
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

    def test_after_an_error_of_send_many_the_transaction_can_be_aborted(self, scene: ProducerScene) -> None:
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

    def test_an_iterable_may_send_messages_itself(self, scene: ProducerScene) -> None:
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
