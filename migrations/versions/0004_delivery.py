"""Where a prepared transaction's messages lie in Kafka's log: proof of its outcome, once its coordinator has forgotten it.

MariaDB and MySQL commit at each DDL statement: what a killed run has done already is passed over there.
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
    """Add the column; rows of the older release have none."""
    if not _left_by_a_killed_run(there=True):
        op.add_column(_TABLE, sa.Column(_COLUMN, sa.Text, nullable=True))


def downgrade() -> None:
    """Drop the column: what is prepared can't be verified by the log then."""
    if not _left_by_a_killed_run(there=False):
        op.drop_column(_TABLE, _COLUMN)


def _left_by_a_killed_run(*, there: bool) -> bool:
    """Whether the column is there (or not) already; never so where DDL is part of the transaction, nor in a script."""
    if op.get_context().as_sql or op.get_context().dialect.name not in ("mysql", "mariadb"):
        return False
    columns = sa.inspect(op.get_bind()).get_columns(_TABLE)
    return any(column["name"] == _COLUMN for column in columns) is there
