"""The tables of jobs: many tasks, one commit.

MariaDB and MySQL commit at each DDL statement: there, what a killed run has already created is accepted.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_MYSQL = ("mysql", "mariadb")
_INDEX = "ix_kafka_job_attempt_prefix"
_TABLES = ("kafka_job", "kafka_job_batch", "kafka_job_attempt", "kafka_job_chunk")


def upgrade() -> None:
    """Create the tables."""
    moment = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *_MYSQL)
    long_text = sa.Text().with_variant(mysql.MEDIUMTEXT(), *_MYSQL)
    op.create_table(
        "kafka_job",
        sa.Column("prefix", sa.String(255), primary_key=True),
        sa.Column("job_id", sa.String(255), nullable=False),
        sa.Column("batch_id", sa.BigInteger, nullable=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("is_open", sa.Boolean, nullable=False),
        sa.Column("keeps_lease", sa.Boolean, nullable=False),
        sa.Column("earlier_tokens", sa.Text, nullable=False),
        sa.Column("staging_table", sa.String(255), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("updated_at", moment, nullable=False),
        **_options(),
    )
    op.create_table(
        "kafka_job_batch",
        sa.Column("job_id", sa.String(255), primary_key=True),
        sa.Column("batch_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("prefix", sa.String(255), nullable=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("winners", long_text, nullable=False),
        sa.Column("committed_at", moment, nullable=False),
        **_options(),
    )
    op.create_table(
        "kafka_job_attempt",
        sa.Column("transactional_id", sa.String(255), primary_key=True),
        sa.Column("prefix", sa.String(255), nullable=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("task", sa.String(32), nullable=False),
        sa.Column("beats", sa.Integer, nullable=False),
        **_options(),
    )
    if not _index_was_left_by_a_killed_run():
        op.create_index(_INDEX, "kafka_job_attempt", ["prefix"])
    op.create_table(
        "kafka_job_chunk",
        sa.Column("job_id", sa.String(200), primary_key=True),
        sa.Column("partition_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("chunk_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("committed_at", moment, nullable=False),
        **_options(),
    )


def _index_was_left_by_a_killed_run() -> bool:
    """Whether the index already exists; always False if DDL is transactional, and for an SQL script."""
    if op.get_context().as_sql or op.get_context().dialect.name not in _MYSQL:
        return False
    return any(index["name"] == _INDEX for index in sa.inspect(op.get_bind()).get_indexes("kafka_job_attempt"))


def downgrade() -> None:
    """Drop the tables of jobs, with the record of committed batches: a batch or jobId can then be written twice."""
    for table in reversed(_TABLES):
        op.drop_table(table, if_exists=op.get_context().dialect.name in _MYSQL)


def _options() -> dict[str, Any]:
    """MariaDB and MySQL: a transactional engine, and ids compared byte by byte, with case, accents and trailing spaces."""
    dialect = op.get_context().dialect
    if dialect.name not in _MYSQL:
        return {}
    collation = "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
    return {"if_not_exists": True, **{f"{dialect.name}_{name}": value for name, value in options.items()}}
