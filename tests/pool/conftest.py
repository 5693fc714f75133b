"""Fixtures of the pool's tests: a scene of the crash tests on one database of each kind."""

import pytest

from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster


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


@pytest.fixture
def scene(databases: Databases, broker: DevCluster, database: str, producer: str) -> Scene:
    """A prefix with its own topic, on the test's database."""
    del producer
    return databases.scene(database, broker)
