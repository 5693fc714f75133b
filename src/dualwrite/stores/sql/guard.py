"""The Connection and the Session that users get: everything works except ending the transaction, which only the writer does.

A refused call raises before SQLAlchemy has changed anything, so the transaction stays intact and usable.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from sqlalchemy import Connection, Engine, PoolProxiedConnection, RootTransaction, event

from dualwrite.errors import TransactionControlError, UsageError, WriterClosedError
from dualwrite.stores.sql.home import OwnConnection
from dualwrite.stores.sql.isolation import Effect, StatementWatch, plain
from dualwrite.stores.store_transaction import control_refused, refused

_SKIPPED: Final = r"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/|;)*"
_CONTROL: Final = (
    r"(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION"
    r"|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))\b"
)
_AT_START: Final = re.compile(rf"{_SKIPPED}({_CONTROL})", re.IGNORECASE | re.DOTALL)
_DEFINITION: Final = re.compile(rf"{_SKIPPED}CREATE\b", re.IGNORECASE | re.DOTALL)
_ADMINISTERED: Final = r"(?:NO_WRITE_TO_BINLOG\s+|LOCAL\s+)?TABLES?"
_IMPLICIT_COMMIT: Final = re.compile(
    rf"(?:\s|--[^\n]*(?:\n|\Z)|\#[^\n]*(?:\n|\Z)|/\*(?!!|M!).*?\*/|;)*"
    rf"((?:ALTER|RENAME|TRUNCATE|GRANT|REVOKE|FLUSH|RESET|INSTALL|UNINSTALL|BACKUP|LOCK\s+TABLES?|CACHE\s+INDEX|LOAD\s+INDEX"
    rf"|(?:ANALYZE|OPTIMIZE|REPAIR|CHECK)\s+{_ADMINISTERED}|CHANGE\s+(?:MASTER|REPLICATION)|(?:START|STOP)\s+(?:ALL\s+)?"
    rf"(?:SLAVES?|REPLICAS?|GROUP_REPLICATION)|IMPORT\s+TABLE|SET\s+PASSWORD"
    rf"|CREATE(?!\s+(?:OR\s+REPLACE\s+)?TEMPORARY\b)|DROP(?!\s+(?:TEMPORARY|PREPARE)\b))\b(?:\s+\w+)?"
    rf"|SET\b[^'\"`;]*?\bAUTOCOMMIT\s*:?=\s*(?!0\b|OFF\b|FALSE\b)\w+)",
    re.IGNORECASE | re.DOTALL,
)


def implicit_commit(sql: str) -> str | None:
    """The beginning of a statement that makes MariaDB and MySQL commit the transaction implicitly, or None.

    `CREATE TABLE`, `TRUNCATE`, `LOCK TABLES`, `FLUSH`, `SET autocommit = 1` and others, but not temporary tables. Checks
    the first statement of a text; executable comments are left to the transaction's marker.
    """
    found = _IMPLICIT_COMMIT.match(sql)
    return None if found is None else " ".join(found[1].split())


def control_statement(sql: str, family: str = "postgresql") -> str | None:
    """The transaction control statement in `sql` (`COMMIT`, `ROLLBACK`, `START TRANSACTION`, …), or None.

    Savepoint statements, including `ROLLBACK TO`, do not count. Checks every statement of a text with several, except in
    `CREATE …`, whose body (functions, triggers) may contain semicolons and `BEGIN … END`.
    """
    found = _AT_START.match(sql)
    if found is None and ";" in sql and _DEFINITION.match(sql) is None:
        found = next(filter(None, map(_AT_START.match, plain(sql, family).split(";"))), None)
    return None if found is None else " ".join(found[1].upper().split())


class StatementBatch(Protocol):
    """Statements that are sent without waiting for the response to each."""

    def sync(self) -> None:
        """Wait for all responses; raises the driver's error of the first that failed."""

    def end(self) -> None:
        """Do the same, and wait for each response from now on."""


