"""The engine of relays and of journals: reads a batch of rows, sends their messages and removes the rows, in one dual write."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection

from dualwrite.errors import BrokerError, ConfigurationError, DualWriteError, TransactionTimeoutError, UnknownTopicError
from dualwrite.kafka.base import Message
from dualwrite.observability import observers
from dualwrite.observability.events import DeadLettered, RowsRelayed
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import ErrorMeaning
from dualwrite.relay.dead_letters import DeadLetters, Failed
from dualwrite.relay.poison import MissingTopics, PoisonSearch, meaning_of
from dualwrite.relay.source import Source
from dualwrite.settings import check_count
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.leases import LeaseStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.transaction import OpenTransaction
from dualwrite.writer import DualWriter

log = SubjectLogger(__name__)

_FIRST_ROWS: Final = 100
"""Rows of the first batch; doubled as long as they fit."""

_LEASE_SECONDS: Final = 60.0
"""Seconds for which an id is leased for a replay."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The limits of a batch.

    Args:
        rows: The maximum number of rows of one transaction.
        size: The number of bytes of keys, values and headers after which a batch ends, so that no more than these are in
            memory; one row may have more.
        attempts: How often a row is tried alone before it is set aside because Kafka refuses its message.

    Raises:
        ConfigurationError: A value is not allowed.
    """

    rows: int = 2000
    size: int = 4_000_000
    attempts: int = 3

    def __post_init__(self) -> None:
        for name in ("rows", "size", "attempts"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Turn:
    """What one transaction did.

    Attributes:
        published: The number of rows that it has published.
        dead: The number of rows that it has moved to the dead letters.
        is_last: Whether nothing can come after it: the gate of a journal is closed.
        is_full: Whether it had as many rows as a batch may have.
        is_idle: Whether there was nothing to do, though more may come: the gate of a journal stays open.
    """

    published: int = 0
    dead: int = 0
    is_last: bool = False
    is_full: bool = False
    is_idle: bool = False

    @property
    def rows(self) -> int:
        """All rows that it has removed."""
        return self.published + self.dead

    def __add__(self, after: Turn) -> Turn:
        return Turn(self.published + after.published, self.dead + after.dead, after.is_last, after.is_full, after.is_idle)


class Drain:
    """Publishes the rows of a source, each once and in the source's order. For one thread, the one that uses the writer.

    The recipe of `DualWriter` makes it exactly once: a batch's rows are removed in the database transaction whose COMMIT
    decides about its messages. So after a crash at any point the rows are either still there and were not published, or are
    gone and are published by recovery.

    Args:
        writer: An open writer on the database of the source. It stays open.
        source: The rows.
        options: The limits of a batch.
        dead_letters: Where rows go that can't be sent; None: the rows before the first one are published, then its error is
            raised.
        reads_before: Read the rows before the dual write that removes them, so that there is none if there are no rows; for a
            source whose rows nobody changes, and whose `remove` notices if somebody else has removed one.

    Attributes:
        writer: See above.

    Raises:
        ConfigurationError: The writer's store is not a SQL database.
    """

    def __init__(
        self,
        writer: DualWriter[Any],
        source: Source,
        *,
        options: BatchOptions | None = None,
        dead_letters: DeadLetters | None = None,
        reads_before: bool = False,
    ) -> None:
        self.writer = writer
        self._source = source
        self._options = options or BatchOptions()
        self._dead_letters = dead_letters
        self._reads_before = reads_before
        self._store = sql_store(writer.store)
        self._driver_errors = self._store.short_transactions.driver_errors
        self._most = min(_FIRST_ROWS, self._options.rows)
        self._search = PoisonSearch()
        self._missing = MissingTopics()
        self._attempts = 0  # with the first row alone

    def has_rows(self) -> bool:
        """Whether there is anything to publish now; this costs less than a turn.

        Raises:
            StoreError: The database's own errors, translated.
        """
        return self._store.short_transactions.query(self._source.has_rows, f"looking for rows of {self._source.name}")

    def turn(self) -> Turn:
        """Publish the next batch, if there is a row.

        After an error because of a row the batch is repeated with fewer rows, until the row is found and was set aside, so one
        call may run several transactions.

        Returns:
            What the last transaction did, which has committed: nothing if the source has no rows.

        Raises:
            DualWriteError: As for `DualWriter.transaction`. If `meaning_of` says LATER or IN_DOUBT, call again: rows whose
                transaction is in doubt are found again unless it has committed.
            InvalidMessageError, MessageRefusedError, MessageTooLargeError, UnknownTopicError: A row can't be sent, and there
                are no dead letters.
            Exception: The database driver's, unless it is an outage or a lock: then StoreUnavailableError.
        """
        while True:
            batch, began = _RowBatch(self._source, self._missing, self._dead_letters), time.monotonic()
            try:
                return self._done(batch, self._transaction(batch), began)
            except self._driver_errors as error:
                if not self._store.is_outage(error):
                    raise
                doing = f"publishing the rows of {self._source.name}"
                raise self._store.short_transactions.errors.translated(error, doing) from error
            except DualWriteError as error:
                if isinstance(error, TransactionTimeoutError):
                    self._most = max(1, len(batch.rows) // 2)
                if meaning_of(error, self._store) is not ErrorMeaning.CONTENT or not batch.rows:
                    raise
                if isinstance(error, BrokerError) and self._source.adapts(batch.rows, error):
                    continue
                is_blamed = self._is_blamed(batch, error)
                if is_blamed and self._dead_letters is None:
                    raise
                if is_blamed and self._set_aside(batch.rows[0], error):
                    self._log_dead(batch.rows[0], error)
                    return self._done(batch, Turn(dead=1), began)

    def _transaction(self, batch: _RowBatch) -> Turn:
        if self._reads_before:
            doing = f"reading the rows of {self._source.name}"
            batch.take(*self._store.short_transactions.query(self._read, doing))
            if not batch.rows:
                return Turn()
        with self.writer.untraced_transaction() as begun:
            with own_statements(begun) as connection:
                if not self._reads_before:
                    batch.take(*self._read(connection))
                if self._dead_letters is not None and batch.failed:
                    self._dead_letters.add(connection, self._source, batch.failed)
                if batch.rows:
                    self._source.remove(connection, batch.rows)
                is_last = self._ends(connection, has_sent=bool(batch.messages))
            if batch.messages:
                begun.send_messages(batch.sent())
        return Turn(len(batch.rows) - len(batch.failed), len(batch.failed), is_last, len(batch.rows) >= self._most)

    def _read(self, connection: Connection) -> tuple[Sequence[Any], bool]:
        return self._source.read(connection, self._search.limit(self._most), self._options.size)

    def _ends(self, connection: Connection, *, has_sent: bool) -> bool:
        """Whether this transaction, which has removed its rows, is the last one."""
        del connection, has_sent
        return False

    def _done(self, batch: _RowBatch, turn: Turn, began: float) -> Turn:
        self._attempts = 0
        if turn.published and observers.installed:
            observers.notify(RowsRelayed(self.writer.transactional_id, turn.published, time.monotonic() - began))
        for failed in batch.failed:
            self._log_dead(failed.row, failed.error)
        self._search.succeeded(turn.rows)
        if batch.is_full:  # the next rows will be as large: don't look at many more than fit
            self._most = max(1, len(batch.rows))
        elif len(batch.rows) == self._most:
            self._most = min(2 * self._most, self._options.rows)
        return turn

    # --- rows that can't be sent ------------------------------------------------------------------------------------------

    def _is_blamed(self, batch: _RowBatch, error: DualWriteError) -> bool:
        """Whether the batch's only row is to be set aside; otherwise the next attempt has fewer rows, or is another one."""
        count, current = len(batch.rows), batch.current
        if (
            isinstance(error, UnknownTopicError)
            and self._dead_letters is not None
            and current is not None
            and current.partition is None
            and repr(current.topic) in error.what
        ):
            self._missing.add(current.topic, error)  # the next attempt sets all of its rows aside
            return False
        if count > 1:
            text, name = "a batch of %d rows of %s has failed, trying fewer: %s", self.writer.transactional_id
            log.info(text, count, self._source.name, error, transactional_id=name)
            self._search.failed(count, suspect=batch.suspect)
            return False
        self._attempts += 1
        return isinstance(error, UnknownTopicError) or self._attempts >= self._options.attempts

    def _set_aside(self, row: Any, error: DualWriteError) -> bool:
        """Move the row to the dead letters, if it still is the first one; return whether it was."""
        assert self._dead_letters is not None
        with self.writer.untraced_transaction() as begun, own_statements(begun) as connection:
            rows, _ = self._source.read(connection, 1, self._options.size)
            if not rows or self._source.identify(rows[0]) != self._source.identify(row):
                return False
            self._dead_letters.add(connection, self._source, [Failed(rows[0], error, self._attempts)])
            self._source.remove(connection, rows)
        return True

    def _log_dead(self, row: Any, error: DualWriteError) -> None:
        text = "row %s of %s can't be sent, and was moved to the dead letters: %s"
        log.error(text, self._source.identify(row), self._source.name, error, transactional_id=self.writer.transactional_id)
        if observers.installed:
            observers.notify(DeadLettered(self.writer.transactional_id, "", error))


