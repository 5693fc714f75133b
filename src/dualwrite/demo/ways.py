"""The ways in which a worker writes its flights, with one contract: one transaction after another, or many flights at once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import dualwrite
from dualwrite.demo.errors import StalePositionError
from dualwrite.demo.flights import Flight
from dualwrite.demo.job import Job, id_prefix
from dualwrite.demo.naive import NaiveWriter
from dualwrite.errors import DualWriteError, FencedError
from dualwrite.stores.sql import SqlStateStore

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
        """See Way."""
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
        """See Way."""
        if len(self._in_progress) >= WINDOW:
            self._await_oldest()
        self._in_progress.append((self._pool.submit(self._run, flight, after), time.perf_counter()))

    def finish(self) -> None:
        """See Way."""
        while self._in_progress:
            self._await_oldest()

    def can_continue(self, error: DualWriteError) -> bool:
        """See Way. Also if both sides were rolled back, or if the pool lost its id after a long pause: it then uses another."""
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
