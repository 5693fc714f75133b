"""Servers and connections that fail during a job, at each side; and transactions that become older than their timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from job_scene import JobScene, MakeScene, replaced

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.errors import (
    BatchRefusedError,
    BrokerUnavailableError,
    DualWriteError,
    InDoubtTransactionError,
    ProducerFencedError,
    TransactionTimeoutError,
)
from dualwrite.jobs.rules import TaskOutcome
from dualwrite.settings import Timeouts
from dualwrite.testing import failpoints
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, TcpProxy, When
from fixtures.pace import LIMIT, done, happened, limit
from fixtures.tiers import thinned

PARTS = [[1, 2, 3, 4], [5, 6], [7]]
ROWS = [1, 2, 3, 4, 5, 6, 7]
TASK_MOMENTS = ("job_after_batch", "job_before_staged", "job_after_staged", "job_after_prepare")
COMMIT_MOMENTS = ("job_before_commit", "job_after_move", "job_after_commit", "job_after_complete")
BROKER_KEPT = ("job_after_prepare", "job_after_commit")
DATABASE_KEPT = ("job_after_batch", "job_after_commit")
TIMEOUT_MS = int(limit(2.5) * 1000)


@pytest.fixture
def make_scene(new_name: Callable[[str], str]) -> Iterator[MakeScene]:
    made: list[JobScene] = []

    def make(url: str, cluster: DevCluster, **settings: object) -> JobScene:
        made.append(JobScene(url, cluster.bootstrap_servers, new_name("job"), **settings))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


class Gate:
    """Makes the first thread at a failpoint wait while the test's thread acts: servers end with the thread that starts them."""

    def __init__(self) -> None:
        self._first = threading.Lock()
        self._reached, self._done = threading.Event(), threading.Event()

    def wait(self) -> None:
        if self._first.acquire(blocking=False):
            self._reached.set()
            happened(self._done)

    def do(self, what: Callable[[], object]) -> None:
        """Run the action while the thread waits."""
        happened(self._reached)
        try:
            what()
        finally:
            self._done.set()


def driven(scene: JobScene, batch_id: int, runs: int = 3) -> list[DualWriteError]:
    """Run a batch like a driver until it is committed; return the errors because of which it was run again."""
    failed: list[DualWriteError] = []
    for _ in range(runs):
        outcomes: list[TaskOutcome | None] = []
        run = scene.run(batch_id)
        try:
            outcomes += scene.write(run, PARTS)
            scene.commit(outcomes)
        except DualWriteError as error:
            failed.append(error)
            scene.abort_run(run)
        else:
            return failed
    raise failed[-1]


def driven_through(scene: JobScene, moment: str, trouble: Callable[[], object]) -> list[DualWriteError]:
    """Run two batches, the second with a fault at some point."""
    scene.commit(scene.write(scene.run(0), [[100], [101]]))
    gate = Gate()
    with ThreadPoolExecutor(1) as job, failpoints.armed(moment, gate.wait):
        running = job.submit(driven, scene, 1)
        gate.do(trouble)
        return done(running)


@pytest.mark.slow
@pytest.mark.parametrize("moment", thinned(TASK_MOMENTS + COMMIT_MOMENTS, kept=BROKER_KEPT))
def test_a_broker_outage(postgres_url: str, prompt_broker: DevCluster, make_scene: MakeScene, moment: str) -> None:
    scene = make_scene(postgres_url, prompt_broker)

    def trouble() -> None:
        prompt_broker.kill()
        prompt_broker.start()

    failed = driven_through(scene, moment, trouble)
    scene.assert_holds([*ROWS, 100, 101])
    if moment in COMMIT_MOMENTS:
        assert failed == []


@pytest.fixture
def own_postgres_url(own_postgres_server: PostgresServer) -> str:
    url = own_postgres_server.create_database("job")
    migration.upgrade(url)
    return url


@pytest.mark.slow
@pytest.mark.parametrize("moment", thinned(TASK_MOMENTS + COMMIT_MOMENTS, kept=DATABASE_KEPT))
def test_a_database_that_crashes(
    own_postgres_server: PostgresServer, own_postgres_url: str, broker: DevCluster, make_scene: MakeScene, moment: str
) -> None:
    """Staged rows are then lost, as in the staging tables that dualwrite creates: the batch is refused and run again."""
    scene = make_scene(own_postgres_url, broker)
    with scene.store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE staged SET UNLOGGED")

    def trouble() -> None:
        own_postgres_server.kill()
        own_postgres_server.start()

    failed = driven_through(scene, moment, trouble)
    scene.store.engine.dispose()  # our own connections have been ended, too
    scene.assert_holds([*ROWS, 100, 101])
    if moment in ("job_before_commit", "job_after_move"):
        assert [type(error) for error in failed] == [BatchRefusedError]
    if moment in ("job_after_commit", "job_after_complete"):
        assert failed == []


