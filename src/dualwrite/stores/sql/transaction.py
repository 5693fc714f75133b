"""One business transaction on a SQL database: begin, record, commit, with as few round trips as possible.

PostgreSQL: BEGIN with the fence's SELECT, record's UPDATE with COMMIT (`MergedTrips`); other databases one by one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Engine, Select, Update, bindparam, select, update
from sqlalchemy.exc import SQLAlchemyError

from dualwrite.delivery import Delivery, delivery_text
from dualwrite.errors import (
    DualWriteError,
    FencedError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreError,
    TransactionControlError,
    WriterClosedError,
)
from dualwrite.state import PreparedTxnState, state_text
from dualwrite.stores.rows import fenced
from dualwrite.stores.sql.access import Access
from dualwrite.stores.sql.dialect import UNIT, ErrorClass, MergedTrips, Record, StoreDialect, driver_error
from dualwrite.stores.sql.errors import ErrorMap, address
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.stores.sql.interrupts import InterruptsFirst
from dualwrite.stores.sql.table import state_table as t
from dualwrite.stores.state_row import Claim
from dualwrite.stores.transaction import StoreTransaction, TransactionThread

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from dualwrite.stores.sql.async_session import AsyncSession
    from dualwrite.stores.sql.orm import GuardedSession, SessionFactory, SessionSource

CURRENT: Final = select(t.c.fence, t.c.owner).where(t.c.transactional_id == bindparam("id"))
_tokens: Final = itertools.count(1)


@dataclass(frozen=True)
class TransactionRoom:
    """What all transactions of one store share; the statements are built once, so that SQLAlchemy can cache their SQL.

    Args:
        engine: Where connections come from.
        dialect: The database's dialect.
        errors: Translates its errors.
        access: Gives transactions their connections.
        session: What the user creates ORM sessions from, or None.
    """

    engine: Engine
    dialect: StoreDialect
    errors: ErrorMap
    access: Access
    session: SessionSource | None = None
    trips: MergedTrips | None = field(init=False)
    check_fence: Select[Any] = field(init=False)
    record: Update = field(init=False)
    driver_errors: tuple[type[BaseException], ...] = field(init=False)

    def __post_init__(self) -> None:
        marks = self.dialect.marks()
        check = CURRENT if marks is None else CURRENT.add_columns(marks)
        record = (
            update(t)
            .where(t.c.transactional_id == bindparam("id"), t.c.fence == bindparam("fence_"))
            .values(
                prepared_transaction_state=bindparam("state"),
                prepared_generation=bindparam("generation_"),
                transaction_number=bindparam("number"),
                delivery=bindparam("delivery_"),
                updated_at=bindparam("now"),
            )
        )
        marked = self.dialect.is_marked()
        object.__setattr__(self, "trips", self.dialect.merged_trips(self.engine))
        object.__setattr__(self, "check_fence", check)
        object.__setattr__(self, "record", record if marked is None else record.where(marked))
        dbapi = self.engine.dialect.dbapi
        object.__setattr__(self, "driver_errors", (SQLAlchemyError, *([dbapi.Error] if dbapi is not None else [])))

    @functools.cached_property
    def sessions(self) -> SessionFactory:
        """Creates the ORM sessions; the ORM is loaded only when it is used."""
        from dualwrite.stores.sql.orm import SessionFactory  # noqa: PLC0415  (only when it is used)

        return SessionFactory(self.session)


class SqlStoreTransaction(StoreTransaction):
    """See StoreTransaction; `begin` opens one.

    Args:
        room: What it shares with the store's other transactions.
        claim: The claim that it runs under.
        is_group: Whether units follow, so that the savepoint of the first can be set with BEGIN.
    """

    def __init__(self, room: TransactionRoom, claim: Claim, *, is_group: bool = False) -> None:
        self._room = room
        self._claim = claim
        self._guard = room.access.guard(claim.transactional_id)
        self._token = f"{os.getpid()}.{next(_tokens)}"
        self._connection: GuardedConnection | None = None
        self._handle: Any = None
        self._session: GuardedSession | None = None
        self._ended_sessions: list[GuardedSession] = []  # of earlier units: they learn how the transaction ended
        self._is_group = is_group
        self._has_unit = False
        self._unit_came_with_begin = False
        self._is_committed = False
        self._outcome_is_known = True
        self._recorded_at_commit: Record | None = None

    def begin(self) -> None:
        """Begin and check the fence; repeated if the pool's connection is dead, since nothing was written yet.

        This replaces a pre-ping, without its round trip. The last two attempts are SQLAlchemy's own, which replaces every
        connection of its pool when one is dead.
        """
        attempts = (None, None) if self._room.trips is None else (self._room.trips, None, None)
        for trips in attempts[:-1]:
            try:
                return self._begin_once(trips)
            except self._room.driver_errors as error:
                if self._room.errors.classify(error) is not ErrorClass.CONNECTION:
                    raise self._translated(error, "beginning a transaction") from error
        try:
            return self._begin_once(attempts[-1])
        except self._room.driver_errors as error:
            raise self._translated(error, "beginning a transaction") from error

    def _begin_once(self, trips: MergedTrips | None) -> None:
        guard = self._guard = self._room.access.guard(self._claim.transactional_id)
        try:
            with InterruptsFirst():
                connection = self._connection = self._room.access.connect(guard)
                self._room.dialect.begin(connection)
                current = self._begin_merged(connection, trips) if trips is not None else self._newest_claim(connection)
                self._check_fence(current)
        except Exception:
            self._release(discard=False)
            raise
        except BaseException:  # KeyboardInterrupt, at any point in the driver
            self._release(discard=True)
            raise
        connection.hand_over()

    def _begin_merged(self, connection: GuardedConnection, trips: MergedTrips) -> Any:
        if not trips.can_begin(connection):
            return self._newest_claim(connection)
        try:
            current = trips.begin(connection, self._claim.transactional_id, self._token, with_unit=self._is_group)
        except self._room.driver_errors as error:
            if self._room.errors.classify(error) is ErrorClass.CONNECTION:
                connection.invalidate(error)  # as SQLAlchemy does, so that the reason is known to whom the connection belongs
            raise
        self._unit_came_with_begin = self._is_group
        return current

    def _newest_claim(self, connection: Connection) -> Any:
        parameters = {"id": self._claim.transactional_id, "token": self._token}
        return connection.execute(self._room.check_fence, parameters).first()

    def _check_fence(self, current: Any) -> None:
        if current is None or current.fence != self._claim.fence:
            raise self._fenced(current)

    def _fenced(self, current: Any) -> FencedError:
        return fenced(self._claim, *((None, None) if current is None else (current.fence, current.owner)))

    # --- the user's side --------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> Any:
        """A SQLAlchemy Connection, or a psycopg one if the store was created from psycopg; it can't end the transaction."""
        connection = self._open_connection()
        if self._handle is None:
            self._handle = self._room.access.handle(connection)
        return self._handle

    @property
    def session(self) -> Session:
        """See StoreTransaction."""
        self._leave_batch()  # SQLAlchemy looks at each answer
        return self._orm_session()

    def _orm_session(self) -> GuardedSession:
        connection = self._open_connection()
        if self._session is None:
            self._session = self._room.sessions(connection)
        return self._session

    def async_handle(self, thread: TransactionThread) -> Any:
        """See StoreTransaction: an AsyncConnection."""
        self._guard.thread = thread.ident
        return self._room.access.async_handle(self._open_connection(), thread)

    def async_session(self, thread: TransactionThread) -> AsyncSession:
        """See StoreTransaction."""
        from dualwrite.stores.sql.async_session import AsyncSession, CallsAfter  # noqa: PLC0415  (the ORM, only when it is used)

        self._guard.thread = thread.ident
        return AsyncSession(self._orm_session(), self._open_connection(), CallsAfter(self._leave_batch, thread))

    def _open_connection(self) -> GuardedConnection:
        if self._connection is None:
            raise WriterClosedError("The transaction has ended.", transactional_id=self._claim.transactional_id)
        return self._connection

    # --- units of a group -------------------------------------------------------------------------------------------------

    def begin_units(self) -> None:
        """See StoreTransaction: under one savepoint, and in libpq's pipeline if the store was created from psycopg."""
        connection = self._open_connection()
        self._guard.batch = self._room.access.batch(connection)
        self.begin_unit()

    @property
    def answers_are_late(self) -> bool:  # type: ignore[override]  # a plain attribute of stores that always wait
        """See StoreTransaction."""
        return self._guard.batch is not None

    @property
    def savepoints(self) -> int:  # type: ignore[override]  # a plain attribute of stores that have none
        """See StoreTransaction: by SQLAlchemy's or psycopg's methods, not those that are plain SQL."""
        return self._guard.savepoints

    def end_units(self) -> None:
        """See StoreTransaction."""
        self._leave_batch()
        self._check_can_commit(self._open_connection())

    def undo_units(self, error: BaseException) -> None:
        """See StoreTransaction."""
        _quietly(self._leave_batch)  # an error of its own is the same, or a consequence of `error`
        sessions, self._ended_sessions = self._ended_sessions, []
        for session in sessions:
            _quietly(session.dispatch_after_rollback)
            _quietly(session.close)
        self._undo_unit(error, note=f" -- {next(_tokens)}")

    def _leave_batch(self) -> None:
        if self._guard.batch is not None:
            self._guard.batch.leave()

    def _check_can_commit(self, connection: GuardedConnection) -> None:
        """Raise if the block, or a unit, has left the transaction unable to commit; in a batch that is not known yet."""
        blocker = None if self._guard.batch is not None else self._room.dialect.commit_blocker(connection)
        if blocker is not None:
            raise self._commit_failed(blocker)

    def begin_unit(self) -> None:
        """See StoreTransaction: a savepoint, which replaces that of the unit before."""
        if self._unit_came_with_begin:
            self._unit_came_with_begin = False
        else:
            self._run_for_unit(*(self._room.dialect.next_unit if self._has_unit else (f"SAVEPOINT {UNIT}",)))
        self._has_unit = True

    def end_unit(self) -> None:
        """See StoreTransaction."""
        connection = self._open_connection()
        self.before_commit()
        self._check_can_commit(connection)
        while (nested := connection.get_nested_transaction()) is not None:  # a savepoint that the unit has left open
            nested.commit()
        if self._session is not None:
            self._ended_sessions.append(self._session)
            self._session = self._guard.session = None

    def undo_unit(self, error: BaseException) -> None:
        """See StoreTransaction; after a deadlock MariaDB and MySQL have rolled back the whole transaction."""
        self._undo_unit(error)

    def _undo_unit(self, error: BaseException, *, note: str = "") -> None:
        """With a text that it has not sent before, psycopg forgets the statements that it has prepared.

        That is needed after a pipeline: some may not have been prepared, since an error came before.
        """
        connection = self._open_connection()
        session, self._session = self._session, None
        self._guard.session = None
        connection.take_back()
        try:
            if session is not None:
                _quietly(session.dispatch_after_rollback)
                _quietly(session.close)
            while (nested := connection.get_nested_transaction()) is not None:
                nested.__exit__(type(error), error, None)  # also of a `with` block that was never left
        except self._room.driver_errors as rolling_back:
            raise self._unit_failed(rolling_back, error) from rolling_back
        finally:
            connection.hand_over()
        self._run_for_unit(f"ROLLBACK TO SAVEPOINT {UNIT}{note}", after=error)

    def _run_for_unit(self, *statements: str, after: BaseException | None = None) -> None:
        connection = self._open_connection()
        connection.take_back()
        try:
            for statement in statements:
                connection.exec_driver_sql(statement)
        except self._room.driver_errors as error:
            raise self._unit_failed(error, after) from error
        finally:
            connection.hand_over()

    def _unit_failed(self, error: BaseException, after: BaseException | None) -> DualWriteError:
        """The savepoint is gone: because of a broken connection, a conflict that rolled back everything, or the unit itself."""
        for cause in (error, after):
            if cause is None or not isinstance(cause, self._room.driver_errors):
                continue
            if self._room.errors.classify(cause) in (ErrorClass.CONNECTION, ErrorClass.CONFLICT):
                return self._translated(cause, "undoing a unit of a group")
        return self._ended_by_block()

    # --- the writer's side ------------------------------------------------------------------------------------------------

    def before_commit(self) -> None:
        """See StoreTransaction."""
        if self._session is not None:
            self._leave_batch()  # a coroutine may have added objects without a call in the thread
            if self._session.is_active:
                self._session.dispatch_before_commit()
        self._flush()

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """See StoreTransaction."""
        connection = self._open_connection()
        self._flush()
        connection.take_back()
        try:
            self._check_marked(connection)
            record = self._record_of(state, generation, transaction_number, delivery)
            if connection.execute(self._room.record, _parameters(record)).rowcount != 1:
                raise self._why_nothing_changed(connection)
        except self._room.driver_errors as error:
            raise self._record_failed(error) from error
        finally:
            connection.hand_over()

    def record_at_commit(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """See StoreTransaction."""
        connection, trips = self._open_connection(), self._room.trips
        if trips is None or not trips.can_commit(connection):
            self.record(state, generation=generation, transaction_number=transaction_number, delivery=delivery)
            return
        self._flush()
        self._check_marked(connection)
        self._recorded_at_commit = self._record_of(state, generation, transaction_number, delivery)

    def _check_marked(self, connection: Connection) -> None:
        if not self._room.dialect.still_marked(connection):
            raise self._ended_by_block()

    def _record_of(self, state: PreparedTxnState | None, generation: int, number: int, delivery: Delivery | None) -> Record:
        return Record(
            transactional_id=self._claim.transactional_id,
            fence=self._claim.fence,
            token=self._token,
            state=state_text(state),
            generation=generation,
            number=number,
            delivery=delivery_text(delivery),
            now=datetime.now(UTC),
        )

    def _flush(self) -> None:
        session = self._session
        if session is None:
            return
        if session.is_active:
            session.flush()
            session.flush()  # again, for changes that a listener made during the first
        else:
            raise StoreError(
                "The database's transaction can't be committed: a flush of the ORM session failed, and the block continued.",
                transactional_id=self._claim.transactional_id,
                next_step="let the error of the flush leave the block, or flush under a savepoint (session.begin_nested())",
            )

    def _why_nothing_changed(self, connection: Connection) -> DualWriteError:
        marked = self._room.dialect.is_marked()
        query = CURRENT if marked is None else CURRENT.add_columns(marked.label("marked"))
        query = query.with_for_update(read=True)  # the newest row: MariaDB's snapshot would still show our own claim
        current = connection.execute(query, {"id": self._claim.transactional_id, "token": self._token}).first()
        if current is not None and marked is not None and not current.marked:
            return self._ended_by_block()
        return self._fenced(current)

    def _record_failed(self, error: BaseException) -> DualWriteError:
        """Under REPEATABLE READ a newer claim causes a serialization failure: only a new transaction shows which it was."""
        failure = self._translated(error, "recording the prepared state")
        if self._room.errors.classify(error) is ErrorClass.CONFLICT:
            with contextlib.suppress(*self._room.driver_errors):
                current = self._claim_after_rollback()
                if current is not None and current.fence != self._claim.fence:
                    return self._fenced(current)
        return failure

    def _claim_after_rollback(self) -> Any:
        """Roll back, and read the newest claim in a new transaction."""
        self.rollback()
        with self._room.engine.connect() as connection:
            return connection.execute(CURRENT, {"id": self._claim.transactional_id}).first()

    def _ended_by_block(self) -> TransactionControlError:
        return TransactionControlError(
            "The block ended the database's transaction itself: what it wrote before that may have been committed WITHOUT its "
            "messages, which are aborted now.",
            transactional_id=self._claim.transactional_id,
            cause="a COMMIT or ROLLBACK through the driver's own connection, a procedure, or a statement that ends the "
            "transaction implicitly (SQLite: ON CONFLICT ROLLBACK; MariaDB, MySQL: CREATE TABLE and the like bypassing tx.db, "
            "or a deadlock whose error the block ignored)",
            next_step="check what the block wrote; remove the commit or rollback from it (savepoints are allowed)",
        )

    def commit(self) -> None:
        """See StoreTransaction."""
        connection = self._open_connection()
        connection.take_back()
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
        dialect = self._room.dialect
        self._check_can_commit(connection)
        try:
            with InterruptsFirst():
                if self._recorded_at_commit is not None:
                    self._commit_merged(connection, self._recorded_at_commit)
                connection.commit()
                dialect.finish(connection, "COMMIT")
        except self._room.driver_errors as error:
            if dialect.commit_surely_failed(error, connection):
                raise self._commit_failed(str(driver_error(error)).strip()) from error
            raise self._commit_unknown(error) from error

    def _commit_merged(self, connection: GuardedConnection, record: Record) -> None:
        """Write the record and commit; what SQLAlchemy sends to commit afterwards does nothing any more."""
        trips = self._room.trips
        assert trips is not None
        try:
            trips.commit(connection, record)
        except self._room.driver_errors as error:
            if not trips.was_not_executed(connection):
                raise
            self.is_surely_rolled_back = True
            if not trips.found_no_row(error):
                raise self._record_failed(error) from error
            raise self._why_no_row() from error

    def _why_no_row(self) -> DualWriteError:
        try:
            current = self._claim_after_rollback()
        except self._room.driver_errors as looking:
            return self._translated(looking, "looking why the prepared state could not be recorded")
        if current is None or current.fence != self._claim.fence:
            return self._fenced(current)
        return self._ended_by_block()

    def _commit_failed(self, cause: str) -> StoreCommitFailedError:
        return StoreCommitFailedError(
            f"The database {address(self._room.engine.url)} did not commit; nothing of the transaction was written.",
            transactional_id=self._claim.transactional_id,
            cause=cause,
            next_step="if the cause is a conflict with another transaction, run the whole transaction again",
        )

    def _commit_unknown(self, error: BaseException) -> StoreCommitUnknownError:
        return StoreCommitUnknownError(
            f"{address(self._room.engine.url)} did not answer the COMMIT: it may or may not have committed.",
            transactional_id=self._claim.transactional_id,
            cause=str(driver_error(error)).strip(),
            next_step="claim the id again with the same expected fence and read the row",
        )

    def rollback(self) -> None:
        """See StoreTransaction."""
        self._release(discard=False)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def _release(self, *, discard: bool) -> None:
        """Close session and connection; with `discard`, or if it can't roll back, the connection is not used again."""
        connection = self._connection
        if connection is None:
            return
        sessions = [*self._ended_sessions, *([] if self._session is None else [self._session])]
        self._connection = self._session = self._handle = None
        self._ended_sessions = []
        guard = self._guard
        connection.take_back()
        try:
            if guard.batch is not None:
                _quietly(guard.batch.leave)
            if not self._is_committed and (discard or not _quietly(lambda: self._roll_back(connection))):
                _quietly(connection.invalidate)
            for session in sessions:
                self._end_session(session)
        except BaseException:  # KeyboardInterrupt while rolling back: the closed connection rolls back
            _quietly(connection.invalidate)
            raise
        finally:
            _quietly(connection.close)
            guard.session = None
            guard.ended = True
            guard.lifted = False

    def _end_session(self, session: GuardedSession) -> None:
        """Notify the session's listeners how the transaction ended, if that is known, and close it."""
        self._guard.ended = True
        try:
            if self._is_committed:
                session.dispatch_after_commit()
            elif self._outcome_is_known:
                _quietly(session.dispatch_after_rollback)
        finally:
            _quietly(session.close)

    def _roll_back(self, connection: GuardedConnection) -> None:
        if connection.in_transaction() or connection.get_transaction() is not None:
            connection.rollback()
            if not connection.invalidated:
                self._room.dialect.finish(connection, "ROLLBACK")

    def _translated(self, error: BaseException, doing: str) -> DualWriteError:
        return self._room.errors.translated(error, doing, self._claim.transactional_id)


def _parameters(record: Record) -> dict[str, Any]:
    return {
        "id": record.transactional_id,
        "fence_": record.fence,
        "state": record.state,
        "delivery_": record.delivery,
        "generation_": record.generation,
        "number": record.number,
        "now": record.now,
        "token": record.token,
    }


def _quietly(action: Any) -> bool:
    """Run a step of the cleanup, and return whether it succeeded. Its errors don't matter: the connection is closed."""
    try:
        action()
    except Exception:  # noqa: BLE001  (rollback's contract: it raises no Exception)
        return False
    return True
