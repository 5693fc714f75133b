"""The table kafka_transaction_state: one row for each logical transactional id.

Column types are written out here, not imported: a migration must keep creating what it created when it was released.

MariaDB and MySQL commit at each DDL statement, so a killed upgrade may have created the table without recording the revision.
There an upgrade accepts an existing table as its own: run it again, and it continues where it stopped.
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


def upgrade() -> None:
    """Create the table."""
    backends = ("mysql", "mariadb")
    moment = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *backends)
    op.create_table(
        "kafka_transaction_state",
        sa.Column("transactional_id", sa.String(255), primary_key=True),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("prepared_transaction_state", sa.String(64), nullable=False, server_default=""),
        sa.Column("prepared_generation", sa.Integer, nullable=False, server_default="0"),
        sa.Column("settled_generation", sa.Integer, nullable=False, server_default="-1"),
        sa.Column("transaction_number", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("lost", sa.Text().with_variant(mysql.MEDIUMTEXT(), *backends), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False, server_default=""),
        sa.Column("claim_token", sa.String(32), nullable=False, server_default=""),
        sa.Column("updated_at", moment, nullable=False),
        sa.Column("forgotten", sa.Boolean, nullable=False),
        **_options(),
    )


def _options() -> dict[str, Any]:
    """MariaDB and MySQL: a transactional engine, and ids compared byte by byte, with case, accents and trailing spaces."""
    dialect = op.get_context().dialect
    if dialect.name not in ("mysql", "mariadb"):
        return {}
    collation = "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
    return {"if_not_exists": True, **{f"{dialect.name}_{name}": value for name, value in options.items()}}


def downgrade() -> None:
    """Drop the table, with every fencing token and unresolved state: open transactions can no longer be recovered."""
    op.drop_table("kafka_transaction_state", if_exists=op.get_context().dialect.name in ("mysql", "mariadb"))
