"""Views of a psycopg connection: the one on which SQLAlchemy runs the recipe, and the base class of the user's view.

A view is an object of another class that shares the state (`__dict__`) of a connection, so transaction, prepared
statements, pipelines and the lock between threads are the same in all of them.
"""

from __future__ import annotations

import functools
from typing import Any, Final, TypeVar

import psycopg
from psycopg.adapt import AdaptersMap, Buffer, Loader
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from dualwrite.stores.sql.psycopg_sources import ConnectionSource, Psycopg

_TEXTS: Final = ("text", "varchar", "bpchar", "name", 0)
"""PostgreSQL's types of texts; 0 is for those that psycopg does not know."""

V = TypeVar("V", bound="ConnectionView")


class ConnectionView(psycopg.Connection[Any]):
    """A view of a psycopg connection: the same state, other methods. Made by `view_of`."""

    __slots__ = ()

    def check_use(self, gen: Any) -> None:
        """Called with what `wait` is about to run, before anything is sent; raises if that is refused."""

    def __del__(self, *_warn: Any) -> None:
        """Does nothing: psycopg's warns that a connection was left open, which the original connection does itself."""


def view_of(kind: type[V], connection: psycopg.Connection[Any]) -> V:
    """A view of `connection`; it keeps the methods of the user's own subclass of `psycopg.Connection`."""
    classes: Any = (kind, type(connection))
    view: V = object.__new__(_view_class(*classes))
    view.__dict__ = connection.__dict__
    return view


@functools.cache
def _view_class(kind: Any, of: Any) -> Any:
    return kind if of is psycopg.Connection else type(f"{kind.__name__}Of{of.__name__}", (kind, of), {"__slots__": ()})


class UnpreparedCursor(psycopg.Cursor[Any]):
    """Prepares no statements, whatever the connection's settings are."""

    __slots__ = ()

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        """As Cursor.execute."""
        return super().execute(query, params, **{**options, "prepare": False})


class _Utf8Loader(Loader):
    """Texts of a connection without an encoding, as str."""

    def load(self, data: Buffer) -> str:
        """See Loader."""
        return bytes(data).decode()


def has_no_encoding(connection: psycopg.Connection[Any]) -> bool:
    """Whether the session's client_encoding is SQL_ASCII, as by default in such a database: psycopg returns texts as bytes."""
    return connection.pgconn.parameter_status(b"client_encoding") == b"SQL_ASCII"


def recipe_adapters(*, decodes: bool = False) -> AdaptersMap:
    """Psycopg's default adapters; with `decodes`, for connections without an encoding."""
    adapters = AdaptersMap(psycopg.adapters)
    for kind in _TEXTS if decodes else ():
        adapters.register_loader(kind, _Utf8Loader)
    return adapters


class RecipeConnection(ConnectionView):
    """A view that gives SQLAlchemy what it expects: tuples, plain cursors, psycopg's own adapters."""

    __slots__ = ("adapters_map", "original", "plain_cursor", "returned", "source")

    original: Psycopg
    source: ConnectionSource
    adapters_map: AdaptersMap
    plain_cursor: type[psycopg.Cursor[Any]]
    returned: bool

    @property
    def adapters(self) -> AdaptersMap:
        """The default adapters of psycopg, whatever the user has registered on the connection."""
        return self.adapters_map

    @property
    def row_factory(self) -> Any:  # type: ignore[override]  # set by nobody: a view is not initialised
        """Tuples."""
        return tuple_row

    @property
    def cursor_factory(self) -> Any:  # type: ignore[override]  # set by nobody: a view is not initialised
        """The plain cursor."""
        return self.plain_cursor

    @property
    def server_cursor_factory(self) -> Any:  # type: ignore[override]  # set by nobody: a view is not initialised
        """The plain server-side cursor."""
        return psycopg.ServerCursor

    def add_notice_handler(self, callback: Any) -> None:
        """Does nothing: SQLAlchemy's handlers would stay on the user's connection, one more with every transaction."""

    def close(self) -> None:
        """Return the connection to its source; if its transaction is still open, it is closed first."""
        if self.returned:
            return
        self.returned = True
        if not self.closed and self.info.transaction_status is not TransactionStatus.IDLE:
            self.pgconn.finish()
        self.source.check_in(self.original)

    def __del__(self, *_warn: Any) -> None:
        """Return the connection if an interrupt kept SQLAlchemy from doing so."""
        if not getattr(self, "returned", True):
            self.close()