@dataclass(slots=True, eq=False)
class Guard:
    """State shared by one transaction's handles: whether the writer or the user is acting, or the transaction has ended.

    Attributes:
        savepoint: The call that creates a savepoint, for the errors.
        savepoints: How many savepoints these calls have created.
        lifted: Whether the writer itself is acting.
        session: The ORM session, if one was created: only then is the ORM loaded.
        batch: While statements are sent without waiting for their responses.
        thread: If a coroutine uses the transaction: the only thread that may run statements.
        executing: SQLAlchemy's context of the statement that is executed now, from its check on; None before.
        watch: Watches the user's statements, if others use the transaction or its connection afterwards.
    """

    transactional_id: str
    savepoint: str
    savepoints: int = 0
    lifted: bool = True
    ended: bool = False
    session: Any = None
    batch: StatementBatch | None = None
    thread: int | None = None
    executing: object = None
    watch: StatementWatch | None = None

    def refuse(self, call: str) -> NoReturn:
        """Raise for a call that would end or replace the transaction."""
        self.check_open()
        raise control_refused(call, self.transactional_id, savepoints=self.savepoint)

    def check_writer(self, call: str) -> None:
        """Refuse a call, unless the writer itself makes it."""
        if not self.lifted:
            self.refuse(call)

    def check_statement(self, sql: str, parameters: Any, family: str) -> None:
        """Refuse a statement of the user's that would end the transaction, and have the others watched."""
        watch = self.watch
        if watch is not None and watch.is_harmless(sql):
            return
        control = control_statement(sql, family)
        if control is not None:
            self.refuse(control)
        if family == "mysql" and (implicit := implicit_commit(sql)) is not None:
            self.refuse_implicit_commit(implicit)
        if watch is not None:
            watch.see(sql, parameters)

    def see_call(self, call: str, effect: Effect = Effect.SESSION) -> None:
        """Have a call watched whose statements are not seen."""
        if self.watch is not None:
            self.watch.see_call(call, effect)

    def end_batch(self) -> None:
        """Wait for the responses to all statements that were sent, and for each response from now on."""
        if self.batch is not None:
            self.batch.end()

    def refuse_implicit_commit(self, statement: str) -> NoReturn:
        """Raise for a statement that makes the database commit the transaction implicitly."""
        self.check_open()
        raise TransactionControlError(
            f"{statement} is not possible inside the block: the database would commit the transaction implicitly.",
            transactional_id=self.transactional_id,
            cause="MariaDB and MySQL commit before and after this statement; the database's side would be committed without "
            "Kafka's",
            next_step="run it before or after the block, on another connection. The transaction is still open and usable",
            call=statement,
        )

    def check_thread(self) -> None:
        """Raise UsageError in the event loop's thread, where a statement would block all coroutines."""
        if self.thread is not None and self.thread != threading.get_ident():
            raise UsageError(
                "A statement was about to run in the event loop's thread, which it would block.",
                transactional_id=self.transactional_id,
                cause="an attribute of an ORM object that is not loaded, or a method of the synchronous connection or session",
                next_step="await the methods of tx.db and tx.session; load attributes with an option such as selectinload(), "
                "with `await tx.session.refresh(…)`, or inside `await tx.session.run_sync(…)`",
            )

    def check_open(self) -> None:
        """Raise WriterClosedError once the transaction has ended."""
        if self.ended:
            raise WriterClosedError(
                "The transaction that this connection or session belonged to has ended.", transactional_id=self.transactional_id
            )


class OwnedTransaction(RootTransaction):
    """The root transaction of a guarded connection."""

    __slots__ = ()

    connection: GuardedConnection

    def commit(self) -> None:
        """Only the writer may call this."""
        self.connection.guard.check_writer("get_transaction().commit()")
        super().commit()

    def rollback(self) -> None:
        """Only the writer may call this."""
        session = self.connection.guard.session
        if session is not None and session._flushing:  # noqa: SLF001  (SQLAlchemy has no public way to ask)
            # A flush has failed and the session calls our rollback. Raising would hide the user's error. The session is
            # inactive from here on, which `record` checks: the transaction can't be committed any more.
            return
        self.connection.guard.check_writer("get_transaction().rollback()")
        super().rollback()

    def close(self) -> None:
        """Only the writer may call this."""
        self.connection.guard.check_writer("get_transaction().close()")
        super().close()

    def __enter__(self) -> NoReturn:
        self.connection.guard.refuse("`with` on the transaction")


