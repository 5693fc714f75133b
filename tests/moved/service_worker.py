"""The service that is moved through its surroundings: a pool that adds links to chains, a relay, and a processor.

python -m moved.service_worker URL BOOTSTRAP PREFIX TOPIC KAFKA   until a line comes from standard input, or it is
    killed; KAFKA are more settings as JSON. With CLOCK_AHEAD its clock is so many seconds ahead; CALLERS add links.

Each part is called again after an error of dualwrite's, as a supervisor would start it again. It prints `open`,
`bare NAME TEXT` for each error that is not one of dualwrite's, and `links PUBLISHED JOURNALED` when it ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

import dualwrite
from crash.worker import say, settings
from dualwrite import DualWriteError, PoolOptions, Timeouts, Transaction
from dualwrite.processor import DualProcessor, ProcessorOptions
from dualwrite.relay import RelayOptions
from fixtures.pace import LIMIT
from journal.chains import link

TAKE = sa.text("INSERT INTO taken (topic, value) VALUES (:topic, :value)")
LEASE = 3.0


def outbox_topic(topic: str) -> str:
    """The topic to which the relay publishes."""
    return f"{topic}.outbox"


def move_clock(seconds: float) -> None:
    """This process's clock is ahead from now on; a real one can be only for the whole machine."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 10**9)


class Service:
    """The parts, each in a thread until `stop`."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stops: list[Callable[[], object]] = []

    def start(self, part: Callable[[], object], stop: Callable[[], object] = lambda: None) -> None:
        def run() -> None:
            while not self._stopping.is_set():
                try:
                    part()
                except DualWriteError as error:
                    say("error", type(error).__name__, " ".join(str(error).split())[:300])
                except Exception as error:  # noqa: BLE001  (the test looks for them)
                    say("bare", type(error).__name__, " ".join(str(error).split())[:300])
                self._stopping.wait(0.02)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._stops.append(stop)

    def stop(self) -> None:
        self._stopping.set()
        for stop in self._stops:
            stop()
        for thread in self._threads:
            thread.join()


def main() -> None:
    url, bootstrap, prefix, topic = sys.argv[1:5]
    kafka = settings(bootstrap)
    if "CLOCK_AHEAD" in os.environ:
        move_clock(float(os.environ["CLOCK_AHEAD"]))
    outcomes = {"published": 0, "journaled": 0}
    lock = threading.Lock()
    options = PoolOptions(timeout=LIMIT, lease=LEASE, when_kafka_is_down="journal")
    limits = Timeouts(claim=10, kafka=5)
    service = Service()

    with (
        dualwrite.create_pool(url, prefix=prefix, kafka=kafka, options=options, size=2, timeouts=limits) as pool,
        dualwrite.Relay(
            url, name=f"{prefix}.relay", kafka=kafka, options=RelayOptions(longest_poll=0.2, lease=LEASE), timeouts=limits
        ) as relay,
    ):

        def add_link() -> None:
            seen: list[Transaction[Any]] = []
            try:
                pool.run(link, topic, seen)
            except sa.exc.DBAPIError as error:  # of the unit's own statement: the driver's, as errors.md says
                if not pool.store.is_outage(error):
                    raise
                return
            with lock:
                outcomes[seen[-1].outcome or "published"] += 1

        def take(message: Any, tx: Transaction[sa.Connection]) -> None:
            tx.db.execute(TAKE, {"topic": topic, "value": message.value().decode()})

        consumer = {
            **kafka,
            "group.id": prefix,
            "session.timeout.ms": "6000",
            "heartbeat.interval.ms": "500",
            "fetch.wait.max.ms": "10",
        }
        answers = ProcessorOptions(attempts=2, pause=0.05, longest_pause=0.5, dead_letter_topic=f"{topic}.dead")
        processor = DualProcessor(pool, consumer, [topic], handle=take, options=answers)
        say("open")
        for _ in range(int(os.environ.get("CALLERS", "2"))):
            service.start(add_link)
        service.start(relay.run, relay.stop)
        service.start(processor.run, processor.stop)
        sys.stdin.readline()
        service.stop()
    say("links", outcomes["published"], outcomes["journaled"])


if __name__ == "__main__":
    main()
