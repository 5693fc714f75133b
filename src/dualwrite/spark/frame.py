"""The sink of a frame's rows: each makes a Kafka message and the row of a table.

The columns of messages are those of Spark's own Kafka sink: `key`, `value`, `topic`, `partition`, `headers`. One more column,
`timestamp`, which Spark's sink does not have, sets the message's create time; by default it is the time of sending.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection, Engine

from dualwrite.errors import ConfigurationError, InvalidMessageError
from dualwrite.jobs.job_tables import quoted_name
from dualwrite.kafka.base import Headers, TransactionalProducer
from dualwrite.kafka.messages import Columns
from dualwrite.spark.columns import TargetTable, compare, is_binary, is_text, table_columns
from dualwrite.spark.loading import StagingWriter
from dualwrite.spark.staging import StagingTable
from dualwrite.stores.base import Claim

MESSAGE_COLUMNS: Final = ("key", "value", "topic", "partition", "headers", "timestamp")
"""The columns of a frame that make the message; the others make the table's row."""

_TEXT: Final = "a string"
_CONTENT: Final = "a string or binary"
_HEADERS: Final = "array<struct<key:string,value:binary>>"


class MessageEncoder:
    """Sends the rows of Arrow record batches as messages.

    A null `value` is a tombstone, as in Kafka. A null in `key`, `partition`, `headers` or `timestamp` means that the message
    has none; `topic` must not be null. The option `topic` takes precedence over the column, as in Spark's sink.

    Args:
        schema: The schema of the record batches.
        topic: The topic of all messages; None uses the column `topic`.

    Raises:
        ConfigurationError: The schema does not define messages; the text lists every problem.
    """

    def __init__(self, schema: pa.Schema, *, topic: str | None = None) -> None:
        problems = [*_problems_of_source(schema, topic), *_problems_of_types(schema, topic)]
        if problems:
            raise ConfigurationError(
                f"The frame can't be written to Kafka: {'; '.join(problems)}.",
                cause=f"its columns are {', '.join(f'{field.name} ({field.type})' for field in schema)}",
                next_step="select, rename or cast the columns, as for Spark's Kafka sink",
            )
        self._topic = topic
        self._columns = {name for name in MESSAGE_COLUMNS if name in schema.names} - ({"topic"} if topic is not None else set())
        self._rows = 0

    def send(self, batch: pa.RecordBatch, producer: TransactionalProducer) -> int:
        """Send one message per row, keeping the order of rows within each topic; return how many.

        Raises: as `TransactionalProducer.send_messages`, and
            InvalidMessageError: The topic of a row is null; nothing of the batch was sent.
        """
        if not len(batch):
            return 0
        self._check_topics(batch)
        for topic, part in self._by_topic(batch):
            self._send_to(topic, part, producer)
        self._rows += len(batch)
        return len(batch)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _check_topics(self, batch: pa.RecordBatch) -> None:
        if self._topic is not None or not batch.column("topic").null_count:
            return
        row = pc.index(batch.column("topic").is_null(), value=True).as_py()
        raise InvalidMessageError(
            f"Row {self._rows + row + 1} of the task has no topic: its column topic is null.",
            next_step="set a topic in each row, filter out such rows, or set the option topic",
            row=self._rows + row + 1,
        )

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of each topic, in their original order; between topics Kafka keeps no order either."""
        if self._topic is not None:
            yield self._topic, batch
            return
        topics = batch.column("topic").dictionary_encode()
        names = topics.dictionary.to_pylist()
        if len(names) == 1:
            yield names[0], batch
            return
        batch = batch.take(pc.array_sort_indices(topics.indices))  # a stable sort
        begin = 0
        counts = {each["values"]: each["counts"] for each in pc.value_counts(topics.indices).to_pylist()}
        for number, name in enumerate(names):
            yield name, batch.slice(begin, counts[number])
            begin += counts[number]

    def _send_to(self, topic: str, batch: pa.RecordBatch, producer: TransactionalProducer) -> None:
        """Send all rows to one topic: by columns, unless rows differ in more than key and value."""
        values = batch.column("value")
        keys = self._used("key", batch)
        partitions, headers, timestamps = (self._used(name, batch) for name in ("partition", "headers", "timestamp"))
        partition = _only_value(partitions)
        if headers is None and timestamps is None and (partitions is None or partition is not None):
            columns = Columns(topic, _binary(values), keys=None if keys is None else _binary(keys), partition=partition)
            producer.send_messages(columns)
            return
        rows = zip(
            repeat(topic),
            _contents(values),
            repeat(None) if keys is None else _contents(keys),
            repeat(None) if headers is None else _header_lists(headers),
            repeat(None) if partitions is None else partitions.to_pylist(),
            repeat(None) if timestamps is None else _milliseconds(timestamps),
            strict=False,
        )
        producer.send_messages(rows)

    def _used(self, name: str, batch: pa.RecordBatch) -> pa.Array | None:
        """The column, or None if it is missing or all its values are null."""
        if name not in self._columns:
            return None
        column = batch.column(name)
        return None if column.null_count == len(column) else column


def _problems_of_source(schema: pa.Schema, topic: str | None) -> Iterator[str]:
    """Columns that are missing or occur more than once."""
    names = schema.names
    yield from (f"there are {names.count(name)} columns named {name}" for name in MESSAGE_COLUMNS if names.count(name) > 1)
    if topic is None and "topic" not in names:
        yield "there is neither the option topic nor a column topic"
    if "value" not in names:
        yield "the column value is missing (to_json(struct(*)) AS value makes it from all columns)"


def _problems_of_types(schema: pa.Schema, topic: str | None) -> Iterator[str]:
    """Message columns of a wrong type; Spark's sink has the same rules for its columns."""
    wanted = {
        "key": (_CONTENT, lambda kind: is_text(kind) or is_binary(kind)),
        "value": (_CONTENT, lambda kind: is_text(kind) or is_binary(kind)),
        "topic": (_TEXT, is_text),
        "partition": ("an int", pa.types.is_int32),
        "headers": (_HEADERS, _is_headers),
        "timestamp": ("a timestamp (with time zone; a timestamp_ntz is not an instant)", _is_instant),
    }
    for name, (expected, fits) in wanted.items():
        if schema.names.count(name) != 1 or (name == "topic" and topic is not None):
            continue
        kind = schema.field(name).type
        if not fits(kind) and not pa.types.is_null(kind):
            yield f"column {name} must be {expected}, not {kind}"


