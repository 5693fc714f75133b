"""One worker: `python -m dualwrite.demo.worker`. It can be killed at any time, and resumes at the position in the database.

That is the point of the demo: position, flight and message are written in the same transaction.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import dualwrite
from dualwrite.demo.flights import Flight, read_flights, share_of
from dualwrite.demo.job import RELEASE, Event, Job
from dualwrite.demo.tables import Departure, Tables
from dualwrite.demo.ways import Transaction, Way, opened
from dualwrite.errors import DualWriteError
from dualwrite.stores.sql import SqlStateStore

log = logging.getLogger(__name__)

MAX_FAILURES: Final = 5
"""Errors in a row, without a flight written in between, after which a worker gives up."""

_STDIN: Final = 0


class Supervisor:
    """The worker's connection to its supervisor: receives the job and the signal to end, and sends reports."""

    def __init__(self) -> None:
        # Unbuffered: a thread that blocks in a buffered read holds the buffer's lock, at which interpreter shutdown fails.
        self._input = os.fdopen(_STDIN, "rb", buffering=0, closefd=False)
        self.stopping = threading.Event()
        self.released = threading.Event()

    def job(self) -> Job:
        """Receive the job, and start listening."""
        job = Job.from_json(self._input.readline())
        threading.Thread(target=self._listen, daemon=True, name="supervisor").start()
        return job

    def report(self, event: Event, **facts: Any) -> None:
        """Send a report."""
        print(json.dumps({"event": event, **facts}), flush=True)  # noqa: T201  (reports go over standard output)

    def _listen(self) -> None:
        while line := self._input.readline():
            if line.decode().strip() == RELEASE:
                self.released.set()
        self.stopping.set()
        self.released.set()  # no release will come


class Worker:
    """Writes one worker's share of the flights, starting at the position in the database.

    Args:
        job: The job.
        supervisor: Receives the reports.
    """

    def __init__(self, job: Job, supervisor: Supervisor) -> None:
        self._job = job
        self._supervisor = supervisor
        self._store = SqlStateStore.from_url(job.url)
        self._tables = Tables(job.run, self._store.engine.dialect.name)
        self._done = 0
        self._took: list[int] = []
        self._commits = 0

    def run(self) -> None:
        """Open the writer or the pool, which runs recovery, and write the flights in order."""
        with self._opened() as way:
            self._write_all(way)
            self._report_done()
        self._supervisor.report(Event.CLOSED)

    @contextmanager
    def _opened(self) -> Iterator[Way]:
        self._supervisor.report(Event.OPENING)
        started = time.perf_counter()
        with opened(self._job, self._store, self._unit, self._written) as way:
            self._report_open(started, way.recovery)
            yield way

    def _write_all(self, way: Way) -> None:
        """Write the flights after the position in the database; after some errors, read the position again and continue."""
        failures = 0
        while True:
            position, done = self._tables.position(self._store.engine, self._job.worker)
            self._done = done
            try:
                return self._write_after(position, way)
            except DualWriteError as error:
                failures = 1 if self._done > done else failures + 1
                if failures == MAX_FAILURES or not way.can_continue(error):
                    raise
                log.warning("reading the position again: %s", error)

    def _write_after(self, position: int, way: Way) -> None:
        flights = self._flights(position)
        flight = next(flights, None)
        while flight is not None and not self._supervisor.stopping.is_set():
            following = next(flights, None)
            if following is None:
                way.finish()
                self._hold()
            if not self._supervisor.stopping.is_set():
                way.write(flight, position)
            position, flight = flight.number, following
        way.finish()

    def _flights(self, position: int) -> Iterator[Flight]:
        for flight in read_flights(self._job.departures, after=position):
            if share_of(flight.aircraft, self._job.workers) == self._job.worker:
                yield flight

    def _unit(self, tx: Transaction, flight: Flight, after: int) -> None:
        departure = self._tables.record(tx.db, flight, self._job.worker, after=after)
        if departure is not None:
            tx.send(self._job.topic, encoded(departure), key=flight.aircraft)

    def _written(self, seconds: float, commits: int) -> None:
        self._took.append(round(seconds * 1e6))
        self._commits += commits
        self._done += 1
        if len(self._took) >= self._job.report_every:
            self._report_done()

    def _hold(self) -> None:
        """Delay the last flight until all kills are done, so that each kill hits a worker with work left."""
        self._report_done()
        self._supervisor.report(Event.HOLDING)
        self._supervisor.released.wait()

    def _report_open(self, started: float, recovery: dualwrite.RecoveryReport) -> None:
        _, done = self._tables.position(self._store.engine, self._job.worker)
        self._supervisor.report(
            Event.OPEN,
            done=done,
            seconds=time.perf_counter() - started,
            outcomes=[found.outcome.value for found in recovery],
            unacknowledged=len(recovery.unacknowledged),
        )

    def _report_done(self) -> None:
        if self._took:
            self._supervisor.report(Event.DONE, done=self._done, took=self._took, commits=self._commits)
            self._took, self._commits = [], 0


def encoded(departure: Departure) -> bytes:
    """The departure as the value of its message."""
    return json.dumps(departure).encode()


def main() -> int:
    """Do the job received over standard input; returns the exit code."""
    supervisor = Supervisor()
    job = supervisor.job()
    try:
        Worker(job, supervisor).run()
    except Exception as error:  # noqa: BLE001  (every error is reported to the supervisor)
        traceback.print_exc()
        supervisor.report(Event.ERROR, text=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
