"""The SQL store: PostgreSQL and SQLite, by SQLAlchemy Core 2. One room for each idea; a database is one dialect file."""

from dualwrite.stores.sql.store import SqlStateStore

__all__ = ["SqlStateStore"]
