"""The ORM sessions of one transaction: one for each unit that uses the ORM; all are notified when the transaction ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.stores.sql.cleanup import quietly
from dualwrite.stores.sql.context import StoreContext
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.stores.sql.transaction_errors import TransactionErrors

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
        self._current: GuardedSession | None = None
        self._of_ended_units: list[GuardedSession] = []

    @property
    def is_used(self) -> bool:
        """Whether there is a current session."""
        return self._current is not None

    def current(self, connection: GuardedConnection) -> GuardedSession:
        """The current session, created at the first use."""
        if self._current is None:
            self._current = self._context.sessions(connection)
        return self._current

    def dispatch_before_commit(self) -> None:
        """Run the session's `before_commit` event, unless a flush has failed before."""
        if self._current is not None and self._current.is_active:
            self._current.dispatch_before_commit()

    def flush(self) -> None:
        """Flush what is pending.

        Raises:
            StoreError: An earlier flush failed, and the block ignored its error.
            Exception: What the flush raises.
        """
        session = self._current
        if session is None:
            return
        if not session.is_active:
            raise self._errors.flush_failed()
        session.flush()
        session.flush()  # again, for changes that a listener made during the first

    def end_unit(self, connection: GuardedConnection) -> None:
        """The next unit gets a session of its own; this one is notified when the transaction ends."""
        if self._current is not None:
            self._of_ended_units.append(self._current)
            self._current = connection.guard.session = None

    def remove_current(self, connection: GuardedConnection) -> GuardedSession | None:
        """Forget the current session and return it, to be closed by the caller."""
        session, self._current = self._current, None
        connection.guard.session = None
        return session

    def remove_of_ended_units(self) -> list[GuardedSession]:
        """Forget the sessions of the ended units and return them, to be closed by the caller."""
        sessions, self._of_ended_units = self._of_ended_units, []
        return sessions

    def remove_all(self) -> list[GuardedSession]:
        """Forget all sessions and return them, to be closed by the caller."""
        sessions = [*self._of_ended_units, *([] if self._current is None else [self._current])]
        self._current = None
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
