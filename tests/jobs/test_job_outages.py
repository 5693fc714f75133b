"""What a job does if the database, Kafka or a connection fails at a critical moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from job_scene import JobScene, replaced

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError, InDoubtTransactionError, StoreUnavailableError, TransactionTimeoutError
from dualwrite.settings import Timeouts
from dualwrite.testing import failpoints
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, TcpProxy, When
from fixtures.pace import LIMIT

PARTS = [[1, 2, 3], [4, 5]]
PATIENT = Timeouts(claim=LIMIT, kafka=LIMIT, delivery=LIMIT)
QUICK = Timeouts(claim=3, kafka=LIMIT, delivery=LIMIT)  # for a database that stays down
COMMIT = b"COMMIT\0"


@pytest.fixture
def postgres_scene(postgres_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[JobScene]:
    made = JobScene(postgres_url, broker.bootstrap_servers, new_name("job"), timeouts=PATIENT)
    yield made
    made.close()


@pytest.fixture
def proxied_scene(proxied_postgres_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[JobScene]:
    """A job whose connections to PostgreSQL go through `postgres_proxy`."""
    made = JobScene(proxied_postgres_url, broker.bootstrap_servers, new_name("job"), timeouts=PATIENT)
    yield made
    made.close()


@pytest.fixture
def fragile(
    own_postgres_server: PostgresServer, broker: DevCluster, new_name: Callable[[str], str]
) -> Iterator[tuple[JobScene, PostgresServer]]:
    """A job on a PostgreSQL that may be killed."""
    url = own_postgres_server.create_database("job")
    migration.upgrade(url)
    made = JobScene(url, broker.bootstrap_servers, new_name("job"), timeouts=QUICK)
    yield made, own_postgres_server
    made.close()


def start_again(scene: JobScene, server: PostgresServer) -> None:
    server.start()
    scene.store.engine.dispose()  # its connections are dead


def test_kafka_is_unreachable_after_the_database_has_committed(postgres_scene: JobScene) -> None:
    outcomes = postgres_scene.write(postgres_scene.run(), PARTS)
    gone = BrokerUnavailableError("No broker answers.")
    with (
        failpoints.armed("recover_after_describe", failpoints.raises(gone)),
        pytest.raises(InDoubtTransactionError, match="2 of its transactions could not be completed") as caught,
    ):
        postgres_scene.commit(outcomes)
    assert caught.value.database_committed is True
    assert "don't write it again" in str(caught.value)
    assert postgres_scene.table() == [1, 2, 3, 4, 5]
    assert len(postgres_scene.open_ids()) == 2
    postgres_scene.abort(outcomes)  # as Spark does after commit has raised
    postgres_scene.assert_holds([1, 2, 3, 4, 5])


@pytest.mark.parametrize("when", ["before", "answered"])
def test_the_answer_to_the_decision_is_lost(proxied_scene: JobScene, postgres_proxy: TcpProxy, when: When) -> None:
    outcomes = proxied_scene.write(proxied_scene.run(), PARTS)

    def cut_the_next_commit() -> None:
        postgres_proxy.on_client_bytes(COMMIT, Link.cut, when=when)

    with failpoints.armed("job_after_move", failpoints.only_at(1, cut_the_next_commit)):
        assert proxied_scene.commit(outcomes) == 5
    proxied_scene.assert_holds([1, 2, 3, 4, 5])


@pytest.mark.slow
def test_the_database_crashes_during_the_decision(fragile: tuple[JobScene, PostgresServer]) -> None:
    scene, server = fragile
    outcomes = scene.write(scene.run(), PARTS)
    with (
        failpoints.armed("job_after_move", failpoints.only_at(1, server.kill)),
        pytest.raises(InDoubtTransactionError, match="did not respond"),
    ):
        scene.commit(outcomes)
    scene.abort(outcomes)  # raises nothing, although it can't reach the database
    start_again(scene, server)
    assert len(scene.open_ids()) == 2
    scene.abort(outcomes)
    scene.assert_holds([])
    scene.commit(scene.write(scene.run(), PARTS))
    scene.assert_holds([1, 2, 3, 4, 5])


@pytest.mark.slow
def test_the_database_crashes_while_a_task_runs(fragile: tuple[JobScene, PostgresServer]) -> None:
    scene, server = fragile
    run = scene.run()
    with failpoints.armed("job_after_batch", failpoints.only_at(1, server.kill)), pytest.raises(StoreUnavailableError):
        scene.task(run, 0, PARTS[0])
    start_again(scene, server)
    scene.commit([scene.task(run, 0, PARTS[0], attempt=1), scene.task(run, 1, PARTS[1])])
    scene.assert_holds([1, 2, 3, 4, 5])


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_a_job_that_exceeds_the_transaction_timeout(
    postgres_url: str, broker: DevCluster, new_name: Callable[[str], str], producer: str
) -> None:
    scene = JobScene(postgres_url, broker.bootstrap_servers, new_name("job"), producer=producer, two_phase=False)
    outcomes = scene.write(scene.run(), PARTS)
    prepared = outcomes[0].prepared
    assert prepared is not None
    assert prepared.timeout == 900  # the broker's own limit
    old = [replaced(outcome, began_at=prepared.began_at - 895) for outcome in outcomes]
    match = r"can't be committed within the time limit(.|\n)*raise transaction\.timeout\.ms if"
    with pytest.raises(TransactionTimeoutError, match=match):
        scene.commit(old)
    assert scene.table() == []
    scene.abort(old)
    scene.assert_holds([])
    scene.close()
