"""One worker: `python -m dualwrite.demo.worker`. It can be killed at any time, and resumes at the position in the database.

That is the point of the demo: position, flight and message are written in the same transaction. The worker reads a Job from its
standard input, and prints an Event for each of its steps, each as a line of JSON. The line RELEASE lets it write its last
flight and end; at the end of its input it stops after its current transaction.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from io import RawIOBase
from itertools import cycle
from typing import Any, Final

from confluent_kafka import Producer

import dualwrite
from dualwrite.demo.flights import Departure, Flight, StalePositionError, Tables, read_flights, share_of
from dualwrite.errors import DeliveryError, DualWriteError, FencedError
from dualwrite.settings import ProducerName
from dualwrite.stores.sql import SqlStateStore

log = logging.getLogger(__name__)

RELEASE: Final = "release"

MAX_FAILURES: Final = 5
"""Errors in a row, without a flight written in between, after which a worker gives up."""

WINDOW: Final = 64
"""The maximum number of flights in progress in a pool: as many as a group may have."""

LEASE: Final = 3.0
"""Seconds. Short, so that live workers recover a killed worker's id during the run. Until then, its prepared transaction
holds consumers back."""

POOL_SIZE: Final = 1
"""All flights of a worker have the same key, so only one of their groups is in progress at a time: a second writer would be
idle. On SQLite, which has one writer at a time, it would also wait for the file's lock when it is opened."""

_DELIVERY_TIMEOUT: Final = 60.0
_STDIN: Final = 0

Submit = Callable[[Flight, int], Future[object]]
"""Begins to write a flight after the given position; the result is an object that flights of one commit share."""


class Event(StrEnum):
    """The kind of a report.

    Attributes:
        OPENING: The worker has started and begins to open its writer or its pool, which runs recovery. No fields.
        OPEN: Fields: `done`; `seconds` to open; `outcomes` of recovery, by name; `unacknowledged`, the number of lost
            transactions.
        DONE: Fields: `done` so far; and since the last report: `took`, the microseconds of each flight, and `commits`, the
            number of transactions that they needed.
        ERROR: Field: `text`. The worker ends.
        CLOSED: All flights are written, and the writer or the pool is closed. No fields.
    """

    OPENING = "opening"
    OPEN = "open"
    DONE = "done"
    ERROR = "error"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's job: which share of the flights, and where and how to write it."""

    run: str
    worker: int
    workers: int
    departures: int
    url: str
    kafka: dict[str, Any]
    topic: str
    producer: ProducerName
    naive: bool
    pool: bool


def id_prefix(run: str) -> str:
    """The prefix of all logical transactional ids of a run, and of its workers' pools."""
    return f"demo-{run}"


def report(event: Event, **facts: Any) -> None:
    """Tell the supervisor."""
    print(json.dumps({"event": event, **facts}), flush=True)  # noqa: T201  (reports go over standard output)


