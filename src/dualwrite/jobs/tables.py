"""The tables of jobs: which job holds a prefix, which batches are committed, which ids tasks have used."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Boolean, Column, Integer, Table

from dualwrite.chunks.table import chunk_table
from dualwrite.stores.base import MAX_OWNER_LENGTH
from dualwrite.stores.sql.column_types import LongWords, UtcDateTime, Words
from dualwrite.stores.sql.table import metadata

__all__ = ["attempt_table", "batch_table", "chunk_table", "job_table", "metadata"]

job_table: Final = Table(
    "kafka_job",
    metadata,
    Column("prefix", Words(255), primary_key=True),
    Column("job_id", Words(255), nullable=False),
    Column("batch_id", BigInteger, nullable=False),
    Column("token", Words(32), nullable=False),
    Column("is_open", Boolean, nullable=False),
    Column("keeps_lease", Boolean, nullable=False),
    Column("earlier_tokens", LongWords(), nullable=False),
    Column("staging_table", Words(255), nullable=False),
    Column("owner", Words(MAX_OWNER_LENGTH), nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)
"""One row per prefix: the job that holds it, and its newest run, open or closed."""

batch_table: Final = Table(
    "kafka_job_batch",
    metadata,
    Column("job_id", Words(255), primary_key=True),
    Column("batch_id", BigInteger, primary_key=True, autoincrement=False),
    Column("prefix", Words(255), nullable=False),
    Column("token", Words(32), nullable=False),
    Column("row_count", BigInteger, nullable=False),
    Column("winners", LongWords(is_medium=True), nullable=False),
    Column("committed_at", UtcDateTime, nullable=False),
)
"""One marker per committed batch, written in the transaction that committed the batch. `winners` is `Marker.document`."""

attempt_table: Final = Table(
    "kafka_job_attempt",
    metadata,
    Column("transactional_id", Words(255), primary_key=True),
    Column("prefix", Words(255), nullable=False, index=True),
    Column("token", Words(32), nullable=False),
    Column("task", Words(32), nullable=False),
    Column("beats", Integer, nullable=False),
)
"""The transactional ids of task attempts; each row names the run and the task attempt that claimed the id last."""
