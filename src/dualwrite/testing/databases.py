"""A PostgreSQL database for tests that is made anew before each of them, as the session has set it up."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self
from uuid import uuid4

import psycopg
from psycopg.sql import SQL, Identifier
from sqlalchemy import make_url


class FreshDatabase:
    """A database of its own on a running server: set up once by `with`, and dropped at its end.

    `fresh` makes a copy of it: all of the set-up is in it, and nothing of an earlier test, in whichever schema that was.

    Args:
        server: The URL of any database on the server, of a user who may create databases.
        set_up: Makes what each test begins with, in the database with the URL that it gets.

    Attributes:
        url: The URL of the copy.
    """

    def __init__(self, server: str, set_up: Callable[[str], object]) -> None:
        self._server = make_url(server)
        self._set_up = set_up
        self._name = f"dualwrite_test_{uuid4().hex[:12]}"
        self._template = f"{self._name}_template"
        self.url: str = self._url_of(self._name)

    def fresh(self) -> str:
        """End all connections to the copy, make it anew, and return its URL."""
        self._drop(self._name)
        self._execute("CREATE DATABASE {} TEMPLATE {}", self._name, self._template)
        return self.url

    def __enter__(self) -> Self:
        self._execute("CREATE DATABASE {}", self._template)
        try:
            self._set_up(self._url_of(self._template))
            self._execute("ALTER DATABASE {} ALLOW_CONNECTIONS false", self._template)  # one would prevent the copy
            with self._connected() as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (self._template,)
                )
        except BaseException:
            self._drop(self._template)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._drop(self._name)
        self._drop(self._template)

    def _drop(self, name: str) -> None:
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _execute(self, statement: str, *names: str) -> None:
        with self._connected() as connection:
            connection.execute(SQL(statement).format(*map(Identifier, names)))

    def _connected(self) -> psycopg.Connection:
        return psycopg.connect(self._server.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True)

    def _url_of(self, name: str) -> str:
        return self._server.set(database=name).render_as_string(hide_password=False)
