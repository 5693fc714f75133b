"""What is made of Arrow's record batches: rows of a staging table, and a digest of rows.

PostgreSQL is loaded by COPY, other databases by multi-row statements. Nothing here commits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from sqlalchemy import Connection, Dialect, Table
from sqlalchemy import types as sql
from sqlalchemy.exc import DBAPIError

from dualwrite.errors import StoreError
from dualwrite.jobs.job_tables import quoted_name
from dualwrite.spark.columns import MYSQL, TargetColumn, is_binary, is_text, plain

_ROWS_PER_STATEMENT: Final = 1000
_SQLITE_DIGITS: Final = 15
# Arrow quotes every text but no null, so PostgreSQL can distinguish an empty text from NULL
_CSV: Final = csv.WriteOptions(include_header=False, batch_size=1 << 16)

_Conversion: TypeAlias = Callable[[pa.Array], pa.Array]
STRICT: Final = "STRICT_ALL_TABLES"
"""Refuse a value that does not fit: otherwise the server shortens texts, and replaces numbers by the nearest that fits."""
ZEROS_KEPT: Final = "NO_AUTO_VALUE_ON_ZERO"
"""Keep a 0 in an AUTO_INCREMENT column: by default it is replaced by the next number."""

_DIGEST_SIZE: Final = 16
_MODULUS: Final = 1 << (8 * _DIGEST_SIZE)
_BYTES: Final = pa.large_binary()


class StagingWriter(ABC):
    """Loads the rows of one task into a staging table, in the given connection's transaction, which the caller ends.

    Until `finish`, nothing else may use the connection. If its `with` block ends with an exception, the writer stops what it
    has started, and the transaction can only be rolled back. The database's errors are SQLAlchemy's or the driver's own.

    The staging table's last two columns are the id and the fencing token under which the rows are staged; `columns` are the
    others.
    """

    def __init__(
        self, connection: Connection, table: Table, columns: Sequence[TargetColumn], transactional_id: str, fence: int
    ) -> None:
        self._connection = connection
        self._table = table
        self._columns = tuple(columns)
        self._key = (transactional_id, fence)
        self._conversions: dict[str, _Conversion] | None = None
        self._rows = 0
        self._opened = ExitStack()

    def add(self, batch: pa.RecordBatch) -> None:
        """Load the batch's rows. Columns that the staging table does not have are ignored.

        Raises:
            StoreError: The database can't store a number (NaN; infinity on MariaDB and MySQL; more than 15 digits on SQLite).
        """
        if self._conversions is None:
            self._conversions = {
                column.name: self._conversion(batch.schema.field(column.name).type, column) for column in self._columns
            }
        self._load([convert(batch.column(name)) for name, convert in self._conversions.items()], len(batch))
        self._rows += len(batch)

    def finish(self) -> int:
        """Complete the load and check that every row has arrived in the transaction; return how many there are.

        Raises:
            StoreError: The database's row count differs from ours.
        """
        self._opened.close()
        return self._rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, traceback)

    @abstractmethod
    def _conversion(self, kind: pa.DataType, column: TargetColumn) -> _Conversion:
        """The conversion of a frame's column to what the database accepts."""

    @abstractmethod
    def _load(self, columns: list[pa.Array], count: int) -> None:
        """Load converted columns. What is opened for that goes to `_opened`."""


class CopyWriter(StagingWriter):
    """PostgreSQL: COPY, with CSV written by Arrow.

    The COMMIT of the staged rows waits neither for the disk nor for a standby (`synchronous_commit = off`). The table is
    UNLOGGED, so a crash may lose staged rows anyway, and the decision, which counts the rows that it moves, then finds them
    missing. The decision's own COMMIT does wait, and by then everything that it has seen is on disk, too.
    """

    _copy: Any = None

    def _load(self, columns: list[pa.Array], count: int) -> None:
        if self._copy is None:
            self._begin()
        arrays = [*columns, pa.repeat(self._key[0], count), pa.repeat(pa.scalar(self._key[1], pa.int64()), count)]
        sink = pa.BufferOutputStream()
        csv.write_csv(pa.RecordBatch.from_arrays(arrays, [str(number) for number in range(len(arrays))]), sink, _CSV)
        self._copy.write(memoryview(sink.getvalue()))

    def _begin(self) -> None:
        raw: Any = self._connection.connection.driver_connection
        names = ", ".join(quoted_name(column.name, None) for column in self._table.columns)
        place = quoted_name(self._table.name, self._table.schema)
        cursor = self._opened.enter_context(raw.cursor())
        cursor.execute("SET LOCAL synchronous_commit = off")
        self._opened.push(lambda kind, *_: None if kind else self._check_count(cursor.rowcount))
        copying = cursor.copy(f"COPY {place} ({names}) FROM STDIN (FORMAT csv, ENCODING 'UTF8')")
        self._copy = self._opened.enter_context(copying)

    def _check_count(self, copied: int) -> None:
        if copied != self._rows:
            raise StoreError(
                f"{self._rows} rows were loaded into staging, but PostgreSQL reports {copied}.",
                next_step="roll back and try again; if it happens again, please report it",
            )

    def _conversion(self, kind: pa.DataType, column: TargetColumn) -> _Conversion:
        del column
        if pa.types.is_dictionary(kind):
            return lambda values: values.cast(kind.value_type)
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            return _in_utc
        if pa.types.is_duration(kind):
            return lambda values: _joined(
                values.cast(pa.duration("us"), safe=False).cast(pa.int64()).cast(pa.string()), " microseconds"
            )
        if is_binary(kind):
            return _hexadecimal
        return lambda values: values


