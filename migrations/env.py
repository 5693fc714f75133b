"""Alembic's environment for the table `kafka_transaction_state`; run by `dualwrite.migration`, which hands over the connection.

The version is kept in a table of its own, so that it goes beside the alembic of the user's application.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from dualwrite.stores.sql.table import VERSION_TABLE_NAME, metadata

ADVISORY_LOCK = 939_000_001
"""Two upgrades at once take turns on it (PostgreSQL); any number that nobody else uses."""


def run() -> None:
    """Run the migrations over the connection that was handed over, or write them as SQL without one."""
    connection = context.config.attributes.get("connection")
    if connection is None:
        context.configure(
            url=context.config.get_main_option("sqlalchemy.url"),
            target_metadata=metadata,
            version_table=VERSION_TABLE_NAME,
            literal_binds=True,
            output_buffer=context.config.output_buffer,
        )
    else:
        context.configure(connection=connection, target_metadata=metadata, version_table=VERSION_TABLE_NAME)
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
    with context.begin_transaction():
        context.run_migrations()


run()