class _RowBatch:
    """The rows of one transaction, the messages of the valid ones, and those that are known to be invalid.

    Without dead letters it ends before the first one that is not valid.

    Attributes:
        is_full: Whether further rows did not fit.
        current: The message that the producer was given last.
        suspect: The index of its row.
    """

    def __init__(self, source: Source, missing: MissingTopics, dead_letters: DeadLetters | None) -> None:
        self._source = source
        self._missing = missing
        self._dead_letters = dead_letters
        self.rows: Sequence[Any] = ()
        self.failed: list[Failed] = []
        self.messages: list[tuple[int, Message]] = []
        self.is_full = False
        self.current: Message | None = None
        self.suspect: int | None = None

    def take(self, rows: Sequence[Any], is_full: bool) -> None:
        """Take the rows that were read, and whether others did not fit.

        Raises:
            DualWriteError: The first row is not valid, and there are no dead letters.
        """
        self.rows, self.is_full = rows, is_full
        for index, row in enumerate(self.rows):
            try:
                made = self._source.messages(row)
                if self._missing.are_known:
                    self._missing.check(made)
            except DualWriteError as error:
                if self._dead_letters is not None:
                    self.failed.append(Failed(row, error, 1))
                    continue
                if not index:
                    raise
                self.rows = self.rows[:index]
                return
            self.messages += ((index, message) for message in made)

    def sent(self) -> Iterator[Message]:
        """The messages in their order, for a producer that fails with one of them."""
        for index, message in self.messages:
            self.suspect, self.current = index, message
            yield message
        self.suspect = self.current = None


