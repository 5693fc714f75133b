"""The databases of the crash tests, with the store's table and the tests' own `events` in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from crash.scene import Scene
from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer

DATABASES = ("sqlite", "postgresql")
EVENTS = "CREATE TABLE events (writer varchar(80), number integer)"


def prepared(url: str) -> sa.Engine:
    """An engine on a database that has every table that the scenes need."""

    engine = sa.create_engine(url, poolclass=sa.NullPool)
    migration.upgrade(engine)
    with engine.begin() as connection:
        connection.execute(sa.text(EVENTS))
    return engine


class Databases:
    """Makes scenes: a SQLite file of its own for each, one PostgreSQL database for all."""

    def __init__(self, folder: Path, postgres: PostgresServer) -> None:
        self._folder = folder
        self._files = 0
        self.postgres = postgres
        self._postgres_url = postgres.create_database("crash")
        self._postgres_engine = prepared(self._postgres_url)

    def scene(self, database: str, broker: DevCluster, **kafka: Any) -> Scene:
        if database == "postgresql":
            return Scene(self._postgres_engine, self._postgres_url, broker.bootstrap_servers, kafka=kafka)
        self._files += 1
        url = f"sqlite:///{self._folder}/crash-{self._files}.db"
        return Scene(prepared(url), url, broker.bootstrap_servers, kafka=kafka)
