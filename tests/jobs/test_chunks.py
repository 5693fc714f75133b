"""A partition in chunks, on each SQL database: each chunk is written once, even if attempts fail, overlap or differ."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa
from chunk_scene import ChunkScene, WorkerDiedError

from crash.databases import Databases
from crash.events import events_at
from dualwrite import FencedError, SqlStateStore, StateTableMissingError, Transaction, UsageError, migration
from dualwrite.devcluster import DevCluster
from dualwrite.errors import ChunkChangedError, ConfigurationError, JobPlanChangedError, StoreCommitFailedError
from dualwrite.spark.chunks import JobPlan, PartitionReport, forget_job
from dualwrite.testing import failpoints
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT
from fixtures.tables import table
from fixtures.tiers import thinned

SQL = ("sqlite", "postgresql", "mariadb")
ROWS = list(range(35))
MOMENTS = ["between two transactions", "within one"]
DYING_POINTS = ["after_prepare", "before_db_commit", "after_db_commit", "after_kafka_commit"]


@pytest.fixture(params=thinned(SQL, kept=["sqlite", "postgresql"], quick=["sqlite"]))
def job(request: pytest.FixtureRequest, databases: Databases, broker: DevCluster, new_name: Callable[[str], str]) -> ChunkScene:
    """A job on each SQL database."""
    return scene_on(databases, request.param, broker, new_name)


@pytest.fixture
def on_postgres(databases: Databases, broker: DevCluster, new_name: Callable[[str], str]) -> ChunkScene:
    """A job on PostgreSQL."""
    return scene_on(databases, "postgresql", broker, new_name)


def scene_on(databases: Databases, database: str, broker: DevCluster, new_name: Callable[[str], str]) -> ChunkScene:
    events = databases.scene(database, broker).events
    return ChunkScene(events, broker.bootstrap_servers, new_name("job"), new_name("topic"))


# --- once ---------------------------------------------------------------------------------------------------------------


def test_each_chunk_is_written_once(job: ChunkScene) -> None:
    assert job.attempt(ROWS) == PartitionReport(0, rows=35, chunks=4)
    assert job.attempt(ROWS) == PartitionReport(0, rows_before=35, chunks_before=4)
    job.partitions = None
    assert job.attempt([], partition=1) == PartitionReport(1)
    assert job.found() == (ROWS, ROWS)


def test_an_attempt_continues_where_the_previous_one_failed(job: ChunkScene) -> None:
    with pytest.raises(WorkerDiedError):
        job.attempt(ROWS, job.put_until(chunk=2))
    assert job.found() == (ROWS[:20], ROWS[:20])
    assert job.attempt(ROWS) == PartitionReport(0, rows=15, chunks=2, rows_before=20, chunks_before=2)
    assert job.found() == (ROWS, ROWS)


@pytest.mark.slow
def test_a_partition_in_one_transaction(job: ChunkScene) -> None:
    job.rows_per_transaction = None
    with pytest.raises(WorkerDiedError):
        job.attempt(ROWS, job.put_until(chunk=0))
    assert job.attempt(ROWS) == PartitionReport(0, rows=35, chunks=1)
    assert job.attempt(ROWS[::-1]) == PartitionReport(0, rows_before=35, chunks_before=1)
    assert job.found() == (ROWS, ROWS)


def test_a_repeated_transaction_gets_the_rows_again(job: ChunkScene) -> None:
    """Even if the function has emptied the list that it got, or changed what is in it."""
    failures = iter([StoreCommitFailedError("a conflict")])

    def put(transaction: Transaction, rows: list[dict[str, list[int]]]) -> None:
        while rows:
            row = rows.pop()
            while row["n"]:
                job.put(transaction, pa.table({"n": [row["n"].pop()]}))
        for error in failures:
            raise error

    assert job.attempt(ROWS, put, content=lambda rows: [{"n": [number]} for number in rows["n"].to_pylist()]).rows == 35
    assert job.found() == (ROWS, ROWS)


def test_a_function_that_only_returns_a_coroutine_is_refused(job: ChunkScene) -> None:
    """Its chunk would be marked as written."""

    async def put(transaction: Transaction, rows: pa.Table) -> None:
        job.put(transaction, rows)

    with pytest.raises(UsageError, match="put returned a coroutine"):
        job.attempt(ROWS, put)
    assert job.attempt(ROWS).rows == 35
    assert job.found() == (ROWS, ROWS)


def test_partitions_that_start_at_once(job: ChunkScene) -> None:
    job.partitions = 4
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(lambda number: job.attempt(ROWS[number::4], partition=number), range(4)))
    assert [(report.partition, report.rows) for report in reports] == [(0, 9), (1, 9), (2, 9), (3, 8)]
    assert job.found() == (ROWS, ROWS)


@pytest.mark.slow
def test_a_forgotten_job_is_written_again(job: ChunkScene) -> None:
    job.attempt(ROWS[:15])
    assert job.forget() == 2
    assert job.forget() == 0
    job.rows_per_transaction = 5
    assert job.attempt(ROWS[15:]).chunks == 4
    assert job.found() == (ROWS, ROWS)


@pytest.mark.slow
def test_jobs_are_independent(job: ChunkScene, new_name: Callable[[str], str]) -> None:
    job.attempt(ROWS[:10])
    first, job.job_id = job.job_id, f"{job.job_id}.0/é Ü"
    assert job.attempt(ROWS[10:], prefix=first).rows == 25
    with job.writer(prefix=first) as writer:
        assert forget_job(writer.store, first) == 1
    assert job.attempt(ROWS[10:], prefix=first).rows_before == 25


# --- two at once --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "where"),
    # SQLite has one transaction at a time: within one, the later attempt waits for it
    thinned(
        [(database, where) for database, where in product(SQL, MOMENTS) if (database, where) != ("sqlite", MOMENTS[1])],
        kept=[*zip(SQL, cycle(MOMENTS))],
    ),
    indirect=["job"],
)
def test_the_later_of_two_attempts_takes_over(job: ChunkScene, where: str) -> None:
    within = where == "within one"
    second: list[PartitionReport] = []

    def overtake(rows: pa.Table) -> None:
        if rows["n"][0].as_py() == 20:
            second.append(job.attempt(ROWS))

    def put(transaction: Transaction, rows: pa.Table) -> None:
        job.put(transaction, rows)
        if within:
            overtake(rows)

    def content(rows: pa.Table) -> pa.Table:
        if not within:
            overtake(rows)
        return rows

    with pytest.raises(FencedError) as caught:
        job.attempt(ROWS, put, content=content)
    assert any("speculative copy" in note for note in caught.value.__notes__)
    assert second == [PartitionReport(0, rows=15, chunks=2, rows_before=20, chunks_before=2)]
    assert job.found() == (ROWS, ROWS)
    assert job.attempt(ROWS).rows_before == 35


# --- other rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "chunk", "rows"),
    [
        ([*ROWS[:10], 100, *ROWS[11:]], 1, 10),  # another row in the second chunk
        ([*ROWS[1:10], *ROWS[10:20]], 0, 10),  # a row is missing
        (ROWS[:15], 1, 5),
        (ROWS[:10], 1, None),
        ([], 0, None),
    ],
)
def test_a_frame_with_different_rows_is_refused(
    on_postgres: ChunkScene, again: list[int], chunk: int, rows: int | None
) -> None:
    job = on_postgres
    with pytest.raises(WorkerDiedError):
        job.attempt(ROWS, job.put_until(chunk=2))
    with pytest.raises(ChunkChangedError, match="not deterministic") as caught:
        job.attempt(again)
    facts = caught.value
    assert (facts.partition, facts.chunk, facts.committed_rows, facts.rows) == (0, chunk, 10, rows)
    assert job.found() == (ROWS[:20], ROWS[:20])
    assert job.attempt(ROWS).rows == 15


@pytest.mark.slow
def test_the_order_of_rows_within_a_chunk_does_not_matter(job: ChunkScene) -> None:
    with pytest.raises(WorkerDiedError):
        job.attempt(ROWS, job.put_until(chunk=1))
    assert job.attempt([*ROWS[9::-1], *ROWS[10:]]).rows == 25
    assert job.found() == (ROWS, ROWS)


@pytest.mark.slow
def test_a_job_with_other_chunks_is_refused(job: ChunkScene) -> None:
    job.partitions = 8
    job.attempt(ROWS[:10])
    job.partitions = 2
    with pytest.raises(JobPlanChangedError, match="8 partitions, 10 rows per transaction then, 2 partitions") as caught:
        job.attempt(ROWS[10:], partition=1)
    assert caught.value.job_id == job.job_id
    job.partitions, job.rows_per_transaction = 8, None
    with pytest.raises(JobPlanChangedError, match="one transaction each now"):
        job.attempt(ROWS[10:], partition=1)
    job.partitions, job.rows_per_transaction = None, 10
    assert job.attempt(ROWS[10:], partition=1).rows == 25
    assert job.found() == (ROWS, ROWS)


def test_a_partition_beyond_the_plan_is_refused(on_postgres: ChunkScene) -> None:
    with pytest.raises(UsageError, match=r"has no partition 1: its plan has 1"):
        on_postgres.attempt(ROWS, partition=1)


# --- unknown outcomes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "answered"])
def test_a_commit_without_an_answer(
    databases: Databases, on_postgres: ChunkScene, when: str, postgres_server: PostgresServer
) -> None:
    """The third chunk's COMMIT or its answer is lost: the attempt resolves it and continues."""
    job = on_postgres
    address = sa.make_url(job.events.url)
    with TcpProxy("127.0.0.1", address.port or 0) as proxy:
        through = SqlStateStore.from_url(address.set(port=proxy.port), lock_timeout=LIMIT)

        def put(transaction: Transaction, rows: pa.Table) -> None:
            job.put(transaction, rows)
            if rows["n"][0].as_py() == 20 and proxy.hooked is False:
                proxy.hooked = True
                proxy.on_client_bytes(b"COMMIT\0", Link.cut, when=when)

        proxy.hooked = False  # type: ignore[attr-defined]  # whether the connection has been cut
        report = job.attempt(ROWS, put, database=through)
        through.close()
    assert report == PartitionReport(0, rows=35, chunks=4)
    assert job.found() == (ROWS, ROWS)


