"""Servers that fail during a Spark job: the broker, the database; and a broker that aborts transactions after their timeout.

The same at more points, without Spark: tests/jobs/test_job_servers.py.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
from driven_scene import is_stopped
from pyspark.errors import PySparkException, StreamingQueryException
from spark_scene import LIMIT, SparkScene, await_end

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.testing.postgres import PostgresServer
from fixtures.pace import limit, until
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

MakeScene = Callable[[str, DevCluster, str], SparkScene]
TIMEOUT_MS = round(limit(6)) * 1000
"""A time-out that is to expire, after a write has come to its commit."""


@pytest.fixture
def on_prompt_broker(
    make_scene: MakeScene, postgres_url: str, prompt_broker: DevCluster, new_name: Callable[[str], str]
) -> SparkScene:
    """A job on a broker that may be killed."""
    return make_scene(postgres_url, prompt_broker, new_name("spark"))


@pytest.fixture
def on_own_database(
    make_scene: MakeScene, own_postgres_server: PostgresServer, broker: DevCluster, new_name: Callable[[str], str]
) -> SparkScene:
    """A job on a database that may be killed."""
    url = own_postgres_server.create_database("orders")
    migration.upgrade(url)
    return make_scene(url, broker, new_name("spark"))


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
def test_a_broker_that_is_killed(on_prompt_broker: SparkScene, prompt_broker: DevCluster, point: str) -> None:
    on_prompt_broker.add_input(range(10))
    on_prompt_broker.run()
    for first in (10, 20):
        on_prompt_broker.add_input(range(first, first + 10))

    def trouble() -> None:
        prompt_broker.kill()
        prompt_broker.start()

    assert through(on_prompt_broker, point, trouble)
    on_prompt_broker.assert_holds(range(30))


@pytest.mark.parametrize(
    "point",
    thinned(["job_after_batch", "job_after_prepare", "job_after_move", "job_after_commit"], kept=["job_after_move"]),
)
def test_a_database_that_crashes(on_own_database: SparkScene, own_postgres_server: PostgresServer, point: str) -> None:
    """The staging table is then empty: the commit is refused, and the batch is run again."""
    on_own_database.add_input(range(10))
    on_own_database.run()
    for first in (10, 20):
        on_own_database.add_input(range(first, first + 10))

    def trouble() -> None:
        own_postgres_server.kill()
        own_postgres_server.start()
        on_own_database.store.engine.dispose()  # our own connections have been ended, too

    came_through = through(on_own_database, point, trouble)
    if point in ("job_after_prepare", "job_after_move"):
        assert not came_through
    if point == "job_after_commit":
        assert came_through
    if not came_through:
        on_own_database.run()
    on_own_database.assert_holds(range(30))


@pytest.mark.soak  # in CI on the same steps without Spark: tests/jobs/test_job_servers.py
def test_a_commit_past_the_timeout_of_its_transactions(on_prompt_broker: SparkScene) -> None:
    scene = on_prompt_broker
    bounded = {"twoPhase": "false", "kafka.transaction.timeout.ms": str(TIMEOUT_MS)}
    scene.fail_at("job_before_commit", f"sleep:{TIMEOUT_MS // 1000 + 1}")
    with pytest.raises(PySparkException, match=r"can't be committed within the time limit.*transaction\.timeout\.ms"):
        scene.write(scene.orders(range(30)), **bounded)
    assert scene.has_failed
    scene.assert_holds([])
    scene.write(scene.orders(range(30)), **{**bounded, "kafka.transaction.timeout.ms": "60000"})
    scene.assert_holds(range(30))
