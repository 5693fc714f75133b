"""What test_interrupts.py sends SIGINT to: a process that opens writers and runs transactions until it is told to stop.

python interrupted.py URL BOOTSTRAP ID TOPIC INTERRUPTS

SIGINT is Python's own: KeyboardInterrupt at any bytecode. The parent sends one after each line that it gets ("ready …"). The
signal is blocked but for the part under test, so that the harness itself is never what is interrupted.
"""

from __future__ import annotations

import gc
import json
import random
import signal
import sys
from contextlib import contextmanager
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

import dualwrite

SIGINT = {signal.SIGINT}


@dataclass
class Tally:
    """What happened, for the parent."""

    interrupts: int = 0
    number: int = 0
    done: list[int] = field(default_factory=list)
    opened: int = 0
    errors: list[str] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)
    checked_out: list[int] = field(default_factory=list)


@contextmanager
def interruptible() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGINT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGINT)


class Interrupted:
    """One engine, one id."""

    def __init__(self, url: str, servers: str, transactional_id: str, topic: str) -> None:
        self.engine = sa.create_engine(url)
        self.servers = servers
        self.id = transactional_id
        self.topic = topic
        self.tally = Tally()
        self.writer: dualwrite.DualWriter | None = None

    def connect(self) -> None:
        self.writer = dualwrite.connect(
            self.engine,
            kafka=self.servers,
            transactional_id=self.id,
            timeouts=dualwrite.Timeouts(claim=10, kafka=20, delivery=20),
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
        """Go on until so many interrupts have come; now and then the writer is closed and another opened."""
        chance = random.Random(7)
        print("ready", flush=True)
        while self.tally.interrupts < interrupts:
            try:
                self.run_until_interrupted(chance)
            except KeyboardInterrupt:
                self.interrupted()
            except dualwrite.FencedError as error:
                self.tally.errors.append(repr(error))
                assert self.writer is not None
                self.writer.reopen()

    def run_until_interrupted(self, chance: random.Random) -> None:
        while True:
            if self.writer is None:
                with interruptible():
                    self.connect()
            with interruptible():
                for _ in range(20):
                    self.transaction()
            if chance.random() < 0.5:
                with interruptible():
                    self.close()

    def interrupted(self) -> None:
        """Look at what is left, and ask for the next one."""
        self.tally.interrupts += 1
        phase = "none" if self.writer is None else self.writer.phase.name
        self.tally.phases[phase] = self.tally.phases.get(phase, 0) + 1
        gc.collect()
        self.tally.checked_out.append(self.engine.pool.checkedout())  # type: ignore[attr-defined]  # QueuePool
        print("ready", self.tally.interrupts, flush=True)

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
        dualwrite.recover(self.engine, kafka=self.servers, ids=[self.id])
        gc.collect()
        self.tally.checked_out.append(self.engine.pool.checkedout())  # type: ignore[attr-defined]  # QueuePool
        self.engine.dispose()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    url, servers, transactional_id, topic, interrupts = sys.argv[1:]
    interrupted = Interrupted(url, servers, transactional_id, topic)
    interrupted.run(int(interrupts))
    interrupted.finish()
    report: dict[str, Any] = vars(interrupted.tally)
    print("report", json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
