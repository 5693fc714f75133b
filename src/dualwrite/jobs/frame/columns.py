"""The columns of a frame against those of its table: looked up and compared before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from sqlalchemy import Connection, inspect, text
from sqlalchemy.engine.interfaces import ReflectedColumn
from sqlalchemy.engine.reflection import Inspector
from sqlalchemy.exc import NoSuchTableError
from sqlalchemy.types import TypeEngine

from dualwrite.errors import ConfigurationError
from dualwrite.jobs.frame.table_names import quoted_name, split_name
from dualwrite.jobs.frame.types import MYSQL, fits, spark_type

# As the server writes them: a reflected type loses what SQLAlchemy does not know, such as types of extensions
_POSTGRESQL_TYPES: Final = text(
    "SELECT a.attname, format_type(a.atttypid, a.atttypmod) || "
    "CASE WHEN a.attcollation <> t.typcollation THEN ' COLLATE ' || quote_ident(n.nspname) || '.' || quote_ident(c.collname) "
    "ELSE '' END "
    "FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid "
    "LEFT JOIN pg_collation c ON c.oid = a.attcollation LEFT JOIN pg_namespace n ON n.oid = c.collnamespace "
    "WHERE a.attrelid = to_regclass(:name) AND a.attnum > 0 AND NOT a.attisdropped"
)

# and the character sets that a column has from its table
_MYSQL_TYPES: Final = text(
    "SELECT COLUMN_NAME, CONCAT(COLUMN_TYPE, IF(COLLATION_NAME IS NULL, '', "
    "CONCAT(' CHARACTER SET ', CHARACTER_SET_NAME, ' COLLATE ', COLLATION_NAME))) "
    "FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = COALESCE(:schema, DATABASE()) AND TABLE_NAME = :name"
)


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of the table.

    Args:
        name: Its name, as it is stored.
        type: Its type, as SQLAlchemy reflects it.
        ddl: Its type, as it is written in CREATE TABLE.
        nullable: Whether it takes NULL.
        has_default: Whether a row may leave it out although it takes no NULL.
        is_generated: Whether the database alone gives its values.
    """

    name: str
    type: TypeEngine[Any]
    ddl: str
    nullable: bool
    has_default: bool
    is_generated: bool


@dataclass(frozen=True, slots=True)
class TargetTable:
    """The table that rows are written to.

    Args:
        name: Its name, as it is stored.
        schema: Its schema, or None for the one that the connection takes by itself.
        dialect: SQLAlchemy's name of the database's dialect.
        columns: In the table's order.
        unique_keys: The columns of the primary key and of each unique constraint and index over whole columns.
    """

    name: str
    schema: str | None
    dialect: str
    columns: tuple[TargetColumn, ...]
    unique_keys: tuple[frozenset[str], ...]

    @property
    def full_name(self) -> str:
        """The name for people."""
        return self.name if self.schema is None else f"{self.schema}.{self.name}"

    def column(self, name: str) -> TargetColumn | None:
        """The column of that name, if there is one."""
        return next((column for column in self.columns if column.name == name), None)


def table_columns(connection: Connection, dbtable: str, schema: str | None = None) -> TargetTable:
    """Look the table up.

    Args:
        connection: To its database.
        dbtable: `table` or `schema.table`. Names in double quotes or backticks are taken to the letter; on PostgreSQL others
            are lower case, as in its SQL.
        schema: The schema, where `dbtable` names none.

    Raises:
        ConfigurationError: There is no such table, or `dbtable` is no name of one.
    """
    dialect = connection.dialect.name
    named, name = split_name(dbtable, dialect)
    schema = named or schema
    inspector = inspect(connection)
    try:
        reflected = inspector.get_columns(name, schema=schema)
    except NoSuchTableError as error:
        found = ", ".join(sorted(inspector.get_table_names(schema=schema))[:10])
        raise ConfigurationError(
            f"There is no table {dbtable!r} in the database.",
            cause=f"the tables {'there' if schema is None else f'of schema {schema!r}'} are: {found}" if found else None,
            next_step="create it, or set dbtable (with its schema, where it is not the connection's own)",
        ) from error
    key = inspector.get_pk_constraint(name, schema=schema)["constrained_columns"]
    ddl = _types_in_ddl(connection, name, schema, reflected)
    return TargetTable(
        name=name,
        schema=schema,
        dialect=dialect,
        columns=tuple(_column(column, ddl[column["name"]], key, dialect) for column in reflected),
        unique_keys=tuple(dict.fromkeys(_unique_keys(inspector, name, schema, key))),
    )


