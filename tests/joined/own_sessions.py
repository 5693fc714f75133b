"""The user's own engines, of each driver, on the database of a scene."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from crash.scene import Scene

SYNC = {
    "psycopg": "postgresql+psycopg",
    "psycopg2": "postgresql+psycopg2",
    "pymysql": "mariadb+pymysql",
    "pysqlite": "sqlite",
}
ASYNC = {"asyncpg": "postgresql+asyncpg", "psycopg_async": "postgresql+psycopg_async", "aiosqlite": "sqlite+aiosqlite"}
DATABASE = {
    **dict.fromkeys(("psycopg", "psycopg2", "asyncpg", "psycopg_async"), "postgresql"),
    "pymysql": "mariadb",
    **dict.fromkeys(("pysqlite", "aiosqlite"), "sqlite"),
}
"""The database of a driver."""

INSERT = sa.text("INSERT INTO events (writer, number) VALUES (:writer, :number)")


def url_of(scene: Scene, driver: str) -> sa.URL:
    return sa.make_url(scene.url).set(drivername={**SYNC, **ASYNC}[driver])


@contextmanager
def own_engine(scene: Scene, driver: str, **options: Any) -> Iterator[sa.Engine]:
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