def _checked(name: str, ours: Callable[..., Any]) -> Any:
    """A method of Connection that executes a statement: `ours` for the writer's, SQLAlchemy's for the user's."""
    users = getattr(Connection, name)

    def execute(self: GuardedConnection, statement: Any, *args: Any, **kwargs: Any) -> Any:
        guard = self.guard
        if guard.ended:
            guard.check_open()
        if guard.lifted:
            return ours(self, statement, *args, **kwargs)
        if guard.thread is not None:
            guard.check_thread()
        guard.executing = None
        result = users(self, statement, *args, **kwargs)
        if guard.executing is None and guard.watch is not None:
            guard.watch.see_past("a listener that executes a statement itself")
        return result

    execute.__doc__ = f"As Connection.{name}."
    return execute


class GuardedConnection(OwnConnection):
    """A SQLAlchemy Connection inside the writer's transaction; `pooled` as for OwnConnection."""

    def __init__(self, engine: Engine, guard: Guard, pooled: PoolProxiedConnection | None = None) -> None:
        self.guard = guard  # first: options of the engine, such as postgresql_readonly, use the connection already
        self._users_has_events = self._has_events = _has_listeners_of_all()
        super().__init__(engine, pooled)
        self.guard.lifted = True
        self._has_events = False
        self._users_options: Any = None
        self._own_options: Any = None
        self._info_before: dict[Any, Any] | None = None
        self._users_dispatch: Any = None  # while the writer has the connection, if the user has added listeners

    def restore_guard(self) -> None:
        """From here on the user has the connection, and the guard refuses what would end the transaction."""
        self.guard.lifted = False
        self._show_to_users_listeners()
        if self._own_options is None:
            self._own_options = self._execution_options
        else:
            self._execution_options = self._users_options

    def lift_guard(self) -> None:
        """From here on the writer has the connection: without the options and the listeners that the user has added to it.

        The engine's listeners, which are the user's too, are called anyway.
        """
        if not self.guard.lifted:
            self._users_has_events, self._users_options = self._has_events, self._execution_options
            self._has_events, self._execution_options = False, self._own_options
            if self._users_has_events:  # SQLAlchemy would call them if the Engine has listeners
                self._users_dispatch = self.__dict__.pop("dispatch")
                self.dispatch = self.dispatch._join(self.engine.dispatch)  # noqa: SLF001  (as in Connection.__init__)
        self.guard.lifted = True

    def _show_to_users_listeners(self) -> None:
        self._has_events = self._users_has_events
        if self._users_dispatch is not None:
            self.dispatch, self._users_dispatch = self._users_dispatch, None

    @contextmanager
    def own_statements(self) -> Iterator[Connection]:
        """The connection, for statements of ours within the user's block."""
        self.lift_guard()
        try:
            yield self
        finally:
            self.restore_guard()

    def renew(self, *, keeps_ends: bool) -> None:
        """Forget the options, `info` and listeners that the user has set; `keeps_ends`: all but listeners for the end."""
        self._execution_options = self._users_options = self._own_options
        if self._users_has_events if self.guard.lifted else self._has_events:
            self._renew_listeners(keeps_ends=keeps_ends)
        if self._info_before is not None:
            info = self._pooled.info
            info.clear()
            info.update(self._info_before)
            self._info_before = None

    def _renew_listeners(self, *, keeps_ends: bool) -> None:
        self._show_to_users_listeners()
        before = self.__dict__.pop("dispatch")
        self.dispatch = self.dispatch._join(self.engine.dispatch)  # noqa: SLF001  (as in Connection.__init__)
        self._has_events = _has_listeners_of_all()
        for name in ("commit", "rollback") if keeps_ends else ():
            for listener in list(getattr(before, name).local.listeners):
                event.listen(self, name, listener)
        self._users_has_events = self._has_events
        if self.guard.lifted:
            self._has_events = False

    @property
    def _pooled(self) -> PoolProxiedConnection:
        return super().connection

    # --- what ends or replaces the transaction ----------------------------------------------------------------------------

    def begin(self) -> RootTransaction:
        """Only the writer may call this."""
        self.guard.check_writer("begin()")
        self._has_events = self._users_has_events
        begun = OwnedTransaction(self)  # it puts itself in place, as RootTransaction does
        self._has_events = False
        return begun

    def commit(self) -> None:
        """Only the writer may call this."""
        self.guard.check_writer("commit()")
        self._show_to_users_listeners()
        super().commit()

    def rollback(self) -> None:
        """Only the writer may call this."""
        self.guard.check_writer("rollback()")
        self._show_to_users_listeners()
        super().rollback()

    def close(self) -> None:
        """Only the writer may call this."""
        self.guard.check_writer("close()")
        super().close()

    def invalidate(self, exception: BaseException | None = None) -> None:
        """Only the writer may call this, and SQLAlchemy itself, which passes the error that broke the connection."""
        if exception is None:
            self.guard.check_writer("invalidate()")
        super().invalidate(exception)

    begin_twophase = refused("begin_twophase()", "guard.refuse")
    detach = refused("detach()", "guard.refuse")
    commit_prepared = refused("commit_prepared()", "guard.refuse")
    rollback_prepared = refused("rollback_prepared()", "guard.refuse")
    __enter__ = refused("`with` on the connection (it would close it)", "guard.refuse")

    # --- what can't be used any more once the transaction has ended -------------------------------------------------------

    @property
    def connection(self) -> PoolProxiedConnection:
        """The driver's connection. Nobody sees what is done with it, so a unit that uses it runs alone."""
        guard = self.guard
        if guard.ended:
            guard.check_open()
        if not guard.lifted:
            guard.see_call("tx.db.connection")
        return super().connection

    @property
    def info(self) -> dict[Any, Any]:
        """As Connection.info; what the user changes in it is forgotten after the unit."""
        info = self._pooled.info
        if self._info_before is None and not self.guard.lifted:
            self._info_before = dict(info)
        return info

    execute = _checked("execute", OwnConnection.execute)
    scalar = _checked("scalar", OwnConnection.scalar)
    exec_driver_sql = _checked("exec_driver_sql", OwnConnection.exec_driver_sql)

    def begin_nested(self) -> Any:
        """A savepoint, as Connection.begin_nested."""
        self.guard.check_open()
        self.guard.savepoints += 1
        return super().begin_nested()


