"""Fixtures of the tests of pools that write into the journal always: a scene of the crash tests on one database of each kind."""

import pytest

from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster


@pytest.fixture
def scene(databases: Databases, broker: DevCluster, database: str, producer: str) -> Scene:
    """A prefix with its own topic, on the test's database."""
    del producer
    return databases.scene(database, broker)
