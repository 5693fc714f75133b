"""Migrations that create our tables in a schema of the user's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Dialect, text

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.home import SCHEMAS_ARE_DATABASES


def refuse_without_schemas(name: str, schema: str | None) -> None:
    """Refuse a schema for SQLite.

    Raises:
        ConfigurationError: A schema is given, and the database has no schemas.
    """
    if schema is not None and name == "sqlite":
        raise ConfigurationError(
            f"schema is {schema!r}, but SQLite has no schemas.",
            cause="an attached database can't be used: with WAL a transaction over two files commits in each file separately",
            next_step="leave schema out; the tables are in the database's own file",
        )


def schema_script(dialect_name: str, quoted_schema: str) -> str:
    """The statement after which a script creates its tables in the schema."""
    return f"USE {quoted_schema};" if dialect_name in SCHEMAS_ARE_DATABASES else f"SET search_path TO {quoted_schema};"


@contextmanager
def made_in_schema(connection: Connection, schema: str | None) -> Iterator[None]:
    """Create unqualified names of the block in this schema (PostgreSQL), in the current transaction.

    Raises:
        ConfigurationError: There is no such schema, or the database does not support this.
    """
    if schema is None:
        yield
        return
    refuse_without_schemas(connection.dialect.name, schema)
    _refuse_another_database(connection.dialect.name, schema)
    if connection.scalar(text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": schema}) is None:
        raise ConfigurationError(
            f"There is no schema {schema!r} in the database, or we may not see it.", next_step=f"CREATE SCHEMA {schema}"
        )
    before = connection.scalar(text("SELECT current_setting('search_path')"))
    setting = text("SELECT set_config('search_path', :path, true)")
    connection.execute(setting, {"path": connection.dialect.identifier_preparer.quote_identifier(schema)})
    yield
    connection.execute(setting, {"path": before})


@contextmanager
def script_in_schema(dialect: Dialect, schema: str | None, write: Callable[[str], None]) -> Iterator[None]:
    """As `made_in_schema`, for a part of a script; what follows it is created in the default schema again.

    Raises: as `made_in_schema`.
    """
    if schema is None:
        yield
        return
    refuse_without_schemas(dialect.name, schema)
    _refuse_another_database(dialect.name, schema)
    write(f"SET LOCAL search_path TO {dialect.identifier_preparer.quote_identifier(schema)};\n")
    yield
    write("SET LOCAL search_path TO DEFAULT;\n")


def _refuse_another_database(dialect_name: str, schema: str) -> None:
    if dialect_name in SCHEMAS_ARE_DATABASES:
        raise ConfigurationError(
            "On MariaDB and MySQL our tables can't be created in another database than the connection's.",
            next_step=f"run `dualwrite db upgrade --schema {schema}`, or pass the URL of that database",
        )
