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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

from confluent_kafka import Producer
from sqlalchemy import Connection, Engine

import dualwrite
from dualwrite.demo.flights import Departure, Flight, Tables, read_flights, share_of
from dualwrite.demo.job import RELEASE, Event, Job, StalePositionError, id_prefix
from dualwrite.errors import DeliveryError, DualWriteError, FencedError
from dualwrite.stores.sql import SqlStateStore

_DELIVERY_TIMEOUT: Final = 60.0


class NaiveTransaction:
    """The object that the block gets, as with dualwrite: a connection, and a method to send."""

    def __init__(self, db: Connection) -> None:
        self.db = db
        self.messages: list[tuple[str, bytes, str]] = []

    def send(self, topic: str, value: bytes, *, key: str) -> None:
        """Send a message when the block ends."""
        self.messages.append((topic, value, key))


class NaiveWriter:
    """Alternates both orders: commits and then produces, the next time produces and then commits.

    Args:
        engine: The database.
        kafka: The Kafka settings, named as in librdkafka.
    """

    def __init__(self, engine: Engine, kafka: Mapping[str, Any]) -> None:
        self._engine = engine
        self._producer = Producer({**kafka, "enable.idempotence": True, "acks": "all"})
        self._kafka_first = False

    @contextmanager
    def transaction(self) -> Iterator[NaiveTransaction]:
        """One business transaction in two steps, with a possible crash between them.

        With the commit first, such a crash loses the message; with Kafka first, the message remains and is sent again.

        Raises:
            DeliveryError: A message was not delivered.
        """
        kafka_first, self._kafka_first = self._kafka_first, not self._kafka_first
        with self._engine.begin() as connection:
            transaction = NaiveTransaction(connection)
            yield transaction
            if kafka_first:
                self._produce(transaction)
        if not kafka_first:
            self._produce(transaction)

    def _produce(self, transaction: NaiveTransaction) -> None:
        failures: list[Any] = []
        for topic, value, key in transaction.messages:
            self._producer.produce(topic, value, key, on_delivery=lambda error, _: failures.append(error) if error else None)
        if self._producer.flush(_DELIVERY_TIMEOUT) or failures:
            raise DeliveryError("A message was not delivered.", cause=str(failures[0]) if failures else None)


WINDOW: Final = 64
"""The maximum number of flights in progress in a pool: as many as a group may have."""

LEASE: Final = 3.0
"""Seconds. Short, so that live workers recover a killed worker's id during the run. Until then, its prepared transaction
holds consumers back."""

POOL_SIZE: Final = 1
"""All flights of a worker have the same key, so only one of their groups is in progress at a time: a second writer would be
idle. On SQLite, which has one writer at a time, it would also wait for the file's lock when it is opened."""


class Transaction(Protocol):
    """The part of a transaction that writing a flight needs."""

    @property
    def db(self) -> Any:
        """A SQLAlchemy connection."""

    def send(self, topic: str, value: bytes, *, key: str) -> None:
        """Send a message with the transaction."""


class Writer(Protocol):
    """A DualWriter, or a NaiveWriter."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """One transaction: the `with` block commits it, or rolls it back if it raises."""


Unit = Callable[[Transaction, Flight, int], None]
"""Writes a flight, and advances the worker's position to it from the given one. May run more than once, if it is rolled back.

It raises StalePositionError if the position in the database is a different one.
"""

Written = Callable[[float, int], None]
"""Called for each flight that is committed on both sides, in order.

