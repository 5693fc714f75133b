"""A transaction's ORM sessions, and the units of a group, each with a savepoint in it, which undoes that unit alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dualwrite.errors import DualWriteError
from dualwrite.stores.sql.dialect import NEXT_UNIT, UNIT, ErrorClass, Outgoing
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.stores.sql.sql_context import StoreContext
from dualwrite.stores.sql.sql_errors import TransactionErrors, error_and_causes, quietly

if TYPE_CHECKING:
    from dualwrite.stores.sql.orm import GuardedSession


class Units:
    """The ORM sessions of one transaction, and the savepoint of its current unit.

    Args:
        context: Of the store.
        errors: Of the transaction.
    """

    def __init__(self, context: StoreContext, errors: TransactionErrors) -> None:
        self._context = context
        self._errors = errors
        self.session: GuardedSession | None = None
        """Of the current unit, if it was used."""
        self._of_ended_units: list[GuardedSession] = []
        self._has_unit = False
        self._handled: BaseException | None = None  # when the unit began: it is the context of what the unit raises

    # --- sessions ---------------------------------------------------------------------------------------------------------

    def used_session(self, connection: GuardedConnection) -> GuardedSession:
        """The current session, created at the first use."""
        if self.session is None:
            self.session = self._context.sessions(connection)
        return self.session

    def before_commit(self) -> None:
        """Run the session's `before_commit` event, unless a flush has failed before, and flush.

        Raises: as `flush`.
        """
        if self.session is not None and self.session.is_active:
            self.session.dispatch_before_commit()
        self.flush()

    def flush(self) -> None:
        """Flush what is pending.

        Raises:
            StoreError: An earlier flush failed, and the block ignored its error.
            Exception: What the flush raises.
        """
        session = self.session
        if session is None:
            return
        if not session.is_active:
            raise self._errors.flush_failed()
        session.flush()
        session.flush()  # again, for changes that a listener made during the first

    def take_sessions(self) -> list[GuardedSession]:
        """Forget all sessions and return them, to be closed by the caller."""
        sessions = [*self._of_ended_units, *([] if self.session is None else [self.session])]
        self.session, self._of_ended_units = None, []
        return sessions

    # --- units ------------------------------------------------------------------------------------------------------------

    def begin(self, connection: GuardedConnection, outgoing: Outgoing) -> None:
        """Set the savepoint, which replaces that of the unit before: now, or with the unit's first statement."""
        self._handled = sys.exception()
        is_first, self._has_unit = not self._has_unit, True
        if outgoing.begin_unit(is_first=is_first):
            return
        connection.lift_guard()
        try:
            for statement in NEXT_UNIT[-1:] if is_first else NEXT_UNIT:
                connection.exec_driver_sql(statement)
        except self._context.driver_errors as error:
            raise self.failed(error, None) from error
        finally:
            connection.restore_guard()

    def end(self, connection: GuardedConnection) -> None:
        """Release the savepoints that the unit has left open. Its session is notified when the transaction ends."""
        while (nested := connection.get_nested_transaction()) is not None:
            nested.commit()
        if self.session is not None:
            self._of_ended_units.append(self.session)
            self.session = connection.guard.session = None

    def undo(self, connection: GuardedConnection, error: BaseException) -> None:
        """Roll back to the savepoint; after a deadlock MariaDB and MySQL have rolled back the whole transaction."""
        sessions = [] if self.session is None else [self.session]
        self.session = None
        self._undo(connection, error, sessions, f"ROLLBACK TO SAVEPOINT {UNIT}")

    def undo_all(self, connection: GuardedConnection, error: BaseException, *, note: str) -> None:
        """Roll back the units that were begun together; `note` is a text that no earlier statement contained.

        After a ROLLBACK with a text that it has not sent before, psycopg forgets which statements it has prepared. That is
        needed after a pipeline: some of them may not have been prepared, because an earlier statement failed.
        """
        self._undo(connection, error, self.take_sessions(), f"ROLLBACK TO SAVEPOINT {UNIT} -- {note}")

    def _undo(
        self, connection: GuardedConnection, error: BaseException, sessions: list[GuardedSession], statement: str
    ) -> None:
        connection.guard.session = None
        connection.lift_guard()
        try:
            for session in reversed(sessions):
                close_rolled_back(session)
            while (nested := connection.get_nested_transaction()) is not None:
                nested.__exit__(type(error), error, None)  # also of a `with` block that was never left
            connection.exec_driver_sql(statement)
        except self._context.driver_errors as rolling_back:
            raise self.failed(rolling_back, error) from rolling_back
        finally:
            connection.restore_guard()

    def failed(self, error: BaseException, after: BaseException | None) -> DualWriteError:
        """The error for a lost savepoint: because of a broken connection, a conflict that rolled back everything, or the unit.

        The unit may have raised another error than the database's: `begin_nested()` raises its own, since its savepoint is gone
        too, and the application may raise one from the database's.
        """
        dialect = self._context.dialect
        causes = (error,) if after is None else (error, *error_and_causes(after, before=self._handled))
        for cause in causes:
            if not isinstance(cause, self._context.driver_errors):
                continue
            if dialect.classify(cause) is ErrorClass.CONNECTION or dialect.may_have_rolled_back(cause):
                return self._errors.translated(cause, "undoing a unit of a group")
        return self._errors.ended_by_block()


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
