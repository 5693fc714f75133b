"""A PostgreSQL database for tests that is emptied before each of them, and has dualwrite's tables."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self
from uuid import uuid4

import psycopg
from psycopg.sql import SQL, Identifier
from sqlalchemy import URL, make_url

from dualwrite import migration

_CLEAN: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid();"
    "DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT ALL ON SCHEMA public TO public;"
)


class CleanDatabase:
    """A database of its own on a running server: created by `with`, dropped at its end. The server's others stay as they are.

    Emptying it is ten times faster than a new database for each test.

    Args:
        server: The URL of any database on the server, of a user who may create databases.

    Attributes:
        url: The database's URL.
    """

    def __init__(self, server: str) -> None:
        self._server = make_url(server)
        self._name = f"dualwrite_test_{uuid4().hex[:12]}"
        self.url: str = self._server.set(database=self._name).render_as_string(hide_password=False)
        self._tables = migration.sql(self.url).replace("BEGIN;", "").replace("COMMIT;", "")

    def clean(self) -> str:
        """Close all connections to it, empty it, create dualwrite's tables, and return its URL."""
        with psycopg.connect(_conninfo(make_url(self.url)), autocommit=True) as connection:
            connection.execute((_CLEAN + self._tables).encode())
        return self.url

    def __enter__(self) -> Self:
        self._execute("CREATE DATABASE {}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(_conninfo(self._server), autocommit=True) as connection:
            connection.execute(SQL(statement).format(Identifier(self._name)))


def _conninfo(url: URL) -> str:
    """The URL as libpq reads it."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)
