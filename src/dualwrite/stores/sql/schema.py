"""Our tables in a schema of the user's choice: the one place that puts it into statements, names and migrations.

Statements are written for tables without a schema, which the database resolves like the user's own. A store in a schema has
its own engine over the user's pool, which puts the tables of our MetaData into that schema in each of our statements. The
user's statements are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any, Final, cast

from sqlalchemy import Column, Connection, Dialect, Engine, MetaData, Table, event, text
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import ClauseElement

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.stores.sql.table import metadata

_OPTION: Final = "dualwrite_schema"
_KEPT: Final = 128
"""How many statements are kept with their copies: more than our constant ones.

A copy refers to its original, so weak references would keep all those that are built for one call.
"""

SCHEMAS_ARE_DATABASES: Final = ("mysql", "mariadb")
"""SQLAlchemy's names."""


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


def engine_in_schema(engine: Engine, schema: str | None) -> Engine:
    """An engine over the same pool for which our tables are in the schema; the engine itself for None.

    Raises:
        ConfigurationError: The database has no schemas.
    """
    refuse_without_schemas(engine.dialect.name, schema)
    if schema is None:
        return engine
    own = engine.execution_options(**{_OPTION: schema})
    moved = lru_cache(_KEPT)(partial(_moved, schema=schema))

    def move(connection: Connection, statement: Any, many: Any, parameters: Any, _options: Any) -> tuple[Any, Any, Any]:
        is_users = isinstance(connection, GuardedConnection) and not connection.guard.lifted
        if not is_users and isinstance(statement, ClauseElement):
            statement = moved(statement)
        return statement, many, parameters

    event.listen(own, "before_execute", move, retval=True)
    return own


def schema_of(engine: Engine) -> str | None:
    """The schema of our tables, or None if the database resolves their names itself."""
    schema: str | None = engine.get_execution_options().get(_OPTION)
    return schema


def full_name(engine: Engine, table: str) -> str:
    """The name of one of our tables in SQL text."""
    schema = schema_of(engine)
    return table if schema is None else f"{quoted(engine, schema)}.{table}"


def quoted(engine: Engine, name: str) -> str:
    """A name quoted as an identifier of the database."""
    return engine.dialect.identifier_preparer.quote_identifier(name)


def _moved(statement: ClauseElement, schema: str) -> ClauseElement:
    tables = {
        found if isinstance(found, Table) else found.table
        for found in visitors.iterate(statement)
        if isinstance(found, Table) or (isinstance(found, Column) and found.table is not None)
    }
    ours = {table: _in_schema(table, schema) for table in tables if isinstance(table, Table) and table.metadata is metadata}

    def replacement(element: Any, **_: Any) -> Any:
        if isinstance(element, Table):
            return ours.get(element)
        if isinstance(element, Column) and element.table in ours:
            return ours[element.table].c[element.name]
        return None

    moved: Any = visitors.replacement_traverse(statement, {}, replacement) if ours else statement
    return cast("ClauseElement", moved)


@cache
def _in_schema(table: Table, schema: str) -> Table:
    return table.to_metadata(MetaData(), schema=schema)


# --- migrations ---------------------------------------------------------------------------------------------------------------


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
    connection.execute(setting, {"path": quoted(connection.engine, schema)})
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