class StatementWriter(StagingWriter):
    """Other databases: multi-row INSERT statements, with the driver's own executemany."""

    def _load(self, columns: list[pa.Array], count: int) -> None:
        insert = _insert(self._table, self._connection.dialect)
        with ExitStack() as session:
            if self._connection.dialect.name in MYSQL:
                session.enter_context(sql_mode(self._connection, STRICT))
                if any(plain(column.type).__visit_name__ == "TIMESTAMP" for column in self._columns):
                    session.enter_context(_setting(self._connection, "time_zone", lambda _: "+00:00"))  # of the texts
            for begin in range(0, count, _ROWS_PER_STATEMENT):
                some = [column.slice(begin, _ROWS_PER_STATEMENT).to_pylist() for column in columns]
                size = min(_ROWS_PER_STATEMENT, count - begin)
                rows = list(zip(*some, [self._key[0]] * size, [self._key[1]] * size, strict=True))
                self._connection.exec_driver_sql(insert, rows)

    def _conversion(self, kind: pa.DataType, column: TargetColumn) -> _Conversion:  # noqa: PLR0911  (one for each kind of type)
        if pa.types.is_dictionary(kind):
            return lambda values: values.cast(kind.value_type)
        if pa.types.is_date(kind) and isinstance(plain(column.type), sql.DateTime):
            return lambda values: values.cast(pa.timestamp("us")).cast(pa.string())
        if pa.types.is_timestamp(kind):
            zone = None if kind.tz is None else "UTC"
            return lambda values: values.cast(pa.timestamp("us", zone), safe=False).cast(pa.timestamp("us")).cast(pa.string())
        if pa.types.is_decimal(kind) and self._connection.dialect.name == "sqlite" and kind.precision > _SQLITE_DIGITS:
            return lambda values: _sqlite_decimals(values, column)
        if pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_decimal(kind):
            return lambda values: values.cast(pa.string())
        if pa.types.is_floating(kind):
            return lambda values: self._checked(values, column.name)
        return lambda values: values

    def _checked(self, values: pa.Array, name: str) -> pa.Array:
        """Reject numbers that SQLite would store as NULL and that MariaDB and MySQL can't store."""
        dialect = self._connection.dialect.name
        bad = pc.invert(pc.is_finite(values)) if dialect in MYSQL else pc.is_nan(values)
        if not pc.any(bad).as_py():
            return values
        raise StoreError(
            f"Column {name} has NaN or an infinity, which {dialect} can't store.",
            next_step="replace such values, for instance with NULL: nanvl(column, null)",
        )


def _sqlite_decimals(values: pa.Array, column: TargetColumn) -> pa.Array:
    """Decimals as text, if SQLite keeps all their digits: it converts them to floats, unless the column has no type."""
    texts = values.cast(pa.string())
    if isinstance(column.type, sql.NullType):
        return texts
    for number in values.to_pylist():
        if number is not None and len(number.normalize().as_tuple().digits) > _SQLITE_DIGITS:
            raise StoreError(
                f"Column {column.name} has the number {number}, of which SQLite would keep {_SQLITE_DIGITS} digits.",
                next_step="use a column of type TEXT, and cast the frame's to string; or round the numbers",
            )
    return texts


def _insert(table: Table, dialect: Dialect) -> str:
    """The statement for the driver's executemany, with one placeholder per column."""
    prepare = dialect.identifier_preparer
    names = ", ".join(prepare.quote_identifier(column.name) for column in table.columns)
    marks = ", ".join(["?" if dialect.paramstyle == "qmark" else "%s"] * len(table.columns))
    return f"INSERT INTO {prepare.format_table(table)} ({names}) VALUES ({marks})"  # noqa: S608  (quoted)


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


