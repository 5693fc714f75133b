"""Compares the columns of a frame with those of its table before anything is written.

The column of the table has the same type or a wider one, and no conversion is guessed.

Strings fit every column that Spark has no type for (enum, uuid, json, arrays, types of extensions), since the database parses
and checks the text; for numbers, dates and bytes, strings must be cast in Spark. The database checks lengths of texts and signs
of unsigned integers. An instant fits only a column of instants; MariaDB's and MySQL's DATETIME and SQLite's columns, which have
no time zone, accept it in UTC.

Fractions of seconds are the exception: Spark's times always have microseconds, and a column that stores fewer digits is usually
meant for whole seconds. The database rounds or truncates the others without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
from sqlalchemy import Connection, inspect, text
from sqlalchemy import types as sql
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine.interfaces import ReflectedColumn
from sqlalchemy.engine.reflection import Inspector
from sqlalchemy.exc import NoSuchTableError
from sqlalchemy.types import TypeEngine

from dualwrite.errors import ConfigurationError
from dualwrite.jobs.job_tables import quoted_name, split_name

# The server's own notation: SQLAlchemy's reflection loses types that it does not know, such as types of extensions
_POSTGRESQL_TYPES: Final = text(
    "SELECT a.attname, format_type(a.atttypid, a.atttypmod) || "
    "CASE WHEN a.attcollation <> t.typcollation THEN ' COLLATE ' || quote_ident(n.nspname) || '.' || quote_ident(c.collname) "
    "ELSE '' END "
    "FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid "
    "LEFT JOIN pg_collation c ON c.oid = a.attcollation LEFT JOIN pg_namespace n ON n.oid = c.collnamespace "
    "WHERE a.attrelid = to_regclass(:name) AND a.attnum > 0 AND NOT a.attisdropped"
)

# Includes the character set that a column inherits from its table
_MYSQL_TYPES: Final = text(
    "SELECT COLUMN_NAME, CONCAT(COLUMN_TYPE, IF(COLLATION_NAME IS NULL, '', "
    "CONCAT(' CHARACTER SET ', CHARACTER_SET_NAME, ' COLLATE ', COLLATION_NAME))) "
    "FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = COALESCE(:schema, DATABASE()) AND TABLE_NAME = :name"
)
MYSQL: Final = ("mysql", "mariadb")
_INTEGER_BITS: Final = {"TINYINT": 8, "SMALLINT": 16, "small_integer": 16, "MEDIUMINT": 24, "BIGINT": 64, "big_integer": 64}
_DIGITS: Final = {8: 3, 16: 5, 32: 10, 64: 19}
_SPARK_TYPES: Final = {
    "boolean": "boolean",
    "instant": "timestamp",
    "local": "timestamp_ntz",
    "date": "date",
    "time": "time",
    "time of a zone": "time",
    "binary": "binary",
    "json": "string, by to_json",
}
"""By the name of a column's family; a string for other columns."""
_FAMILIES: Final[Mapping[type[TypeEngine[Any]], str]] = {
    sql.Boolean: "boolean",
    sql.Date: "date",
    sql.JSON: "json",
    sql.NullType: "unknown",
    postgresql.INTERVAL: "interval",
}
_EXACT_FLOAT_BITS: Final = {32: 24, 64: 53}  # integers of so many bits that a float represents exactly, by the float's bits


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of the table, with its name as stored in the database, and its type also as written in CREATE TABLE.

    A row may omit it if it is nullable or has a default. If it is generated, only the database generates its values.
    """

    name: str
    type: TypeEngine[Any]
    ddl: str
    nullable: bool
    has_default: bool
    is_generated: bool


@dataclass(frozen=True, slots=True)
class TargetTable:
    """The table that rows are written to, with its columns in the table's order.

    `unique_keys` has the columns of the primary key and of each unique constraint and unique index on whole columns.
    """

    name: str
    schema: str | None
    dialect: str
    columns: tuple[TargetColumn, ...]
    unique_keys: tuple[frozenset[str], ...]

    @property
    def full_name(self) -> str:
        """The name, with the schema if there is one, for messages."""
        return self.name if self.schema is None else f"{self.schema}.{self.name}"

    def column(self, name: str) -> TargetColumn | None:
        """The column with this name, or None."""
        return next((column for column in self.columns if column.name == name), None)


def table_columns(connection: Connection, dbtable: str, schema: str | None = None) -> TargetTable:
    """Reflect the table.

    Args:
        connection: A connection to its database.
        dbtable: `table` or `schema.table`. Names in double quotes or backticks are used literally; on PostgreSQL other names
            are folded to lower case, as in its SQL.
        schema: The schema, if `dbtable` has none.

    Raises:
        ConfigurationError: There is no such table, or `dbtable` is not a table name.
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
            cause=f"existing tables{'' if schema is None else f' in schema {schema!r}'}: {found}" if found else None,
            next_step="create it, or correct dbtable (with its schema, unless it is the connection's default schema)",
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
    """Check that every row of the frame can be written to the table, as far as its columns and types show it.

    `schema` has the frame's columns without the message's columns, `upsert_keys` those by which a row replaces an earlier one.

    Raises:
        ConfigurationError: The frame does not fit the table; the text lists every mismatch.
    """
    problems = [*_column_problems(schema, table), *_missing(schema, table), *_key_problems(schema, table, upsert_keys)]
    if problems:
        raise ConfigurationError(
            f"The frame does not fit the table {table.full_name}: {'; '.join(problems)}.",
            next_step="select, rename or cast the frame's columns accordingly, or alter the table; nothing was written",
            problems=problems,
        )


