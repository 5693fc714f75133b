"""A transaction's ORM sessions, and the units of a group, each with a savepoint in it, which undoes that unit alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dualwrite.errors import DualWriteError
from dualwrite.stores.sql.dialect import UNIT, ErrorClass, MergedStatements, QueuedStatements
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.stores.sql.sql_context import StoreContext
from dualwrite.stores.sql.sql_errors import TransactionErrors, error_and_causes, quietly

if TYPE_CHECKING:
    from dualwrite.stores.sql.orm import GuardedSession


class TransactionSessions:
    """The current unit's session, if it was used, and those of the units before.

    Args:
        context: Of the store; creates the sessions.
        errors: Of the transaction.
    """

    def __init__(self, context: StoreContext, errors: TransactionErrors) -> None:
        self._context = context
        self._errors = errors
        self.current: GuardedSession | None = None
        self._of_ended_units: list[GuardedSession] = []

    def get(self, connection: GuardedConnection) -> GuardedSession:
        """The current session, created at the first use."""
        if self.current is None:
            self.current = self._context.sessions(connection)
        return self.current

    def dispatch_before_commit(self) -> None:
        """Run the session's `before_commit` event, unless a flush has failed before."""
        if self.current is not None and self.current.is_active:
            self.current.dispatch_before_commit()

    def flush(self) -> None:
        """Flush what is pending.

        Raises:
            StoreError: An earlier flush failed, and the block ignored its error.
            Exception: What the flush raises.
        """
        session = self.current
        if session is None:
            return
        if not session.is_active:
            raise self._errors.flush_failed()
        session.flush()
        session.flush()  # again, for changes that a listener made during the first

    def end_unit(self, connection: GuardedConnection) -> None:
        """The next unit gets a session of its own; this one is notified when the transaction ends."""
        if self.current is not None:
            self._of_ended_units.append(self.current)
            self.current = connection.guard.session = None

    def remove_current(self, connection: GuardedConnection) -> GuardedSession | None:
        """Forget the current session and return it, to be closed by the caller."""
        session, self.current = self.current, None
        connection.guard.session = None
        return session

    def remove_of_ended_units(self) -> list[GuardedSession]:
        """Forget the sessions of the ended units and return them, to be closed by the caller."""
        sessions, self._of_ended_units = self._of_ended_units, []
        return sessions

    def remove_all(self) -> list[GuardedSession]:
        """Forget all sessions and return them, to be closed by the caller."""
        sessions = [*self._of_ended_units, *([] if self.current is None else [self.current])]
        self.current = None
        self._of_ended_units = []
        return sessions


def close_rolled_back(session: GuardedSession) -> None:
    """Notify the session's listeners of the rollback, and close it. The guard must be lifted."""
    quietly(session.dispatch_after_rollback)
    quietly(session.close_undone)


def close_ended(session: GuardedSession, *, is_committed: bool, is_known: bool) -> Exception | None:
    """Notify the session's listeners how the transaction ended, if that is known, and close it.

    Returns:
        What a listener of the commit has raised.
    """
    if is_known and not is_committed:
        close_rolled_back(session)
        return None
    try:
        if is_committed:
            session.dispatch_after_commit()
    except Exception as error:  # noqa: BLE001  (it must not look like an error of the commit)
        return error
    finally:
        quietly(session.close)
    return None


class UnitSavepoints:
    """The savepoint of the current unit of one transaction."""

    def __init__(self, context: StoreContext, errors: TransactionErrors, sessions: TransactionSessions) -> None:
        self._context = context
        self._errors = errors
        self._sessions = sessions
        self._has_unit = False
        self._handled: BaseException | None = None  # when the unit began: it is the context of what the unit raises
        self.came_with_begin = False
        """Whether BEGIN sets the savepoint of the first unit."""

    def begin(
        self, connection: GuardedConnection, merged: MergedStatements | None, queued: QueuedStatements | None
    ) -> QueuedStatements | None:
        """Set the savepoint, which replaces that of the unit before: now, or with the unit's first statement.

        `queued` is what was queued on the connection last; returns what is queued now.
        """
        self._handled = sys.exception()
        is_first, self._has_unit = not self._has_unit, True
        if self.came_with_begin:
            self.came_with_begin = False
            return queued
        if merged is not None:
            waiting = merged.begin_unit(queued, lambda error: self._failed(error, None), is_first=is_first)
            if waiting is not None:
                return waiting
        self._execute(connection, *((f"SAVEPOINT {UNIT}",) if is_first else self._context.dialect.next_unit))
        return None

    def end(self, connection: GuardedConnection) -> None:
        """Release the savepoints that the unit has left open, and finish with its session."""
        while (nested := connection.get_nested_transaction()) is not None:
            nested.commit()
        self._sessions.end_unit(connection)

    def undo(self, connection: GuardedConnection, error: BaseException) -> None:
        """Roll back to the savepoint; after a deadlock MariaDB and MySQL have rolled back the whole transaction."""
        self._undo(connection, error, f"ROLLBACK TO SAVEPOINT {UNIT}")

    def undo_all(self, connection: GuardedConnection, error: BaseException, *, note: str) -> None:
        """Roll back the units that were begun together; `note` is a text that no earlier statement contained.

        After a ROLLBACK with a text that it has not sent before, psycopg forgets which statements it has prepared. That is
        needed after a pipeline: some of them may not have been prepared, because an earlier statement failed.
        """
        connection.lift_guard()  # until the end of `_undo`
        for session in reversed(self._sessions.remove_of_ended_units()):
            close_rolled_back(session)
        self._undo(connection, error, f"ROLLBACK TO SAVEPOINT {UNIT} -- {note}")

    def _undo(self, connection: GuardedConnection, error: BaseException, statement: str) -> None:
        session = self._sessions.remove_current(connection)
        connection.lift_guard()
        try:
            if session is not None:
                close_rolled_back(session)
            while (nested := connection.get_nested_transaction()) is not None:
                nested.__exit__(type(error), error, None)  # also of a `with` block that was never left
        except self._context.driver_errors as rolling_back:
            raise self._failed(rolling_back, error) from rolling_back
        finally:
            connection.restore_guard()
        self._execute(connection, statement, after=error)

    def _execute(self, connection: GuardedConnection, *statements: str, after: BaseException | None = None) -> None:
        connection.lift_guard()
        try:
            for statement in statements:
                connection.exec_driver_sql(statement)
        except self._context.driver_errors as error:
            raise self._failed(error, after) from error
        finally:
            connection.restore_guard()

    def _failed(self, error: BaseException, after: BaseException | None) -> DualWriteError:
        """The savepoint is gone: because of a broken connection, a conflict that rolled back everything, or the unit itself.

        The unit may have raised another error than the database's: `begin_nested()` raises its own, since its savepoint is gone
        too, and the application may raise one from the database's.
        """
        dialect, errors = self._context.dialect, self._context.errors
        causes = (error,) if after is None else (error, *error_and_causes(after, before=self._handled))
        for cause in causes:
            if not isinstance(cause, self._context.driver_errors):
                continue
            if errors.classify(cause) is ErrorClass.CONNECTION or dialect.may_have_rolled_back(cause):
                return self._errors.translated(cause, "undoing a unit of a group")
        return self._errors.ended_by_block()
