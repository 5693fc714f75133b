"""The contract of what a `Drain` drains: rows that are read, sent and removed in one transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from dualwrite.errors import BrokerError
from dualwrite.kafka.base import Message


class Source(ABC):
    """Rows that are messages. Used by one thread at a time.

    `read`, `remove` and `all_columns` run on the connection of a dual write. A row of `read` may be of any type; only the
    source looks into it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What is drained, for messages and for dead letters: the table."""

    @abstractmethod
    def has_rows(self, connection: Connection) -> bool:
        """Whether `read` would find a row now. Called outside of dual writes, since a look costs less than a transaction."""

    @abstractmethod
    def read(self, connection: Connection, most: int, size: int) -> tuple[Sequence[Any], bool]:
        """The first rows in the order in which they are published, and whether more were left out because of `size`.

        They are at most `most` rows, and end before the one with which their messages would have more than `size` bytes. No
        more than that is fetched, but a first row that is larger.

        Until the end of the transaction nobody else may change or publish them. So the source locks them, in this order, and
        waits for those that others have locked: skipping a row would publish later ones of its key before it.
        """

    @abstractmethod
    def messages(self, row: Any) -> Sequence[Message]:
        """The messages of a row, in their order.

        Raises:
            InvalidMessageError: The row is not valid.
        """

    def adapts(self, rows: Sequence[Any], error: BrokerError) -> bool:
        """Called when one of the messages of these rows is refused: whether `messages` returns other ones for them now."""
        del rows, error
        return False

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
    def all_columns(self, connection: Connection, row: Any) -> Mapping[str, Any]:
        """The row with all its columns, for a dead letter."""


def fitting(sizes: Iterable[int], limit: int) -> int:
    """How many of the first things with these sizes fit into the limit; at least one, if there is one."""
    count = 0
    for size in sizes:
        limit -= size
        if limit < 0 and count:
            break
        count += 1
    return count
