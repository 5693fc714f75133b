"""The Kafka cluster of an id, and the database's store id; older rows have neither until their next generation.

MariaDB and MySQL commit at each DDL statement: there, what a killed run has already done is skipped.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_TABLE = "kafka_transaction_state"
_MYSQL = ("mysql", "mariadb")


def upgrade() -> None:
    """Add the columns and the table of the store id; the id itself is created when it is first needed."""
    for column in _columns():
        if not _left_by_a_killed_run(column.name, there=True):
            op.add_column(_TABLE, column)
    op.create_table(
        "kafka_transaction_store",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.Text, nullable=False),
        **_options(),
    )


def downgrade() -> None:
    """Drop the store id: the older release looks for prepared transactions under other Kafka ids, so recover them first."""
    op.drop_table("kafka_transaction_store", if_exists=op.get_context().dialect.name in _MYSQL)
    for column in reversed(_columns()):
        if not _left_by_a_killed_run(column.name, there=False):
            op.drop_column(_TABLE, column.name)


def _columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("cluster_id", sa.String(255), nullable=False, server_default=""),
        sa.Column("store_id", sa.String(32), nullable=False, server_default=""),
        sa.Column("named_from", sa.Integer),
    ]


def _options() -> dict[str, Any]:
    """MariaDB and MySQL: a transactional engine, and a table that a killed run has already created is skipped."""
    name = op.get_context().dialect.name
    if name not in _MYSQL:
        return {}
    return {"if_not_exists": True, f"{name}_engine": "InnoDB", f"{name}_charset": "utf8mb4"}


def _left_by_a_killed_run(name: str, *, there: bool) -> bool:
    """Whether the column already exists (or is missing); always False if DDL is transactional, and for an SQL script."""
    if op.get_context().as_sql or op.get_context().dialect.name not in _MYSQL:
        return False
    return any(column["name"] == name for column in sa.inspect(op.get_bind()).get_columns(_TABLE)) is there
