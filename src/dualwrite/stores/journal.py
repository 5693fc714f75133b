"""The contract of a store that keeps a journal: messages that are committed with the user's data while Kafka is down.

A prefix has a gate. While it is open, every unit of the prefix writes its messages into the journal, in its own database
transaction. It closes when all of them are published. docs/how-it-works/journal.md has the rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from dualwrite.settings import check_count, check_seconds
from dualwrite.stores.rows import Claim
from dualwrite.stores.store_transaction import StoreTransaction


class JournalEntry(NamedTuple):
    """One message; `headers` is a text that only the writer and the drainer understand, `sent_at_ms` since 1970.

    `has_own_time`: the sender gave that time; otherwise it is that of the sender's host.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: str | None
    partition: int | None
    sent_at_ms: int
    has_own_time: bool = False

    @property
    def size(self) -> int:
        """Bytes of its key and value."""
        return len(self.key or b"") + len(self.value or b"")


class LaterEntry(NamedTuple):
    """A message that is published at `due_ms` since 1970, or soon after; `cancel_id` names it, if it may be cancelled."""

    entry: JournalEntry
    due_ms: int
    cancel_id: str | None = None


class NumberedEntry(NamedTuple):
    """An entry with its number, by which entries are published in order."""

    number: int
    entry: JournalEntry


def is_open(epoch: int) -> bool:
    """Whether the gate is open; `epoch` counts its openings and closings."""
    return epoch % 2 == 1


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """How much a journal may contain.

    Args:
        entries: The maximum number of messages.
        size: The maximum number of bytes of keys and values.
        age: The maximum number of seconds for which a message may wait there.

    Raises:
        ConfigurationError: A value is out of range.
    """

    entries: int = 1_000_000
    size: int = 1_000_000_000
    age: float = 86_400.0

    def __post_init__(self) -> None:
        for name in ("entries", "size"):
            check_count(name, getattr(self, name))
        check_seconds("age", self.age)

    def reached(self, status: GateStatus, now: float) -> str | None:
        """Which limit a journal has reached, in words; None if none."""
        if (status.entries or 0) >= self.entries:
            return f"it has {status.entries} messages (the limit is {self.entries})"
        if (status.size or 0) >= self.size:
            return f"its messages have {status.size} bytes (the limit is {self.size})"
        if (age := status.age(now)) >= self.age:
            return f"its oldest message has waited for {age:.0f} s (the limit is {self.age:g})"
        return None


@dataclass(frozen=True, slots=True)
class GateStatus:
    """The gate of a prefix, and what is in its journal.

    Args:
        prefix: The prefix of the pools' transactional ids.
        epoch: How often the gate was opened and closed.
        changed_at: When that was the last time, by the clock of the process that did it.
        changed_by: That process.
        entries: The number of messages to be published now; None if they were not counted. Messages that wait for their time
            are among them once it has come.
        size: Bytes of their keys and values; None if they were not counted.
        limits: Those of the process that has opened it, or wanted to, the last time; None if none has. Each process keeps to
            its own.
        failure: Why its messages could not be published the last time, and the next step; None if they could.
        later: The number of messages whose time has not come; None if they were not counted.
        oldest: When the oldest message was written, or when its time came, in seconds since 1970, by the clock of its process;
            None if they were not counted, there is none, or each has a time of its own.
    """

    prefix: str
    epoch: int
    changed_at: datetime
    changed_by: str
    entries: int | None = None
    size: int | None = None
    limits: JournalLimits | None = None
    failure: str | None = None
    later: int | None = None
    oldest: float | None = None

    def age(self, now: float) -> float:
        """Seconds for which the oldest message has waited; 0 if that is not known."""
        return 0.0 if self.oldest is None else max(0.0, now - self.oldest)

    @property
    def is_open(self) -> bool:
        """Whether units write their messages into the journal."""
        return is_open(self.epoch)


class JournaledTransaction(StoreTransaction):
    """A store transaction that has read the gate of a prefix with its claim's fence.

    `record` and `record_at_commit` have one more condition: the gate is as it was read, so that a unit which has sent its
    messages to Kafka does not overtake those in the journal.

    Raises JournalSwitchedError, from these and from `write_journal`, if the gate has changed; both sides must be rolled back.
    """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The gate as it was read; valid once the fence is checked."""

    @abstractmethod
    def write_journal(self, entries: Sequence[JournalEntry], transaction_number: int) -> None:
        """In place of `record`: write the entries and the number, and lock the gate, shared, until the end of the transaction.

        The row keeps the prepared state of an earlier transaction: it may still be in doubt at Kafka.

        Raises: as `StoreTransaction.record`; and JournalSwitchedError if the gate is not open.
        """


class UnclaimedTransaction(JournaledTransaction):
    """A store transaction of no id: it commits its messages with its data, in the journal, and records nothing else.

    So it has no fence, and any number of them run side by side. `write_journal` may happen in `commit`, which then does both in
    one round trip and raises either's errors; the number is ignored.

    Attributes:
        own_id: What the database calls the transaction; 0 if it does not say, or has not said yet.
    """

    own_id: int = 0

    @abstractmethod
    def write_later(self, later: LaterEntry) -> None:
        """Write a message for later.

        Raises:
            StoreError: Another message waits under its `cancel_id`; or as for `write_journal`.
        """

    @abstractmethod
    def cancel(self, cancel_id: str) -> bool:
        """Cancel a message that waits, as part of the transaction; False if there is none: it was published, or cancelled.

        Waits for a transaction that publishes or cancels it now.
        """


class JournalStore(ABC):
    """Keeps the journals of a database. Safe to use from several threads.

    Every method raises StoreUnavailableError if the database can't be reached, and StateTableMissingError if a table is
    missing.
    """

    @abstractmethod
    def begin(self, claim: Claim, prefix: str, *, at_once: bool) -> JournaledTransaction:
        """As `TxnStateStore.begin_soon`, or if `at_once` as `TxnStateStore.begin`."""

    @abstractmethod
    def begin_unclaimed(self, prefix: str, *, at_once: bool) -> UnclaimedTransaction:
        """As `begin`, for a transaction of no id."""

    @abstractmethod
    def begin_unclaimed_on(self, connection: Any, prefix: str) -> UnclaimedTransaction:
        """The same, for a transaction that the user has begun: as `TxnStateStore.begin_on`."""

    @abstractmethod
    def has_committed(self, transaction: UnclaimedTransaction, *, timeout: float) -> bool | None:
        """After a `commit` whose outcome is unknown: what the database says, within the time; None if it does not know."""

    @abstractmethod
    def cancel(self, prefix: str, cancel_id: str) -> bool:
        """As `UnclaimedTransaction.cancel`, in a transaction of its own."""

    @abstractmethod
    def prepare(self, prefix: str) -> GateStatus:
        """Create the gate of a prefix, closed, if there is none; return it."""

    @abstractmethod
    def gates(self, prefix: str | None = None, *, counts: bool) -> list[GateStatus]:
        """The gates, or that of one prefix; `counts`: with the number and size of the entries."""

    @abstractmethod
    def note_failure(self, prefix: str, failure: str | None) -> None:
        """Store why the messages can't be published, for people; None: they can. Opening and closing the gate forgets it."""

    @abstractmethod
    def entries(self, prefix: str, *, after: int = 0, most: int) -> list[NumberedEntry]:
        """The first entries whose number is above `after`, in their order."""

    @abstractmethod
    def open(self, prefix: str, owner: str, limits: JournalLimits) -> bool:
        """Open the gate; False if it is open already. In both cases record the limits, for those who look at it."""
