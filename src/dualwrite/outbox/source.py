"""The contract of what a `Drain` drains: rows that are read, sent and removed in one transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from dualwrite.kafka.base import Message


class Source(ABC):
    """Rows that are messages. Used by one thread at a time.

    `read`, `remove` and `whole` run on the connection of a dual write. A row of `read` may be of any type; only the source
    looks into it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What is drained, for messages and for dead letters: the table."""

    @abstractmethod
    def has_rows(self, connection: Connection) -> bool:
        """Whether `read` would find a row now. Called outside of dual writes, since a look costs less than a transaction."""

    @abstractmethod
    def read(self, connection: Connection, most: int) -> Sequence[Any]:
        """The first rows in the order in which they are published, at most so many.

        Until the end of the transaction nobody else may change or publish them. So the source locks them, in this order, and
        waits for those that others have locked: skipping a row would publish later ones of its key before it.
        """

    @abstractmethod
    def messages(self, row: Any) -> Sequence[Message]:
        """The messages of a row, in their order.

        Raises:
            InvalidMessageError: The row is not valid.
        """

    @abstractmethod
    def remove(self, connection: Connection, rows: Sequence[Any]) -> None:
        """Make sure that `read` never finds these rows again, which it has just returned.

        Raises:
            StoreError: Not each of them could be removed exactly once.
        """

    @abstractmethod
    def identify(self, row: Any) -> str:
        """The row's id, for messages and for dead letters."""

    @abstractmethod
    def whole(self, connection: Connection, row: Any) -> Mapping[str, Any]:
        """The row with all its columns, for a dead letter."""
