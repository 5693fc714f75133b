"""The only broker is killed around the two commits: it restarts, or stays down for longer than the time limits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

import dualwrite
from crash.cases import PRODUCERS
from crash.databases import Databases
from crash.scene import Scene
from dualwrite import DualWriter, InDoubtTransactionError, Phase, Timeouts
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from fixtures.broker import started, wait_for_markers
from fixtures.pace import LIMIT, limit
from fixtures.tiers import thinned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("producer", "one_lane", "no_recovery_when_idle")]

mostly_native = pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]), indirect=True)


@pytest.fixture(scope="module")
def own_broker() -> Iterator[DevCluster]:
    """A broker to kill."""
    with started() as cluster:
        yield cluster


@pytest.fixture
def scene(databases: Databases, own_broker: DevCluster) -> Scene:
    """Its first transaction is also complete at Kafka: a broker killed before that may never write its marker (rule FB)."""
    made = databases.scene("postgresql", own_broker)
    made.write_here(1)
    wait_for_markers(own_broker.bootstrap_servers)
    return made


def start_again(broker: DevCluster, databases: Databases) -> None:
    """Start the killed broker, and wait until it has served another writer: a process that has just started is slow."""
    broker.start(1)
    databases.scene("postgresql", broker).write_here(1)


@pytest.mark.parametrize(
    ("producer", "point"),
    thinned(
        product(PRODUCERS, ["after_send", "after_prepare", "before_db_commit", "before_kafka_commit"]),
        kept=[("native", "after_prepare")],
    ),
    indirect=["producer"],
)
def test_the_broker_is_killed_and_restarts(scene: Scene, own_broker: DevCluster, point: str) -> None:
    def crash() -> None:
        own_broker.kill(1)
        own_broker.start(1)

    with scene.connect() as writer:
        with failpoints.armed(point, failpoints.only_at(1, crash)):
            scene.event(writer, 2)
        assert scene.agree() == [1, 2]
        assert writer.phase is Phase.READY
        scene.event(writer, 3)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


def goes_on(scene: Scene, writer: DualWriter, broker: DevCluster, databases: Databases, there: list[int]) -> None:
    """Nothing is written while the broker is down; once it is back, the writer continues by itself."""
    with pytest.raises(dualwrite.BrokerUnavailableError):
        scene.event(writer, 4)
    assert scene.rows() == there
    start_again(broker, databases)
    scene.event(writer, 5)
    assert scene.agree() == [*there, 5]
    writer.close()
    scene.assert_resolved()


@mostly_native
@pytest.mark.soak
def test_the_broker_is_killed_before_prepare_and_stays_down(scene: Scene, own_broker: DevCluster, databases: Databases) -> None:
    writer = scene.connect(timeouts=Timeouts(claim=LIMIT, kafka=limit(2), delivery=limit(2)))
    with pytest.raises(dualwrite.DeliveryError) as caught, writer.transaction() as tx:  # noqa: PT012  (the end must raise)
        scene.events.write(tx.db, scene.transactional_id, 2)
        tx.send(scene.topic, "2")
        own_broker.kill(1)
        tx.send(scene.topic, "3")
    assert caught.value.retriable
    goes_on(scene, writer, own_broker, databases, [1])


@mostly_native
@pytest.mark.soak
def test_the_broker_is_down_between_the_two_commits_beyond_the_time_limit(
    scene: Scene, own_broker: DevCluster, databases: Databases
) -> None:
    writer = scene.connect(timeouts=Timeouts(claim=LIMIT, kafka=limit(2), delivery=LIMIT))
    with (
        failpoints.armed("before_kafka_commit", lambda: own_broker.kill(1)),
        pytest.raises(InDoubtTransactionError) as caught,
    ):
        scene.event(writer, 2)
    assert caught.value.database_committed is True
    assert "The database committed" in str(caught.value)
    assert caught.value.state == str(scene.row().prepared_state)
    assert writer.phase is Phase.IN_DOUBT
    goes_on(scene, writer, own_broker, databases, [1, 2])
