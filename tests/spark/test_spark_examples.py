"""The Spark examples: table and topic have each flight once, also where the job was killed on its way.

Every day they run in the session that tests share, over a few flights of each month, which are in the folder already. In soak
they run as scripts over all flights, and the stream is killed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import sqlalchemy as sa
from pyarrow import parquet

from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import read_topic
from fixtures.job_evidence import open_at_kafka, staged_rows, unresolved
from fixtures.tiers import thinned
from spark.job import SparkJob
from spark.session import SUBMITTED

pytest.importorskip("pyspark")

EXAMPLES = Path(__file__).parents[2] / "examples"
FLIGHTS = 336_776
FEW = 12 * 20

amounts = pytest.mark.parametrize("amount", thinned([FEW, FLIGHTS], kept=[FEW], quick=[]))
SETTINGS = "--master local[2] --driver-memory 1g --conf spark.ui.enabled=false --conf spark.ui.showConsoleProgress=false"

Start = Callable[..., SparkJob]
Run = Callable[..., str]
Flight = tuple[Any, ...]


@pytest.fixture
def name(new_name: Callable[[str], str]) -> str:
    """Of the table and of the topic."""
    return new_name("flights").replace("-", "_")


@pytest.fixture
def start(postgres_url: str, broker: DevCluster, name: str, spark_environment: dict[str, str]) -> Start:
    """Starts an example, as its first lines say."""
    ours = {"DUALWRITE_DATABASE_URL": postgres_url, "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers}

    def start(example: str, *arguments: str | Path) -> SparkJob:
        environment = {**spark_environment, **ours, "PYSPARK_SUBMIT_ARGS": f"{SETTINGS} {SUBMITTED}"}
        return SparkJob(EXAMPLES / example, [*arguments, "--name", name], environment=environment)

    return start


@pytest.fixture
def run(postgres_url: str, broker: DevCluster, name: str, run_example: Run) -> Run:
    """Runs an example in the shared session; returns what it says."""
    ours = {"DUALWRITE_DATABASE_URL": postgres_url, "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers}

    def run(example: str, *arguments: str | Path) -> str:
        return run_example(example, *arguments, "--name", name, **ours)

    return run


@pytest.fixture(scope="module")
def everything() -> Iterator[pa.Table]:
    """What stands in the package's file, as the example reads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import spark_batch  # noqa: PLC0415

        yield spark_batch.read_flights()
        del sys.modules["spark_batch"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the examples look for their input."""
    made = tmp_path / "input"
    made.mkdir()
    return made


@pytest.fixture
def flights(everything: pa.Table, folder: Path, amount: int) -> list[Flight]:
    """The flights that the example is to write: all of those that it finds itself, or those that it finds in the folder."""
    if amount == FLIGHTS:
        return rows(everything)
    of_months = []
    months = pc.month(everything["time_hour"])
    for month in range(1, 13):
        of_months.append(everything.filter(pc.equal(months, month)).slice(0, amount // 12))
        parquet.write_table(of_months[-1], folder / f"2013-{month:02}.parquet")
    return sorted(rows(pa.concat_tables(of_months)))


def rows(table: pa.Table) -> list[Flight]:
    return [tuple(each.values()) for each in table.to_pylist()]


def assert_equal_everywhere(flights: list[Flight], amount: int, url: str, servers: str, name: str) -> None:
    """File, table and topic have the same flights, row by row, and nothing is left open or staged."""
    assert len(flights) == amount
    with SqlStateStore.from_url(url) as store:
        with store.engine.connect() as connection:
            found = connection.execute(sa.text(f"SELECT * FROM {name} ORDER BY number"))
            columns = tuple(found.keys())
            assert [tuple(row) for row in found] == flights
        assert staged_rows(store.engine) == 0
        assert unresolved(store, f"{name}-import") == []
    assert open_at_kafka(servers, f"{name}-import") == []
    messages = []
    for message in read_topic(servers, name):
        value = json.loads(message.value() or b"null")
        value["time_hour"] = datetime.fromisoformat(value["time_hour"])
        messages.append((value["number"], message.key(), tuple(value.get(column) for column in columns)))
    messages.sort(key=lambda each: each[0])
    tail = columns.index("tailnum")
    assert messages == [(each[0], None if each[tail] is None else each[tail].encode(), each) for each in flights]
    assert {each[columns.index("time_hour")].utcoffset() for each in flights} == {timedelta(0)}


@amounts
def test_the_batch_example_writes_once_over_several_runs(
    request: pytest.FixtureRequest,
    flights: list[Flight],
    amount: int,
    postgres_url: str,
    broker: DevCluster,
    name: str,
    folder: Path,
) -> None:
    arguments = ("spark_batch.py", "--input", folder)
    in_table, in_topic = (
        f"{amount:,} flights are in the table {name}.",
        f"{amount:,} committed messages are in the topic {name}",
    )
    for _ in range(2):
        if amount == FLIGHTS:
            with request.getfixturevalue("start")(*arguments) as job:
                job.wait_for(in_table)
                job.wait_for(in_topic)
                assert job.wait() == 0, job.output
        else:
            said = request.getfixturevalue("run")(*arguments)
            assert in_table in said
            assert in_topic in said
    assert_equal_everywhere(flights, amount, postgres_url, broker.bootstrap_servers, name)


@amounts
def test_the_stream_example_writes_once_over_kills(
    request: pytest.FixtureRequest,
    flights: list[Flight],
    amount: int,
    postgres_url: str,
    broker: DevCluster,
    name: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    arguments = ("spark_stream.py", "--input", folder, "--checkpoint", tmp_path / "checkpoint")
    in_table = f"{amount:,} flights are in the table {name}."
    if amount == FLIGHTS:
        start: Start = request.getfixturevalue("start")
        with start(*arguments) as job:
            job.wait_for("batch 4: ")
            job.kill_all()  # while the next batch is written, or the one after it
        with start(*arguments) as job:
            job.wait_for(in_table)
            assert job.wait() == 0, job.output
    else:
        assert in_table in request.getfixturevalue("run")(*arguments)
    assert_equal_everywhere(flights, amount, postgres_url, broker.bootstrap_servers, name)
