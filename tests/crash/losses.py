"""Writers on a broker without two-phase commit that die, or pause, at random steps, often for longer than their timeout.

Kafka then aborts what the database has committed, and the next owner of the id publishes it again, or dies while it does so. At
the end the database and the topic are compared record by record, and each id's messages must be in their order. From the
folder of the checkout::

    PYTHONPATH=tests python -m crash.losses --producer native --seconds 120
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from crash import worker
from crash.cases import PRODUCERS, REPUBLISH_POINTS
from crash.databases import Databases
from crash.scene import Scene, Worker, report_of
from dualwrite.devcluster import DevCluster
from dualwrite.testing.topics import read_committed
from fixtures.broker import PROMPT_TIMEOUTS

IDS = 6
TIMEOUT = 5.0
"""Seconds of `transaction.timeout.ms`."""
POINTS = ("after_prepare", "after_record", "after_db_commit", "after_db_commit", "before_kafka_commit", *REPUBLISH_POINTS)
RESTARTED_AFTER = (0.0, 1.5 * TIMEOUT)
TRANSACTIONS = (2, 12)
"""How many transactions a writer writes before it dies."""


@dataclass
class Tally:
    """The result of a run: what the writers have written, how they ended, and what those that opened next found."""

    producer: str
    transactions: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        ends = ", ".join(f"{name} {count}" for name, count in sorted(self.ends.items()))
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(self.recoveries.items()))
        return (
            f"{self.producer}: {self.transactions:,} transactions; writers were {ends}; those that opened found: {outcomes}. "
            "Database and topic agree, and each id's messages are in order."
        )


def run(databases: Databases, broker: DevCluster, producer: str, seconds: float, *, seed: int | None = None) -> Tally:
    """Run the writers for this long; then recover and compare.

    Raises:
        AssertionError: The two sides differ, messages are out of order, or something was left open.
    """
    chance = random.Random(seed)
    scenes = [databases.scene("postgresql", broker) for _ in range(IDS)]
    for scene in scenes:
        scene.kafka = {"transaction.timeout.ms": int(1000 * TIMEOUT)}
    tally = Tally(producer)
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(IDS) as threads:
        for writing in [threads.submit(_write, scene, tally, until, random.Random(chance.random())) for scene in scenes]:
            writing.result()
    for scene in scenes:
        report = report_of(scene.recovery(**_options(producer)))
        assert (report["error"], report["unacknowledged"]) == (None, []), report
        in_order = [int(message.value or b"-1") for message in read_committed(scene.bootstrap, scene.topic)]
        assert in_order == sorted(in_order), f"{scene.transactional_id}: {in_order}"
        tally.transactions += len(scene.agree())
    assert tally.recoveries["PUBLISHED_AGAIN"], f"nothing was lost in {seconds} s: {tally}"
    return tally


def _write(scene: Scene, tally: Tally, until: float, chance: random.Random) -> None:
    """Write with one writer after the other, each of which dies, or is paused, at a random step."""
    following = 1
    while time.monotonic() < until:
        point, action = chance.choice(POINTS), chance.choice(("kill", "kill", "stop"))
        count = 1 if point in REPUBLISH_POINTS else chance.randint(*TRANSACTIONS)
        writer = scene.write(following, TRANSACTIONS[1], f"{point}#{count}={action}", **_options(tally.producer))
        pause = chance.uniform(*RESTARTED_AFTER)
        ended = _end(writer, pause, chance)
        with _LOCK:
            tally.ends[ended] += 1
            opened = [line.removeprefix("open ") for line in writer.lines if line.startswith("open ")]
            tally.recoveries.update(outcome for found in opened for outcome in found.split(",") if outcome)
        begun = [int(line.split()[1]) for line in writer.lines if line.startswith("begin ")]
        following = max([following, *(number + 1 for number in begun)])


def _options(producer: str) -> dict[str, str]:
    plain = {"DUALWRITE_TWO_PHASE": "false"} if producer == "native" else {}
    return {"DUALWRITE_PRODUCER": producer, "DUALWRITE_ON_LOST": "republish", **plain}


_LOCK = threading.Lock()


def _end(writer: Worker, pause: float, chance: random.Random) -> str:
    """Wait until the writer has ended; one that is stopped goes on after a pause, or is replaced while it is stopped."""
    status = Path(f"/proc/{writer.process.pid}/status")
    while writer.process.poll() is None:
        if "State:\tT" in status.read_text():
            time.sleep(pause)
            if chance.random() < 0.5:
                writer.kill()
                return "stopped, then killed"
            writer.resume()
            code = writer.end()
            return "stopped, then finished" if code == 0 else f"stopped, then ended with {writer.last().split()[1]}"
        time.sleep(0.05)
    code = writer.end()
    if code == -signal.SIGKILL:
        time.sleep(pause)
        return "killed"
    return "finished" if code == 0 else f"ended with {writer.last().split()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--producer", choices=PRODUCERS, action="append", help="both if it is not given")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["DUALWRITE_TESTING"] = "1"
    with (
        tempfile.TemporaryDirectory() as folder,
        Databases(Path(folder)) as databases,
        DevCluster.temporary(config=PROMPT_TIMEOUTS) as broker,
    ):
        for producer in options.producer or PRODUCERS:
            worker.say(run(databases, broker, producer, options.seconds, seed=options.seed))


if __name__ == "__main__":
    main()
