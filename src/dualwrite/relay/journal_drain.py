"""Publishes a journal and closes its gate: a journal is an outbox of a fixed layout, whose last turn closes the gate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy import Connection

from dualwrite.errors import BrokerError, StoreError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import Message
from dualwrite.recipe.journaling import message_of
from dualwrite.recovery.report import lost_error
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.relay.drain import Drain, Turn, sql_store
from dualwrite.relay.source import Source, fitting
from dualwrite.stores.journal import is_open
from dualwrite.stores.sql.sql_journal import (
    close_gate,
    delete_entries,
    delete_later,
    due_sizes,
    entry_of_row,
    first_batch,
    has_entries,
    lock_due,
    lock_gate,
)
from dualwrite.stores.sql.tables import JOURNAL_TABLE_NAME, LATER_TABLE_NAME
from dualwrite.transactional_id import drainer_id, journaled_prefix
from dualwrite.writer import DualWriter

_FEW_ENTRIES: Final = 500
"""Entries; if there are fewer, it is tried to close the gate."""

_LAST_SECONDS: Final = 2.0
"""For so long, and one batch more, entries are published while nobody can write into the journal; it is usually some ms."""

_LOCK_SECONDS: Final = 2.0
"""Seconds that closing waits for those who write into the journal; a transaction of theirs may be paused."""


class JournalSource(Source):
    """The entries of a prefix, in the order of their ids, which is an order by cause (`insert_entries`)."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._at_present = 0  # up to this id, entries get the time at which they are sent

    @property
    def name(self) -> str:
        return JOURNAL_TABLE_NAME

    def has_rows(self, connection: Connection) -> bool:
        return has_entries(connection, self._prefix)

    def read(self, connection: Connection, most: int, size: int) -> tuple[Sequence[Any], bool]:
        """Without locks: only the owner of the drainer's id deletes entries, and nobody changes them."""
        return first_batch(connection, self._prefix, most, size)

    def messages(self, row: Any) -> Sequence[Message]:
        return [message_of(entry_of_row(row), at_present=row.id <= self._at_present)]

    def adapts(self, rows: Sequence[Any], error: BrokerError) -> bool:
        """If a timestamp is refused: it may be that of a host whose clock was wrong, so the present time must do."""
        before = self._at_present
        if error.facts.get("name") == "INVALID_TIMESTAMP":  # some errors are not Kafka's
            self._at_present = max(before, *(row.id for row in rows))
        return self._at_present > before

    def remove(self, connection: Connection, rows: Sequence[Any]) -> None:
        deleted = self._delete(connection, [row.id for row in rows])
        if deleted != len(rows):
            raise StoreError(
                f"{len(rows)} journal entries were to be deleted, and {deleted} were: somebody else has deleted some.",
                next_step="nothing was published; leave the table to dualwrite",
            )

    def _delete(self, connection: Connection, ids: Sequence[int]) -> int:
        return delete_entries(connection, ids)

    @staticmethod
    def message(columns: Mapping[str, Any]) -> Message:
        """The message of an entry that is among the dead letters, by its columns."""
        return message_of(entry_of_row(SimpleNamespace(**columns)))

    def identify(self, row: Any) -> str:
        return str(row.id)

    def all_columns(self, connection: Connection, row: Any) -> Mapping[str, Any]:
        del connection
        return dict(row._mapping)  # noqa: SLF001  (public, in spite of its name)


class LaterSource(JournalSource):
    """The messages of a prefix whose time has come, in the order of their times."""

    @property
    def name(self) -> str:
        return LATER_TABLE_NAME

    def has_rows(self, connection: Connection) -> bool:
        return bool(due_sizes(connection, self._prefix, _now_ms(), 1))

    def read(self, connection: Connection, most: int, size: int) -> tuple[Sequence[Any], bool]:
        """Locked: they may be cancelled."""
        sizes = due_sizes(connection, self._prefix, _now_ms(), most)
        fit = fitting(sizes, size)
        return lock_due(connection, self._prefix, _now_ms(), fit) if fit else (), fit < len(sizes)

    def _delete(self, connection: Connection, ids: Sequence[int]) -> int:
        return delete_later(connection, ids)


