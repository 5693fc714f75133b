"""The tables of dualwrite: the state of each id, the database's own id, leases, positions, dead letters, the journal, jobs.

Column types are written out here, not imported: a migration must keep creating what it created when it was released.

MariaDB and MySQL commit at each DDL statement, so a killed upgrade may have created some tables without recording the revision.
There an upgrade accepts what exists as its own: run it again, and it continues where it stopped.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_MYSQL = ("mysql", "mariadb")
_INDEX = "ix_kafka_job_attempt_prefix"
_JOURNAL_INDEX = "ix_dualwrite_journal_prefix"
_LATER_INDEX = "ix_dualwrite_journal_later_due"
_JOB_TABLES = ("kafka_job", "kafka_job_batch", "kafka_job_attempt", "kafka_job_chunk")
_TABLES = (
    "kafka_transaction_state",
    "kafka_transaction_store",
    "kafka_transaction_lease",
    "kafka_consumed_offset",
    "dualwrite_dead_letter",
    "dualwrite_journal_gate",
    "dualwrite_journal",
    "dualwrite_journal_later",
    *_JOB_TABLES,
)


def upgrade() -> None:
    """Create the tables."""
    _create_tables_of_writers()
    _create_table_of_relays()
    _create_tables_of_the_journal()
    _create_tables_of_jobs()


def downgrade() -> None:
    """Drop every table: fencing tokens, prepared states (open transactions can't be recovered any more), positions, batches."""
    for table in reversed(_TABLES):
        op.drop_table(table, if_exists=op.get_context().dialect.name in _MYSQL)


def _create_tables_of_writers() -> None:
    op.create_table(
        "kafka_transaction_state",
        sa.Column("transactional_id", sa.String(255), primary_key=True),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("prepared_transaction_state", sa.String(64), nullable=False, server_default=""),
        sa.Column("prepared_generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("delivery", sa.Text, nullable=True),
        sa.Column("resolved_generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("transaction_number", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("lost", _long_text(), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False, server_default=""),
        sa.Column("claim_token", sa.String(32), nullable=False, server_default=""),
        sa.Column("updated_at", _moment(), nullable=False),
        sa.Column("forgotten", sa.Boolean, nullable=False),
        sa.Column("cluster_id", sa.String(255), nullable=False, server_default=""),
        sa.Column("store_id", sa.String(32), nullable=False, server_default=""),
        sa.Column("generation_kind", sa.String(16), nullable=False, server_default="librdkafka"),
        **_options(),
    )
    op.create_table(
        "kafka_transaction_store",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.Text, nullable=False),
        **_options(),
    )
    op.create_table(
        "kafka_transaction_lease",
        sa.Column("transactional_id", sa.String(255), primary_key=True),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("leased_until", _moment(), nullable=False),
        sa.Column("lease_ms", sa.BigInteger, nullable=False),
        **_options(),
    )
    op.create_table(
        "kafka_consumed_offset",
        sa.Column("group_id", sa.String(255), primary_key=True),
        sa.Column("topic", sa.String(249), primary_key=True),
        sa.Column("partition_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        sa.Column("topic_id", sa.String(36), nullable=False, server_default=""),
        sa.Column("updated_at", _moment(), nullable=False),
        **_options(),
    )


def _create_table_of_relays() -> None:
    op.create_table(
        "dualwrite_dead_letter",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("relay", sa.String(255), nullable=False),
        sa.Column("source_table", sa.String(255), nullable=False),
        sa.Column("source_id", sa.String(255), nullable=False),
        sa.Column("source_row", sa.Text().with_variant(mysql.LONGTEXT(), *_MYSQL), nullable=False),
        sa.Column("topic", sa.String(249), nullable=True),
        sa.Column("error_kind", sa.String(255), nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("failed_at", _moment(), nullable=False),
        **_options(),
    )


def _create_tables_of_the_journal() -> None:
    op.create_table(
        "dualwrite_journal_gate",
        sa.Column("prefix", sa.String(255), primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("changed_at", _moment(), nullable=False),
        sa.Column("changed_by", sa.String(255), nullable=False),
        sa.Column("max_entries", sa.BigInteger, nullable=True),
        sa.Column("max_size", sa.BigInteger, nullable=True),
        sa.Column("max_age_ms", sa.BigInteger, nullable=True),
        sa.Column("failure", sa.Text, nullable=True),
        **_options(),
    )
    op.create_table("dualwrite_journal", *_columns_of_messages(), **_options())
    if not _index_was_left_by_a_killed_run(_JOURNAL_INDEX, "dualwrite_journal"):
        op.create_index(_JOURNAL_INDEX, "dualwrite_journal", ["prefix", "id"])
    op.create_table(
        "dualwrite_journal_later",
        *_columns_of_messages(),
        sa.Column("due_ms", sa.BigInteger, nullable=False),
        sa.Column("cancel_id", sa.String(255), nullable=True),
        sa.UniqueConstraint("prefix", "cancel_id", name="uq_dualwrite_journal_later"),
        **_options(),
    )
    if not _index_was_left_by_a_killed_run(_LATER_INDEX, "dualwrite_journal_later"):
        op.create_index(_LATER_INDEX, "dualwrite_journal_later", ["prefix", "due_ms", "id"])


def _columns_of_messages() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("prefix", sa.String(255), nullable=False),
        sa.Column("topic", sa.String(249), nullable=False),
        sa.Column("message_key", _bytes(), nullable=True),
        sa.Column("message_value", _bytes(), nullable=True),
        sa.Column("headers", sa.Text().with_variant(mysql.LONGTEXT(), *_MYSQL), nullable=True),
        sa.Column("partition_number", sa.Integer, nullable=True),
        sa.Column("sent_at_ms", sa.BigInteger, nullable=False),
        sa.Column("has_own_time", sa.Boolean, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
    ]


def _create_tables_of_jobs() -> None:
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
        sa.Column("updated_at", _moment(), nullable=False),
        **_options(),
    )
    op.create_table(
        "kafka_job_batch",
        sa.Column("job_id", sa.String(255), primary_key=True),
        sa.Column("batch_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("prefix", sa.String(255), nullable=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("winners", _long_text(), nullable=False),
        sa.Column("committed_at", _moment(), nullable=False),
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
    if not _index_was_left_by_a_killed_run(_INDEX, "kafka_job_attempt"):
        op.create_index(_INDEX, "kafka_job_attempt", ["prefix"])
    op.create_table(
        "kafka_job_chunk",
        sa.Column("job_id", sa.String(200), primary_key=True),
        sa.Column("partition_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("chunk_number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("committed_at", _moment(), nullable=False),
        **_options(),
    )


def _moment() -> sa.types.TypeEngine[Any]:
    return sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *_MYSQL)


def _long_text() -> sa.types.TypeEngine[Any]:
    return sa.Text().with_variant(mysql.MEDIUMTEXT(), *_MYSQL)


def _bytes() -> sa.types.TypeEngine[Any]:
    return sa.LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL)


def _options() -> dict[str, Any]:
    """MariaDB and MySQL: a transactional engine, and ids compared byte by byte, with case, accents and trailing spaces."""
    dialect = op.get_context().dialect
    if dialect.name not in _MYSQL:
        return {}
    collation = "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
    return {"if_not_exists": True, **{f"{dialect.name}_{name}": value for name, value in options.items()}}


def _index_was_left_by_a_killed_run(name: str, table: str) -> bool:
    """Whether the index already exists; always False if DDL is transactional, and for an SQL script."""
    if op.get_context().as_sql or op.get_context().dialect.name not in _MYSQL:
        return False
    return any(index["name"] == name for index in sa.inspect(op.get_bind()).get_indexes(table))
