"""Fixtures of the journal's tests: a broker to kill, and a scene on each database."""

from collections.abc import Iterator

import pytest

from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic, started
from fixtures.pace import LIMIT


@pytest.fixture(scope="module")
def own_broker() -> Iterator[DevCluster]:
    """A broker to kill; it is running again when the next test begins."""
    with started() as cluster:
        yield cluster


@pytest.fixture
def scene(databases: Databases, own_broker: DevCluster, database: str, producer: str) -> Iterator[Scene]:
    """A prefix with its own topic of one partition, on the test's database."""
    del producer
    made = databases.scene(database, own_broker)
    make_topic(own_broker, made.topic)
    yield made
    if not all(node.alive for node in own_broker.status().nodes):
        own_broker.start(1, timeout=LIMIT)
