"""What producers inherit: methods that make messages of their arguments. Nothing can inherit from the compiled `messages`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from dualwrite.kafka.base import GivenMessage, Headers
from dualwrite.kafka.messages import Columns


class Sending:
    """What producers inherit."""

    @abstractmethod
    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """See TransactionalProducer."""

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Send one message. `timestamp` is in milliseconds since 1970; the other arguments are those of `Transaction.send`."""
        self.send_messages(((topic, value, key, headers, partition, timestamp),))

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Send many messages, which costs less than `send` for each; the arguments are those of `Transaction.send_many`."""
        self.send_messages(Columns(topic, values, keys=keys, partition=partition, timestamp=timestamp))
