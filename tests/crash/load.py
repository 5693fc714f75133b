"""Writers under load, killed at random: at the end the database and the topic are compared record by record.

From the folder of the checkout::

    PYTHONPATH=tests python -m crash.load --database zookeeper --seconds 300

Four writers, each with its own transactional id, write one event after another; every few seconds one is killed (SIGKILL) and
started again, which recovers its id. Only one process can open a RocksDB database: there the four are threads, killed together.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crash import worker
from crash.databases import DATABASES, Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended, happened, joined

WRITERS = 4
PAUSE = (1.0, 4.0)


@dataclass
class Tally:
    """The result of a run.

    Args:
        database: The kind of database.
        seconds: How long the writers ran.
        transactions: The number of events in the database, which are the same as in the topic.
        kills: The number of processes that were killed.
        unsure: The number of events that exist although their process was killed before their block had ended.
        recoveries: What the writers found when they opened, by outcome.
    """

    database: str
    seconds: float
    transactions: int = 0
    kills: int = 0
    unsure: int = 0
    recoveries: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(self.recoveries.items())) or "none"
        return (
            f"{self.database}: {self.transactions:,} transactions in {self.seconds:.0f} s, {self.kills} kills; "
            f"{self.unsure} were committed and had not told; recoveries by outcome: {outcomes}. Database and topic agree."
        )


class Killed:
    """A process with one or more writers, which is killed and restarted until `end`."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self._scenes = scenes
        self._next = dict.fromkeys((scene.transactional_id for scene in scenes), 1)
        self.done: dict[str, list[int]] = {scene.transactional_id: [] for scene in scenes}
        self.outcomes: Counter[str] = Counter()
        self.errors: list[str] = []
        self.start()

    def start(self) -> None:
        first = self._scenes[0]
        ids = [[name, number] for name, number in self._next.items()]
        self._process = ForkedProcess(
            "crash.worker",
            ["load", first.url, first.bootstrap, json.dumps(ids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._open = threading.Event()
        self._reading = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reading.start()

    def _read(self, process: ForkedProcess) -> None:
        assert process.stdout is not None
        waiting = set(self._next)
        for line in process.stdout:
            word, name, *rest = line.rstrip("\n").split(" ", 2)
            if word == "begin":
                self._next[name] = int(rest[0]) + 1
            elif word == "done":
                self.done[name].append(int(rest[0]))
            elif word == "open":
                self.outcomes.update(outcome for outcome in (rest[0].split(",") if rest else []) if outcome)
                waiting.discard(name)
                if not waiting:
                    self._open.set()
            else:
                self.errors.append(line)
        self._open.set()

    def kill(self) -> None:
        """Kill it once every id was opened, so that it has done some work."""
        happened(self._open, f"{list(self._next)} are opened")
        assert self._process.poll() is None, f"it ended by itself, with {self._process.returncode}: {self.errors}"
        self._process.kill()
        self._gone()

    def end(self) -> None:
        """Let it finish its current transactions."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._gone()

    def _gone(self) -> None:
        ended(self._process)
        joined(self._reading)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def run(databases: Databases, broker: DevCluster, database: str, seconds: float, *, seed: int | None = None) -> Tally:
    """Run the writers for this long while killing them; then recover and compare.

    Raises:
        AssertionError: The two sides differ, something was left open, or a writer had an error.
    """
    chance = random.Random(seed)
    scenes = [databases.scene(database, broker)]
    scenes += [Scene(scenes[0].events, broker.bootstrap_servers) for _ in range(WRITERS - 1)]
    together = scenes[0].events.one_process
    processes = [Killed(scenes)] if together else [Killed([scene]) for scene in scenes]
    tally = Tally(database, seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(chance.uniform(*PAUSE))
        process = chance.choice(processes)
        process.kill()
        process.start()
        tally.kills += 1
    for process in processes:
        process.end()
        assert not process.errors, process.errors
        tally.recoveries.update(process.outcomes)
    for scene in scenes:
        report = scene.recover()
        assert (report["error"], report["unacknowledged"]) == (None, []), report
        there = scene.agree()
        told = next(process.done[scene.transactional_id] for process in processes if scene.transactional_id in process.done)
        assert set(told) <= set(there), f"told as committed, and not there: {sorted(set(told) - set(there))}"
        tally.transactions += len(there)
        tally.unsure += len(set(there) - set(told))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=DATABASES, action="append", help="several times: several")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder, Databases(Path(folder)) as databases, DevCluster.temporary() as broker:
        for database in options.database or DATABASES:
            worker.say(run(databases, broker, database, options.seconds, seed=options.seed))


if __name__ == "__main__":
    main()