def _column_problems(schema: pa.Schema, table: TargetTable) -> Iterator[str]:
    if not len(schema):
        yield "the frame has no column for the table"
    for field in schema:
        column = table.column(field.name)
        if schema.names.count(field.name) > 1:
            yield f"the frame has {schema.names.count(field.name)} columns named {field.name}"
        elif column is None:
            alike = next((each.name for each in table.columns if each.name.lower() == field.name.lower()), None)
            hint = f" (rename it to {alike!r}, as in the table)" if alike else ""
            yield f"column {field.name}: the table has no column with this name{hint}"
        elif column.is_generated:
            yield f"column {field.name}: the database generates it; leave it out"
        elif pa.types.is_nested(field.type):
            yield f"column {field.name}: a table can't store {field.type}; convert it in Spark, for instance by to_json"
        elif not fits(field.type, column.type, table.dialect):
            wanted = spark_type(column.type, table.dialect)
            yield f"column {field.name}: {field.type} does not fit {column.ddl or 'its type'}; cast it to {wanted}"


def _missing(schema: pa.Schema, table: TargetTable) -> Iterator[str]:
    for column in table.columns:
        if not (column.nullable or column.has_default or column.is_generated or column.name in schema.names):
            yield f"column {column.name} of the table is NOT NULL and has no default, but the frame has no such column"


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
                    f"upsertKeys: the table also has a unique key over ({', '.join(sorted(key))}), and {table.dialect} would "
                    "replace a row that matches in any unique key"
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


def fits(kind: pa.DataType, column: TypeEngine[Any], dialect: str) -> bool:  # noqa: PLR0911  (a table)
    """Whether a column can store every value of the frame's type unchanged, apart from fractions of seconds."""
    family, size, _ = found = _family(column, dialect)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind) or (family == "unknown" and dialect == "sqlite"):
        return True
    if pa.types.is_boolean(kind):
        return family == "boolean" or (dialect != "postgresql" and family in ("integer", "bit"))
    if pa.types.is_integer(kind):
        whole = {"integer": size, "float": _EXACT_FLOAT_BITS.get(size, 0)}.get(family, 0)
        return whole >= kind.bit_width or _fits_decimal(_DIGITS[kind.bit_width], 0, found)
    if pa.types.is_floating(kind):
        return family == "unbounded" or (family == "float" and size >= kind.bit_width)
    if pa.types.is_decimal(kind):
        return _fits_decimal(kind.precision, kind.scale, found)
    if is_text(kind):
        return spark_type(column, dialect).startswith("string")  # for other columns cast in Spark, which finds bad texts early
    if pa.types.is_timestamp(kind):
        return family == ("local" if kind.tz is None else "instant") or (family == "local" and dialect != "postgresql")
    if pa.types.is_date(kind):
        return family in ("date", "local")
    others = {"binary": is_binary, "time": pa.types.is_time, "interval": pa.types.is_duration}
    return family in others and bool(others[family](kind))


def spark_type(column: TypeEngine[Any], dialect: str) -> str:
    """The Spark type to cast to for a column of the table."""
    family, size, scale = _family(column, dialect)
    if family == "integer":
        return {8: "tinyint", 16: "smallint", 24: "smallint", 32: "int", 64: "bigint"}[size]
    if family == "float":
        return "double" if size == 64 else "float"  # noqa: PLR2004  (bits)
    if family in ("decimal", "unbounded"):
        return f"decimal({size},{scale})"
    return _SPARK_TYPES.get(family, "string")


class _Family(NamedTuple):
    """What a column stores: the bits of an integer or a float, the digits and the scale of a decimal."""

    name: str
    size: int = 0
    scale: int = 0


def _family(column: TypeEngine[Any], dialect: str) -> _Family:  # noqa: PLR0911  (a table)
    match column := plain(column):
        case sql.Integer():
            return _Family("integer", 64 if dialect == "sqlite" else _INTEGER_BITS.get(column.__visit_name__, 32))
        case sql.Float():
            is_double = isinstance(column, sql.Double) or column.__visit_name__.upper().startswith("DOUBLE")
            return _Family("float", 64 if is_double or dialect == "sqlite" else 32)
        case sql.Numeric():
            name = "unbounded" if column.precision is None else "decimal"
            return _Family(name, column.precision or 38, column.scale or 0)
        case sql.DateTime():
            is_instant = column.__visit_name__ == "TIMESTAMP" if dialect in MYSQL else getattr(column, "timezone", False)
            return _Family("instant" if is_instant else "local")
        case sql.Time():
            return _Family("time of a zone" if getattr(column, "timezone", False) else "time")
        case sql.LargeBinary() | sql.BINARY() | sql.VARBINARY():
            return _Family("binary")
    if column.__visit_name__ == "BIT":
        return _Family("bit")
    return _Family(next((name for kind, name in _FAMILIES.items() if isinstance(column, kind)), "other"))


def _fits_decimal(precision: int, scale: int, found: _Family) -> bool:
    if found.name == "decimal":
        return found.scale >= scale and found.size - found.scale >= precision - scale
    whole = found.name == "integer" and scale == 0 and precision < _DIGITS.get(found.size, 0)
    return whole or found.name == "unbounded"


def plain(column: TypeEngine[Any]) -> TypeEngine[Any]:
    """The base type of a domain, or the type itself."""
    while isinstance(column, postgresql.DOMAIN):
        column = column.data_type
    return column


def is_text(kind: pa.DataType) -> bool:
    """Whether the type is one of those that Spark has its strings in."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Whether the type is one of those that Spark has its bytes in."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
