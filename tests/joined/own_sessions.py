"""The user's own engines, of each driver, on the database of a scene."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.machinery import PathFinder
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from crash.scene import Scene
from fixtures.tiers import thinned

SYNC = ("psycopg", "psycopg2", "pymysql", "mysqldb", "pysqlite")
ASYNC = ("asyncpg", "psycopg_async", "aiomysql", "asyncmy", "aiosqlite")
"""By SQLAlchemy's names of the drivers."""
DATABASE = {
    **dict.fromkeys(("psycopg", "psycopg2", "asyncpg", "psycopg_async"), "postgresql"),
    **dict.fromkeys(("pymysql", "mysqldb", "aiomysql", "asyncmy"), "mariadb"),
    **dict.fromkeys(("pysqlite", "aiosqlite"), "sqlite"),
}
"""The database of a driver."""

INSERT = sa.text("INSERT INTO events (writer, number) VALUES (:writer, :number)")


def each(drivers: Sequence[str]) -> list[Any]:
    """Cases of (driver, its database), of which one of each kind is quick."""
    return thinned(
        [(driver, DATABASE[driver]) for driver in drivers],
        quick=[(driver, DATABASE[driver]) for driver in drivers if driver not in ("mysqldb", "aiomysql")],
    )


def skip_unless_installed(driver: str) -> None:
    """Skip a test of mysqlclient where it is not installed: alone of all that the tests need, it may be missing in CI."""
    if driver == "mysqldb" and PathFinder.find_spec("MySQLdb") is None:  # Django's tests may have imported PyMySQL as MySQLdb
        pytest.skip("mysqlclient has no wheels for Linux, and is not installed, as in CI; CONTRIBUTING.md says how to run this")


def users_url(url: str, driver: str) -> sa.URL:
    """The URL of a scene's database for a driver of the user's."""
    found = sa.make_url(url)
    found = found.set(drivername=f"{found.get_backend_name()}+{driver}")
    return found if driver == "pymysql" else found.difference_update_query(["ssl_disabled", "read_timeout"])  # of PyMySQL


def url_of(scene: Scene, driver: str) -> sa.URL:
    return users_url(scene.url, driver)


@contextmanager
def own_engine(scene: Scene, driver: str, **options: Any) -> Iterator[sa.Engine]:
    skip_unless_installed(driver)
    engine = sa.create_engine(url_of(scene, driver), **options)
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def own_async_engine(scene: Scene, driver: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url_of(scene, driver), **options)
    try:
        yield engine
    finally:
        await engine.dispose()


def row(scene: Scene, number: int) -> dict[str, Any]:
    return {"writer": scene.transactional_id, "number": number}


def send(tx: Any, scene: Scene, *numbers: int) -> None:
    for number in numbers:
        tx.send(scene.topic, str(number), key=scene.transactional_id)