@pytest.mark.soak
def test_a_database_outage_beyond_the_time_limit(
    own_postgres_server: PostgresServer, own_postgres_url: str, broker: DevCluster, make_scene: MakeScene
) -> None:
    """The outcome is not guessed: transactions stay prepared, and the next run resolves them."""
    scene = make_scene(own_postgres_url, broker)
    scene.site = replace(scene.site, timeouts=replace(scene.site.timeouts, claim=2.0))
    outcomes = scene.write(scene.run(0), PARTS)
    in_doubt = pytest.raises(InDoubtTransactionError, match="did not respond")
    with failpoints.armed("job_after_move", failpoints.only_at(1, own_postgres_server.kill)), in_doubt:
        scene.commit(outcomes)
    scene.abort(outcomes)  # raises nothing, although it can't reach the database
    own_postgres_server.start()
    scene.store.engine.dispose()  # our own connections have been ended, too
    assert scene.open_ids() != []
    assert driven(scene, 0) == []
    scene.assert_holds(ROWS)


@pytest.mark.parametrize(
    "moment",
    thinned(
        ["job_after_batch", "job_after_staged", "job_before_commit", "job_after_move"],
        kept=["job_after_move"],
    ),
)
@pytest.mark.soak
def test_a_broker_that_times_transactions_out(
    postgres_url: str, prompt_broker: DevCluster, make_scene: MakeScene, moment: str
) -> None:
    """Without two-phase commit a transaction has a timeout: after it, nothing is committed on either side."""
    scene = make_scene(postgres_url, prompt_broker, two_phase=False)
    patient = scene.site
    scene.site = replace(patient, kafka={**patient.kafka, "transaction.timeout.ms": TIMEOUT_MS})
    longer = failpoints.only_at(1, lambda: time.sleep(TIMEOUT_MS / 1000 + 1))
    told = pytest.raises((TransactionTimeoutError, ProducerFencedError), match=r"transaction\.timeout\.ms|timed out")
    with failpoints.armed(moment, longer), told:
        driven(scene, 0, runs=1)
    scene.assert_holds([])
    scene.site = patient
    assert driven(scene, 0) == []
    scene.assert_holds(ROWS)


def test_kafka_is_unreachable_after_the_database_has_committed(
    postgres_url: str, broker: DevCluster, make_scene: MakeScene
) -> None:
    scene = make_scene(postgres_url, broker)
    outcomes = scene.write(scene.run(), PARTS)
    gone = BrokerUnavailableError("No broker answers.")
    with (
        failpoints.armed("recover_after_describe", failpoints.raises(gone)),
        pytest.raises(InDoubtTransactionError, match="3 of its transactions could not be completed") as caught,
    ):
        scene.commit(outcomes)
    assert caught.value.database_committed is True
    assert "don't write it again" in str(caught.value)
    assert scene.table() == ROWS
    assert len(scene.open_ids()) == 3
    scene.abort(outcomes)  # as Spark does after commit has raised
    scene.assert_holds(ROWS)


@pytest.mark.parametrize("when", ["before", "answered"])
def test_the_answer_to_the_decision_is_lost(
    proxied_postgres_url: str, postgres_proxy: TcpProxy, broker: DevCluster, make_scene: MakeScene, when: When
) -> None:
    scene = make_scene(proxied_postgres_url, broker, timeouts=Timeouts(claim=LIMIT, kafka=LIMIT, delivery=LIMIT))
    outcomes = scene.write(scene.run(), PARTS)

    def cut_the_next_commit() -> None:
        postgres_proxy.on_client_bytes(b"COMMIT\0", Link.cut, when=when)

    with failpoints.armed("job_after_move", failpoints.only_at(1, cut_the_next_commit)):
        assert scene.commit(outcomes) == 7
    scene.assert_holds(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_a_job_that_exceeds_the_transaction_timeout(
    postgres_url: str, broker: DevCluster, make_scene: MakeScene, producer: str
) -> None:
    scene = make_scene(postgres_url, broker, producer=producer, two_phase=False)
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