def _is_instant(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz is not None)


def _is_headers(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = list(kind.value_type)
    return [field.name for field in fields] == ["key", "value"] and is_text(fields[0].type) and is_binary(fields[1].type)


def _binary(column: pa.Array) -> pa.Array:
    """Texts as bytes, without decoding and encoding them again: Arrow stores them in UTF-8."""
    kind = column.type
    if pa.types.is_string(kind):
        return column.cast(pa.binary())
    return column.cast(pa.large_binary()) if pa.types.is_large_string(kind) else column


def _contents(column: pa.Array) -> list[Any]:
    """The values as bytes; None for a null."""
    listed: list[Any] = _binary(column).to_pylist()
    return listed


def _header_lists(column: pa.Array) -> list[Headers | None]:
    """The headers of each row; a null in the place of a header is one without a name, which `send` refuses."""
    none: dict[str, Any] = {"key": None, "value": None}
    return [
        None if pairs is None else [((pair or none)["key"], (pair or none)["value"]) for pair in pairs]
        for pairs in column.to_pylist()
    ]


def _milliseconds(column: pa.Array) -> list[int | None]:
    listed: list[int | None] = column.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64()).to_pylist()
    return listed


def _only_value(column: pa.Array | None) -> int | None:
    """The number, if it is the same in every row, else None."""
    if column is None or column.null_count:
        return None
    edges = pc.min_max(column).as_py()
    return edges["min"] if edges["min"] == edges["max"] else None


@dataclass(frozen=True)
class FrameSettings:
    """Where and how a frame is written, as the options of the same names say. It can be pickled."""

    dbtable: str
    topic: str | None = None
    upsert_keys: tuple[str, ...] = ()
    staging_schema: str | None = None


class FrameSink:
    """The sink of a frame with these columns for a reflected table; see `dualwrite.jobs.task.Sink`. It can be pickled.

    Raises:
        ConfigurationError: The frame can't be written to the table or to Kafka; the text lists every problem.
    """

    def __init__(self, settings: FrameSettings, schema: pa.Schema, target: TargetTable) -> None:
        self._settings, self._schema, self._target = settings, schema, target
        self._columns = [name for name in schema.names if name not in MESSAGE_COLUMNS]
        self._encoder = MessageEncoder(schema, topic=settings.topic)
        compare(pa.schema([schema.field(name) for name in self._columns]), target, settings.upsert_keys)
        self._staging = StagingTable(target, self._columns, staging_schema=settings.staging_schema)

    @classmethod
    def found(cls, engine: Engine, settings: FrameSettings, schema: pa.Schema) -> FrameSink:
        """Reflect the table, compare it with the frame, and create the staging table if it is missing.

        Raises:
            ConfigurationError: The frame can't be written to the table or to Kafka, or the staging table can't be created.
            StoreError: The database rejects a statement or can't be reached.
        """
        with engine.connect() as connection:
            target = table_columns(connection, settings.dbtable)
        sink = cls(settings, schema, target)
        sink._staging.ensure(engine)
        return sink

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._settings, self._schema, self._target)

    @property
    def staging_table(self) -> str:
        return quoted_name(self._staging.name, self._staging.schema)

    def send(self, batch: pa.RecordBatch, producer: TransactionalProducer) -> int:
        return self._encoder.send(batch, producer)

    def loader(self, connection: Connection, claim: Claim) -> StagingWriter:
        return self._staging.writer(connection, claim.transactional_id, claim.fence)

    def move(self, connection: Connection, keys: Sequence[tuple[str, int]]) -> int:
        return self._staging.move(connection, keys, upsert_keys=self._settings.upsert_keys)
