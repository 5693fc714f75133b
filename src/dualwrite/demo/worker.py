"""One worker: `python -m dualwrite.demo.worker`. It can be killed at any time, and resumes at the position in the database.

That is the point of the demo: position, flight and message are written in the same transaction. Worker and supervisor exchange
one JSON object per line, over the worker's standard input (a Job) and output (an Event with its fields).
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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, Self

from confluent_kafka import Producer
from sqlalchemy import Connection, Engine

import dualwrite
from dualwrite.demo.flights import Departure, Flight, StalePositionError, Tables, read_flights, share_of
from dualwrite.errors import DeliveryError, DualWriteError, FencedError
from dualwrite.settings import ProducerName
from dualwrite.stores.sql import SqlStateStore

RELEASE: Final = "release"
"""The line, after the job, that lets a worker write its last flight and end. End of input means: stop now, cleanly."""


class Event(StrEnum):
    """The kind of a report."""

    OPENING = "opening"
    """The worker has started and begins to open its writer or its pool, which runs recovery. No fields."""

    OPEN = "open"
    """Fields: `done`; `seconds` to open; `outcomes` of recovery, by name; `unacknowledged`, the number of lost transactions."""

    DONE = "done"
    """Fields: `done` so far; and since the last report: `took`, the microseconds of each flight, and `commits`, the number of
    transactions that they needed."""

    HOLDING = "holding"
    """One flight is left, to be written after the release. No fields."""

    ERROR = "error"
    """Field: `text`. The worker ends."""

    CLOSED = "closed"
    """All flights are written, and the writer or the pool is closed. No fields."""


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's job: which share of the flights, where and how to write it, and how many flights a report has."""

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
    report_every: int

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(line))


def id_prefix(run: str) -> str:
    """The prefix of all logical transactional ids of a run, and of its workers' pools."""
    return f"demo-{run}"


# --- writing ------------------------------------------------------------------------------------------------------------------

WINDOW: Final = 64
"""The maximum number of flights in progress in a pool: as many as a group may have."""

LEASE: Final = 3.0
"""Seconds. Short, so that live workers recover a killed worker's id during the run. Until then, its prepared transaction
holds consumers back."""

POOL_SIZE: Final = 1
"""All flights of a worker have the same key, so only one of their groups is in progress at a time: a second writer would be
idle. On SQLite, which has one writer at a time, it would also wait for the file's lock when it is opened."""

_DELIVERY_TIMEOUT: Final = 60.0


class Transaction(Protocol):
    """The part of a transaction that writing a flight needs."""

    @property
    def db(self) -> Any:
        """A SQLAlchemy connection."""

    def send(self, topic: str, value: bytes, *, key: str) -> None:
        """Send a message with the transaction."""


class NaiveTransaction:
    """The object that the block gets, as with dualwrite: a connection, and a method to send."""

    def __init__(self, db: Connection) -> None:
        self.db = db
        self.messages: list[tuple[str, bytes, str]] = []

    def send(self, topic: str, value: bytes, *, key: str) -> None:
        """Send a message when the block ends."""
        self.messages.append((topic, value, key))


class NaiveWriter:
    """Without dualwrite. Alternates both orders: commits and then produces, the next time produces and then commits."""

    def __init__(self, engine: Engine, kafka: Mapping[str, Any]) -> None:
        self._engine = engine
        self._producer = Producer({**kafka, "enable.idempotence": True, "acks": "all"})
        self._kafka_first = False

    @contextmanager
    def transaction(self) -> Iterator[NaiveTransaction]:
        """One business transaction in two steps, with a possible crash between them.

        With the commit first, such a crash loses the message; with Kafka first, the message remains and is sent again.
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


Unit = Callable[[Transaction, Flight, int], None]
"""Writes a flight, and advances the worker's position to it from the given one. May run more than once, if it is rolled back.

It raises StalePositionError if the position in the database is a different one.
"""

Written = Callable[[float, int], None]
"""Called for each flight that is committed on both sides, in order.

