"""The SQL store: PostgreSQL, MariaDB/MySQL and SQLite, using SQLAlchemy Core 2. Each database has one dialect file."""

from dualwrite.stores.sql.sql_store import SqlStateStore

__all__ = ["SqlStateStore"]