def _idle(done: Turn) -> Turn:
    return replace(done, is_idle=not (done.rows or done.is_last))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class JournalDrain(Drain):
    """Publishes the journal of a prefix, and closes the gate in its last turn.

    Args:
        writer: On `drainer_id(prefix)`, without a journal of its own; its blocks must end when the messages are visible.
        prefix: The prefix.
        owner: Who drains, for people.
        keeps_open: Never close the gate; otherwise it stays open as long as another process lives that needs it so.
    """

    def __init__(self, writer: DualWriter[Any], prefix: str, owner: str, *, keeps_open: bool = False) -> None:
        letters = DeadLetters(sql_store(writer.store), drainer_id(prefix))
        super().__init__(writer, JournalSource(prefix), dead_letters=letters, reads_before=keeps_open)
        self._later = Drain(writer, LaterSource(prefix), dead_letters=letters)
        self._prefix = prefix
        self._owner = owner
        self._keeps_open = keeps_open
        self._is_clean = False  # nothing is lost, which is found when the writer opens, or recovers after an error

    def turn(self) -> Turn:
        """Publish one batch, or close the gate if few entries are left; the turn is the last one if it is closed then.

        Raises:
            LostTransactionError, UnverifiedTransactionError: An earlier batch was lost, or may be: it must be published again,
                or acknowledged, before the next one, and before the gate closes.
            FencedError: Another process drains.
            DualWriteError: As for `DualWriter.transaction`.
        """
        short = self._store.short_transactions
        was_clean, self._is_clean = self._is_clean, False
        try:
            if not was_clean:
                self._check_none_lost()
            done = self._published()
            self._is_clean = True
            if self._keeps_open or self._store.is_local:  # the latter closes the gate in a batch
                return _idle(done)
            if self._has_many(done):
                return done
            return _idle(done) if self._is_needed_open() else done + self._close()
        except short.driver_errors as error:
            raise short.errors.translated(error, f"publishing the journal of {self._prefix}") from error

    def _published(self) -> Turn:
        """A batch of the journal, or if it is empty, of what was written for later."""
        done = super().turn()
        return self._later.turn() if not done.rows and self._later.has_rows() else done

    def has_rows(self) -> bool:
        """Whether there is anything to publish now, also of what was written for later."""
        return super().has_rows() or self._later.has_rows()

    def _is_needed_open(self) -> bool:
        """Whether this process, or another one, always writes into the journal; if it were closed, it would be opened again."""
        leases = self._store.leases.entries
        return self._keeps_open or any(not each.has_ended for each in leases(f"{journaled_prefix(self._prefix)}."))

    def _has_many(self, done: Turn) -> bool:
        """Whether many entries are left, or others whose time has come: the first batches are small, however much there is."""
        if done.rows and self._later.has_rows():
            return True
        return done.rows >= _FEW_ENTRIES or self._store.short_transactions.query(
            lambda connection: has_entries(connection, self._prefix, _FEW_ENTRIES), "looking for journal entries"
        )

    def _check_none_lost(self) -> None:
        row = self._store.read(self.writer.transactional_id)
        if row is not None and row.without_messages:  # their messages come before those that are still in the journal
            error = lost_error((row.transactional_id, entry) for entry in row.without_messages)
            assert error is not None
            raise error

    def _close(self) -> Turn:
        """Close the gate, if it takes a short time to empty the journal while nobody can write into it.

        Those who write into the journal wait meanwhile. Otherwise it would never be empty as long as there are some. If this
        process is paused, the database ends the transaction that keeps them waiting.

        The last turn finds nothing, and is a transaction of the drainer's id that commits: so nobody else has claimed the id
        before, everything that was drained is committed at Kafka, and nothing can come after it while the gate is locked.
        """
        with self._store.short_transactions.begin(_LOCK_SECONDS) as connection:
            if (epoch := self._locked(connection)) is None:
                return Turn(is_last=not self._source.has_rows(connection))
            done, until = Turn(), time.monotonic() + _LAST_SECONDS
            while (batch := super().turn()).rows:
                done += batch
                if time.monotonic() > until:
                    return done
            self._check_none_lost()
            return done + Turn(is_last=self._closed(connection, epoch))

    def _ends(self, connection: Connection, *, has_sent: bool) -> bool:
        """The same on SQLite: at the end of the batch that empties the journal, since nobody else can write beside it.

        Without two-phase commit Kafka may still abort what was sent, so that the next, empty batch closes the gate.
        """
        if not self._store.is_local or (has_sent and not self.writer.is_two_phase) or self._source.has_rows(connection):
            return False
        if self._is_needed_open():
            return False
        epoch = self._locked(connection)
        return epoch is None or self._closed(connection, epoch)

    def _locked(self, connection: Connection) -> int | None:
        """Lock the gate; its epoch, or None if it is closed already."""
        epoch = lock_gate(connection, self._prefix)
        return epoch if epoch is not None and is_open(epoch) else None

    def _closed(self, connection: Connection, epoch: int) -> bool:
        hit("journal_before_close")
        return close_gate(connection, self._prefix, epoch, self._owner)
