"""A message with its deserialized key and value. The original message is kept unchanged, for retries and dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualwrite.kafka.topic import Topic


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
