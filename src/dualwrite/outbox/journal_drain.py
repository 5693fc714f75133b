"""Publishes a journal and closes its gate: the source that `outbox.Drain` drains, and the last transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy import Connection

from dualwrite.errors import DualWriteError, StoreError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import Message
from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.drain import BatchOptions, Drain, own_statements, sql_store
from dualwrite.outbox.source import Source
from dualwrite.recipe.journaling import message_of
from dualwrite.recovery.report import lost_error
from dualwrite.stores.journal import is_open
from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_journal import (
    close_gate,
    delete_entries,
    entry_of_row,
    first_entries,
    has_many,
    has_none,
    lock_gate,
)
from dualwrite.stores.sql.tables import JOURNAL_TABLE_NAME
from dualwrite.writer import DualWriter

_FEW: Final = 500
"""Entries; if there are fewer, it is tried to close the gate."""

_LAST_SECONDS: Final = 2.0
"""For so long, and one batch more, entries are published while nobody can write into the journal; it is usually some ms."""

_LOCK_LIMIT: Final = 2.0
"""Seconds that closing waits for those who write into the journal; a transaction of theirs may be paused."""

_LEASE: Final = 15.0
"""Seconds after which another process drains, if this one has died."""


def drainer_id(prefix: str) -> str:
    """The transactional id that drains the journal of a prefix. One process uses it at a time; its claims fence the others."""
    return f"{prefix}.journal"


class JournalSource(Source):
    """The entries of a prefix, in the order of their ids, which is an order by cause (`insert_entries`)."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    @property
    def name(self) -> str:
        return JOURNAL_TABLE_NAME

    def has_rows(self, connection: Connection) -> bool:
        return not has_none(connection, self._prefix)

    def read(self, connection: Connection, most: int) -> Sequence[Any]:
        """Without locks: only the owner of the drainer's id deletes entries, and nobody changes them."""
        return first_entries(connection, self._prefix, most)

    def messages(self, row: Any) -> Sequence[Message]:
        return [message_of(entry_of_row(row))]

    def remove(self, connection: Connection, rows: Sequence[Any]) -> None:
        deleted = delete_entries(connection, [row.id for row in rows])
        if deleted != len(rows):
            raise StoreError(
                f"{len(rows)} journal entries were to be deleted, and {deleted} were: somebody else has deleted some.",
                next_step="nothing was published; leave the table to dualwrite",
            )

    @staticmethod
    def message(columns: Mapping[str, Any]) -> Message:
        """The message of an entry that is among the dead letters, by its columns."""
        return message_of(entry_of_row(SimpleNamespace(**columns)))

    def identify(self, row: Any) -> str:
        return str(row.id)

    def whole(self, connection: Connection, row: Any) -> Mapping[str, Any]:
        del connection
        return dict(row._mapping)  # noqa: SLF001  (public, in spite of its name)


class DrainLease:
    """The lease on the drainer's id: one process at a time drains. It only saves work: claiming the id stops the others.

    Args:
        leases: The database's leases.
        prefix: The prefix of the journal.
        owner: This process, as nobody else is named.
    """

    def __init__(self, leases: LeaseStore, prefix: str, owner: str) -> None:
        self._leases = leases
        self._id = drainer_id(prefix)
        self._owner = owner
        self._until = 0.0

    def is_ours(self) -> bool:
        """Whether this process drains: it gets the lease if that is free, and renews it at half its time."""
        now = time.monotonic()
        if now < self._until - _LEASE / 2:
            return True
        leased = self._leases.acquire([self._id], self._owner, seconds=_LEASE)
        self._until = now + _LEASE if self._id in leased else 0.0
        return bool(leased)

    def held_by(self) -> Lease | None:
        """The lease of another process, if there is one that has not ended."""
        for each in self._leases.entries(self._id):
            if each.transactional_id == self._id and each.owner != self._owner and not each.has_ended:
                return each
        return None

    def give_up(self) -> None:
        """Another process drains; the lease may be its own."""
        self._until = 0.0

    def release(self) -> None:
        """Let another process drain at once."""
        if self._until:
            self._until = 0.0
            with suppress(DualWriteError):  # it ends by itself
                self._leases.release([self._id], self._owner)


