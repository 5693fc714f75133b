"""Alembic's environment for the table `kafka_transaction_state`; run by `dualwrite.migration`, which hands over the connection.

The version is kept in a table of its own, so that it goes beside the alembic of the user's application.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from alembic import context
from sqlalchemy import Connection, text

from dualwrite.errors import StoreUnavailableError
from dualwrite.jobs.tables import metadata
from dualwrite.stores.sql.table import VERSION_TABLE_NAME

ADVISORY_LOCK = 939_000_001
"""Two upgrades at once take turns on it (PostgreSQL); any number that nobody else uses."""

NAMED_LOCK = "dualwrite.migrations"
"""The same for MariaDB and MySQL, where a lock of the transaction would end with the first DDL statement."""

LOCK_TIMEOUT = 60
"""Seconds to wait for the named lock."""


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
    with one_at_a_time(connection), context.begin_transaction():
        context.run_migrations()


@contextmanager
def one_at_a_time(connection: Connection | None) -> Iterator[None]:
    """Take turns with other upgrades of the same database; SQLite's BEGIN IMMEDIATE has done so already."""
    name = None if connection is None else connection.dialect.name
    if connection is None or name not in ("postgresql", "mysql", "mariadb"):
        yield
    elif name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        yield
    else:
        # names are the whole server's: one for each database, and at most 64 characters
        lock = {"name": f"{NAMED_LOCK}.{connection.engine.url.database}"[:64], "timeout": LOCK_TIMEOUT}
        if connection.scalar(text("SELECT GET_LOCK(:name, :timeout)"), lock) != 1:
            raise StoreUnavailableError(
                f"Another upgrade of this database has not ended for {LOCK_TIMEOUT} s.", next_step="see what it waits for"
            )
        try:
            yield
            connection.commit()  # before the lock: what is noted in the version table is seen by the next one
        except Exception:
            connection.rollback()
            raise
        finally:
            if not connection.invalidated:
                connection.execute(text("SELECT RELEASE_LOCK(:name)"), lock)


run()
