"""Alembic's environment for the table `kafka_transaction_state`; run by `dualwrite.migration`, which passes the connection.

The revision is recorded in a separate version table, so that it does not conflict with the user's own alembic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from alembic import context
from sqlalchemy import Connection, text

from dualwrite.errors import StoreUnavailableError
from dualwrite.jobs.job_tables import metadata
from dualwrite.stores.sql.tables import VERSION_TABLE_NAME

ADVISORY_LOCK = 939_000_001
"""Serializes concurrent upgrades (PostgreSQL); an arbitrary number that nothing else uses."""

NAMED_LOCK = "dualwrite.migrations"
"""The same for MariaDB and MySQL, where a transaction's lock would end with the first DDL statement."""

LOCK_TIMEOUT = 60
"""Seconds to wait for the named lock."""


def run() -> None:
    """Run the migrations on the given connection, or write them as SQL if there is none."""
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
    """Wait for other upgrades of the same database; SQLite's BEGIN IMMEDIATE has already done so."""
    name = None if connection is None else connection.dialect.name
    if connection is None or name not in ("postgresql", "mysql", "mariadb"):
        yield
    elif name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        yield
    else:
        # lock names are global to the server, so there is one per database, of at most 64 characters
        lock = {"name": f"{NAMED_LOCK}.{connection.engine.url.database}"[:64], "timeout": LOCK_TIMEOUT}
        if connection.scalar(text("SELECT GET_LOCK(:name, :timeout)"), lock) != 1:
            raise StoreUnavailableError(
                f"Another upgrade of this database did not finish within {LOCK_TIMEOUT} s.",
                next_step="check what it waits for, then try again",
            )
        try:
            yield
            connection.commit()  # before releasing the lock, so that the next upgrade sees the version table
        except Exception:
            connection.rollback()
            raise
        finally:
            if not connection.invalidated:
                connection.execute(text("SELECT RELEASE_LOCK(:name)"), lock)


run()
