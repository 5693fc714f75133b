"""Chunk markers in a SQL database: rows of `kafka_job_chunk`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, bindparam, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

from dualwrite.chunks.markers import ChunkMarker, ChunkMarkers, committed_meanwhile
from dualwrite.chunks.table import CHUNK_TABLE_NAME
from dualwrite.chunks.table import chunk_table as t
from dualwrite.errors import StateTableMissingError
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.transaction import Transaction

_ANY: Final = select(t).where(t.c.job_id == "").limit(1)
_READ: Final = select(t.c.chunk_number, t.c.row_count, t.c.digest).where(
    t.c.job_id == bindparam("job_id"), t.c.partition_number == bindparam("partition")
)
_WRITE: Final = insert(t)
_OF_JOB: Final = t.c.job_id == bindparam("job")
_COUNT: Final = select(func.count()).select_from(t).where(_OF_JOB, t.c.partition_number >= 0)
_DELETE: Final = delete(t).where(_OF_JOB)


class SqlChunkMarkers(ChunkMarkers):
    """See ChunkMarkers. The statements run on the connection of `tx.session`, which every SQL store has.

    Args:
        store: The store.
    """

    def __init__(self, store: SqlStateStore) -> None:
        self._store = store

    def prepare(self) -> None:
        """See ChunkMarkers; `dualwrite db upgrade` creates the table."""
        try:
            self._store.short_transactions.query(
                lambda connection: connection.execute(_ANY).first(), "checking the table of chunk markers"
            )
        except StateTableMissingError as error:
            raise StateTableMissingError(
                f"The table {CHUNK_TABLE_NAME} in {self._store.description} is missing or out of date.",
                cause="the database was last upgraded for an earlier release",
                next_step=error.next_step,
            ) from error

    def read(self, transaction: Transaction, job_id: str, partition: int) -> Mapping[int, ChunkMarker]:
        """See ChunkMarkers."""
        with _own_statements(transaction) as connection:
            found = connection.execute(_READ, {"job_id": job_id, "partition": partition}).all()
        return {row.chunk_number: ChunkMarker(row.chunk_number, row.row_count, row.digest) for row in found}

    def write(self, transaction: Transaction, job_id: str, partition: int, marker: ChunkMarker) -> None:
        """See ChunkMarkers; the primary key rejects a duplicate."""
        row = {
            "job_id": job_id,
            "partition_number": partition,
            "chunk_number": marker.number,
            "row_count": marker.rows,
            "digest": marker.digest,
            "committed_at": datetime.now(UTC),
        }
        try:
            with _own_statements(transaction) as connection:
                connection.execute(_WRITE, row)
        except IntegrityError as error:
            raise committed_meanwhile(job_id, partition, marker) from error

    def forget(self, job_id: str) -> int:
        """See ChunkMarkers."""
        counted = 0  # the maximum over all attempts: a COMMIT whose response was lost may have deleted them already

        def work(connection: Connection) -> None:
            nonlocal counted
            counted = max(counted, connection.execute(_COUNT, {"job": job_id}).scalar_one())
            connection.execute(_DELETE, {"job": job_id})

        self._store.short_transactions.run(work, "forgetting a job")
        return counted


def _own_statements(transaction: Transaction) -> AbstractContextManager[Connection]:
    connection = transaction.session.connection()
    assert isinstance(connection, GuardedConnection)
    return connection.own_statements()
