"""The sink of a frame's rows: Arrow record batches whose columns make a message and the row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from sqlalchemy import Connection, Engine

from dualwrite.jobs.frame.columns import TargetTable, compare, table_columns
from dualwrite.jobs.frame.loading import StagingWriter
from dualwrite.jobs.frame.messages import MESSAGE_COLUMNS, MessageEncoder
from dualwrite.jobs.frame.staging import StagingTable
from dualwrite.jobs.frame.table_names import quoted_name
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.stores.base import Claim


@dataclass(frozen=True)
class FrameSettings:
    """Where and how a frame is written. It can be pickled.

    Args:
        dbtable: The table, `table` or `schema.table`.
        topic: The topic of all messages, or None for the column `topic`.
        upsert_keys: Columns by which a row replaces an earlier one; empty for append.
        staging_schema: The schema of the staging table, or None for the table's own schema.
    """

    dbtable: str
    topic: str | None = None
    upsert_keys: tuple[str, ...] = ()
    staging_schema: str | None = None


class FrameSink:
    """See `dualwrite.jobs.task.Sink` and `dualwrite.jobs.driver.Mover`. It can be pickled.

    Args:
        settings: Where and how the frame is written.
        schema: The frame's columns.
        target: The reflected table.

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
        """See Sink."""
        return quoted_name(self._staging.name, self._staging.schema)

    def send(self, batch: pa.RecordBatch, producer: TransactionalProducer) -> int:
        """See Sink."""
        return self._encoder.send(batch, producer)

    def loader(self, connection: Connection, claim: Claim) -> StagingWriter:
        """See Sink."""
        return self._staging.writer(connection, claim.transactional_id, claim.fence)

    def move(self, connection: Connection, keys: Sequence[tuple[str, int]]) -> int:
        """See Mover."""
        return self._staging.move(connection, keys, upsert_keys=self._settings.upsert_keys)
