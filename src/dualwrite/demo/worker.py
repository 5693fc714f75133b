"""One worker, a process of its own. It can be killed at any time, and resumes at the position in the database.

That is the point of the demo: position, flight and message are written in the same transaction. The worker receives a Job
through a connection to its supervisor, and sends a WorkerEvent with its facts for each of its steps. RELEASE lets it write its
last flight and end; at STOP, and when the connection ends, it stops after its current transaction.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer

import dualwrite
from dualwrite.demo.flights import Departure, Flight, StalePositionError, Tables, read_flights, share_of
from dualwrite.errors import ConfigurationError, DeliveryError, DualWriteError, FencedError
from dualwrite.settings import ProducerName, Settings
from dualwrite.stores.sql import SqlStateStore

log = logging.getLogger(__name__)

RELEASE: Final = "release"
STOP: Final = "stop"
MAX_WORKERS: Final = 32

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

Submit = Callable[[Flight, int], Future[object]]
"""Begins to write a flight after the given position; the result is an object that flights of one commit share."""


class WorkerEvent(Enum):
    """What a worker reports.

    Attributes:
        OPENING: The worker has started and begins to open its writer or its pool, which runs recovery. No facts.
        OPEN: Facts: `done`; `seconds` to open; `outcomes` of recovery, by name; `unacknowledged`, the number of lost
            transactions.
        DONE: Facts: `done` so far; and since the last report: `took`, the microseconds of each flight, and `commits`, the
            number of transactions that they needed.
        ERROR: Fact: `text`. The worker ends.
        CLOSED: All flights are written, and the writer or the pool is closed. No facts.
    """

    OPENING = auto()
    OPEN = auto()
    DONE = auto()
    ERROR = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run the demo; the options of `dualwrite demo` say what each is. Kafka's settings are named as in librdkafka.

    By default, the database is a SQLite file of the run, the broker a local one, and there are two workers, or one on SQLite: a
    second process would spend most of its time waiting for the file's only write lock, and would be killed there.

    Raises:
        ConfigurationError: A number is out of range, the producer is unknown, or `naive` and `pool` are both set.
    """

    departures: int = 20_000
    kills: int = 20
    seed: int = 939
    workers: int | None = None
    producer: ProducerName = "auto"
    naive: bool = False
    pool: bool = False
    url: str | None = None
    kafka: Mapping[str, Any] | None = None
    data_dir: Path | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        Settings(producer=self.producer)
        if self.naive and self.pool:
            raise ConfigurationError("naive and pool can't be combined.", next_step="use --pool or --naive, not both")
        if self.kills < 0:
            raise ConfigurationError(f"kills must be at least 0, not {self.kills}.")
        if not 0 < self.number_of_workers <= MAX_WORKERS:
            raise ConfigurationError(f"workers must be between 1 and {MAX_WORKERS}, not {self.workers}.")

    @property
    def number_of_workers(self) -> int:
        """`workers`, or its default."""
        if self.workers is not None:
            return self.workers
        return 1 if self.url is None or self.url.startswith("sqlite") else 2


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's job: which share of the flights, and where and how to write it."""

    run: str
    worker: int
    options: Options
    url: str
    kafka: dict[str, Any]
    topic: str


def id_prefix(run: str) -> str:
    """The prefix of all logical transactional ids of a run, and of its workers' pools."""
    return f"demo-{run}"


class FlightWriter:
    """Writes one worker's share of the flights, starting at the position in the database."""

    def __init__(self, job: Job, supervisor: Connection) -> None:
        self._job = job
        self._supervisor = supervisor
        self._stopping = threading.Event()
        self._released = threading.Event()
        self._store = SqlStateStore.from_url(job.url)
        self._tables = Tables(job.run, self._store.engine.dialect.name)
        self._report_every = max(1, min(10, job.options.departures // 200))
        self._in_progress: deque[tuple[Future[object], float]] = deque()
        self._last_commit: object = None
        self._done = 0
        self._took: list[int] = []
        self._commits = 0

    def listen(self) -> None:
        """Wait for the release, and for the signal to stop."""
        with suppress(EOFError, OSError):  # the supervisor is gone
            while self._supervisor.recv() != STOP:
                self._released.set()
        self._stopping.set()
        self._released.set()  # no release will come

    def report(self, event: WorkerEvent, **facts: Any) -> None:
        """Tell the supervisor."""
        self._supervisor.send((event, facts))

    def run(self) -> None:
        """Open the writer or the pool, which runs recovery, and write the flights in order."""
        self.report(WorkerEvent.OPENING)
        started = time.perf_counter()
        with self._opened() as (submit, recovery):
            self.report(
                WorkerEvent.OPEN,
                done=self._position()[1],
                seconds=time.perf_counter() - started,
                outcomes=[found.outcome.value for found in recovery],
                unacknowledged=len(recovery.unacknowledged),
            )
            self._write_all(submit)
            self._report_done()
        self.report(WorkerEvent.CLOSED)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Submit, dualwrite.RecoveryReport]]:
        """The way to write, and what was recovered: pools recover ids in the background, and only log it."""
        job, prefix = self._job, id_prefix(self._job.run)
        if job.options.naive:
            yield self._naive(), dualwrite.RecoveryReport()
        elif job.options.pool:
            with dualwrite.create_pool(
                self._store,
                kafka=job.kafka,
                prefix=prefix,  # the same for all workers, so that they recover each other's ids
                size=POOL_SIZE,
                options=dualwrite.PoolOptions(lease=LEASE),
                producer=job.options.producer,
            ) as pool:
                ordered = pool.with_options(key=f"worker {job.worker}")
                yield (lambda flight, after: ordered.submit(self._unit, flight, after)), dualwrite.RecoveryReport()
        else:
            with dualwrite.connect(
                self._store,
                kafka=job.kafka,
                transactional_id=f"{prefix}-{job.worker}",  # the same after a restart
                producer=job.options.producer,
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
                if failures == MAX_FAILURES or not can_continue(error, pool=self._job.options.pool):
                    raise
                log.warning("reading the position again: %s", error)
            finally:
                wait([future for future, _ in self._in_progress])  # they may still advance the position
                self._in_progress.clear()

    def _write_after(self, position: int, submit: Submit) -> None:
        window = WINDOW if self._job.options.pool else 1
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
            self.report(WorkerEvent.DONE, done=self._done, took=self._took, commits=self._commits)
            self._took, self._commits = [], 0

    def _position(self) -> tuple[int, int]:
        return self._tables.position(self._store.engine, self._job.worker)

    def _flights(self, position: int) -> Iterator[tuple[Flight, bool]]:
        """The worker's flights after a position, each with whether it is the last one."""
        year = read_flights(self._job.options.departures, after=position)
        mine = (flight for flight in year if share_of(flight.aircraft, self._job.options.number_of_workers) == self._job.worker)
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


def main() -> None:
    """Do the job that comes through the connection, whose file descriptor is the process's argument."""
    with Connection(int(sys.argv[1])) as supervisor:
        writer = FlightWriter(supervisor.recv(), supervisor)
        threading.Thread(target=writer.listen, daemon=True, name="supervisor").start()
        try:
            writer.run()
        except Exception as error:  # noqa: BLE001  (every error is reported to the supervisor)
            traceback.print_exc()
            writer.report(WorkerEvent.ERROR, text=f"{type(error).__name__}: {error}")
            sys.exit(1)
