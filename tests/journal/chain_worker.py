"""The process that the journal's chaos tests kill: threads that add links to chains, through a pool with a journal.

python -m journal.chain_worker URL BOOTSTRAP PREFIX TOPIC THREADS   until a line comes from standard input, or it is killed;
    after the line "arm" it dies at JOURNAL_FAILPOINT, once it has written into the journal

It prints `open`, and `links N JOURNALED` when it ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import sqlalchemy as sa

import dualwrite
from crash.worker import say, settings
from dualwrite import PoolOptions, Timeouts, Transaction, WriterPool
from fixtures.pace import LIMIT
from journal.chains import die_at_failpoint, link, shorten_leases


def opened(url: str, kafka: dict[str, Any], prefix: str) -> WriterPool[Any]:
    """A pool, whether Kafka answers or not."""
    shorten_leases()
    options = PoolOptions(
        timeout=LIMIT,
        lease=float(os.environ.get("LEASE", "2")),
        when_kafka_is_down="journal",
        acknowledge=os.environ.get("ACKNOWLEDGE", "visible"),  # type: ignore[arg-type]  # checked there
    )
    two_phase = None if os.environ.get("TWO_PHASE") != "no" else False
    isolation = os.environ.get("ISOLATION")
    engine = sa.create_engine(url, **({} if isolation is None else {"isolation_level": isolation}))
    return dualwrite.create_pool(
        engine,
        prefix=prefix,
        kafka=kafka,
        options=options,
        size=int(os.environ.get("SIZE", "2")),
        two_phase=two_phase,
        timeouts=Timeouts(claim=10, kafka=5),
    )


def main() -> None:
    url, bootstrap, prefix, topic, threads = sys.argv[1:6]
    stopping = threading.Event()
    counts = {"published": 0, "journaled": 0}
    lock = threading.Lock()

    def write(pool: WriterPool[Any]) -> None:
        while not stopping.is_set():
            seen: list[Transaction[Any]] = []
            try:
                pool.run(link, topic, seen)
            except Exception as error:  # noqa: BLE001  (counted by the test through what both sides have)
                say("error", type(error).__name__, str(error)[:300].replace("\n", " "))
                time.sleep(0.05)
            else:
                with lock:
                    counts[seen[-1].outcome or "published"] += 1
            time.sleep(0.03)  # what runs beside it needs the cores, too

    with opened(url, settings(bootstrap), prefix) as pool:
        say("open")
        writers = [threading.Thread(target=write, args=(pool,)) for _ in range(int(threads))]
        for thread in writers:
            thread.start()
        if sys.stdin.readline() == "arm\n":  # once Kafka is down: wait until units go through the journal
            die_at_failpoint(lambda: counts["journaled"] > 0)
            sys.stdin.readline()
        stopping.set()
        for thread in writers:
            thread.join()
    say("links", counts["published"], counts["journaled"])


if __name__ == "__main__":
    main()