The arguments are the seconds since the flight was begun, and the number of commits: 1, or 0 if it shares the previous flight's
commit.
"""


class Way(ABC):
    """Writes one worker's flights in order. Used by one thread.

    Args:
        unit: Writes a flight.
        written: Called with what has been written.
    """

    recovery: dualwrite.RecoveryReport = dualwrite.RecoveryReport()
    """What was recovered at the start, as far as it is reported: pools recover ids in the background and only log it."""

    def __init__(self, unit: Unit, written: Written) -> None:
        self._unit = unit
        self._written = written

    @abstractmethod
    def write(self, flight: Flight, after: int) -> None:
        """Write the next flight; it may still be in progress when this returns.

        Args:
            flight: The flight.
            after: The worker's position before it.

        Raises:
            Exception: The error of the first flight that failed. No flight is in progress any more.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until no flight is in progress.

        Raises:
            Exception: As for `write`.
        """

    def can_continue(self, error: DualWriteError) -> bool:
        """Whether the caller can read the position again after this error, and write the flights after it."""
        return isinstance(error, StalePositionError)


class OneByOne(Way):
    """Each flight in a transaction of its own, which has ended when `write` returns.

    Args:
        writer: Begins the transactions.
        unit: As for Way.
        written: As for Way.
        recovery: As for Way.
    """

    def __init__(self, writer: Writer, unit: Unit, written: Written, recovery: dualwrite.RecoveryReport) -> None:
        super().__init__(unit, written)
        self._writer = writer
        self.recovery = recovery

    def write(self, flight: Flight, after: int) -> None:
        began = time.perf_counter()
        with self._writer.transaction() as tx:
            self._unit(tx, flight, after)
        self._written(time.perf_counter() - began, 1)

    def finish(self) -> None:
        """See Way: there is nothing to wait for."""


class ThroughPool(Way):
    """Up to WINDOW flights at once, which share commits; all with the same key, so that they keep their order.

    Args:
        pool: The pool.
        key: The worker's ordering key.
        unit: As for Way.
        written: As for Way.
    """

    def __init__(self, pool: dualwrite.WriterPool[Any], key: str, unit: Unit, written: Written) -> None:
        super().__init__(unit, written)
        self._pool = pool.with_options(key=key)
        self._in_progress: deque[tuple[Future[object], float]] = deque()
        self._last_commit: object = None

    def write(self, flight: Flight, after: int) -> None:
        if len(self._in_progress) >= WINDOW:
            self._await_oldest()
        self._in_progress.append((self._pool.submit(self._run, flight, after), time.perf_counter()))

    def finish(self) -> None:
        while self._in_progress:
            self._await_oldest()

    def can_continue(self, error: DualWriteError) -> bool:
        """Also if both sides were rolled back, or if the pool lost its id after a long pause: it then uses another."""
        return super().can_continue(error) or error.retriable or isinstance(error, FencedError)

    def _run(self, tx: dualwrite.Transaction[Any], flight: Flight, after: int) -> object:
        """The pool's unit; returns SQLAlchemy's transaction, which is the same object for all units of a group."""
        self._unit(tx, flight, after)
        return tx.db.get_transaction()

    def _await_oldest(self) -> None:
        future, began = self._in_progress.popleft()
        try:
            commit = future.result()
        except Exception:
            self._end_rest()
            raise
        self._report(commit, began)

    def _end_rest(self) -> None:
        """After a failed flight: cancel those that have not begun, and wait for the others."""
        rest = list(self._in_progress)
        self._in_progress.clear()
        for future, began in rest:
            if not future.cancel() and future.exception() is None:
                self._report(future.result(), began)

    def _report(self, commit: object, began: float) -> None:
        is_new, self._last_commit = commit is not self._last_commit, commit
        self._written(time.perf_counter() - began, int(is_new))


@contextmanager
def opened(job: Job, store: SqlStateStore, unit: Unit, written: Written) -> Iterator[Way]:
    """Open the job's way of writing.

    Raises:
        DualWriteError: As for `dualwrite.connect` and `dualwrite.create_pool`.
    """
    if job.naive:
        yield OneByOne(NaiveWriter(store.engine, job.kafka), unit, written, dualwrite.RecoveryReport())
    elif job.pool:
        with dualwrite.create_pool(
            store,
            kafka=job.kafka,
            prefix=id_prefix(job.run),  # the same for all workers, so that they recover each other's ids
            size=POOL_SIZE,
            options=dualwrite.PoolOptions(lease=LEASE),
            producer=job.producer,
            on_lost="report",
        ) as pool:
            yield ThroughPool(pool, f"worker {job.worker}", unit, written)
    else:
        with dualwrite.connect(
            store,
            kafka=job.kafka,
            transactional_id=job.transactional_id,
            producer=job.producer,
            on_lost="report",
        ) as writer:
            yield OneByOne(writer, unit, written, writer.recovery_report)


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
