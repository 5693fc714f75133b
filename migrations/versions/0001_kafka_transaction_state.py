"""The table kafka_transaction_state: one row for each logical transactional id.

Column types are written out here, not imported: a migration must go on making what it made when it was released.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "kafka_transaction_state",
        sa.Column("transactional_id", sa.String(255), primary_key=True),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("prepared_transaction_state", sa.String(64), nullable=False, server_default=""),
        sa.Column("prepared_generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("settled_generation", sa.Integer, nullable=False, server_default="-1"),
        sa.Column("transaction_number", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("lost", sa.Text, nullable=False),
        sa.Column("owner", sa.String(255), nullable=False, server_default=""),
        sa.Column("claim_token", sa.String(32), nullable=False, server_default=""),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("forgotten", sa.Boolean, nullable=False),
    )


def downgrade() -> None:
    """Drop the table, and with it every fence and every unsettled state."""
    op.drop_table("kafka_transaction_state")
