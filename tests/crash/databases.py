"""The databases of the crash tests, on servers that are started on first use, with a place for the tests' own `events`.

Loaded through `pytest_plugins`: `databases`, and what a scene of a test is made of, `database` and `producer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import sqlalchemy as sa

from crash.events import Events, SqlEvents, events_at
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer
from fixtures.mariadb_server import MariaDBServer
from fixtures.zookeeper_server import ZooKeeperServer

DATABASES = ("sqlite", "postgresql", "mariadb", "rocksdb", "zookeeper")


class Databases:
    """Makes scenes: each has its own SQLite file or RocksDB folder; all share one database per server.

    Args:
        folder: Where files and folders are made.
        server_of: Returns a running server of a class; by default a new one, which ends with this.
    """

    def __init__(self, folder: Path, server_of: Callable[[type[Any]], Any] | None = None) -> None:
        self._folder = folder
        self._made = 0
        self._opened = ExitStack()
        self._server_of = server_of or (lambda kind: self._opened.enter_context(kind()))

    def scene(self, database: str, broker: DevCluster, **kafka: Any) -> Scene:
        return Scene(self._events(database), broker.bootstrap_servers, kafka=kafka)

    def _events(self, database: str) -> Events:
        if database == "postgresql":
            return self._postgresql
        if database == "mariadb":
            return self._mariadb
        if database == "zookeeper":
            return self._zookeeper
        self._made += 1
        if database == "rocksdb":
            return _ready(f"rocksdb:///{self._folder}/crash-{self._made}")
        return _ready(f"sqlite:///{self._folder}/crash-{self._made}.db")

    @cached_property
    def _postgresql(self) -> Events:
        return self._pooled(self._server_of(PostgresServer))

    @cached_property
    def _mariadb(self) -> Events:
        return self._pooled(self._server_of(MariaDBServer))

    @cached_property
    def _zookeeper(self) -> Events:
        return _ready(f"{self._server_of(ZooKeeperServer).url}/crash")

    def _pooled(self, server: PostgresServer | MariaDBServer) -> Events:
        """With a pool: a writer in this process would spend most of its time on new connections."""
        events = SqlEvents(server.create_database("crash"), sa.QueuePool)
        self._opened.callback(events.engine.dispose)
        events.create()
        return events

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory, server_of: Callable[[type[Any]], Any]) -> Iterator[Databases]:
    """For all tests, on the session's servers."""
    with Databases(tmp_path_factory.mktemp("databases"), server_of) as made:
        yield made


@pytest.fixture
def database() -> str:
    """The kind of database of `scene`; a test gets others if it is parametrized with this name."""
    return "postgresql"


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The producer of every writer of the test; a test gets others if it is parametrized with this name (indirect)."""
    name = str(getattr(request, "param", "native"))
    monkeypatch.setenv("DUALWRITE_PRODUCER", name)
    return name


def _ready(url: str) -> Events:
    events = events_at(url)
    events.create()
    return events


def copied_file(scene: Scene, target: Path) -> Scene:
    """Copy the SQLite file with the contents of its write-ahead log."""
    with scene.engine.connect() as connection:
        connection.exec_driver_sql(f"VACUUM INTO '{target}'")
    return replace(scene, events=events_at(f"sqlite:///{target}"))
