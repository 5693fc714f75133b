"""One business transaction on a SQL database: begin, record, commit.

Our statements in it go through an `Outgoing`, which on PostgreSQL sends some of them with others, to save round trips.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Update, select

from dualwrite.errors import DualWriteError, StoreCommitFailedError
from dualwrite.observability.logs import SubjectLogger
from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.stores.journal import JournalEntry
from dualwrite.stores.rows import Claim
from dualwrite.stores.sql.dialect import ErrorClass, Fence, Mark, NotRecorded, Outgoing, StateRecord, driver_error
from dualwrite.stores.sql.engines import note_error
from dualwrite.stores.sql.guard import Guard, GuardedConnection
from dualwrite.stores.sql.home import OwnConnection
from dualwrite.stores.sql.isolation import StatementWatch
from dualwrite.stores.sql.sql_context import NEWEST_CLAIM, NEWEST_CLAIM_AND_GATE, StoreContext
from dualwrite.stores.sql.sql_errors import TransactionErrors, quietly
from dualwrite.stores.sql.sql_journal import RecordingTransaction, switched
from dualwrite.stores.sql.units import Units, close_ended
from dualwrite.stores.store_transaction import RunAloneError, TransactionThread

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from dualwrite.stores.sql.async_handles import AsyncSession


log = SubjectLogger(__name__)

_tokens: Final = itertools.count(1)
_RECORDING: Final = "recording the prepared state"


class SqlStoreTransaction(RecordingTransaction):
    """One transaction of a SQL store; `begin` opens it.

    `gate`: the prefix whose gate is read with the fence; see JournaledTransaction.
    """

    is_fence_checked = False

    def __init__(self, context: StoreContext, claim: Claim, *, gate: str | None = None) -> None:
        self._context = context
        self._claim = claim
        self._guard: Guard
        self._outgoing: Outgoing  # once there is a connection
        self._token = f"{os.getpid()}.{next(_tokens)}"
        self._connection: GuardedConnection | None = None
        self._handle: Any = None
        self._gate = gate
        self._epoch: int | None = None
        self._errors = TransactionErrors(context.errors, claim)
        self._units = Units(context, self._errors)
        self._is_committed = False
        self._outcome_is_known = True
        self._reports: tuple[object, ...] = ()  # when the watch began
        self._settings: Mapping[str, str] | None = None  # of the unit that has begun last
        self._store_id = ""  # of the row that BEGIN has read

    def begin(self, *, may_wait: bool) -> None:
        """Begin and check the fence; once more if the pool's connection is dead, since nothing was written yet.

        This replaces a pre-ping, without its round trip. `may_wait`: BEGIN and the check may be sent with the first statement.
        """
        try:
            try:
                self._begin_once(may_wait=may_wait)
            except self._context.driver_errors as error:
                if self._context.dialect.classify(error) is not ErrorClass.CONNECTION:
                    raise
                self._begin_once(may_wait=may_wait)
        except self._context.driver_errors as error:
            raise self._begin_failed(error) from error

    def _begin_once(self, *, may_wait: bool) -> None:
        guard = self._guard = Guard(self._claim.transactional_id, self._context.access.savepoint)
        try:
            connection = self._context.access.connect(self._context, guard)
            outgoing = self._context.dialect.outgoing(self._context, connection, self._check_fence, self._failed_late)
            self._connection, self._outgoing = connection, outgoing
            self._context.dialect.begin(connection)
            outgoing.begin(self._mark(), may_wait=may_wait)
        except BaseException as error:
            if self._connection is not None:
                note_error(self._connection, error)
            self._release(discard=not isinstance(error, Exception))  # KeyboardInterrupt: it may come at any point in the driver
            raise
        connection.restore_guard()

    def _mark(self) -> Mark:
        return Mark(self._claim.transactional_id, self._token, self._gate)

    def _begin_failed(self, error: BaseException) -> DualWriteError:
        return self._errors.translated(error, "beginning a transaction")

    def _failed_late(self, error: BaseException) -> DualWriteError:
        return self._units.failed(error, None) if self.is_fence_checked else self._begin_failed(error)

    def _check_fence(self, current: Fence | None) -> None:
        if current is None or current.fence != self._claim.fence:
            raise self._errors.fenced(current)
        self._store_id = current.store_id
        self.found_number = current.transaction_number
        if self._gate is not None:
            self._epoch = current.epoch
        self.is_fence_checked = True

    @property
    def begin_error(self) -> Exception | None:  # type: ignore[override]  # as above
        return None if self.is_fence_checked else self._outgoing.error

    def check_fence(self) -> None:
        if not self.is_fence_checked:
            self._outgoing.send()

    # --- the user's side --------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> Any:
        """A SQLAlchemy Connection, or a psycopg one if the store was created from psycopg; it can't end the transaction."""
        connection = self._open_connection()
        if self._handle is None:
            self._handle = self._context.access.handle(connection)
        return self._handle

    @property
    def session(self) -> Session:
        self._guard.end_batch()  # SQLAlchemy reads each response
        return self._units.used_session(self._open_connection())

    @contextlib.contextmanager
    def own_statements(self) -> Iterator[Connection]:
        """The connection, for statements of our own within the block, whatever the user's handle and its options are."""
        self._guard.end_batch()  # SQLAlchemy reads each response
        connection = self._open_connection()
        with self._outgoing.without_settings(), connection.own_statements():
            yield connection

    def async_handle(self, thread: TransactionThread) -> Any:
        """An AsyncConnection."""
        self._guard.thread = thread.ident
        return self._context.access.async_handle(self._open_connection(), thread)

    def async_session(self, thread: TransactionThread) -> AsyncSession:
        from dualwrite.stores.sql.async_handles import AsyncSession  # noqa: PLC0415  (the ORM, only when it is used)

        self._guard.thread = thread.ident
        connection = self._open_connection()
        return AsyncSession(self._units.used_session(connection), connection, thread)

    def _open_connection(self) -> GuardedConnection:
        if self._connection is None:
            raise self._errors.ended()
        if self._outgoing.error is not None:
            raise self._outgoing.error
        return self._connection

    # --- isolation --------------------------------------------------------------------------------------------------------

    @property
    def refused(self) -> str | None:  # type: ignore[override]  # a plain attribute of stores without settings
        watch = self._guard.watch
        return None if watch is None else watch.refused

    def watch(self, *, shares: bool) -> None:
        watch = self._guard.watch
        if watch is None:
            watch = self._guard.watch = StatementWatch(self._context.effects, self._has_own_functions)
            self._reports = self._context.dialect.session_reports(self._open_connection())
        watch.shares = shares

    def _has_own_functions(self, names: frozenset[str]) -> bool | None:
        with self.own_statements() as connection:
            if self._context.dialect.commit_blocker(connection) is not None:
                return None
            return self._context.dialect.has_own_functions(connection, names)

    def renew_handle(self) -> None:
        self._renew_handle(keeps_ends=True)

    def _renew_handle(self, *, keeps_ends: bool) -> None:
        self._context.access.renew(self._handle)
        if self._connection is not None:
            self._connection.renew(keeps_ends=keeps_ends)

    def _check_isolated(self, connection: GuardedConnection) -> None:
        """Raise if the unit was refused and has ignored that, or if the server reports that a setting has changed."""
        watch = self._guard.watch
        if watch is None or not watch.shares:
            return
        if watch.refused is None and self._guard.batch is None:
            reports = self._context.dialect.session_reports(connection)
            if reports != self._reports:
                watch.refused = "a setting, as the server reports"
        if watch.refused is not None:
            raise RunAloneError(watch.refused)

    # --- settings that a unit declares ------------------------------------------------------------------------------------

    def may_set_local(self, settings: Mapping[str, str]) -> bool:
        if self._settings is None or self._settings == settings:
            return True
        return not self._context.deferred_triggers.exist(self._has_deferred_triggers)

    def _has_deferred_triggers(self) -> bool:
        with self.own_statements() as connection:
            return self._context.dialect.has_deferred_triggers(connection)

    def set_local(self, settings: Mapping[str, str]) -> None:
        self._open_connection()
        self._outgoing.set_local(settings)
        self._settings = settings

    # --- units of a group -------------------------------------------------------------------------------------------------

    def begin_units(self) -> None:
        """Under one savepoint, and in libpq's pipeline if the store was created from psycopg."""
        self.begin_unit()  # first, so that its savepoint is sent with BEGIN
        self._guard.batch = self._context.access.batch(self._open_connection())

    @property
    def has_unanswered_statements(self) -> bool:  # type: ignore[override]  # a plain attribute of stores that always wait
        return self._guard.batch is not None

    @property
    def savepoints(self) -> int:  # type: ignore[override]  # a plain attribute of stores that have none
        """By SQLAlchemy's or psycopg's methods, not those that are plain SQL."""
        return self._guard.savepoints

    def end_units(self) -> None:
        self._guard.end_batch()
        connection = self._open_connection()
        self._check_can_commit(connection)
        self._check_isolated(connection)

    def undo_units(self, error: BaseException) -> None:
        quietly(self._guard.end_batch)  # if it raises, that is `error` again, or a consequence of it
        self._outgoing.unit_undone()
        self._units.undo_all(self._open_connection(), error, note=str(next(_tokens)))
        self._begin_isolated()

    def _check_can_commit(self, connection: GuardedConnection) -> None:
        """Raise if the block, or a unit, has left the transaction unable to commit; a batch shows that only at its end."""
        is_unknown = self._guard.batch is not None or self._outgoing.is_waiting
        blocker = None if is_unknown else self._context.dialect.commit_blocker(connection)
        if blocker is not None:
            raise self._errors.commit_failed(blocker)

    def begin_unit(self) -> None:
        """A savepoint, which replaces that of the unit before."""
        self._units.begin(self._open_connection(), self._outgoing)
        self.watch(shares=True)

    def end_unit(self) -> None:
        connection = self._open_connection()
        self.before_commit()
        self._check_can_commit(connection)
        self._check_isolated(connection)
        self._units.end(connection)
        self._renew_handle(keeps_ends=True)

    def undo_unit(self, error: BaseException) -> None:
        self._outgoing.unit_undone()
        self._units.undo(self._open_connection(), error)
        self._begin_isolated()

    def _begin_isolated(self) -> None:
        """After a unit was undone."""
        self._renew_handle(keeps_ends=False)
        if self._guard.watch is not None:
            self._guard.watch.refused = None

    # --- the writer's side ------------------------------------------------------------------------------------------------

    def before_commit(self) -> None:
        if self._units.session is not None:
            self._guard.end_batch()  # a coroutine may have added objects without a call in the thread
            self._units.before_commit()

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        with self._recording() as connection:
            record = self._record_of(state, generation, transaction_number, delivery)
            statement = self._context.record if self._gate is None else self._context.record_at_gate
            self._execute_record(connection, statement, record)

    @contextlib.contextmanager
    def _recording(self, doing: str = _RECORDING) -> Iterator[GuardedConnection]:
        """The connection without its guard, for the last writes of the transaction, after all of the user's."""
        connection = self._open_connection()
        self._units.flush()
        self._outgoing.send_last()
        connection.lift_guard()
        try:
            if not self._context.dialect.still_marked(connection):
                raise self._errors.ended_by_block()
            yield connection
        except self._context.driver_errors as error:
            raise self._record_failed(error, doing) from error
        finally:
            connection.restore_guard()

    def _execute_record(self, connection: GuardedConnection, statement: Update, record: StateRecord) -> None:
        if connection.execute(statement, record._asdict()).rowcount != 1:
            raise self._why_nothing_changed(connection)

    def write_journal(self, entries: Sequence[JournalEntry], transaction_number: int) -> None:
        with self._recording("writing into the journal") as connection:
            self._insert_entries(connection, entries)
            record = self._record_of(None, 0, transaction_number, None)
            self._execute_record(connection, self._context.record_number, record)

    def record_at_commit(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        self._open_connection()
        self._units.flush()
        self._outgoing.send_last()
        if not self._outgoing.record_at_commit(self._record_of(state, generation, transaction_number, delivery)):
            self.record(state, generation=generation, transaction_number=transaction_number, delivery=delivery)

    def _why_nothing_changed(self, connection: Connection) -> DualWriteError:
        marked = self._context.dialect.marked_condition()
        was_marked = marked is None or bool(connection.scalar(select(marked), {"token": self._token}))
        return self._why_not_recorded(was_marked=was_marked, wrong_encoding=self._context.dialect.wrong_encoding(connection))

    def _record_failed(self, error: BaseException, doing: str = _RECORDING) -> DualWriteError:
        """Under REPEATABLE READ a newer claim causes a serialization failure: only a new transaction shows which it was."""
        failure = self._errors.translated(error, doing)
        if self._context.dialect.classify(error) is ErrorClass.CONFLICT:
            with contextlib.suppress(*self._context.driver_errors):
                current = self._claim_after_rollback()
                if current is not None and current.fence != self._claim.fence:
                    return self._errors.fenced(current)
        return failure

    def _claim_after_rollback(self) -> Any:
        """Roll back, and read the newest claim in a new transaction."""
        self.rollback()
        with OwnConnection(self._context.engine) as connection:
            only = {"id": self._claim.transactional_id}
            if self._gate is None:
                return connection.execute(NEWEST_CLAIM, only).first()
            return connection.execute(NEWEST_CLAIM_AND_GATE, {**only, "gate": self._gate}).first()

    def commit(self) -> None:
        connection = self._open_connection()
        connection.lift_guard()
        try:
            self._send_commit(connection)
        except StoreCommitFailedError:
            self._release(discard=False)
            raise
        except BaseException:  # unknown: close the connection, since its transaction might still be open
            self._outcome_is_known = self.is_surely_rolled_back
            self._release(discard=not self.is_surely_rolled_back)
            raise
        self._is_committed = True
        self._release(discard=False)

    def _send_commit(self, connection: GuardedConnection) -> None:
        dialect = self._context.dialect
        if self._outgoing.record is None:  # otherwise `record_at_commit` has checked that
            self._check_can_commit(connection)
        try:
            self._commit_outgoing(connection)
            connection.commit()
            dialect.finish(connection, "COMMIT")
        except self._context.driver_errors as error:
            if dialect.commit_surely_failed(error, connection):
                raise self._errors.commit_failed(str(driver_error(error)).strip()) from error
            raise self._errors.commit_unknown(error) from error

    def _commit_outgoing(self, connection: GuardedConnection) -> None:
        try:
            self._outgoing.commit()
        except self._context.driver_errors as error:
            note_error(connection, error)
            reason = self._outgoing.why_not_recorded(error)
            if reason is None:
                raise
            self.is_surely_rolled_back = True
            if reason is NotRecorded.ERROR:
                raise self._record_failed(error) from error
            raise self._why_not_recorded(was_marked=reason is NotRecorded.NO_ROW) from error

    def _why_not_recorded(self, *, was_marked: bool, wrong_encoding: str | None = None) -> DualWriteError:
        """Rolls back, and reads the newest rows in a new transaction."""
        try:
            current = self._claim_after_rollback()
        except self._context.driver_errors as reading:
            return self._errors.translated(reading, "reading why the prepared state could not be recorded")
        if wrong_encoding is not None and (current is None or current.fence == self._claim.fence):
            return self._errors.not_found_in_encoding(wrong_encoding)
        if current is None or current.fence != self._claim.fence:
            return self._errors.fenced(current)
        if not was_marked:
            return self._errors.ended_by_block()
        if self._gate is not None and current.epoch != self._epoch:
            return switched(self._gate, self._claim.transactional_id, current.epoch)
        return self._errors.row_not_found(current, self._store_id)

    def rollback(self) -> None:
        self._release(discard=False)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def _release(self, *, discard: bool) -> None:
        """Close session and connection; with `discard`, or if it can't roll back, the connection is not used again."""
        connection = self._connection
        if connection is None:
            return
        sessions = self._units.take_sessions()
        self._context.access.renew(self._handle)
        self._connection = self._handle = None
        guard = self._guard
        connection.lift_guard()
        try:
            self._outgoing.drop()
            if guard.watch is not None:
                quietly(functools.partial(connection.renew, keeps_ends=True))
            if guard.batch is not None:
                quietly(guard.batch.end)
            if not self._is_committed and (discard or not quietly(lambda: self._roll_back(connection))):
                quietly(connection.invalidate)
            if guard.watch is not None and guard.watch.has_changed_session and self._context.access.can_replace:
                quietly(connection.invalidate)
            for session in sessions:
                guard.ended = True
                self._note(close_ended(session, is_committed=self._is_committed, is_known=self._outcome_is_known))
        except BaseException:  # KeyboardInterrupt
            if not self._is_committed:  # perhaps while rolling back: the closed connection rolls back
                quietly(connection.invalidate)
            raise
        finally:
            quietly(connection.close)
            guard.session = None
            guard.ended = True
            guard.lifted = False

    def _note(self, error: Exception | None) -> None:
        if error is None:
            return
        if self.after_commit_error is None:
            self.after_commit_error = error
        else:
            log.error(
                "another listener of after_commit has failed", exc_info=error, transactional_id=self._claim.transactional_id
            )

    def _roll_back(self, connection: GuardedConnection) -> None:
        if connection.in_transaction() or connection.get_transaction() is not None:
            connection.rollback()
            if not connection.invalidated:
                self._context.dialect.finish(connection, "ROLLBACK")
