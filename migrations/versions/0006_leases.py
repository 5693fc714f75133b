"""Leases on the ids of pools: which process should use which id."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TABLE = "kafka_transaction_lease"
_MYSQL = ("mysql", "mariadb")


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        _TABLE,
        sa.Column("transactional_id", sa.String(255), primary_key=True),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("leased_until", sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *_MYSQL), nullable=False),
        **_options(),
    )


def downgrade() -> None:
    """Drop the leases of pools: a pool of the older release takes the ids from those that are running, so stop them first."""
    op.drop_table(_TABLE, if_exists=op.get_context().dialect.name in _MYSQL)


def _options() -> dict[str, Any]:
    """MariaDB and MySQL: a transactional engine, and ids compared byte by byte, with case, accents and trailing spaces.

    They commit at each DDL statement, so a table that a killed upgrade has already created is accepted.
    """
    dialect = op.get_context().dialect
    if dialect.name not in _MYSQL:
        return {}
    collation = "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
    return {"if_not_exists": True, **{f"{dialect.name}_{name}": value for name, value in options.items()}}
