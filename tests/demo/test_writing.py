"""Writing flights, and the position, which keeps them right when a dead process's COMMIT arrives late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import Engine, func, select, text

import dualwrite
from dualwrite.demo.flights import Flight, StalePositionError, read_flights
from dualwrite.demo.run import Options, Resources, job_of, prepared
from dualwrite.demo.screen import Screen
from dualwrite.demo.supervisor import Report, WorkerProcess
from dualwrite.demo.verdict import Evidence, compare, read_evidence
from dualwrite.demo.worker import WINDOW, Pipeline, Transaction, encoded, opened
from dualwrite.devcluster import DevCluster
from dualwrite.errors import DeliveryError, FencedError, InDoubtTransactionError
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned


@dataclass
class Scene:
    """The resources of a run with one worker, and how many commits its flights had."""

    options: Options
    resources: Resources
    commits: list[int] = field(default_factory=list)

    def write(self, tx: Transaction, flight: Flight, after: int) -> None:
        departure = self.resources.tables.record(tx.db, flight, 0, after=after)
        if departure is not None:
            tx.send(self.resources.topic, encoded(departure), key=flight.aircraft)

    def pipeline(self) -> AbstractContextManager[Pipeline]:
        job = job_of(self.options, self.resources, 0)
        return opened(job, self.resources.store, self.write, lambda _, commits: self.commits.append(commits))

    def position(self) -> tuple[int, int]:
        return self.resources.tables.position(self.resources.store.engine, 0)

    def evidence(self) -> Evidence:
        resources = self.resources
        return read_evidence(
            resources.store.engine, resources.tables, resources.kafka, resources.topic, self.options.departures
        )


Begin = Callable[..., AbstractContextManager[Scene]]


@pytest.fixture
def begin(broker: DevCluster, tmp_path: Path) -> Begin:
    @contextmanager
    def scene(run: str, departures: int, **options: Any) -> Iterator[Scene]:
        kafka = {"bootstrap.servers": broker.bootstrap_servers}
        chosen = Options(departures=departures, workers=1, kafka=kafka, data_dir=tmp_path, **options)
        with prepared(chosen, run, Screen(Console(quiet=True))) as resources:
            yield Scene(chosen, resources)

    return scene


def waits_for_a_lock(engine: Engine) -> bool:
    with engine.connect() as connection:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return bool(connection.scalar(text(waiting)))


def test_a_stale_position_writes_nothing(begin: Begin) -> None:
    first, second = list(read_flights(2))
    with begin("stale1", 2) as scene:
        engine, tables = scene.resources.store.engine, scene.resources.tables
        with engine.begin() as connection:
            tables.record(connection, first, 0, after=0)
        with engine.begin() as connection:
            with pytest.raises(StalePositionError, match="no longer 0; flight 1 was not written"):
                tables.record(connection, first, 0, after=0)
            assert connection.scalar(select(func.count()).select_from(tables.departures)) == 1
            tables.record(connection, second, 0, after=1)
        assert scene.position() == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", thinned(("writer", "naive", "pool"), kept=["writer", "naive"]))
def test_the_commit_of_a_dead_process_arrives_late(begin: Begin, postgres_url: str, tmp_path: Path, way: str) -> None:
    """The worker has read the position when a transaction with its next three flights is still open, and then commits."""
    log = tmp_path / "log"
    with (
        begin(f"late{way}", 200, url=postgres_url, naive=way == "naive", pool=way == "pool") as scene,
        dualwrite.connect(postgres_url, kafka=scene.resources.kafka, transactional_id="dead") as dead,
    ):
        with dead.transaction() as tx:
            for after, flight in enumerate(read_flights(3)):
                scene.write(tx, flight, after)
            reports: Queue[Report] = Queue()
            worker = WorkerProcess(job_of(scene.options, scene.resources, 0), reports, log)
            worker.release()
            until(lambda: waits_for_a_lock(scene.resources.store.engine), log.read_text)
        assert worker.wait(LIMIT)
        assert worker.exit_code == 0
        assert "reading the position again: The position of worker 0 is no longer 0" in log.read_text()
        evidence = scene.evidence()
    assert compare(evidence).agree
    assert len(evidence.rows) == len(evidence.messages) == 200


def test_flights_through_a_pool_keep_their_order_and_share_commits(begin: Begin) -> None:
    flights = list(read_flights(2 * WINDOW))
    with begin("order1", 2 * WINDOW, pool=True) as scene:
        with scene.pipeline() as pipeline:
            pipeline.write(flights[0], 0)
            for before, flight in pairwise(flights):
                pipeline.write(flight, before.number)
            pipeline.finish()
            assert scene.position() == (flights[-1].number, len(flights))
        assert compare(scene.evidence()).agree
    assert len(scene.commits) == len(flights)
    assert 1 <= sum(scene.commits) < len(flights)


def test_after_an_error_no_flight_is_in_progress_and_the_pipeline_is_usable(begin: Begin) -> None:
    flights = list(read_flights(20))
    with begin("error1", 20, pool=True) as scene:
        with scene.pipeline() as pipeline:
            for flight in [*flights[:10], *flights[11:]]:  # one is missing
                pipeline.write(flight, flight.number - 1)
            with pytest.raises(StalePositionError, match="flight 12 was not written"):
                pipeline.finish()
            assert scene.position() == (10, 10)
            assert len(scene.commits) == 10
            for flight in flights[10:]:
                pipeline.write(flight, flight.number - 1)
            pipeline.finish()
            assert all(pipeline.can_continue(error("x")) for error in (StalePositionError, FencedError, DeliveryError))
            assert not pipeline.can_continue(InDoubtTransactionError("x"))
        assert compare(scene.evidence()).agree