@pytest.mark.parametrize(
    ("job", "point"),
    thinned(
        product(SQL, DYING_POINTS),
        kept=[*zip(SQL, cycle(DYING_POINTS)), ("postgresql", "after_db_commit")],
        quick=[("sqlite", "after_prepare")],
    ),
    indirect=["job"],
)
def test_an_attempt_that_dies_at_any_point(job: ChunkScene, point: str) -> None:
    """A failure at each step of the third chunk's commit, which the same process does not resolve."""
    armed = failpoints.only_at(4, failpoints.raises(KeyboardInterrupt()))  # the first transaction records the plan
    with failpoints.armed(point, armed), pytest.raises(KeyboardInterrupt):
        job.attempt(ROWS)
    before = 3 if point in ("after_db_commit", "after_kafka_commit") else 2
    report = job.attempt(ROWS)
    assert (report.chunks, report.chunks_before) == (4 - before, before)
    assert job.found() == (ROWS, ROWS)


# --- stores -------------------------------------------------------------------------------------------------------------


def test_psycopg_connections(on_postgres: ChunkScene) -> None:
    job = on_postgres
    store = SqlStateStore.from_psycopg(lambda: psycopg.connect(job.events.url.replace("+psycopg", "")))

    def put(transaction: Transaction, rows: pa.Table) -> None:
        for number in rows["n"].to_pylist():
            transaction.db.execute("INSERT INTO events (writer, number) VALUES (%s, %s)", (job.job_id, number))
            transaction.send(job.topic, str(number))

    assert job.attempt(ROWS, put, database=store).rows == 35
    assert job.attempt(ROWS, put, database=store).rows_before == 35
    assert forget_job(store, job.job_id) == 4
    store.close()
    assert job.found() == (ROWS, ROWS)