class JournalDrain:
    """Publishes the journal of a prefix with an open writer on the drainer's id, and closes the gate. For one thread.

    Args:
        writer: On `drainer_id(prefix)`, without a journal of its own; its blocks must end when the messages are visible.
        prefix: The prefix.
        owner: Who drains, for people.
    """

    def __init__(self, writer: DualWriter[Any], prefix: str, owner: str) -> None:
        self._writer = writer
        self._prefix = prefix
        self._owner = owner
        self._store: SqlStateStore = sql_store(writer.store)
        self._locks_all = self._store.is_local
        self._source = JournalSource(prefix)
        letters = DeadLetters(self._store, drainer_id(prefix))
        self._drain = Drain(writer, self._source, options=BatchOptions(), dead_letters=letters)

    def step(self) -> bool:
        """Publish one batch, or close the gate if the journal is empty; False if it is closed.

        Raises:
            LostTransactionError, UnverifiedTransactionError: An earlier batch was lost, or may be: it must be published again,
                or acknowledged, before the next one, and before the gate closes.
            FencedError: Another process drains.
            DualWriteError: As for `DualWriter.transaction`.
        """
        self._check_none_lost()
        if self._drain.turn().rows >= _FEW or self._has_many():  # the first batches are small, however much there is
            return True
        return not (self._close_on_sqlite() if self._locks_all else self._close())

    def _has_many(self) -> bool:
        return self._store.short_transactions.query(
            lambda connection: has_many(connection, self._prefix, _FEW), "looking for journal entries"
        )

    def _check_none_lost(self) -> None:
        row = self._store.read(self._writer.transactional_id)
        if row is not None and row.lost:  # their messages come before those that are still in the journal
            error = lost_error((row.transactional_id, entry) for entry in row.lost)
            assert error is not None
            raise error

    def _close(self) -> bool:
        """Close the gate, if it takes a short time to empty the journal while nobody can write into it; whether it is closed.

        Those who write into the journal wait meanwhile. Otherwise it would never be empty as long as there are some. If this
        process is paused, the database ends the transaction that keeps them waiting.

        The last turn finds nothing, and is a transaction of the drainer's id that commits: so nobody else has claimed the id
        before, everything that was drained is committed at Kafka, and nothing can come after it while the gate is locked.
        """
        short = self._store.short_transactions
        try:
            with short.begin(_LOCK_LIMIT) as connection:
                return self._close_on(connection)
        except short.driver_errors as error:
            raise short.errors.translated(error, "closing the journal's gate") from error

    def _close_on(self, connection: Connection) -> bool:
        epoch = lock_gate(connection, self._prefix)
        if epoch is None or not is_open(epoch):
            return True
        until = time.monotonic() + _LAST_SECONDS
        while self._drain.turn().rows:
            if time.monotonic() > until:
                return False
        self._check_none_lost()
        hit("journal_before_close")
        return close_gate(connection, self._prefix, epoch, self._owner)

    def _close_on_sqlite(self) -> bool:
        """The same in one transaction of the drainer's id, beside which nobody can write.

        Under two-phase commit it publishes the last entries as well: Kafka can't abort them any more, and they are in the log.
        """
        with self._writer.group_transaction(is_group=False) as begun:
            with own_statements(begun) as connection:
                epoch = lock_gate(connection, self._prefix)
                rows = self._source.read(connection, _FEW)
            if epoch is None or not is_open(epoch):
                return True
            if len(rows) == _FEW or (rows and not self._writer.is_two_phase):
                return False
            if rows:
                begun.send_messages([message for row in rows for message in self._source.messages(row)])
            hit("journal_before_close")
            with own_statements(begun) as connection:
                self._source.remove(connection, rows)
                return close_gate(connection, self._prefix, epoch, self._owner)