def _has_listeners_of_all() -> bool:
    """Whether the user has added listeners to SQLAlchemy's class Connection; our own is on ours, and for statements only."""
    return bool(getattr(Connection, "_has_events", False))  # before SQLAlchemy 2.1 the attribute comes with the first one


def check_statements(engine: Engine) -> None:
    """Check the statements of this engine's guarded connections; a second call for its dialect adds nothing."""
    for name, check in _CHECKS.items():
        if not event.contains(engine.dialect, name, check):
            event.listen(engine.dialect, name, check)


def _check(cursor: Any, statement: str, parameters: Any, context: Any) -> None:
    connection = context.root_connection
    if not isinstance(connection, GuardedConnection) or connection.guard.lifted:
        return
    guard = connection.guard
    if guard.watch is not None:
        if guard.executing is not context and _has_run(cursor):  # the rows of one INSERT may take several executions
            guard.watch.see_past("a listener that executes something with the cursor")
        guard.executing = context
    guard.check_statement(statement, parameters, connection.home.dialect.family)


def _check_without_parameters(cursor: Any, statement: str, context: Any) -> None:
    _check(cursor, statement, (), context)


_CHECKS: Final[dict[str, Callable[..., None]]] = {
    "do_execute": _check,
    "do_executemany": _check,
    "do_execute_no_params": _check_without_parameters,
}


def _has_run(cursor: Any) -> bool:
    """Whether something was executed with a cursor, of any driver."""
    return cursor.rowcount != -1 or getattr(cursor, "statusmessage", None) is not None
