"""Which kind of producer holds the newest generation; until now every one was librdkafka's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    column = sa.Column("generation_kind", sa.String(16), nullable=False, server_default="librdkafka")
    op.add_column("kafka_transaction_state", column)


def downgrade() -> None:
    """Drop the column; writers of the older release take a new generation with each claim, whatever held the last one."""
    op.drop_column("kafka_transaction_state", "generation_kind")