def test_a_database_without_the_chunk_table(tmp_path: Path, broker: DevCluster, new_name: Callable[[str], str]) -> None:
    events = events_at(f"sqlite:///{tmp_path}/old.db")
    migration.upgrade(events.url)
    engine = sa.create_engine(events.url)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE kafka_job_chunk"))
    engine.dispose()
    job = ChunkScene(events, broker.bootstrap_servers, new_name("job"), new_name("topic"))
    with pytest.raises(StateTableMissingError, match=r"(?s)kafka_job_chunk.*dualwrite db upgrade"):
        job.attempt(ROWS)


def test_another_kind_of_store_is_refused(databases: Databases, broker: DevCluster, new_name: Callable[[str], str]) -> None:
    job = scene_on(databases, "rocksdb", broker, new_name)
    with pytest.raises(ConfigurationError, match="needs a SQL database, but the store is rocksdb:"):
        job.attempt(ROWS)
    assert job.events.numbers(job.name) == []


@table(
    "changes",
    [
        *({"job_id": name} for name in ("", "x" * 201, "a\0b", "a\nb", 5)),
        *({name: number} for name in ("partitions", "rows_per_transaction") for number in (0, -1, 2.5)),
    ],
)
def test_invalid_plans(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="A job id" if "job_id" in changes else next(iter(changes))):
        JobPlan(**{"job_id": "job", **changes})