def _in_utc(column: pa.Array) -> pa.Array:
    """Timestamps as texts with Z; converted without a time zone, since with one, even UTC, Arrow takes 18 times as long."""
    unit = column.type.unit
    return _joined(column.cast(pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit)).cast(pa.string()), "Z")


def _hexadecimal(column: pa.Array) -> pa.Array:
    r"""Bytes in PostgreSQL's hex format (`\x` and two digits per byte), converted for the whole column at once."""
    filled = pc.fill_null(column.cast(pa.binary()), b"")  # Arrow may store bytes behind a null
    places = memoryview(filled.buffers()[1]).cast("i")
    first, last = places[filled.offset], places[filled.offset + len(filled)]
    content = filled.buffers()[2]
    digits = b"" if content is None else content.slice(first, last - first).to_pybytes().hex().encode()
    ends = pc.cumulative_sum(pc.multiply(pc.binary_length(filled), 2))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])
    texts = pa.StringArray.from_buffers(len(column), offsets.buffers()[1], pa.py_buffer(digits))
    return pc.if_else(column.is_valid(), _joined("\\x", texts), pa.scalar(None, pa.string()))


def sql_mode(connection: Connection, *modes: str) -> AbstractContextManager[None]:
    """Add modes to the session's `sql_mode` for the `with` block."""
    return _setting(connection, "sql_mode", lambda before: ",".join(dict.fromkeys([*filter(None, before.split(",")), *modes])))


@contextmanager
def _setting(connection: Connection, name: str, wanted: Callable[[str], str]) -> Iterator[None]:
    before: str = connection.exec_driver_sql(f"SELECT @@SESSION.{name}").scalar_one()
    value = wanted(before)
    if value == before:
        yield
        return
    connection.exec_driver_sql(f"SET SESSION {name} = %s", (value,))
    try:
        yield
    finally:
        with suppress(DBAPIError):  # the settings of a broken connection are gone anyway
            connection.exec_driver_sql(f"SET SESSION {name} = %s", (before,))


def table_digest(table: pa.Table) -> str:
    """The digest of a table's rows and column names, as 32 hexadecimal digits.

    Two values are equal here if their text is equal; times are compared as instants, regardless of their time zone.
    """
    total = _hash(repr(table.column_names).encode())
    for batch in table.to_batches():
        for row in _row_texts(batch):
            total += _hash(row)
    return f"{total % _MODULUS:0{2 * _DIGEST_SIZE}x}"


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=_DIGEST_SIZE).digest())


def _row_texts(batch: pa.RecordBatch) -> list[bytes]:
    """Each row as one text; different rows have different texts."""
    columns = [_texts(column) for column in batch.columns]
    if not columns:
        return [b""] * batch.num_rows
    texts: list[bytes] = pc.binary_join_element_wise(*columns, pa.scalar(b",", _BYTES)).to_pylist()
    return texts


def _texts(column: pa.Array) -> pa.Array:
    """Each value as a text that no other value has and whose end is unambiguous; the empty text for a null."""
    kind = column.type
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        column = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())  # noqa: PLR2004  (bits, not a setting)
    elif is_text(kind) or is_binary(kind):
        return _with_length(column.cast(_BYTES))
    elif not _has_text(kind):
        if (comparable := _with_instants(kind)) != kind:
            column = column.cast(comparable)
        values = [None if value is None else repr(value).encode() for value in column.to_pylist()]
        return _with_length(pa.array(values, _BYTES))
    return pc.fill_null(column.cast(pa.large_string()).cast(_BYTES), b"")


def _with_length(column: pa.Array) -> pa.Array:
    lengths = pc.binary_length(column).cast(pa.large_string()).cast(_BYTES)
    texts = pc.binary_join_element_wise(lengths, column, pa.scalar(b":", _BYTES), null_handling="emit_null")
    return pc.fill_null(texts, b"")


def _with_instants(kind: Any) -> Any:
    """The type, with integers for the timestamps in it that have a time zone, which Python's text would name."""
    types = pa.types
    if types.is_timestamp(kind):
        return kind if kind.tz is None else pa.int64()
    if types.is_struct(kind):
        return pa.struct([_field_with_instants(kind.field(place)) for place in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(_field_with_instants(kind.key_field), _field_with_instants(kind.item_field))
    if types.is_large_list(kind):
        return pa.large_list(_field_with_instants(kind.value_field))
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_field_with_instants(kind.value_field), -1 if types.is_list(kind) else kind.list_size)
    return kind


def _field_with_instants(field: pa.Field) -> pa.Field:
    return field.with_type(_with_instants(field.type))


def _has_text(kind: Any) -> bool:
    """Whether Arrow can cast the type to text; it can't for lists, structs and maps."""
    types = pa.types
    checks = (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_null)
    return any(each(kind) for each in checks)
