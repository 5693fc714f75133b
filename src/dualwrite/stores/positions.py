"""The contract of positions: how far a consumer group has read each partition, stored with the data that it has written.

A position is moved in the database transaction of the data, by compare-and-set: the transaction fails unless the position is
still where the consumer began. So a message takes effect once, even if several consumers believe that they own a partition: one
that was paused for longer than its session, and resumes, can't commit.

Where positions are stored depends on the store (`TxnStateStore.positions`): a table for SQL, a column family for RocksDB, nodes
for ZooKeeper.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from dualwrite.errors import ConfigurationError, PositionMovedError, StoredStateError
from dualwrite.state import MAX_TOPIC_LENGTH
from dualwrite.stores.store_transaction import StoreTransaction

MAX_GROUP_LENGTH: Final = 255
"""Maximum length of a group's id, in characters."""

_LARGEST: Final = 2**63 - 1

Partition = tuple[str, int]
"""A topic, and one of its partitions."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How far one partition was read.

    Args:
        topic: The topic.
        partition: The partition.
        offset: The next offset to read.
        topic_id: Kafka's id of the topic, which distinguishes it from another topic of the same name; empty if unknown.
        updated_at: When it was stored (aware); None before that. Compare-and-set ignores it.

    Raises:
        ConfigurationError: A value is out of range.
    """

    topic: str
    partition: int
    offset: int
    topic_id: str = ""
    updated_at: datetime | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.topic) <= MAX_TOPIC_LENGTH:
            raise ConfigurationError(f"A topic has 1 to {MAX_TOPIC_LENGTH} characters, not {self.topic!r}.")
        for name in ("partition", "offset"):
            number = getattr(self, name)
            if not isinstance(number, int) or not 0 <= number <= _LARGEST:
                raise ConfigurationError(f"{name} must be an integer of at least 0, not {number!r}.")

    @property
    def key(self) -> Partition:
        """The partition that it belongs to."""
        return self.topic, self.partition

    def __str__(self) -> str:
        """Readable text: `orders-0 at 17`."""
        return f"{self.topic}-{self.partition} at {self.offset}"


@dataclass(frozen=True, slots=True)
class Move:
    """One position before and after a batch of messages.

    Args:
        before: The position when the batch was read; None if it was not stored yet.
        after: The position after the batch.

    Raises:
        ConfigurationError: They belong to different partitions.
    """

    before: Position | None
    after: Position

    def __post_init__(self) -> None:
        if self.before is not None and self.before.key != self.after.key:
            raise ConfigurationError(f"A position can't be moved from {self.before} to {self.after}: another partition.")

    @property
    def key(self) -> Partition:
        """The partition that is moved."""
        return self.after.key

    @property
    def expected(self) -> tuple[int, str] | None:
        """The offset and the topic's id that must be stored; None if nothing may be."""
        return None if self.before is None else (self.before.offset, self.before.topic_id)


class Positions(ABC):
    """Stores and reads the positions in one store. Safe to use from several threads.

    All methods but `move` have transactions of their own, and raise StoreError: StoreUnavailableError if the database can't be
    reached, StateTableMissingError if the table is missing (`dualwrite db upgrade`).
    """

    def prepare(self) -> None:  # noqa: B027  (there may be nothing to prepare)
        """Create what the first position needs (a column family, a node), or check that it exists (a table)."""

    @abstractmethod
    def read(self, group_id: str) -> Mapping[Partition, Position]:
        """The committed positions of a group, by partition."""

    @abstractmethod
    def move(self, transaction: StoreTransaction, group_id: str, moves: Iterable[Move]) -> None:
        """Move positions as part of an open transaction of this store, before its state is recorded.

        If a position is not where the move expects it, the transaction must fail: here (PositionMovedError), or in its commit,
        with StoreCommitFailedError; then running it again with the same moves raises PositionMovedError. The database's own
        errors are passed on unchanged, as for a statement in the user's block.
        """

    @abstractmethod
    def reset(self, group_id: str, moves: Iterable[Move]) -> None:
        """Move positions in a transaction of its own, all or none.

        Raises:
            PositionMovedError: A position is not where the move expects it; nothing was changed.
        """

    @abstractmethod
    def forget(self, group_id: str) -> int:
        """Remove the positions of a group that no longer consumes; returns how many there were. Idempotent."""

    @abstractmethod
    def groups(self, prefix: str = "") -> list[str]:
        """The groups that have positions and whose id begins with `prefix`, sorted."""


def validate_group_id(group_id: str) -> str:
    """Return the group's id if it is valid: 1 to 255 printable characters.

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(group_id, str) or not 0 < len(group_id) <= MAX_GROUP_LENGTH or not group_id.isprintable():
        raise ConfigurationError(
            f"A group.id must be a string of 1 to {MAX_GROUP_LENGTH} printable characters, not {str(group_id)[:60]!r}.",
            next_step="set it among the consumer's settings, for example to 'billing'",
        )
    return group_id


def in_order(moves: Iterable[Move]) -> list[Move]:
    """The moves sorted by partition, so that two transactions lock positions in the same order.

    Raises:
        ConfigurationError: A partition is moved twice.
    """
    found = sorted(moves, key=lambda move: move.key)
    for one, other in pairwise(found):
        if one.key == other.key:
            raise ConfigurationError(f"The position of {one.after.topic}-{one.after.partition} is moved twice at once.")
    return found


def check_expected(group_id: str, move: Move, found: Position | None) -> None:
    """Check that the stored position is the one that the move expects.

    Raises:
        PositionMovedError: It is not.
    """
    stored = None if found is None else (found.offset, found.topic_id)
    if stored != move.expected:
        raise moved(group_id, move, found)


def moved(group_id: str, move: Move, found: Position | None) -> PositionMovedError:
    """The error for a position that is not where a move expects it."""
    expected = "nothing" if move.before is None else str(replace(move.before, updated_at=None))
    there = "nothing" if found is None else str(found)
    is_other_topic = found is not None and move.before is not None and found.topic_id != move.before.topic_id
    return PositionMovedError(
        f"The position of group {group_id!r} on {move.after.topic}-{move.after.partition} was moved by another process: "
        f"expected {expected}, found {there}. The transaction takes no effect.",
        cause="it belongs to another topic of the same name"
        if is_other_topic
        else "the partition was given to another consumer of the group, or the position was reset",
        next_step="read the positions again, and continue from there if the partition is still assigned",
        group_id=group_id,
        topic=move.after.topic,
        partition=move.after.partition,
        expected=None if move.before is None else move.before.offset,
        found=None if found is None else found.offset,
    )


def position_text(position: Position) -> bytes:
    """The text of a position that is stored now."""
    return json.dumps([position.offset, position.topic_id, datetime.now(UTC).isoformat()]).encode()


def parse_position(partition: Partition, text: bytes) -> Position:
    """The position in a stored text.

    Raises:
        StoredStateError: It can't be read.
    """
    try:
        offset, topic_id, updated_at = json.loads(text)
        return Position(*partition, offset, topic_id, datetime.fromisoformat(updated_at))
    except (ValueError, TypeError) as error:
        raise StoredStateError(
            f"The stored position of {partition[0]}-{partition[1]} can't be read: {text!r}.",
            cause="it was changed manually or by a newer release",
            next_step="restore it, or upgrade dualwrite; nothing was changed",
            text=repr(text),
        ) from error