def own_statements(begun: OpenTransaction) -> AbstractContextManager[Connection]:
    """The connection of a transaction for statements of ours, whatever the user's handle is."""
    transaction = begun.store_transaction
    assert isinstance(transaction, SqlStoreTransaction)
    return transaction.own_statements()


def replay(
    writer: DualWriter[Any], letters: DeadLetters, ids: Collection[int], message_of: Callable[[Mapping[str, Any]], Message]
) -> int:
    """Publish dead letters, each once: in a dual write that removes it from them. Returns how many there were.

    If they are large, they are published in several dual writes, each with as many as fit into a batch by default.

    Args:
        writer: An open writer on the database.
        letters: The dead letters.
        ids: Their numbers; those that don't exist (any more) are ignored.
        message_of: The message of a row.

    Raises:
        InvalidMessageError, MessageRefusedError, MessageTooLargeError, UnknownTopicError: One of them can't be sent; none of
            its dual write was published.
        DualWriteError: As for `DualWriter.transaction`.
    """
    published, left = 0, sorted(set(ids))
    while left:
        with writer.untraced_transaction() as begun:
            with own_statements(begun) as connection:
                taken, left = letters.taken(connection, left, BatchOptions().size)
            if messages := [message_of(each.row) for each in taken]:
                begun.send_messages(messages)
        published += len(taken)
    return published


@contextmanager
def leased_id(leases: LeaseStore, prefix: str, owner: str, without: Collection[str] = ()) -> Iterator[str]:
    """An id of the prefix for what is done by hand, other than those `without`; leased in the block."""
    (name,) = leases.lease(prefix, owner, 1, seconds=_LEASE_SECONDS, without=frozenset(without))
    try:
        yield name
    finally:
        with suppress(DualWriteError):  # it ends by itself
            leases.release([name], owner)


def sql_store(store: TxnStateStore) -> SqlStateStore:
    """The store, if it is a SQL database.

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(store, SqlStateStore):
        raise ConfigurationError(
            f"A relay needs a SQL database, but the store is {store.description}.",
            next_step="use PostgreSQL, MariaDB, MySQL or SQLite",
        )
    return store
