"""With how many connections of a database's pool a pool of writers may grow."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg_pool import ConnectionPool, NullConnectionPool
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from dualwrite.stores.sql.engines import kept_connections
from dualwrite.stores.sql.psycopg_sources import PooledConnections
from fixtures.tables import table


@table(
    ("options", "kept"),
    [
        ({}, 5),
        ({"pool_size": 8}, 8),
        ({"pool_size": 8, "max_overflow": 0}, 7),
        ({"pool_size": 8, "max_overflow": -1}, 8),
        ({"poolclass": NullPool}, 1),
    ],
    ids=str,
)
def test_of_an_engine(options: dict[str, Any], kept: int) -> None:
    """One is left for leases and claims if the pool opens no others; this also shows that SQLAlchemy's name is still there."""
    assert kept_connections(create_engine("postgresql+psycopg://", **options)) == kept


def test_of_an_engine_without_a_limit() -> None:
    assert kept_connections(create_engine("postgresql+psycopg://", pool_size=0)) > 64


class Own:
    """A pool of the user's that has only the methods that are needed."""

    def check(self) -> None: ...

    def getconn(self) -> Any: ...

    def putconn(self, conn: Any) -> None: ...


@pytest.mark.parametrize(
    ("pool", "most"),
    [
        (ConnectionPool("", min_size=0, max_size=6, open=False), 6),
        (NullConnectionPool("", max_size=0, open=False), 0),
        (Own(), 0),
    ],
    ids=["psycopg's", "without a limit", "the user's"],
)
def test_of_a_pool_of_psycopg_connections(pool: Any, most: int) -> None:
    assert PooledConnections(pool).most == most
