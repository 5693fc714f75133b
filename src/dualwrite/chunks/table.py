"""The table `kafka_job_chunk`: one row per committed chunk of a job, and one per job."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Integer, Table

from dualwrite.chunks.markers import MAX_DIGEST_LENGTH, MAX_JOB_ID_LENGTH
from dualwrite.stores.sql.column_types import UtcDateTime, Words
from dualwrite.stores.sql.table import metadata

CHUNK_TABLE_NAME: Final = "kafka_job_chunk"

chunk_table: Final = Table(
    CHUNK_TABLE_NAME,
    metadata,
    Column("job_id", Words(MAX_JOB_ID_LENGTH), primary_key=True),
    Column("partition_number", Integer, primary_key=True, autoincrement=False),
    Column("chunk_number", Integer, primary_key=True, autoincrement=False),
    Column("row_count", BigInteger, nullable=False),
    Column("digest", Words(MAX_DIGEST_LENGTH), nullable=False),
    Column("committed_at", UtcDateTime, nullable=False),
)
"""The row with partition -1 belongs to the job itself: its digest column has the job's plan, as JSON text."""
