"""Servers that fail during a Spark job: the broker, the database; and a broker that aborts transactions after their timeout.

The same at more points, without Spark: tests/jobs/test_job_servers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psutil
import pytest
from driven_scene import is_stopped
from pyspark.errors import PySparkException, StreamingQueryException
from spark_scene import LIMIT, SparkScene, await_end

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer
from fixtures.broker import PROMPT_TIMEOUTS, started
from fixtures.pace import limit, until
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

MakeScene = Callable[[str, DevCluster, str], SparkScene]
TIMEOUT_MS = round(limit(6)) * 1000
"""A time-out that is to expire, after a write has come to its commit."""


@pytest.fixture(scope="module")
def fragile() -> Iterator[DevCluster]:
    """A broker that can be restarted and checks for timed-out transactions very often."""
    with started(config=PROMPT_TIMEOUTS) as cluster:
        yield cluster


@pytest.fixture
def own_scene(
    make_scene: MakeScene, own_postgres_server: PostgresServer, fragile: DevCluster, new_name: Callable[[str], str]
) -> SparkScene:
    """A job on servers that may be killed."""
    url = own_postgres_server.create_database("orders")
    migration.upgrade(url)
    return make_scene(url, fragile, new_name("spark"))


def through(scene: SparkScene, point: str, trouble: Callable[[], None]) -> bool:
    """Run the query over all input, with a fault while a worker is stopped at a failpoint; return whether it finished."""
    scene.fail_at(point, "stop")
    query = scene.start()
    stopped = stopped_worker()
    trouble()
    stopped.resume()
    try:
        await_end(query)
    except StreamingQueryException:
        return False
    return True


def stopped_worker() -> psutil.Process:

    def look() -> psutil.Process | None:
        return next(filter(is_stopped, psutil.Process().children(recursive=True)), None)

    return until(look, "a worker that has come to the point", seconds=LIMIT, pause=0.05)


@pytest.mark.parametrize(
    "point", thinned(["job_after_batch", "job_after_prepare", "job_after_commit"], kept=["job_after_prepare"])
)
def test_a_broker_that_is_killed(own_scene: SparkScene, fragile: DevCluster, point: str) -> None:
    own_scene.add_input(range(10))
    own_scene.run()
    for first in (10, 20):
        own_scene.add_input(range(first, first + 10))

    def trouble() -> None:
        fragile.kill()
        fragile.start()

    assert through(own_scene, point, trouble)
    own_scene.assert_holds(range(30))


@pytest.mark.parametrize(
    "point",
    thinned(["job_after_batch", "job_after_prepare", "job_after_move", "job_after_commit"], kept=["job_after_move"]),
)
def test_a_database_that_crashes(own_scene: SparkScene, own_postgres_server: PostgresServer, point: str) -> None:
    """The staging table is then empty: the commit is refused, and the batch is run again."""
    own_scene.add_input(range(10))
    own_scene.run()
    for first in (10, 20):
        own_scene.add_input(range(first, first + 10))

    def trouble() -> None:
        own_postgres_server.kill()
        own_postgres_server.start()
        own_scene.store.engine.dispose()  # our own connections have been ended, too

    came_through = through(own_scene, point, trouble)
    if point in ("job_after_prepare", "job_after_move"):
        assert not came_through
    if point == "job_after_commit":
        assert came_through
    if not came_through:
        own_scene.run()
    own_scene.assert_holds(range(30))


@pytest.mark.soak  # in CI on the same steps without Spark: tests/jobs/test_job_servers.py
def test_a_commit_past_the_timeout_of_its_transactions(
    make_scene: MakeScene, postgres_url: str, fragile: DevCluster, new_name: Callable[[str], str]
) -> None:
    scene = make_scene(postgres_url, fragile, new_name("spark"))
    bounded = {"twoPhase": "false", "kafka.transaction.timeout.ms": str(TIMEOUT_MS)}
    scene.fail_at("job_before_commit", f"sleep:{TIMEOUT_MS // 1000 + 1}")
    with pytest.raises(PySparkException, match=r"can't be committed within the time limit.*transaction\.timeout\.ms"):
        scene.write(scene.orders(range(30)), **bounded)
    assert scene.has_failed
    scene.assert_holds([])
    scene.write(scene.orders(range(30)), **{**bounded, "kafka.transaction.timeout.ms": "60000"})
    scene.assert_holds(range(30))
