"""Scenes of processors, and a broker for tests that kill members of consumer groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from processor_scene import ProcessorScene

from crash.databases import Databases
from dualwrite.devcluster import DevCluster
from fixtures.broker import BRISK, started
from fixtures.broker_door import BrokerBehindDoor, Door, behind_door


@pytest.fixture(scope="module")
def _brisk_and_door() -> Iterator[tuple[DevCluster, Door]]:
    with Door() as door, started(config=BRISK, proxy_port=door.port) as cluster:
        yield cluster, door


@pytest.fixture(scope="module")
def brisk(_brisk_and_door: tuple[DevCluster, Door]) -> DevCluster:
    return _brisk_and_door[0]


@pytest.fixture
def brisk_behind_door(_brisk_and_door: tuple[DevCluster, Door]) -> Iterator[BrokerBehindDoor]:
    """The same broker, for a test in which it is down."""
    with behind_door(*_brisk_and_door) as found:
        yield found


@pytest.fixture
def make_scene(databases: Databases, broker: DevCluster, new_name: Callable[[str], str]) -> Callable[[str], ProcessorScene]:
    """Creates a processor on a kind of database."""
    return lambda database: ProcessorScene(databases.scene(database, broker).events, broker, new_name)


@pytest.fixture
def scene(make_scene: Callable[[str], ProcessorScene]) -> ProcessorScene:
    """A processor on SQLite; a module may have one on another database."""
    return make_scene("sqlite")
