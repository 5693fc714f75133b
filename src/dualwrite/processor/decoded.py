"""What a handler gets: a message with its deserialized key and value. The original is kept, for retries and dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dualwrite.kafka.topic import K_co, Topic, V_co


class Received(Protocol[V_co, K_co]):
    """A message in a handler: what it has of confluent-kafka's Message, with the types of its topic.

    `Received[Order, str]` is a message of a `Topic[Order, str]`, and `Received[bytes, bytes]` one of a topic that was given by
    name. It is a type for annotations; the objects are confluent-kafka's, or have its methods.
    """

    def key(self) -> K_co | None:
        """The key as the topic's deserializer returned it, or bytes if the topic has none for keys; None without a key."""

    def value(self) -> V_co | None:
        """The value as the topic's deserializer returned it, or bytes if the topic has none for values; None: a tombstone."""

    def topic(self) -> str:
        """The topic's name."""

    def partition(self) -> int:
        """The partition."""

    def offset(self) -> int:
        """The offset in the partition."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """The headers; None without headers."""

    def timestamp(self) -> tuple[int, int]:
        """The kind of timestamp, as confluent-kafka numbers them, and milliseconds since 1970."""

    def __len__(self) -> int:
        """The size of the original value in bytes."""


class DecodedMessage:
    """Has the methods of confluent-kafka's Message; `key()` and `value()` return what the deserializers returned."""

    __slots__ = ("_key", "_message", "_value")

    def __init__(self, message: Any, key: Any, value: Any) -> None:
        self._message = message
        self._key = key
        self._value = value

    def key(self) -> Any:
        """The deserialized key."""
        return self._key

    def value(self) -> Any:
        """The deserialized value."""
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def __len__(self) -> int:
        return len(self._message)


def decoded(messages: Sequence[Any], topics: Mapping[str, Topic[Any, Any]]) -> list[Any]:
    """The messages, deserialized if their topic has a deserializer.

    Raises:
        DeserializationError: A key or a value could not be deserialized.
    """
    return [_decoded(message, topics.get(message.topic())) for message in messages]


def _decoded(message: Any, topic: Topic[Any, Any] | None) -> Any:
    if topic is None:
        return message
    headers = message.headers()
    key = topic.deserialized("key", message.key(), headers)
    return DecodedMessage(message, key, topic.deserialized("value", message.value(), headers))
