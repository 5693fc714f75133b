"""Where a prepared transaction's messages are in Kafka's log: proof of its outcome, after the coordinator has forgotten it.

MariaDB and MySQL commit at each DDL statement: there, what a killed run has already done is skipped.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TABLE = "kafka_transaction_state"
_COLUMN = "delivery"


def upgrade() -> None:
    """Add the column; it is null in rows of the older release."""
    if not _left_by_a_killed_run(there=True):
        op.add_column(_TABLE, sa.Column(_COLUMN, sa.Text, nullable=True))


def downgrade() -> None:
    """Drop where messages are: prepared transactions can no longer be verified in Kafka's log."""
    if not _left_by_a_killed_run(there=False):
        op.drop_column(_TABLE, _COLUMN)


def _left_by_a_killed_run(*, there: bool) -> bool:
    """Whether the column already exists (or is missing); always False if DDL is transactional, and for an SQL script."""
    if op.get_context().as_sql or op.get_context().dialect.name not in ("mysql", "mariadb"):
        return False
    columns = sa.inspect(op.get_bind()).get_columns(_TABLE)
    return any(column["name"] == _COLUMN for column in columns) is there
