"""Which Arrow types fit which columns of a table: the column has the same type or a wider one, and no conversion is guessed.

Strings fit every column that Spark has no type for (enum, uuid, json, arrays, types of extensions), since the database parses
and checks the text; for numbers, dates and bytes, strings must be cast in Spark. The database checks lengths of texts and signs
of unsigned integers. An instant fits only a column of instants; MariaDB's and MySQL's DATETIME and SQLite's columns, which have
no time zone, accept it in UTC.

Fractions of seconds are the exception: Spark's times always have microseconds, and a column that stores fewer digits is usually
meant for whole seconds. The database rounds or truncates the others without an error.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
from sqlalchemy import types as sql
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

MYSQL: Final = ("mysql", "mariadb")
_INTEGER_BITS: Final = {"TINYINT": 8, "SMALLINT": 16, "small_integer": 16, "MEDIUMINT": 24, "BIGINT": 64, "big_integer": 64}
_DIGITS: Final = {8: 3, 16: 5, 32: 10, 64: 19}
_EXACT_FLOAT_BITS: Final = {32: 24, 64: 53}  # integers of so many bits that a float represents exactly, by the float's bits


def fits(kind: pa.DataType, column: TypeEngine[Any], dialect: str) -> bool:
    """Whether a column can store every value of an Arrow type unchanged, apart from fractions of seconds.

    Args:
        kind: The type in the frame.
        column: The type in the table.
        dialect: SQLAlchemy's name of the database's dialect.
    """
    column = plain(column)
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind) or (isinstance(column, sql.NullType) and dialect == "sqlite"):
        return True
    if pa.types.is_boolean(kind):
        return isinstance(column, sql.Boolean) or (
            dialect != "postgresql" and (_integer_bits(column, dialect) > 0 or column.__visit_name__ == "BIT")
        )
    if pa.types.is_integer(kind):
        return _fits_integer(kind.bit_width, column, dialect)
    if pa.types.is_floating(kind):
        return _float_bits(column, dialect) >= kind.bit_width or _is_unbounded(column)
    if pa.types.is_decimal(kind):
        return _fits_decimal(kind.precision, kind.scale, column, dialect)
    return _fits_other(kind, column, dialect)


def spark_type(column: TypeEngine[Any], dialect: str) -> str:  # noqa: PLR0911  (a table)
    """The Spark type to cast to for a column of the table."""
    column = plain(column)
    bits = _integer_bits(column, dialect)
    match column:
        case sql.Boolean():
            return "boolean"
        case _ if bits:
            return {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}[bits if bits != 24 else 16]  # noqa: PLR2004
        case sql.Float():
            return "double" if _float_bits(column, dialect) == 64 else "float"  # noqa: PLR2004
        case sql.Numeric():
            return f"decimal({column.precision or 38},{column.scale or 0})"
        case sql.DateTime():
            return "timestamp" if _is_instant(column, dialect) else "timestamp_ntz"
        case sql.Date():
            return "date"
        case sql.Time():
            return "time"
        case sql.LargeBinary() | sql.BINARY() | sql.VARBINARY():
            return "binary"
        case sql.JSON():
            return "string, by to_json"
    return "string"


def plain(column: TypeEngine[Any]) -> TypeEngine[Any]:
    """The base type of a domain, or the type itself."""
    while isinstance(column, postgresql.DOMAIN):
        column = column.data_type
    return column


def is_text(kind: pa.DataType) -> bool:
    """Whether the type is one of Arrow's string types."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Whether the type is one of Arrow's binary types."""
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)


def _fits_integer(bits: int, column: TypeEngine[Any], dialect: str) -> bool:
    if _integer_bits(column, dialect) >= bits:
        return True
    if isinstance(column, sql.Float):
        return _EXACT_FLOAT_BITS.get(_float_bits(column, dialect), 0) >= bits
    return _fits_decimal(_DIGITS[bits], 0, column, dialect)


def _fits_decimal(precision: int, scale: int, column: TypeEngine[Any], dialect: str) -> bool:
    if _is_unbounded(column):
        return True
    if isinstance(column, sql.Numeric) and not isinstance(column, sql.Float):
        room = column.scale or 0
        return room >= scale and (column.precision or 0) - room >= precision - scale
    return scale == 0 and precision < _DIGITS.get(_integer_bits(column, dialect), 0)


def _fits_other(kind: pa.DataType, column: TypeEngine[Any], dialect: str) -> bool:  # noqa: PLR0911  (a table)
    """Texts, bytes, dates and times."""
    if is_text(kind):
        return spark_type(column, dialect).startswith("string")  # for other columns cast in Spark, which finds bad texts early
    if is_binary(kind):
        return isinstance(column, sql.LargeBinary | sql.BINARY | sql.VARBINARY | postgresql.BYTEA)
    if pa.types.is_date(kind):
        return isinstance(column, sql.Date) or (isinstance(column, sql.DateTime) and not _is_instant(column, dialect))
    if pa.types.is_timestamp(kind):
        if not isinstance(column, sql.DateTime):
            return False
        if kind.tz is None:
            return not _is_instant(column, dialect)
        return _is_instant(column, dialect) or dialect != "postgresql"
    if pa.types.is_time(kind):
        return isinstance(column, sql.Time) and not getattr(column, "timezone", False)
    if pa.types.is_duration(kind):
        return isinstance(column, postgresql.INTERVAL)
    return False


def _integer_bits(column: TypeEngine[Any], dialect: str) -> int:
    """Bits of an integer column; 0 for any other column."""
    if not isinstance(column, sql.Integer):
        return 0
    return 64 if dialect == "sqlite" else _INTEGER_BITS.get(column.__visit_name__, 32)


def _float_bits(column: TypeEngine[Any], dialect: str) -> int:
    if not isinstance(column, sql.Float):
        return 0
    if dialect == "sqlite" or isinstance(column, sql.Double) or column.__visit_name__.upper().startswith("DOUBLE"):
        return 64
    return 32


def _is_unbounded(column: TypeEngine[Any]) -> bool:
    return isinstance(column, sql.Numeric) and not isinstance(column, sql.Float) and column.precision is None


def _is_instant(column: TypeEngine[Any], dialect: str) -> bool:
    """Whether a date and time column stores instants, not local times."""
    if dialect in MYSQL:
        return column.__visit_name__ == "TIMESTAMP"
    return bool(getattr(column, "timezone", False))
