"""`SentMessage`: one message as a test sees it, sent to a `FakeTransaction` or read from a topic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from dualwrite.kafka.base import Message
from dualwrite.kafka.topic import K, Topic, V


@dataclass(frozen=True, slots=True)
class SentLater:
    """A message that waits for its time.

    Args:
        message: The message.
        not_before: When it is published, at the earliest (UTC).
        cancel_id: What names it, or None.
    """

    message: SentMessage
    not_before: datetime
    cancel_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage:
    """One message. Key, value and headers are what Kafka stores; `text`, `json`, `decoded` and `decoded_key` read them.

    Args:
        topic: The topic.
        value: The value; None for a tombstone.
        key: The key, or None.
        headers: Pairs of name and value, in order.
        partition: The partition; in a FakeTransaction None, unless the caller has chosen it.
        timestamp: Milliseconds since 1970; in a FakeTransaction None, unless the caller has chosen it.
    """

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None
    timestamp: int | None = None

    @classmethod
    def of(cls, message: Message) -> Self:
        """A message that was sent in a transaction."""
        return cls(
            topic=message.topic,
            value=message.value,
            key=message.key,
            headers=tuple(message.headers or ()),
            partition=message.partition,
            timestamp=message.timestamp,
        )

    @property
    def text(self) -> str | None:
        """The value as UTF-8 text; None for a tombstone."""
        return None if self.value is None else self.value.decode()

    @property
    def key_text(self) -> str | None:
        """The key as UTF-8 text; None without a key."""
        return None if self.key is None else self.key.decode()

    @property
    def header(self) -> Mapping[str, bytes | None]:
        """The headers by name; of several with one name, the last."""
        return dict(self.headers)

    def json(self) -> Any:
        """The value, parsed as JSON; None for a tombstone.

        Raises:
            ValueError: It is not JSON.
        """
        return None if self.value is None else json.loads(self.value)

    def decoded(self, topic: Topic[V, Any]) -> V | None:
        """The value as the topic's deserializer returns it; None for a tombstone.

        Raises:
            DeserializationError, SchemaRegistryUnavailableError: See `Topic.deserialized`.
        """
        value: V | None = topic.deserialized("value", self.value, self.headers)
        return value

    def decoded_key(self, topic: Topic[Any, K]) -> K | None:
        """The key as the topic's deserializer returns it; None without a key.

        Raises:
            DeserializationError, SchemaRegistryUnavailableError: See `Topic.deserialized`.
        """
        key: K | None = topic.deserialized("key", self.key, self.headers)
        return key
