"""What the writer tests share: a database of each kind with the user's table, one for the session, and scenes on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer
from fixtures.broker import make_topic
from writer.scene import Base, Scene

DATABASES = ("sqlite", "postgresql")


@dataclass(frozen=True)
class Urls:
    """A database of each kind."""

    sqlite: str
    postgresql: str


@pytest.fixture(scope="session")
def writer_urls(tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer) -> Urls:
    """Databases with our table and the user's."""
    urls = Urls(f"sqlite:///{tmp_path_factory.mktemp('writer')}/writer.db", postgres_server.create_database("writer"))
    for url in (urls.sqlite, urls.postgresql):
        migration.upgrade(url)
        engine = sa.create_engine(url)
        Base.metadata.create_all(engine)
        engine.dispose()
    return urls


@pytest.fixture(params=["librdkafka", "native"])
def producer(request: pytest.FixtureRequest) -> str:
    """The producer of every writer in the test, here and in other processes."""
    return str(request.param)


@pytest.fixture(autouse=True)
def environment(producer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane unless a test says otherwise, so that it is known which row and which Kafka id a transaction is on."""
    monkeypatch.setenv("DUALWRITE_PRODUCER", producer)
    monkeypatch.setenv("DUALWRITE_LANES", "1")


@pytest.fixture
def new_scene(writer_urls: Urls, broker: DevCluster) -> Iterator[Callable[..., Scene]]:
    """Makes scenes on a database of the given kind, each with an engine of its own."""
    engines = []

    def new(kind: str, servers: str | None = None, engine_options: dict[str, Any] | None = None, **changes: Any) -> Scene:
        engine = sa.create_engine(getattr(writer_urls, kind), **(engine_options or {}))
        engines.append(engine)
        return Scene(engine, servers or broker.bootstrap_servers, **changes)

    yield new
    for engine in engines:
        engine.dispose()


@pytest.fixture(params=DATABASES)
def scene(request: pytest.FixtureRequest, new_scene: Callable[..., Scene]) -> Scene:
    """A scene, over each kind of database."""
    return new_scene(request.param)


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=pytest.mark.slow)])
def each_scene(request: pytest.FixtureRequest, new_scene: Callable[..., Scene]) -> Scene:
    """A scene, over each kind of database; SQLite's is left to the slow tests."""
    return new_scene(request.param)


@pytest.fixture
def sqlite_scene(new_scene: Callable[..., Scene]) -> Scene:
    """A scene on SQLite."""
    return new_scene("sqlite")


@pytest.fixture
def postgres_scene(new_scene: Callable[..., Scene]) -> Scene:
    """A scene on PostgreSQL."""
    return new_scene("postgresql")


@pytest.fixture
def many_partitions(broker: DevCluster) -> Callable[[str], None]:
    """Makes a topic with several partitions."""
    return lambda topic: make_topic(broker, topic, partitions=3)
