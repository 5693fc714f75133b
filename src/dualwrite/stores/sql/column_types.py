"""Column types of our tables whose values do not depend on what a session or a driver was set to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, DateTime, Dialect, String, Text
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

_MYSQL: Final = ("mysql", "mariadb")  # SQLAlchemy's names
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC, also where the database (SQLite, MariaDB, MySQL) stores no time zone.

    PostgreSQL sends it as a number: as a text it would depend on the session's DateStyle and TimeZone.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """MySQL's DATETIME has whole seconds by default; its TIMESTAMP would depend on the session's time zone."""
        return dialect.type_descriptor(mysql.DATETIME(fsp=6) if dialect.name in _MYSQL else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To what the driver accepts: if the stored value has no offset, it must be in UTC."""
        if value is None:
            return None
        value = value.astimezone(UTC)
        return value if dialect.name == "postgresql" else value.replace(tzinfo=None)

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """What is selected."""
        return _Sent(column, type_=self)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """To UTC, whatever the session's time zone is."""
        del dialect
        if value is None:
            return None
        if isinstance(value, datetime):
            return value.replace(tzinfo=UTC)  # it has none: see process_bind_param
        return _EPOCH + timedelta(microseconds=int(value))


class _Sent(FunctionElement[Any]):
    """A time as the database sends it: on PostgreSQL as microseconds since 1970."""

    inherit_cache = True

    def __init__(self, column: ColumnElement[Any], type_: TypeEngine[Any]) -> None:
        super().__init__(column)
        self.type = type_


@compiles(_Sent)
def _as_it_is(element: _Sent, compiler: SQLCompiler, **options: Any) -> str:
    return compiler.process(element.clauses, **options)


@compiles(_Sent, "postgresql")
def _as_number(element: _Sent, compiler: SQLCompiler, **options: Any) -> str:
    return f"(extract(epoch FROM {compiler.process(element.clauses, **options)}) * 1000000)::bigint"


class Words(TypeDecorator[str]):
    """A text; as bytes if the session's client_encoding is SQL_ASCII (PostgreSQL), or the driver was told to give bytes."""

    impl = String
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        """To a str."""
        del dialect
        return None if value is None else decoded(value)


class LongWords(Words):
    """The same without a limit.

    Args:
        is_medium: On MySQL, up to 16 MiB instead of 64 KiB.
    """

    impl = Text
    cache_ok = True

    def __init__(self, *, is_medium: bool = False) -> None:
        super().__init__()
        self.is_medium = is_medium

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """See TypeDecorator."""
        return mysql.MEDIUMTEXT() if self.is_medium and dialect.name in _MYSQL else super().load_dialect_impl(dialect)


def decoded(value: Any) -> str:
    """A text that the driver may have returned as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