class Worker:
    """Writes one worker's share of the flights, starting at the position in the database."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stopping = threading.Event()
        self._released = threading.Event()
        self._store = SqlStateStore.from_url(job.url)
        self._tables = Tables(job.run, self._store.engine.dialect.name)
        self._report_every = max(1, min(10, job.departures // 200))
        self._in_progress: deque[tuple[Future[object], float]] = deque()
        self._last_commit: object = None
        self._done = 0
        self._took: list[int] = []
        self._commits = 0

    def listen(self, lines: RawIOBase) -> None:
        """Wait for the release, and for the signal to stop."""
        while line := lines.readline():
            if line.decode().strip() == RELEASE:
                self._released.set()
        self._stopping.set()
        self._released.set()  # no release will come

    def run(self) -> None:
        """Open the writer or the pool, which runs recovery, and write the flights in order."""
        report(Event.OPENING)
        started = time.perf_counter()
        with self._opened() as (submit, recovery):
            report(
                Event.OPEN,
                done=self._position()[1],
                seconds=time.perf_counter() - started,
                outcomes=[found.outcome.value for found in recovery],
                unacknowledged=len(recovery.unacknowledged),
            )
            self._write_all(submit)
            self._report_done()
        report(Event.CLOSED)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Submit, dualwrite.RecoveryReport]]:
        """The way to write, and what was recovered: pools recover ids in the background, and only log it."""
        job, prefix = self._job, id_prefix(self._job.run)
        if job.naive:
            yield self._naive(), dualwrite.RecoveryReport()
        elif job.pool:
            with dualwrite.create_pool(
                self._store,
                kafka=job.kafka,
                prefix=prefix,  # the same for all workers, so that they recover each other's ids
                size=POOL_SIZE,
                options=dualwrite.PoolOptions(lease=LEASE),
                producer=job.producer,
            ) as pool:
                ordered = pool.with_options(key=f"worker {job.worker}")
                yield (lambda flight, after: ordered.submit(self._unit, flight, after)), dualwrite.RecoveryReport()
        else:
            with dualwrite.connect(
                self._store,
                kafka=job.kafka,
                transactional_id=f"{prefix}-{job.worker}",  # the same after a restart
                producer=job.producer,
            ) as writer:

                def write(flight: Flight, after: int) -> object:
                    with writer.transaction() as tx:
                        return self._unit(tx, flight, after)

                yield _at_once(write), writer.recovery_report

    def _naive(self) -> Submit:
        """Without dualwrite: commits and then produces, and the next time produces and then commits.

        A crash between the two loses the message in the first order; in the second, the message remains and is sent again.
        """
        producer = Producer({**self._job.kafka, "enable.idempotence": True, "acks": "all"})
        orders = cycle((False, True))

        def publish(departure: Departure | None) -> None:
            if departure is None:
                return
            failures: list[Any] = []
            producer.produce(
                self._job.topic,
                encoded(departure),
                departure["aircraft"],
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )
            if producer.flush(_DELIVERY_TIMEOUT) or failures:
                raise DeliveryError("A message was not delivered.", cause=str(failures[0]) if failures else None)

        def write(flight: Flight, after: int) -> object:
            kafka_first = next(orders)
            with self._store.engine.begin() as connection:
                departure = self._tables.record(connection, flight, self._job.worker, after=after)
                if kafka_first:
                    publish(departure)
            if not kafka_first:
                publish(departure)
            return object()

        return _at_once(write)

    def _unit(self, tx: dualwrite.Transaction[Any], flight: Flight, after: int) -> object:
        """Write a flight, and advance the position to it; returns the database's transaction, which units of a group share."""
        departure = self._tables.record(tx.db, flight, self._job.worker, after=after)
        if departure is not None:
            tx.send(self._job.topic, encoded(departure), key=flight.aircraft)
        return tx.db.get_transaction()

    def _write_all(self, submit: Submit) -> None:
        """Write the flights after the position in the database; after some errors, read the position again and continue."""
        failures = 0
        while True:
            position, done = self._position()
            self._done = done
            try:
                return self._write_after(position, submit)
            except DualWriteError as error:
                failures = 1 if self._done > done else failures + 1
                if failures == MAX_FAILURES or not can_continue(error, pool=self._job.pool):
                    raise
                log.warning("reading the position again: %s", error)
            finally:
                wait([future for future, _ in self._in_progress])  # they may still advance the position
                self._in_progress.clear()

    def _write_after(self, position: int, submit: Submit) -> None:
        window = WINDOW if self._job.pool else 1
        for flight, is_last in self._flights(position):
            if is_last:
                self._await_flights(0)
                self._hold()
            if self._stopping.is_set():
                break
            began = time.perf_counter()
            self._in_progress.append((submit(flight, position), began))
            self._await_flights(window - 1)
            position = flight.number
        self._await_flights(0)

    def _await_flights(self, left: int) -> None:
        """Wait until only so many flights are in progress. Raises the error of the first one that failed."""
        while len(self._in_progress) > left:
            future, began = self._in_progress.popleft()
            commit = future.result()
            self._took.append(round((time.perf_counter() - began) * 1e6))
            self._commits += commit is not self._last_commit
            self._last_commit = commit
            self._done += 1
            if len(self._took) >= self._report_every:
                self._report_done()

    def _hold(self) -> None:
        """Delay the last flight until all kills are done, so that each kill hits a worker with work left."""
        self._report_done()
        self._released.wait()

    def _report_done(self) -> None:
        if self._took:
            report(Event.DONE, done=self._done, took=self._took, commits=self._commits)
            self._took, self._commits = [], 0

    def _position(self) -> tuple[int, int]:
        return self._tables.position(self._store.engine, self._job.worker)

    def _flights(self, position: int) -> Iterator[tuple[Flight, bool]]:
        """The worker's flights after a position, each with whether it is the last one."""
        year = read_flights(self._job.departures, after=position)
        mine = (flight for flight in year if share_of(flight.aircraft, self._job.workers) == self._job.worker)
        flight = next(mine, None)
        while flight is not None:
            following = next(mine, None)
            yield flight, following is None
            flight = following


def _at_once(write: Callable[[Flight, int], object]) -> Submit:
    def submit(flight: Flight, after: int) -> Future[object]:
        written: Future[object] = Future()
        written.set_result(write(flight, after))
        return written

    return submit


def encoded(departure: Departure) -> bytes:
    """The departure as the value of its message."""
    return json.dumps(departure).encode()


def can_continue(error: DualWriteError, *, pool: bool) -> bool:
    """Whether a worker can read the position again after this error, and write the flights after it.

    With a pool, also if both sides were rolled back, or if the pool lost its id after a long pause: it then uses another.
    """
    return isinstance(error, StalePositionError) or (pool and (error.retriable or isinstance(error, FencedError)))


def main() -> int:
    """Do the job received over standard input; returns the exit code."""
    # Unbuffered: a thread that blocks in a buffered read holds the buffer's lock, at which interpreter shutdown fails.
    lines = os.fdopen(_STDIN, "rb", buffering=0, closefd=False)
    try:
        worker = Worker(Job(**json.loads(lines.readline())))
        threading.Thread(target=worker.listen, args=(lines,), daemon=True, name="supervisor").start()
        worker.run()
    except Exception as error:  # noqa: BLE001  (every error is reported to the supervisor)
        traceback.print_exc()
        report(Event.ERROR, text=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
