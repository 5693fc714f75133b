"""The Spark examples, in the session that tests share, over a few flights of each month: table and topic have each once."""

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

pytest.importorskip("pyspark")

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_EACH_MONTH = 20

Flight = tuple[Any, ...]


@pytest.fixture
def name(new_name: Callable[[str], str]) -> str:
    """Of the table and of the topic."""
    return new_name("flights").replace("-", "_")


@pytest.fixture
def run(postgres_url: str, broker: DevCluster, name: str, run_example: Callable[..., str]) -> Callable[..., str]:
    """Runs an example in the shared session; returns what it says."""
    ours = {"DUALWRITE_DATABASE_URL": postgres_url, "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers}
    return lambda example, *arguments: run_example(example, *arguments, "--name", name, **ours)


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
def flights(everything: pa.Table, folder: Path) -> list[Flight]:
    """The flights that the example is to write: those that it finds in the folder."""
    of_months = []
    months = pc.month(everything["time_hour"])
    for month in range(1, 13):
        of_months.append(everything.filter(pc.equal(months, month)).slice(0, OF_EACH_MONTH))
        parquet.write_table(of_months[-1], folder / f"2013-{month:02}.parquet")
    return sorted(rows(pa.concat_tables(of_months)))


def rows(table: pa.Table) -> list[Flight]:
    return [tuple(each.values()) for each in table.to_pylist()]


def assert_equal_everywhere(flights: list[Flight], url: str, servers: str, name: str) -> None:
    """File, table and topic have the same flights, row by row, and nothing is left open or staged."""
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


@pytest.mark.soak
def test_the_batch_example_writes_once_over_several_runs(
    run: Callable[..., str], flights: list[Flight], postgres_url: str, broker: DevCluster, name: str, folder: Path
) -> None:
    for _ in range(2):
        said = run("spark_batch.py", "--input", folder)
        assert f"{len(flights):,} flights are in the table {name}." in said
        assert f"{len(flights):,} committed messages are in the topic {name}" in said
    assert_equal_everywhere(flights, postgres_url, broker.bootstrap_servers, name)


@pytest.mark.soak
def test_the_stream_example(
    run: Callable[..., str],
    flights: list[Flight],
    postgres_url: str,
    broker: DevCluster,
    name: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    said = run("spark_stream.py", "--input", folder, "--checkpoint", tmp_path / "checkpoint")
    assert f"{len(flights):,} flights are in the table {name}." in said
    assert_equal_everywhere(flights, postgres_url, broker.bootstrap_servers, name)