The arguments are the seconds since the flight was begun, and the number of commits: 1, or 0 if it shares the previous flight's
commit.
"""


class Pipeline:
    """Writes one worker's flights in order: one after the other, or up to WINDOW at once. Used by one thread.

    Args:
        submit: Begins to write a flight from the given position; the result is an object that flights of one commit share.
        written: Called with what has been written.
        window: The maximum number of flights in progress.
        recovery: What was recovered at the start. Pools recover ids in the background and only log it.
    """

    def __init__(
        self,
        submit: Callable[[Flight, int], Future[object]],
        written: Written,
        *,
        window: int = 1,
        recovery: dualwrite.RecoveryReport = dualwrite.RecoveryReport(),  # noqa: B008  (frozen and empty)
    ) -> None:
        self.recovery = recovery
        self._submit = submit
        self._written = written
        self._window = window
        self._in_progress: deque[tuple[Future[object], float]] = deque()
        self._last_commit: object = None

    def write(self, flight: Flight, after: int) -> None:
        """Write the next flight, after the position `after`; it may still be in progress when this returns.

        Raises:
            Exception: The error of the first flight that failed. No flight is in progress any more.
        """
        began = time.perf_counter()
        self._in_progress.append((self._submit(flight, after), began))
        if len(self._in_progress) == self._window:
            self._await_oldest()

    def finish(self) -> None:
        """Wait until no flight is in progress. Raises as `write`."""
        while self._in_progress:
            self._await_oldest()

    def can_continue(self, error: DualWriteError) -> bool:
        """Whether the caller can read the position again after this error, and write the flights after it.

        With a pool, also if both sides were rolled back, or if the pool lost its id after a long pause: it then uses another.
        """
        pooled = self._window > 1
        return isinstance(error, StalePositionError) or (pooled and (error.retriable or isinstance(error, FencedError)))

    def _await_oldest(self) -> None:
        future, began = self._in_progress.popleft()
        try:
            commit = future.result()
        except Exception:
            rest = list(self._in_progress)
            self._in_progress.clear()
            for each, its_begin in rest:  # cancel those that have not begun, and wait for the others
                if not each.cancel() and each.exception() is None:
                    self._report(each.result(), its_begin)
            raise
        self._report(commit, began)

    def _report(self, commit: object, began: float) -> None:
        is_new, self._last_commit = commit is not self._last_commit, commit
        self._written(time.perf_counter() - began, int(is_new))


@contextmanager
def opened(job: Job, store: SqlStateStore, unit: Unit, written: Written) -> Iterator[Pipeline]:
    """Open the job's writer or pool. Raises as `dualwrite.connect` and `dualwrite.create_pool`."""
    if job.naive:
        yield Pipeline(_one_by_one(NaiveWriter(store.engine, job.kafka).transaction, unit), written)
    elif job.pool:

        def run(tx: dualwrite.Transaction[Any], flight: Flight, after: int) -> object:
            unit(tx, flight, after)
            return tx.db.get_transaction()  # the same object for all units of a group

        with dualwrite.create_pool(
            store,
            kafka=job.kafka,
            prefix=id_prefix(job.run),  # the same for all workers, so that they recover each other's ids
            size=POOL_SIZE,
            options=dualwrite.PoolOptions(lease=LEASE),
            producer=job.producer,
            on_lost="report",
        ) as pool:
            ordered = pool.with_options(key=f"worker {job.worker}")
            yield Pipeline(lambda flight, after: ordered.submit(run, flight, after), written, window=WINDOW)
    else:
        with dualwrite.connect(
            store,
            kafka=job.kafka,
            transactional_id=f"{id_prefix(job.run)}-{job.worker}",  # the same after a restart
            producer=job.producer,
            on_lost="report",
        ) as writer:
            yield Pipeline(_one_by_one(writer.transaction, unit), written, recovery=writer.recovery_report)


def _one_by_one(
    transaction: Callable[[], AbstractContextManager[Transaction]], unit: Unit
) -> Callable[[Flight, int], Future[object]]:
    def submit(flight: Flight, after: int) -> Future[object]:
        written: Future[object] = Future()
        with transaction() as tx:
            unit(tx, flight, after)
        written.set_result(object())
        return written

    return submit


# --- the process --------------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

MAX_FAILURES: Final = 5
"""Errors in a row, without a flight written in between, after which a worker gives up."""

_STDIN: Final = 0


class Pipe:
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
    """Writes one worker's share of the flights, starting at the position in the database."""

    def __init__(self, job: Job, supervisor: Pipe) -> None:
        self._job = job
        self._supervisor = supervisor
        self._store = SqlStateStore.from_url(job.url)
        self._tables = Tables(job.run, self._store.engine.dialect.name)
        self._done = 0
        self._took: list[int] = []
        self._commits = 0

    def run(self) -> None:
        """Open the writer or the pool, which runs recovery, and write the flights in order."""
        self._supervisor.report(Event.OPENING)
        started = time.perf_counter()
        with opened(self._job, self._store, self._unit, self._written) as pipeline:
            self._supervisor.report(
                Event.OPEN,
                done=self._position()[1],
                seconds=time.perf_counter() - started,
                outcomes=[found.outcome.value for found in pipeline.recovery],
                unacknowledged=len(pipeline.recovery.unacknowledged),
            )
            self._write_all(pipeline)
            self._report_done()
        self._supervisor.report(Event.CLOSED)

    def _write_all(self, pipeline: Pipeline) -> None:
        """Write the flights after the position in the database; after some errors, read the position again and continue."""
        failures = 0
        while True:
            position, done = self._position()
            self._done = done
            try:
                return self._write_after(position, pipeline)
            except DualWriteError as error:
                failures = 1 if self._done > done else failures + 1
                if failures == MAX_FAILURES or not pipeline.can_continue(error):
                    raise
                log.warning("reading the position again: %s", error)

    def _write_after(self, position: int, pipeline: Pipeline) -> None:
        flights = self._flights(position)
        flight = next(flights, None)
        while flight is not None and not self._supervisor.stopping.is_set():
            following = next(flights, None)
            if following is None:
                pipeline.finish()
                self._hold()
            if not self._supervisor.stopping.is_set():
                pipeline.write(flight, position)
            position, flight = flight.number, following
        pipeline.finish()

    def _position(self) -> tuple[int, int]:
        return self._tables.position(self._store.engine, self._job.worker)

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

    def _report_done(self) -> None:
        if self._took:
            self._supervisor.report(Event.DONE, done=self._done, took=self._took, commits=self._commits)
            self._took, self._commits = [], 0


def encoded(departure: Departure) -> bytes:
    """The departure as the value of its message."""
    return json.dumps(departure).encode()


def main() -> int:
    """Do the job received over standard input; returns the exit code."""
    supervisor = Pipe()
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
