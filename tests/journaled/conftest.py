"""Fixtures of the tests of pools that write into the journal always: a scene with a topic of one partition, and what fails."""

from collections.abc import Iterator

import pytest

from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import LIMIT


@pytest.fixture
def scene(databases: Databases, broker: DevCluster, database: str) -> Scene:
    """On the test's database, and the shared broker."""
    made = databases.scene(database, broker)
    make_topic(broker, made.topic)
    return made


@pytest.fixture
def outage(databases: Databases, broker_behind_door: BrokerBehindDoor, database: str) -> Iterator[Scene]:
    """The same, on a broker that goes down."""
    made = databases.scene(database, broker_behind_door)
    make_topic(broker_behind_door, made.topic)
    yield made
    broker_behind_door.start(1, timeout=LIMIT)
