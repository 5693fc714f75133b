"""Fixtures of the journal's tests: a broker that goes down, and a scene on each database."""

from collections.abc import Iterator

import pytest

from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic, started
from fixtures.broker_door import BrokerBehindDoor
from fixtures.pace import LIMIT

BEHIND_DOOR, KILLED = "broker_behind_door", "killed_broker"


@pytest.fixture(scope="module")
def killed_broker() -> Iterator[DevCluster]:
    """A broker whose process is killed; it is running again when the next test begins."""
    with started() as cluster:
        yield cluster


@pytest.fixture
def own_broker(request: pytest.FixtureRequest) -> BrokerBehindDoor | DevCluster:
    """A broker that goes down: behind a door, or KILLED if the test has that as an indirect parameter."""
    found: BrokerBehindDoor | DevCluster = request.getfixturevalue(getattr(request, "param", BEHIND_DOOR))
    return found


@pytest.fixture
def scene(databases: Databases, own_broker: BrokerBehindDoor | DevCluster, database: str, producer: str) -> Iterator[Scene]:
    """A prefix with its own topic of one partition, on the test's database."""
    del producer
    made = databases.scene(database, own_broker)
    make_topic(own_broker, made.topic)
    yield made
    own_broker.start(1, timeout=LIMIT)
