"""The database's side of a `FakeTransaction`: a real transaction on the user's engine, or what the user has given."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from dualwrite.errors import UsageError, WriterClosedError
from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.stores.sql.async_handles import AsyncConnection, AsyncSession
from dualwrite.stores.sql.engines import dialect_of
from dualwrite.stores.sql.guard import Guard, GuardedConnection, check_statements
from dualwrite.stores.sql.home import engine_at_home
from dualwrite.stores.sql.orm import GuardedSession, SessionFactory, SessionSource
from dualwrite.stores.sql.units import close_ended
from dualwrite.stores.store_transaction import StoreTransaction, TransactionThread

P = ParamSpec("P")
T = TypeVar("T")

_NO_THREAD: Final = -1


class FakeStoreTransaction(StoreTransaction):
    """A transaction of the user's alone: there is no row of dualwrite's to write."""

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """While a coroutine's call runs, which may execute statements."""
        yield

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        del state, generation, transaction_number, delivery

    @abstractmethod
    def before_commit(self) -> None: ...


class GivenHandle(FakeStoreTransaction):
    """The user's own objects, whose transaction is the user's as well."""

    def __init__(self, handle: Any, session: Any) -> None:
        self._handle = handle
        self._session = session

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise UsageError(
                "This FakeTransaction has no database.",
                next_step="pass one, FakeTransaction(db): a SQLAlchemy Engine, a Connection, or a stub",
            )
        return self._handle

    @property
    def session(self) -> Any:
        if self._session is None:
            raise UsageError(
                "This FakeTransaction has no ORM session.",
                next_step="pass a SQLAlchemy Engine, FakeTransaction(engine), or a session, FakeTransaction(session=session)",
            )
        return self._session

    def before_commit(self) -> None:
        if isinstance(self._session, Session):
            self._session.flush()

    def commit(self) -> None:
        """The user decides."""

    def rollback(self) -> None:
        """The user decides."""


class OnEngine(FakeStoreTransaction):
    """A transaction on an engine, with the handles of a SQL store; begun at the first use.

    Args:
        engine: The user's engine.
        source: What sessions are made from.
        transactional_id: For errors.
    """

    def __init__(self, engine: Engine, source: SessionSource | None, transactional_id: str) -> None:
        # with the name of a schema: our tables, which a unit test's database need not have, are not looked up
        self._engine = engine_at_home(engine, dialect_of(engine), "unused", is_ours=False)
        check_statements(engine)
        self._sessions = SessionFactory(source)
        self._guard = Guard(transactional_id, "begin_nested")
        self._connection: GuardedConnection | None = None
        self._session: GuardedSession | None = None

    @property
    def handle(self) -> GuardedConnection:
        self._guard.check_open()
        if self._connection is None:
            self._connection = GuardedConnection(self._engine, self._guard)
            self._connection.begin()
            self._connection.restore_guard()
        return self._connection

    @property
    def session(self) -> GuardedSession:
        connection = self.handle
        if self._session is None:
            self._session = self._sessions(connection)
        return self._session

    # --- for coroutines ---------------------------------------------------------------------------------------------------

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        before, self._guard.thread = self._guard.thread, threading.get_ident()
        try:
            yield
        finally:
            self._guard.thread = before

    def async_handle(self, thread: TransactionThread) -> AsyncConnection:
        with self.in_thread():
            connection = self.handle
        self._guard.thread = _NO_THREAD  # as in a pool: outside of awaited calls, no statement may run
        return AsyncConnection(connection, thread)

    def async_session(self, thread: TransactionThread) -> AsyncSession:
        with self.in_thread():
            connection, session = self.handle, self.session
        self._guard.thread = _NO_THREAD  # as above
        return AsyncSession(session, connection, thread)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def before_commit(self) -> None:
        if self._session is not None:
            self._session.dispatch_before_commit()
            self._session.flush()

    def commit(self) -> None:
        if self._connection is not None:
            self._connection.lift_guard()
            self._connection.commit()
        self._end(is_committed=True)

    def rollback(self) -> None:
        self._end(is_committed=False)

    def _end(self, *, is_committed: bool) -> None:
        connection, session = self._connection, self._session
        self._connection = self._session = None
        if connection is not None:
            connection.lift_guard()
            try:
                if not is_committed:
                    connection.rollback()
                self._guard.ended = True
                if session is not None:
                    self.after_commit_error = close_ended(session, is_committed=is_committed, is_known=True)
            finally:
                connection.close()
        self._guard.ended, self._guard.lifted, self._guard.session = True, False, None


class InlineThread:
    """In place of the thread that serves a coroutine: its calls run where the coroutine runs."""

    def __init__(self, database: FakeStoreTransaction) -> None:
        self.ident = threading.get_ident()
        self.is_open = True
        self._database = database

    def check(self) -> None:
        """Check that the coroutine has not ended."""
        if not self.is_open:
            raise WriterClosedError("The transaction ended with its coroutine, or with its block.")

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function at once; see TransactionThread."""
        self.check()
        return self.run(function, *args, **kwargs)

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function, which may execute statements."""
        with self._database.in_thread():
            return function(*args, **kwargs)
