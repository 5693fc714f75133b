"""The kind of producer that uses the newest generation; before this revision, it was always librdkafka's.

MariaDB and MySQL commit at each DDL statement: there, what a killed run has already done is skipped.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    if not _left_by_a_killed_run(there=True):
        column = sa.Column("generation_kind", sa.String(16), nullable=False, server_default="librdkafka")
        op.add_column("kafka_transaction_state", column)


def downgrade() -> None:
    """Drop the kind of producer: writers of the older release start a new generation with each claim."""
    if not _left_by_a_killed_run(there=False):
        op.drop_column("kafka_transaction_state", "generation_kind")


def _left_by_a_killed_run(*, there: bool) -> bool:
    """Whether the column already exists (or is missing); always False if DDL is transactional, and for an SQL script."""
    if op.get_context().as_sql or op.get_context().dialect.name not in ("mysql", "mariadb"):
        return False
    columns = sa.inspect(op.get_bind()).get_columns("kafka_transaction_state")
    return any(column["name"] == "generation_kind" for column in columns) is there
