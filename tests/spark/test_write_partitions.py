"""write_partitions on real Spark: every row once in the database and in the topic, whatever happens to tasks and workers."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

import dualwrite
from crash import events
from crash.databases import Databases
from crash.events import events_at
from dualwrite import DualWriter, Transaction, UsageError
from dualwrite.devcluster import DevCluster
from dualwrite.errors import ConfigurationError
from dualwrite.testing import failpoints
from dualwrite.testing.topics import read_committed
from fixtures import zookeeper_client

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

cloudpickle = pytest.importorskip("pyspark.cloudpickle")
partitions = pytest.importorskip("dualwrite.spark.partitions")
for module in (sys.modules[__name__], events, zookeeper_client):  # Spark's workers can't import a test
    cloudpickle.register_pickle_by_value(module)

# Spark warns about every pandas since 3.0; it requires pandas here, but does not use it

COUNT = 1000


class DiedError(Exception):
    """The error with which a task of these tests fails."""


@dataclass(frozen=True)
class Job:
    """What the tasks need, and how one of them fails once; it is pickled.

    Args:
        url: The database.
        servers: The broker.
        name: The name of the job, its events and its topic.
        folder: Where tasks leave notes.
        dies: Whether each attempt fails in the middle of its third chunk.
        point: The point of the commit of its third chunk at which the first attempt is killed; None for none.
    """

    url: str
    servers: str
    name: str
    folder: Path
    dies: bool = False
    point: str | None = None

    def writer(self, transactional_id: str) -> DualWriter:
        if self.point is not None and self._takes("armed"):
            # the first transaction records the plan
            failpoints.arm(self.point, failpoints.only_at(4, failpoints.sends_itself(signal.SIGKILL)))
        return dualwrite.connect(self.url, kafka=self.servers, transactional_id=transactional_id)

    def write(self, transaction: Transaction, rows: list[Any]) -> None:
        numbers = [row.id for row in rows]
        assert [row.name for row in rows] == [f"name {number}" for number in numbers]
        self._put(transaction, numbers)

    def write_arrow(self, transaction: Transaction, rows: pa.Table) -> None:
        assert rows.column_names == ["id", "name"]
        self._put(transaction, rows["id"].to_pylist())

    def _put(self, transaction: Transaction, numbers: list[int]) -> None:
        for number in numbers:
            events_at(self.url).write(transaction.db, self.name, number)
        transaction.send_many(self.name, [str(number) for number in numbers])
        if not self.dies:
            return
        with (self.folder / f"chunks-{os.getpid()}").open("a") as notes:
            notes.write(".")
            third = notes.tell() == 3
        if third:
            raise DiedError

    def _takes(self, what: str) -> bool:
        """Whether this is the first task that calls it."""
        try:
            (self.folder / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def run(self, frame: DataFrame, **options: Any) -> Any:
        chosen: dict[str, Any] = {"job_id": self.name, "rows_per_transaction": 50, **options}
        write = self.write_arrow if chosen.get("arrow") else self.write
        return partitions.write_partitions(frame, self.writer, write, **chosen)

    def found(self) -> tuple[list[int], list[int]]:
        """What the database and a read_committed consumer see."""
        messages = read_committed(self.servers, self.name)
        return events_at(self.url).numbers(self.name), sorted(int(message.value or b"") for message in messages)


@pytest.fixture
def job(databases: Databases, broker: DevCluster, new_name: Callable[[str], str], tmp_path: Path) -> Job:
    """A job on PostgreSQL."""
    made = databases.scene("postgresql", broker).events
    return Job(made.url, broker.bootstrap_servers, new_name("partitions"), tmp_path)


def numbered(spark: SparkSession, count: int = COUNT) -> DataFrame:
    return spark.range(count).selectExpr("id", "concat('name ', id) AS name")


def frame(spark: SparkSession, number: int = 4, count: int = COUNT) -> DataFrame:
    return numbered(spark, count).repartition(number, "id").sortWithinPartitions("id")


def frame_with_rows_in_one(spark: SparkSession) -> DataFrame:
    """Four partitions, three of them empty: after their only writer has failed, no other task continues to write."""
    return numbered(spark).selectExpr("*", "0 AS same").repartition(4, "same").drop("same").sortWithinPartitions("id")


ALL = (list(range(COUNT)), list(range(COUNT)))


@pytest.mark.slow
@pytest.mark.parametrize("arrow", [False, True])
def test_every_row_once(spark: SparkSession, job: Job, arrow: bool) -> None:
    report = job.run(frame(spark), arrow=arrow)
    assert (report.rows, report.rows_before, len(report.partitions)) == (COUNT, 0, 4)
    assert report.chunks == sum(-(-each.rows // 50) for each in report.partitions)
    again = job.run(frame(spark), arrow=arrow)
    assert (again.rows, again.chunks, again.rows_before, again.chunks_before) == (0, 0, COUNT, report.chunks)
    assert job.found() == ALL


@pytest.mark.slow
def test_a_worker_that_dies_while_it_commits(spark: SparkSession, job: Job) -> None:
    """The retried task opens the writer, which resolves the third chunk, and then finds its marker."""
    report = replace(job, point="after_db_commit").run(frame(spark))
    assert (job.folder / "armed").exists()
    assert (report.rows + report.rows_before, report.chunks_before) == (COUNT, 3)
    assert job.found() == ALL


@pytest.mark.soak
def test_a_failed_job_is_continued(spark: SparkSession, job: Job) -> None:
    """With the same number of partitions."""
    from pyspark.errors import PythonException  # noqa: PLC0415  (where no Spark is installed, this file is skipped)

    with pytest.raises(PythonException, match="DiedError"):
        replace(job, dies=True).run(frame_with_rows_in_one(spark))
    before = job.found()
    written = len(before[0])
    assert before[0] == before[1]
    assert 0 < written < COUNT
    with pytest.raises(PythonException, match=r"(?s)JobPlanChangedError.* 4 partitions, 50 rows .* then, 3 partitions"):
        job.run(frame(spark, 3))
    with pytest.raises(ConfigurationError, match="has 4 partitions, not 3"):
        job.run(frame_with_rows_in_one(spark), partitions=3)
    assert job.found() == before
    report = job.run(frame_with_rows_in_one(spark), partitions=4)
    assert (report.rows, report.rows_before) == (COUNT - written, written)
    assert job.found() == ALL


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_the_frame_is_evaluated_once(spark: SparkSession, job: Job, adaptive: str) -> None:
    seen = job.folder / "seen"

    def note(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with seen.open("a") as notes:
                notes.writelines(f"{number}\n" for number in batch["id"].to_pylist())
            yield batch

    spark.conf.set("spark.sql.adaptive.enabled", adaptive)
    try:
        rows = numbered(spark).mapInArrow(note, "id bigint, name string")
        report = job.run(rows.groupBy("id").agg({"name": "max"}).toDF("id", "name"), rows_per_transaction=None)
    finally:
        spark.conf.unset("spark.sql.adaptive.enabled")
    assert report.rows == COUNT
    assert Counter(seen.read_text().split()) == Counter(map(str, range(COUNT)))


@pytest.mark.slow
def test_empty_frames(spark: SparkSession, job: Job) -> None:
    assert job.run(numbered(spark, 0)).rows == 0
    assert job.run(spark.createDataFrame([], "id bigint, name string"), job_id=f"{job.name}.none").rows == 0


@pytest.mark.slow
def test_every_type_of_a_row_comes_as_collect_gives_it(spark: SparkSession, job: Job) -> None:
    rows = spark.sql(
        "SELECT 1 AS id, 1.5D AS x, 1.25BD AS d, true AS b, 'é' AS s, X'00ff' AS bin, DATE'2026-01-01' AS day, "
        "TIMESTAMP'2026-01-01 00:00:00' AS at, TIMESTAMP_NTZ'2026-01-01 00:00:00' AS local, array(1, null) AS list, "
        "map('a', 1) AS m, named_struct('k', 1, 'v', array('x')) AS st, CAST(null AS string) AS nothing"
    )
    servers, url, name = job.servers, job.url, job.name

    def writer(transactional_id: str) -> DualWriter:
        return dualwrite.connect(url, kafka=servers, transactional_id=transactional_id)

    def write(transaction: Transaction, found: list[Any]) -> None:
        transaction.send(name, repr(found))

    partitions.write_partitions(rows, writer, write, job_id=name, prefix=f"{name}.prefix")
    (message,) = read_committed(servers, name)
    assert (message.value or b"").decode() == repr(rows.collect())


@pytest.mark.soak
def test_arguments_that_are_refused(spark: SparkSession, job: Job) -> None:
    from pyspark.errors import PythonException  # noqa: PLC0415  (as above)

    with pytest.raises(UsageError, match=r"(?s)streaming frame.*foreachBatch"):
        job.run(spark.readStream.format("rate").load())
    for options in ({"job_id": ""}, {"rows_per_transaction": 0}, {"attempts": 0}, {"prefix": "a#b"}):
        with pytest.raises(ConfigurationError):
            job.run(frame(spark), **options)

    def of_another_id(transactional_id: str) -> DualWriter:
        return job.writer(job.name)

    with pytest.raises(PythonException, match="partitions would fence each other"):  # 1: no other error first
        partitions.write_partitions(frame(spark, 1), of_another_id, job.write, job_id=job.name)
    with pytest.raises(PythonException, match="returned a str, not a DualWriter"):
        partitions.write_partitions(frame(spark), str, job.write, job_id=job.name)


@pytest.mark.soak
def test_the_example(
    run_example: Callable[..., str], sqlite_url: str, broker: DevCluster, new_name: Callable[[str], str], tmp_path: Path
) -> None:
    """A second run finds everything written."""
    path, topic = tmp_path / "orders.csv", new_name("orders")
    path.write_text("id,item,quantity\n" + "".join(f"o{number},tea {number},{number}\n" for number in range(3000)))
    variables = {
        "DUALWRITE_DATABASE_URL": sqlite_url,
        "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        "SHOP_TOPIC": topic,
        "PYTHONWARNINGS": "ignore",
    }
    for expected in (
        "Wrote 3000 orders in 8 transactions; 0 orders were",
        "Wrote 0 orders in 0 transactions; 3000 orders were",
    ):
        assert expected in run_example("spark_partitions.py", path, "orders-1", **variables)
    messages = [json.loads(message.value or b"") for message in read_committed(broker.bootstrap_servers, topic)]
    engine = sa.create_engine(sqlite_url)
    with engine.connect() as connection:
        rows = [dict(row) for row in connection.execute(sa.text("SELECT id, item, quantity FROM orders")).mappings()]
    engine.dispose()
    assert len(rows) == 3000
    assert sorted(messages, key=lambda order: order["quantity"]) == sorted(rows, key=lambda order: order["quantity"])
