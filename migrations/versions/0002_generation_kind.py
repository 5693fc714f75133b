"""Which kind of producer holds the newest generation; until now every one was librdkafka's.

MariaDB and MySQL commit at each DDL statement: what a killed run has done already is passed over there.
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
    """Drop the column; writers of the older release take a new generation with each claim, whatever held the last one."""
    if not _left_by_a_killed_run(there=False):
        op.drop_column("kafka_transaction_state", "generation_kind")


def _left_by_a_killed_run(*, there: bool) -> bool:
    """Whether the column is there (or not) already; never so where DDL is part of the transaction, nor in a script."""
    if op.get_context().as_sql or op.get_context().dialect.name not in ("mysql", "mariadb"):
        return False
    columns = sa.inspect(op.get_bind()).get_columns("kafka_transaction_state")
    return any(column["name"] == "generation_kind" for column in columns) is there
