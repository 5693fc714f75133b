"""The psycopg connection that users get: their own, except that only the writer can end the transaction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import GeneratorType
from typing import Any, NoReturn, cast

from psycopg import Cursor
from psycopg import Error as PsycopgError
from psycopg.adapt import AdaptersMap
from psycopg.sql import Composable
from sqlalchemy import Connection

from dualwrite.stores.sql.engines import note_error
from dualwrite.stores.sql.guard import Guard
from dualwrite.stores.sql.isolation import Effect
from dualwrite.stores.sql.psycopg_sources import ConnectionView
from dualwrite.stores.store_transaction import refused


def _setting(name: str, *, is_guarded: bool = False) -> Any:
    """A setting of the connection; what the user sets stays on the view. If `is_guarded`, a factory of cursors."""

    def read(self: GuardedPsycopgConnection) -> Any:
        found = self.own[name] if name in self.own else self.__dict__[name]
        if not is_guarded:
            return found
        if not isinstance(found, type):
            self.guard.see_call("a cursor_factory that is a function")
        return _guarded_cursors(found)

    def write(self: GuardedPsycopgConnection, value: Any) -> None:
        self.own[name] = value

    return property(read, write, doc=f"As Connection.{name}.")


def _refused_setting(name: str) -> Callable[..., NoReturn]:
    def refuse(self: GuardedPsycopgConnection, value: Any) -> NoReturn:
        self.guard.refuse(f"{name} = {value}")

    return refuse


class GuardedPsycopgConnection(ConnectionView):
    """The user's psycopg connection inside the writer's transaction.

    Cursors, `execute`, `copy`, `pipeline()` and `transaction()` (a savepoint here) work as usual; a call that would end or
    replace the transaction raises before anything is sent, so the transaction stays intact and usable.
    """

    __slots__ = ("guard", "handlers", "own", "owner", "prepared")

    guard: Guard
    own: dict[str, Any]
    """What the user has set on this view; the connection keeps its own."""
    prepared: tuple[int | None, int | None]
    """The connection's own `prepare_threshold` and `prepared_max`."""
    handlers: list[tuple[Callable[[Any], None], Any]]
    """The handlers of notices and notifications that the user has added, with the method that removes each."""
    owner: Connection
    """Kept alive: when it is garbage-collected it rolls back, and that would deadlock on psycopg's lock during a statement."""

    # --- what works while the transaction is open -------------------------------------------------------------------------

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """As Connection.cursor."""
        self.guard.check_open()
        if args or "name" in kwargs:  # a server-side cursor
            self.guard.end_batch()
            self.guard.see_call("cursor(name)", Effect.TRANSACTION)
        return super().cursor(*args, **kwargs)

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        """A savepoint, as Connection.transaction inside a transaction."""
        self.guard.check_open()
        self.guard.savepoints += 1
        self.guard.end_batch()
        return super().transaction(*args, **kwargs)

    def pipeline(self) -> Any:
        """As Connection.pipeline; it must be left before the block ends."""
        self.guard.check_open()
        self.guard.end_batch()
        return super().pipeline()

    def notifies(self, *args: Any, **kwargs: Any) -> Any:
        """As Connection.notifies."""
        self.guard.check_open()
        self.guard.end_batch()
        return super().notifies(*args, **kwargs)

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """As Connection.wait, which every cursor calls."""
        self.check_use(gen)
        try:
            return super().wait(gen, *args, **kwargs)
        except PsycopgError as error:
            note_error(self.owner, error)
            raise

    def check_use(self, gen: Any) -> None:
        """A cursor that the user has made, such as `psycopg.ClientCursor(tx.db)`, is not seen otherwise."""
        if self.guard.watch is not None:
            frame = gen.gi_frame if isinstance(gen, GeneratorType) else None
            sender = None if frame is None else frame.f_locals.get("self")
            if isinstance(sender, Cursor) and not isinstance(sender, _GuardedCursor):
                self.guard.watch.see_call("a cursor that was not made by tx.db.cursor()")

    # --- settings: those of the connection, and what the user sets on this view, which ends with it -------------------------

    row_factory: Any = _setting("row_factory")
    cursor_factory: Any = _setting("cursor_factory", is_guarded=True)
    server_cursor_factory: Any = _setting("server_cursor_factory", is_guarded=True)

    @property
    def adapters(self) -> AdaptersMap:
        """A copy of the connection's adapters."""
        found: AdaptersMap | None = self.own.get("adapters")
        if found is None:
            found = self.own["adapters"] = AdaptersMap(super().adapters)
        return found

    def add_notice_handler(self, callback: Any) -> None:
        """As Connection.add_notice_handler; it is removed at the end of the unit or block."""
        super().add_notice_handler(callback)
        self.handlers.append((super().remove_notice_handler, callback))

    def add_notify_handler(self, callback: Any) -> None:
        """As Connection.add_notify_handler; it is removed at the end of the unit or block."""
        super().add_notify_handler(callback)
        self.handlers.append((super().remove_notify_handler, callback))

    def restore(self) -> None:
        """Give the connection its own settings back."""
        self.own.clear()
        self.prepare_threshold, self.prepared_max = self.prepared
        for remove, callback in self.handlers:
            with suppress(ValueError):  # the user has removed it
                remove(callback)
        self.handlers.clear()

    # --- what would end, replace or change the transaction ----------------------------------------------------------------

    commit = refused("commit()", "guard.refuse")
    rollback = refused("rollback()", "guard.refuse")
    close = refused("close()", "guard.refuse")
    tpc_begin = refused("tpc_begin()", "guard.refuse")
    tpc_prepare = refused("tpc_prepare()", "guard.refuse")
    tpc_commit = refused("tpc_commit()", "guard.refuse")
    tpc_rollback = refused("tpc_rollback()", "guard.refuse")
    __enter__ = refused("`with` on the connection (it would commit and close it)", "guard.refuse")
    set_autocommit = _refused_setting("autocommit")
    set_isolation_level = _refused_setting("isolation_level")
    set_read_only = _refused_setting("read_only")
    set_deferrable = _refused_setting("deferrable")

    @property
    def autocommit(self) -> bool:
        """False: there is a transaction."""
        return False

    @autocommit.setter
    def autocommit(self, value: bool) -> None:
        self.set_autocommit(value)


