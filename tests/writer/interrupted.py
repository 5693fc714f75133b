"""The process to which test_interrupts.py sends SIGINT: it opens writers and runs transactions until enough SIGINTs have come.

python -m writer.interrupted URL BOOTSTRAP ID TOPIC INTERRUPTS

Python's own SIGINT handler raises KeyboardInterrupt at any bytecode. The first line of output is the duration of a transaction
on this machine ("pace SECONDS"); after each following line ("ready …") the parent sends one SIGINT. It is delivered only in the
part under test, so that the harness itself is never interrupted.
"""

# ruff: noqa: T201  (the test waits for the printed lines)

from __future__ import annotations

import gc
import json
import random
import signal
import sqlite3
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import sqlalchemy as sa

import dualwrite
from fixtures.pace import TimeLimitError, limit, until

TIMEOUTS = dualwrite.Timeouts(claim=limit(10), kafka=limit(20), delivery=limit(20))
WARM_UP = 7
"""How many transactions run before the first interrupt."""


@dataclass
class Tally:
    """What happened; reported to the parent."""

    interrupts: int = 0
    number: int = 0
    done: list[int] = field(default_factory=list)
    opened: int = 0
    errors: list[str] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)
    locks_left: int = 0
    checked_out: list[int] = field(default_factory=list)


class Gate:
    """Python's own SIGINT handler while the gate is open; a SIGINT that comes while it is closed is delivered when it opens.

    pthread_sigmask can't do this: it blocks a signal in one thread, but Python's main thread handles signals of all threads.
    """

    def __init__(self) -> None:
        self._open = self._kept = False
        signal.signal(signal.SIGINT, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            signal.default_int_handler(number, frame)
        self._kept = True

    @contextmanager
    def opened(self) -> Iterator[None]:
        try:
            self._open = True
            if self._kept:
                self._kept = False
                raise KeyboardInterrupt
            yield
        finally:
            self._open = False

    def close(self) -> None:
        """Close the gate, even if an interrupt came just before `opened` could."""
        while True:
            try:
                self._open = False
            except KeyboardInterrupt:
                continue
            return


class Interrupted:
    """One engine, one id."""

    def __init__(self, url: str, servers: str, transactional_id: str, topic: str) -> None:
        self.watching = sa.create_engine(url)
        options = {} if "sqlite" in url else {"connect_args": {"application_name": transactional_id}}
        self.engine = sa.create_engine(url, **options)
        self.servers = servers
        self.id = transactional_id
        self.topic = topic
        self.gate = Gate()
        self.tally = Tally()
        self.writer: dualwrite.DualWriter | None = None

    def connect(self) -> None:
        self.writer = dualwrite.connect(
            self.engine,
            kafka=self.servers,
            transactional_id=self.id,
            timeouts=TIMEOUTS,
        )
        self.tally.opened += 1

    def transaction(self) -> None:
        assert self.writer is not None
        self.tally.number += 1
        number = self.tally.number
        with self.writer.transaction() as tx:
            tx.db.execute(sa.text("INSERT INTO events (writer, number) VALUES (:w, :n)"), {"w": self.id, "n": number})
            tx.send(self.topic, str(number), key=self.id)
        self.tally.done.append(number)

    def close(self) -> None:
        writer, self.writer = self.writer, None
        assert writer is not None
        writer.close()

    def run(self, interrupts: int) -> None:
        """Run until this many interrupts have come; occasionally close the writer and open another."""
        chance = random.Random(7)
        print("pace", self.pace(), flush=True)
        print("ready", flush=True)
        while self.tally.interrupts < interrupts:
            try:
                self.run_until_interrupted(chance)
            except KeyboardInterrupt:
                self.gate.close()  # and drop the exception: its traceback refers to every frame and its variables
            except dualwrite.FencedError as error:
                self.tally.errors.append(repr(error))
                assert self.writer is not None
                self.writer.reopen()
                continue
            self.interrupted()

    def pace(self) -> float:
        """The median duration of a transaction in seconds, without the first ones, which wait for a new topic."""
        taken = []
        self.connect()
        for _ in range(WARM_UP):
            began = time.monotonic()
            self.transaction()
            taken.append(time.monotonic() - began)
        return statistics.median(taken)

    def run_until_interrupted(self, chance: random.Random) -> None:
        while True:
            if self.writer is None:
                with self.gate.opened():
                    self.connect()
            with self.gate.opened():
                for _ in range(20):
                    self.transaction()
            if chance.random() < 0.5:
                with self.gate.opened():
                    self.close()

    def interrupted(self) -> None:
        """Check for leftovers, and ask for the next interrupt."""
        self.tally.interrupts += 1
        phase = "none" if self.writer is None else self.writer.phase.name
        self.tally.phases[phase] = self.tally.phases.get(phase, 0) + 1
        gc.collect()
        self.tally.checked_out.append(self.engine.pool.checkedout())  # type: ignore[attr-defined]  # QueuePool
        self.tally.locks_left += self.locks_are_left()
        print("ready", self.tally.interrupts, flush=True)

    def locks_are_left(self) -> bool:
        """Whether a lock or a transaction is still there some time after the interrupt."""
        try:  # PostgreSQL takes a moment to notice that a connection was closed
            until(lambda: not self.is_locked(), "no lock", seconds=limit(2))
        except TimeLimitError:
            return True
        return False

    def is_locked(self) -> bool:
        if self.engine.dialect.name == "sqlite":
            with closing(sqlite3.connect(self.engine.url.database or "", timeout=0, isolation_level=None)) as raw:
                try:
                    raw.execute("BEGIN IMMEDIATE")
                    raw.execute("ROLLBACK")
                except sqlite3.OperationalError:
                    return True
            return False
        query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :id AND state LIKE 'idle in tr%'")
        with self.watching.connect() as connection:
            return bool(connection.scalar(query, {"id": self.id}))

    def finish(self) -> None:
        """After the last interrupt everything works."""
        if self.writer is None:
            self.connect()
        self.transaction()
        self.close()
        dualwrite.recover(self.engine, kafka=self.servers, ids=[self.id])
        gc.collect()
        self.tally.checked_out.append(self.engine.pool.checkedout())  # type: ignore[attr-defined]  # QueuePool
        self.engine.dispose()
        self.watching.dispose()


def main() -> None:
    url, servers, transactional_id, topic, interrupts = sys.argv[1:]
    interrupted = Interrupted(url, servers, transactional_id, topic)
    interrupted.run(int(interrupts))
    interrupted.finish()
    report: dict[str, Any] = vars(interrupted.tally)
    print("report", json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
