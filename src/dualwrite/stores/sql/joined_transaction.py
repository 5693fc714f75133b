"""The last steps of a transaction that the user has begun, on the user's connection: fence, record, COMMIT.

The user's transaction may be old: what it reads may be older than the newest claim of the id. So the fence is checked under the
lock of the row, which is held until COMMIT (docs/how-it-works/rules.md, F2).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar, cast

from sqlalchemy import Dialect, Engine, Update, event, make_url, update
from sqlalchemy.pool import NullPool
from sqlalchemy.util import greenlet_spawn

from dualwrite.errors import DualWriteError, StoreCommitFailedError, UsageError
from dualwrite.state import Delivery, PreparedTxnState
from dualwrite.stores.journal import JournalEntry
from dualwrite.stores.rows import Claim
from dualwrite.stores.sql.dialect import Fence, Mark, NotRecorded, Outgoing, StateRecord, driver_error, pooled_connection
from dualwrite.stores.sql.greenlets import in_thread
from dualwrite.stores.sql.home import OwnConnection, with_home
from dualwrite.stores.sql.sql_context import NEWEST_CLAIM_AND_GATE, RecordStatements, StoreContext
from dualwrite.stores.sql.sql_errors import TransactionErrors, quietly
from dualwrite.stores.sql.sql_journal import RecordingTransaction, switched
from dualwrite.stores.sql.tables import state_table as t

T = TypeVar("T")

_RECORDS: Final = RecordStatements(None)
_tokens: Final = itertools.count(1)
_RECORDING: Final = "recording the prepared state"
_TAKE_WRITE_LOCK: Final = update(t).where(t.c.transactional_id == "").values(fence=t.c.fence)
"""SQLite has no lock of a row; a statement that changes nothing gets the write lock of the file."""


class UsersConnection:
    """A driver's connection with a transaction of the user's.

    Args:
        dialect: SQLAlchemy's, for that driver.
        pooled: The connection as SQLAlchemy's pools lend it; or as `raw_connections` does, which alone has `begin`.
        invalidate: Closes it, whatever its transaction does.
        run: Runs what uses the connection, and returns its result: here and now, unless it belongs to an event loop.
    """

    def __init__(
        self,
        dialect: Dialect,
        pooled: Any,
        invalidate: Callable[[], None],
        run: Callable[[Callable[[], Any]], Any] = lambda step: step(),
    ) -> None:
        self.dialect = dialect
        self._pooled = pooled
        self._invalidate = invalidate
        self._run = run

    def through(self, run: Callable[[Callable[[], Any]], Any]) -> UsersConnection:
        """The same connection, for a thread that must not use it itself."""
        return UsersConnection(self.dialect, self._pooled, self._invalidate, run)

    def run(self, step: Callable[[], T]) -> T:
        """Run a step that uses the connection."""
        return cast("T", self._run(step))

    def driver_is(self, name: str) -> bool:
        """Whether SQLAlchemy calls the driver so, and uses its connections directly."""
        return self.dialect.driver == name and not self.dialect.is_async

    @property
    def is_async(self) -> bool:
        return bool(self.dialect.is_async)

    def begin(self) -> None:
        self.run(self._pooled.begin)

    @property
    def was_ended(self) -> bool:
        """Whether it is known that somebody has ended the transaction that `begin` has begun."""
        return bool(getattr(self._pooled, "was_ended", False))

    @property
    def is_marked(self) -> bool:
        """Whether `begin` has marked the transaction for `StoreDialect.still_marked`: its driver notices no end of it."""
        return bool(getattr(self._pooled, "is_marked", False))

    async def awaited(self, work: Callable[[UsersConnection], T]) -> T:
        return await greenlet_spawn(in_thread, lambda run: work(self.through(run)))

    def own(self, context: StoreContext) -> OwnConnection:
        """A connection for our statements, which none of the user's listeners sees."""
        key = self.dialect, _may_isolate_snapshots(self._pooled)
        engine = context.users_engines.get(key)
        if engine is None:
            pool = NullPool(_refuse_to_connect, dialect=self.dialect)
            engine = with_home(Engine(pool, self.dialect, make_url(f"{self.dialect.name}://")), context.home)
            if key[1]:
                event.listen(engine, "before_cursor_execute", _see_newest, retval=True)
            context.users_engines[key] = engine
        return OwnConnection(engine, self._pooled)

    def commit(self) -> None:
        self.run(lambda: self.dialect.do_commit(self._pooled))

    def roll_back(self) -> None:
        if not self.run(lambda: quietly(lambda: self.dialect.do_rollback(self._pooled))):
            self.close()

    def close(self) -> None:
        """Close the connection, whatever its transaction does."""
        self.run(lambda: quietly(self._invalidate))


def _may_isolate_snapshots(pooled: Any) -> bool:
    """Whether the server is a MariaDB with `innodb_snapshot_isolation`, which is on by default from 11.6.2 on.

    Under REPEATABLE READ it refuses to lock a row that has changed since the transaction's first SELECT: our row does so with
    each transaction of its writer.
    """
    server_info = getattr(pooled.driver_connection, "get_server_info", None)
    text = str(server_info()) if server_info is not None else ""
    version = re.search(r"(\d+)\.(\d+)\.(\d+)-MariaDB", text)
    return version is not None and tuple(map(int, version.groups())) >= (11, 4, 2)


def _see_newest(_connection: object, _cursor: object, statement: str, parameters: Any, _context: object, many: bool) -> Any:
    return statement if many else f"SET STATEMENT innodb_snapshot_isolation=OFF FOR {statement}", parameters


