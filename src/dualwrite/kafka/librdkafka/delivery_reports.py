"""Delivery reports of one transaction, received from librdkafka by callables implemented in C.

KeyboardInterrupt could be raised inside a Python callback, and confluent-kafka turns an exception in a callback into a
SystemError. `SimpleQueue.put` and `dict.setdefault` are C functions that accept (error, message) directly: the queue keeps the
error (its second argument only says whether to block), the dict keeps both. The message is needed only for the first one of a
topic, whose place in the log identifies the transaction later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from queue import SimpleQueue
from typing import Any

from confluent_kafka import KafkaError, Message

from dualwrite.state import Place


class _TopicReports:
    __slots__ = ("errors", "first", "place", "sent")

    def __init__(self) -> None:
        self.errors: SimpleQueue[KafkaError | None] = SimpleQueue()
        self.begin()

    def begin(self) -> None:
        self.sent = 0
        self.first: dict[KafkaError | None, Message] = {}
        self.place: tuple[int | None, int | None] = (None, None)


class DeliveryReports:
    """The reports of the current transaction: how many messages were sent, and stored. librdkafka calls back within `poll`."""

    def __init__(self) -> None:
        self._topics: dict[str, _TopicReports] = {}
        self.sent = self.acknowledged = 0

    def __contains__(self, topic: str) -> bool:
        return topic in self._topics

    def add_topic(self, topic: str) -> None:
        """Collect reports of another topic from now on."""
        self._topics[topic] = _TopicReports()

    def begin(self) -> None:
        """A new transaction; every report of the previous one has been read."""
        self.sent = self.acknowledged = 0
        for topic in self._topics.values():
            topic.begin()

    def callback(self, topic: str) -> Callable[..., Any]:
        """The callback for the next message to the topic."""
        found = self._topics[topic]
        return found.errors.put if found.sent else found.first.setdefault

    def count(self, topic: str) -> None:
        """Record that a message was passed to librdkafka with the callback."""
        self._topics[topic].sent += 1
        self.sent += 1

    def failures(self) -> Iterator[tuple[str, KafkaError]]:
        """Read the reports that have arrived; yields topic and error of each message that was not stored."""
        for name, topic in self._topics.items():
            while topic.first:
                error, message = topic.first.popitem()
                if error is not None:
                    yield name, error
                    continue
                self.acknowledged += 1
                topic.place = message.partition(), message.offset()
            while not topic.errors.empty():
                error = topic.errors.get_nowait()
                if error is None:
                    self.acknowledged += 1
                else:
                    yield name, error

    @property
    def topics(self) -> Iterator[str]:
        """The topics of the transaction's messages."""
        return (name for name, topic in self._topics.items() if topic.sent)

    def places(self, written: Collection[tuple[str, int]]) -> Iterator[Place]:
        """Where the first message of each topic is stored, with the number of messages sent to the topic.

        To know the number in each partition, the callbacks would have to keep every message until the end of the transaction.

        Args:
            written: The partitions that the coordinator has added to the transaction, each before its first message was sent.
        """
        by_topic: dict[str, list[int]] = {}
        for name, index in written:
            by_topic.setdefault(name, []).append(index)
        for name, topic in self._topics.items():
            partition, offset = topic.place
            if topic.sent and partition is not None:
                first = None if offset is None or offset < 0 else offset
                others = _others(by_topic.get(name, ()), partition)
                yield Place(name, partition, first, topic.sent, in_topic=True, others=others)


def _others(written: Collection[int], partition: int) -> tuple[int, ...] | None:
    """The other partitions of a topic that are written to; None if the partition of its first message is not among them."""
    return tuple(sorted(each for each in written if each != partition)) if partition in written else None
