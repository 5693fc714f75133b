"""Fixtures of the writer tests: one database of each kind per session, with the user's table, and scenes on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer
from writer.cases import NATIVE, POSTGRESQL
from writer.scene import Base, Scene


@dataclass(frozen=True)
class Urls:
    """A database of each kind."""

    sqlite: str
    postgresql: str


@pytest.fixture(scope="session")
def writer_urls(tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer) -> Urls:
    """Databases with dualwrite's tables and the user's table."""
    urls = Urls(f"sqlite:///{tmp_path_factory.mktemp('writer')}/writer.db", postgres_server.create_database("writer"))
    for url in (urls.sqlite, urls.postgresql):
        migration.upgrade(url)
        engine = sa.create_engine(url)
        Base.metadata.create_all(engine)
        engine.dispose()
    return urls


@pytest.fixture
def producer() -> str:
    """The producer of every writer in the test, here and in other processes; see `writer.cases` for both."""
    return NATIVE


@pytest.fixture
def database() -> str:
    """The kind of database of `scene`; see `writer.cases` for both."""
    return POSTGRESQL


@pytest.fixture
def lanes() -> int:
    """The default number of lanes of every writer in the test: with one, a transaction's row and Kafka id are known."""
    return 1


@pytest.fixture(autouse=True)
def environment(producer: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default settings for writers in the test's own process and in others."""
    monkeypatch.setenv("DUALWRITE_PRODUCER", producer)
    monkeypatch.setenv("DUALWRITE_LANES", str(lanes))


@pytest.fixture
def new_scene(writer_urls: Urls, broker: DevCluster) -> Iterator[Callable[..., Scene]]:
    """Makes scenes on a database of the given kind, each with its own engine."""
    engines = []

    def new(kind: str, servers: str | None = None, engine_options: dict[str, Any] | None = None, **changes: Any) -> Scene:
        engine = sa.create_engine(getattr(writer_urls, kind), **(engine_options or {}))
        engines.append(engine)
        return Scene(engine, servers or broker.bootstrap_servers, **changes)

    yield new
    for engine in engines:
        engine.dispose()


@pytest.fixture
def scene(database: str, new_scene: Callable[..., Scene]) -> Scene:
    """A scene, by default on PostgreSQL."""
    return new_scene(database)


@pytest.fixture
def sqlite_scene(new_scene: Callable[..., Scene]) -> Scene:
    """A scene on SQLite."""
    return new_scene("sqlite")


@pytest.fixture
def postgres_scene(new_scene: Callable[..., Scene]) -> Scene:
    """A scene on PostgreSQL."""
    return new_scene("postgresql")