def _of_response(name: str) -> Any:
    """An attribute of a cursor that needs the response: a batch must wait for it."""

    def read(self: _GuardedCursor) -> Any:
        self._sync_batch()
        return getattr(super(_GuardedCursor, self), name)  # the next class in the MRO has it

    return property(read, doc=f"As Cursor.{name}.")


class _GuardedCursor:
    """Mixin for a cursor class: checks each statement before it is sent."""

    __slots__ = ()

    connection: GuardedPsycopgConnection
    pgresult: Any

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """As Cursor.execute."""
        self._check(query, args, kwargs)
        return super().execute(query, *args, **kwargs)  # type: ignore[misc]  # the next class in the MRO has it

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """As Cursor.executemany."""
        self._check(query, args, kwargs)
        return super().executemany(query, *args, **kwargs)  # type: ignore[misc]  # as above

    def stream(self, query: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As Cursor.stream."""
        self._check(query, args, kwargs)
        self.connection.guard.end_batch()
        return cast("Iterator[Any]", super().stream(query, *args, **kwargs))  # type: ignore[misc]  # as above

    def copy(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """As Cursor.copy."""
        self._check(statement, args, kwargs)
        self.connection.guard.end_batch()
        return super().copy(statement, *args, **kwargs)  # type: ignore[misc]  # as above

    rowcount = _of_response("rowcount")
    description = _of_response("description")
    statusmessage = _of_response("statusmessage")

    def nextset(self) -> Any:
        """As Cursor.nextset."""
        self._sync_batch()
        return super().nextset()  # type: ignore[misc]  # as above

    def _sync_batch(self) -> None:
        batch = self.connection.guard.batch
        if batch is not None and self.pgresult is None:
            batch.sync()

    def _check(self, query: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        guard = self.connection.guard
        if guard.ended:
            guard.check_open()
        if isinstance(query, str):
            text = query
        elif isinstance(query, Composable):
            text = query.as_string(self.connection)
        elif isinstance(query, bytes):
            text = query.decode(errors="replace")
        else:  # a template: the transaction's marker detects it
            guard.see_call("a template")
            return
        guard.check_statement(text, (*args, kwargs), "postgresql")


@functools.cache
def _guarded_cursors(factory: Any) -> Any:
    if not isinstance(factory, type):
        return factory  # a function: the transaction's marker detects what it lets through
    return type(f"Guarded{factory.__name__}", (_GuardedCursor, factory), {"__slots__": ()})