def compare(schema: pa.Schema, table: TargetTable, upsert_keys: Sequence[str] = ()) -> None:
    """See that every row of the frame can go into the table, as far as types can tell.

    Args:
        schema: The frame's columns for the table, without those of the message.
        table: The table.
        upsert_keys: Columns by which a row replaces an earlier one; empty for append.

    Raises:
        ConfigurationError: It can't; the text has every mismatch.
    """
    problems = [*_column_problems(schema, table), *_missing(schema, table), *_key_problems(schema, table, upsert_keys)]
    if problems:
        raise ConfigurationError(
            f"The frame does not fit the table {table.full_name}: {'; '.join(problems)}.",
            next_step="select, rename or cast the frame's columns as told, or alter the table; nothing was written",
            problems=problems,
        )


def _column_problems(schema: pa.Schema, table: TargetTable) -> Iterator[str]:
    if not len(schema):
        yield "the frame has no column for the table"
    for field in schema:
        column = table.column(field.name)
        if schema.names.count(field.name) > 1:
            yield f"column {field.name} is there {schema.names.count(field.name)} times"
        elif column is None:
            alike = next((each.name for each in table.columns if each.name.lower() == field.name.lower()), None)
            hint = f" (rename it {alike!r}, as the table has it)" if alike else ""
            yield f"column {field.name}: the table has none of this name{hint}"
        elif column.is_generated:
            yield f"column {field.name}: the database generates it; leave it out"
        elif not fits(field.type, column.type, table.dialect):
            wanted = spark_type(column.type, table.dialect)
            yield f"column {field.name}: {field.type} does not fit {column.ddl or 'its type'}; cast it to {wanted}"


def _missing(schema: pa.Schema, table: TargetTable) -> Iterator[str]:
    for column in table.columns:
        if not (column.nullable or column.has_default or column.is_generated or column.name in schema.names):
            yield f"column {column.name} of the table takes no NULL and has no default, and the frame has none of this name"


def _key_problems(schema: pa.Schema, table: TargetTable, upsert_keys: Sequence[str]) -> Iterator[str]:
    wanted = frozenset(upsert_keys)
    if not wanted:
        return
    yield from (f"upsertKeys: the frame has no column {name}" for name in upsert_keys if name not in schema.names)
    if wanted not in table.unique_keys:
        known = " or ".join(f"({', '.join(sorted(key))})" for key in table.unique_keys) or "none"
        yield (
            f"upsertKeys: the table has no primary key, unique constraint or unique index over exactly "
            f"({', '.join(upsert_keys)}); it has {known}"
        )
    if table.dialect in MYSQL:
        for key in table.unique_keys:
            if key != wanted and key & frozenset(schema.names):
                yield (
                    f"upsertKeys: the table is unique over ({', '.join(sorted(key))}) as well, and {table.dialect} would "
                    "replace a row that is equal in any unique key"
                )


def _column(found: ReflectedColumn, ddl: str, key: Sequence[str], dialect: str) -> TargetColumn:
    identity = found.get("identity")
    is_rowid = dialect == "sqlite" and list(key) == [found["name"]] and ddl.upper() == "INTEGER"
    return TargetColumn(
        name=found["name"],
        type=found["type"],
        ddl=ddl,
        nullable=found["nullable"],
        has_default=bool(found.get("default")) or identity is not None or found.get("autoincrement") is True or is_rowid,
        is_generated=found.get("computed") is not None or (identity is not None and bool(identity.get("always"))),
    )


def _types_in_ddl(
    connection: Connection, name: str, schema: str | None, reflected: Sequence[ReflectedColumn]
) -> dict[str, str]:
    dialect = connection.dialect
    if dialect.name == "postgresql":
        return {row[0]: row[1] for row in connection.execute(_POSTGRESQL_TYPES, {"name": quoted_name(name, schema)})}
    if dialect.name in MYSQL:
        return {row[0]: row[1] for row in connection.execute(_MYSQL_TYPES, {"name": name, "schema": schema})}
    return {
        column["name"]: "" if column["type"].__visit_name__ == "null" else column["type"].compile(dialect=dialect)
        for column in reflected
    }


def _unique_keys(inspector: Inspector, name: str, schema: str | None, key: Sequence[str]) -> Iterator[frozenset[str]]:
    if key:
        yield frozenset(key)
    for constraint in inspector.get_unique_constraints(name, schema=schema):
        yield frozenset(constraint["column_names"])
    for index in inspector.get_indexes(name, schema=schema):
        columns = index["column_names"]
        partly = any(option.endswith(("_where", "_length")) and how for option, how in index.get("dialect_options", {}).items())
        if index["unique"] and not partly and all(column is not None for column in columns):
            yield frozenset(column for column in columns if column is not None)