def _refuse_to_connect() -> NoReturn:
    raise UsageError("The user's connection was lost, and can't be made again by dualwrite.")


def in_autocommit() -> UsageError:
    """The error for a connection without transactions."""
    return UsageError(
        "The connection is in AUTOCOMMIT: it has no transactions that could be joined.",
        next_step="leave isolation_level='AUTOCOMMIT', or the driver's autocommit, out for this connection",
    )


class JoinedTransaction(RecordingTransaction):
    """The database's side of a transaction that the user has begun.

    Args:
        context: Of the store.
        claim: Under which its state is recorded.
        users: Its connection.
        gate: As for JournaledTransaction, or None.
    """

    is_fence_checked = False

    def __init__(self, context: StoreContext, claim: Claim, users: UsersConnection, *, gate: str | None) -> None:
        self._context = context
        self._claim = claim
        self._users = users
        self._gate = gate
        self._errors = TransactionErrors(context.errors, claim)
        self._store_id = ""
        self._epoch = 0
        self._has_ended = False
        self._token = f"{os.getpid()}.{next(_tokens)}"
        self._connection = users.run(lambda: users.own(context))
        kind = context.dialect.outgoing if users.driver_is(context.dialect.driver) else Outgoing
        self._outgoing = kind(context, self._connection, self._locked, lambda error: self._errors.translated(error, _RECORDING))

    @property
    def handle(self) -> NoReturn:
        raise UsageError("A joined transaction is written through the user's own session or connection.")

    def check_fence(self) -> None:
        """Under the row's lock: see the module."""
        if not self.is_fence_checked:
            self._execute(self._lock, "checking the fence")

    def _check_not_ended(self) -> None:
        if self._users.was_ended or (self._users.is_marked and not self._context.dialect.still_marked(self._connection)):
            raise self._errors.ended_by_block()

    def _lock(self) -> None:
        self._check_not_ended()
        if self._users.dialect.name == "sqlite":
            self._connection.execute(_TAKE_WRITE_LOCK)
            if not pooled_connection(self._connection).driver_connection.in_transaction:
                raise in_autocommit()
        self._outgoing.lock(Mark(self._claim.transactional_id, self._token, self._gate))

    def _locked(self, current: Fence | None) -> None:
        if current is None or current.fence != self._claim.fence:
            raise self._errors.fenced(current)
        self._store_id, self.found_number = current.store_id, current.transaction_number
        if self._gate is not None:
            self._epoch = current.epoch or 0
        self.is_fence_checked = True

    @contextmanager
    def own_statements(self) -> Iterator[OwnConnection]:
        """The connection, for statements of ours."""
        yield self._connection

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        record = self._record_of(state, generation, transaction_number, delivery)
        statement = _RECORDS.record if self._gate is None else _RECORDS.record_at_gate
        self._execute(lambda: self._write(statement, record), _RECORDING)

    def record_at_commit(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        if not self._outgoing.record_at_commit(self._record_of(state, generation, transaction_number, delivery)):
            self.record(state, generation=generation, transaction_number=transaction_number, delivery=delivery)

    def write_journal(self, entries: Sequence[JournalEntry], transaction_number: int) -> None:
        def write() -> None:
            self._insert_entries(self._connection, entries)
            self._write(_RECORDS.record_number, self._record_of(None, 0, transaction_number, None))

        self._execute(write, "writing into the journal")

    def _write(self, statement: Update, record: StateRecord) -> None:
        if self._connection.execute(statement, record._asdict()).rowcount != 1:
            raise self._why_not_recorded()

    def _why_not_recorded(self) -> DualWriteError:
        """Rolls back. The row was locked, with our fence: the gate has changed, or the row is hidden."""
        self.rollback()
        with OwnConnection(self._context.engine) as own:
            values = {"id": self._claim.transactional_id, "gate": self._gate}
            current: Any = own.execute(NEWEST_CLAIM_AND_GATE, values).one()
        if self._gate is not None and current.epoch != self._epoch:
            return switched(self._gate, self._claim.transactional_id, current.epoch)
        return self._errors.row_not_found(current, self._store_id)

    def _execute(self, step: Callable[[], T], doing: str) -> T:
        if self._has_ended:
            raise self._errors.ended()
        try:
            return self._users.run(step)
        except self._context.driver_errors as error:
            raise self._errors.translated(error, doing) from error

    def commit(self) -> None:
        """The outcome of an error is known only for the drivers whose errors the store's dialect knows."""
        self._has_ended = True
        try:
            self._send_commit()
        except BaseException as error:
            if self.is_surely_rolled_back or isinstance(error, StoreCommitFailedError):
                self._users.roll_back()
            else:  # unknown: its transaction might still be open
                self._users.close()
            raise

    def _send_commit(self) -> None:
        try:
            if self._outgoing.record is not None:
                self._users.run(self._outgoing.commit)
            else:
                self._users.commit()
        except Exception as error:
            reason = self._outgoing.why_not_recorded(error)
            if reason is not None:
                self.is_surely_rolled_back = True
                is_hidden = reason is NotRecorded.NO_ROW
                raise (self._why_not_recorded() if is_hidden else self._errors.translated(error, _RECORDING)) from error
            if self._is_surely_refused(error):
                raise self._errors.commit_failed(str(driver_error(error)).strip()) from error
            raise self._errors.commit_unknown(error) from error

    def _is_surely_refused(self, error: Exception) -> bool:
        dialect = self._context.dialect
        return self._users.driver_is(dialect.driver) and dialect.commit_surely_failed(error, self._connection)

    def rollback(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._outgoing.drop()
            self._users.roll_back()
