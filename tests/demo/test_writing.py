"""Writing flights, and the position, which keeps them right when a dead process's COMMIT arrives late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import Engine, func, select, text

import dualwrite
from dualwrite.demo.flights import StalePositionError, read_flights
from dualwrite.demo.run import DemoRun, prepared
from dualwrite.demo.screen import Screen
from dualwrite.demo.supervisor import WorkerProcess
from dualwrite.demo.verdict import compare
from dualwrite.demo.worker import RELEASE, Options, can_continue, encoded
from dualwrite.devcluster import DevCluster
from dualwrite.errors import DeliveryError, DualWriteError, FencedError, InDoubtTransactionError
from fixtures.pace import LIMIT, until
from fixtures.tables import table

Begin = Callable[..., AbstractContextManager[DemoRun]]


@pytest.fixture
def begin(broker: DevCluster, tmp_path: Path) -> Begin:
    @contextmanager
    def prepare(name: str, departures: int, **options: Any) -> Iterator[DemoRun]:
        kafka = {"bootstrap.servers": broker.bootstrap_servers}
        chosen = Options(departures=departures, workers=1, kafka=kafka, data_dir=tmp_path, **options)
        with prepared(chosen, name, Screen(Console(quiet=True))) as run:
            yield run

    return prepare


def waits_for_a_lock(engine: Engine) -> bool:
    with engine.connect() as connection:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return bool(connection.scalar(text(waiting)))


def test_a_stale_position_writes_nothing(begin: Begin) -> None:
    first, second = list(read_flights(2))
    with begin("stale1", 2) as run:
        engine, tables = run.store.engine, run.tables
        with engine.begin() as connection:
            tables.record(connection, first, 0, after=0)
        with engine.begin() as connection:
            with pytest.raises(StalePositionError, match="no longer 0; flight 1 was not written"):
                tables.record(connection, first, 0, after=0)
            assert connection.scalar(select(func.count()).select_from(tables.departures)) == 1
            tables.record(connection, second, 0, after=1)
        assert tables.position(engine, 0) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["writer", "naive", "pool"])
def test_the_commit_of_a_dead_process_arrives_late(begin: Begin, postgres_url: str, tmp_path: Path, way: str) -> None:
    """The worker has read the position when a transaction with its next three flights is still open, and then commits."""
    log = tmp_path / "log"
    with (
        begin(f"late{way}", 200, url=postgres_url, naive=way == "naive", pool=way == "pool") as run,
        dualwrite.connect(postgres_url, kafka=run.kafka, transactional_id="dead") as dead,
    ):
        with dead.transaction() as tx:
            for after, flight in enumerate(read_flights(3)):
                departure = run.tables.record(tx.db, flight, 0, after=after)
                assert departure is not None
                tx.send(run.topic, encoded(departure), key=flight.aircraft)
            worker = WorkerProcess(run.job(0), log)
            worker.tell(RELEASE)
            until(lambda: waits_for_a_lock(run.store.engine), log.read_text)
        while worker.reports.poll(LIMIT) and worker.received():
            pass
        assert worker.exit_code == 0
        assert "reading the position again: The position of worker 0 is no longer 0" in log.read_text()
        evidence = run.evidence()
    assert compare(evidence).agree
    assert len(evidence.rows) == len(evidence.messages) == 200


@table(
    "error, with_pool, without",
    [
        (StalePositionError("x"), True, True),
        (FencedError("x"), True, False),
        (DeliveryError("x"), True, False),
        (InDoubtTransactionError("x"), False, False),
    ],
)
def test_after_which_errors_a_worker_reads_the_position_again(error: DualWriteError, *, with_pool: bool, without: bool) -> None:
    assert can_continue(error, pool=True) == with_pool
    assert can_continue(error, pool=False) == without
