"""The ways of writing flights, and the position, which keeps them right when a dead process's COMMIT arrives late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text

import dualwrite
from dualwrite.demo.flights import Flight, read_flights
from dualwrite.demo.job import Job, StalePositionError
from dualwrite.demo.places import Places, prepared
from dualwrite.demo.supervisor import Report, WorkerProcess
from dualwrite.demo.verdict import compare, read_evidence
from dualwrite.demo.worker import WINDOW, Transaction, encoded, opened
from dualwrite.devcluster import DevCluster
from dualwrite.errors import DeliveryError, FencedError, InDoubtTransactionError
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned

WAYS = ("writer", "naive", "pool")


@pytest.fixture
def kafka(broker: DevCluster) -> dict[str, Any]:
    return {"bootstrap.servers": broker.bootstrap_servers}


@contextmanager
def places_of(run: str, url: str | None, kafka: dict[str, Any], folder: Path) -> Iterator[Places]:
    with prepared(run, workers=1, url=url, kafka=kafka, data_dir=folder, keep=False, say=print, remind=print) as places:
        yield places


def job_of(places: Places, way: str, departures: int) -> Job:
    return Job(
        run=places.run,
        worker=0,
        workers=1,
        departures=departures,
        url=places.url,
        kafka=dict(places.kafka),
        topic=places.topic,
        producer="auto",
        naive=way == "naive",
        pool=way == "pool",
        report_every=1,
    )


def write(places: Places, tx: Transaction, flight: Flight, after: int) -> None:
    departure = places.tables.record(tx.db, flight, 0, after=after)
    if departure is not None:
        tx.send(places.topic, encoded(departure), key=flight.aircraft)


def waits_for_a_lock(engine: Engine) -> bool:
    with engine.connect() as connection:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return bool(connection.scalar(text(waiting)))


def test_a_stale_position_writes_nothing(kafka: dict[str, Any], tmp_path: Path) -> None:
    first, second = list(read_flights(2))
    with places_of("stale1", None, kafka, tmp_path) as places:
        engine, tables = places.store.engine, places.tables
        with engine.begin() as connection:
            tables.record(connection, first, 0, after=0)
        with engine.begin() as connection:
            with pytest.raises(StalePositionError, match="no longer 0; flight 1 was not written"):
                tables.record(connection, first, 0, after=0)
            assert connection.scalar(select(func.count()).select_from(tables.departures)) == 1
            tables.record(connection, second, 0, after=1)
        assert tables.position(engine, 0) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", thinned(WAYS, kept=["writer", "naive"]))
def test_the_commit_of_a_dead_process_arrives_late(kafka: dict[str, Any], postgres_url: str, tmp_path: Path, way: str) -> None:
    """The worker has read the position when a transaction with its next three flights is still open, and then commits."""
    flights = list(read_flights(200))
    with (
        places_of(f"late{way}", postgres_url, kafka, tmp_path) as places,
        dualwrite.connect(postgres_url, kafka=kafka, transactional_id="dead") as dead,
    ):
        with dead.transaction() as tx:
            for after, flight in enumerate(flights[:3]):
                write(places, tx, flight, after)
            reports: Queue[Report] = Queue()
            worker = WorkerProcess(job_of(places, way, 200), reports, tmp_path / "log")
            worker.release()
            until(lambda: waits_for_a_lock(places.store.engine), (tmp_path / "log").read_text)
        assert worker.wait(LIMIT)
        assert worker.exit_code == 0
        assert "reading the position again: The position of worker 0 is no longer 0" in (tmp_path / "log").read_text()
        evidence = read_evidence(places.store.engine, places.tables, kafka, places.topic, 200)
    assert compare(evidence).agree
    assert len(evidence.rows) == len(evidence.messages) == 200


def test_flights_through_a_pool_keep_their_order_and_share_commits(kafka: dict[str, Any], tmp_path: Path) -> None:
    flights = list(read_flights(2 * WINDOW))
    told: list[int] = []
    with places_of("order1", None, kafka, tmp_path) as places:

        def unit(tx: Transaction, flight: Flight, after: int) -> None:
            write(places, tx, flight, after)

        with opened(job_of(places, "pool", len(flights)), places.store, unit, lambda _, commits: told.append(commits)) as way:
            way.write(flights[0], 0)
            for before, flight in pairwise(flights):
                way.write(flight, before.number)
            way.finish()
            assert places.tables.position(places.store.engine, 0) == (flights[-1].number, len(flights))
        evidence = read_evidence(places.store.engine, places.tables, kafka, places.topic, len(flights))
    assert compare(evidence).agree
    assert len(told) == len(flights)
    assert 1 <= sum(told) < len(flights)


def test_after_an_error_no_flight_is_in_progress_and_the_way_is_usable(kafka: dict[str, Any], tmp_path: Path) -> None:
    flights = list(read_flights(20))
    told: list[int] = []
    with places_of("error1", None, kafka, tmp_path) as places:

        def unit(tx: Transaction, flight: Flight, after: int) -> None:
            write(places, tx, flight, after)

        with opened(job_of(places, "pool", 20), places.store, unit, lambda _, commits: told.append(commits)) as way:
            for flight in flights[:10]:
                way.write(flight, flight.number - 1)
            for flight in flights[11:]:  # one is missing
                way.write(flight, flight.number - 1)
            with pytest.raises(StalePositionError, match="flight 12 was not written"):
                way.finish()
            assert places.tables.position(places.store.engine, 0) == (10, 10)
            assert len(told) == 10
            for flight in flights[10:]:
                way.write(flight, flight.number - 1)
            way.finish()
            assert way.can_continue(StalePositionError("x"))
            assert way.can_continue(FencedError("x"))
            assert way.can_continue(DeliveryError("x"))
            assert not way.can_continue(InDoubtTransactionError("x"))
        assert compare(read_evidence(places.store.engine, places.tables, kafka, places.topic, 20)).agree
