"""Delivery reports of one transaction, taken from librdkafka by callables of C.

A callback that is Python code would be where KeyboardInterrupt is raised, and confluent-kafka turns an exception of a callback
into a SystemError. `SimpleQueue.put` and `dict.setdefault` are C, and take an error and a message as they come: the queue keeps
the error (its second argument only says whether to wait), the dict keeps both. Both is needed for a topic's first message only,
whose place in the log the transaction is known by later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from confluent_kafka import KafkaError, Message

from dualwrite.delivery import Place


class _Topic:
    __slots__ = ("errors", "first", "place", "sent")

    def __init__(self) -> None:
        self.errors: SimpleQueue[KafkaError | None] = SimpleQueue()
        self.begin()

    def begin(self) -> None:
        self.sent = 0
        self.first: dict[KafkaError | None, Message] = {}
        self.place: tuple[int | None, int | None] = (None, None)


class DeliveryReports:
    """The reports of the current transaction. For one thread: librdkafka calls from within `poll`.

    Attributes:
        sent: Messages handed to librdkafka in this transaction.
        acknowledged: How many of them were stored.
    """

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}
        self.sent = self.acknowledged = 0

    def __contains__(self, topic: str) -> bool:
        return topic in self._topics

    def add_topic(self, topic: str) -> None:
        """Take reports of another topic, from now on."""
        self._topics[topic] = _Topic()

    def begin(self) -> None:
        """A new transaction; every report of the one before was read."""
        self.sent = self.acknowledged = 0
        for topic in self._topics.values():
            topic.begin()

    def callback(self, topic: str) -> Callable[..., Any]:
        """What librdkafka is to call for the next message to the topic."""
        found = self._topics[topic]
        return found.errors.put if found.sent else found.first.setdefault

    def count(self, topic: str) -> None:
        """A message was handed over, with the callback."""
        self._topics[topic].sent += 1
        self.sent += 1

    def failures(self) -> Iterator[tuple[str, KafkaError]]:
        """Read the reports that have come; the topics and reasons of messages that were not stored."""
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
    def places(self) -> Iterator[Place]:
        """Where the first message of each topic lies, with the number of the topic's messages."""
        for name, topic in self._topics.items():
            partition, offset = topic.place
            if topic.sent and partition is not None:
                yield Place(name, partition, None if offset is None or offset < 0 else offset, topic.sent)
