"""Positions of consumer groups: how far each partition was read, stored with the data that was written for it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TABLE = "kafka_consumed_offset"
_MYSQL = ("mysql", "mariadb")


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        _TABLE,
        sa.Column("group_id", sa.String(255), primary_key=True),
        sa.Column("topic", sa.String(249), primary_key=True),
        sa.Column("partition_number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("next_offset", sa.BigInteger(), nullable=False),
        sa.Column("topic_id", sa.String(36), nullable=False, server_default=""),
        sa.Column("updated_at", sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *_MYSQL), nullable=False),
        **_options(),
    )


def downgrade() -> None:
    """Drop every position of consumer groups: a group then begins like a new one, and may process messages twice."""
    op.drop_table(_TABLE, if_exists=op.get_context().dialect.name in _MYSQL)


def _options() -> dict[str, Any]:
    """MariaDB and MySQL: a transactional engine, and names compared byte by byte, with case, accents and trailing spaces.

    They commit at each DDL statement, so a table that a killed upgrade has already created is accepted.
    """
    dialect = op.get_context().dialect
    if dialect.name not in _MYSQL:
        return {}
    collation = "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
    return {"if_not_exists": True, **{f"{dialect.name}_{name}": value for name, value in options.items()}}
