"""The processor that tests kill while Kafka is down: each message adds a link to a chain, through a pool with a journal.

python -m processor.journal_worker URL BOOTSTRAP PREFIX GROUP SOURCE TARGET [MEMBER]
    until a line comes from standard input, or it is killed; after the line "arm" it dies at JOURNAL_FAILPOINT, once it has
    written into the journal

A MEMBER keeps its partitions, and the messages that it has fetched, however long the broker is down; a process that is started
in its place has them at once. It prints `processing` when it has its first batch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any

import sqlalchemy as sa

import dualwrite
from crash.events import SqlEvents
from crash.worker import say, settings
from dualwrite.processor import DualProcessor, ProcessorOptions
from journal.chain_worker import opened
from journal.chains import die_at_failpoint, link

BATCH = 5
BRIEF = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 300}
PATIENT = {"session.timeout.ms": 300_000, "heartbeat.interval.ms": 1000}
"""The member keeps its partitions, and the messages that it has fetched, however long the broker is down."""

ONE_AFTER_ANOTHER = "UPDATE chains SET link = link WHERE chain = 0 AND topic = :topic"
"""Batches lock several chains, each in another order."""


def main() -> None:
    url, bootstrap, prefix, group, source, target, *member = sys.argv[1:]
    consumer = {**settings(bootstrap), "group.id": group, "fetch.wait.max.ms": 10, **(PATIENT if member else BRIEF)}
    if member:
        consumer["group.instance.id"] = member[0]
    seen: Any = deque(maxlen=10 * BATCH)
    is_processing = threading.Event()

    def add_links(messages: list[Any], tx: dualwrite.Transaction[sa.Connection]) -> None:
        tx.db.execute(sa.text(ONE_AFTER_ANOTHER), {"topic": target})
        for message in messages:
            SqlEvents.write(tx.db, group, int(message.value()))
            link(tx, target, seen)
        if not is_processing.is_set():
            is_processing.set()
            say("processing")
        time.sleep(0.01)  # there is something left to do when the broker is killed

    with opened(url, settings(bootstrap), prefix) as pool:
        options = ProcessorOptions(batch=BATCH, attempts=1, pause=0.05, longest_pause=0.5)
        processor = DualProcessor(pool, consumer, [source], handle_batch=add_links, options=options)
        running = threading.Thread(target=processor.run)
        running.start()
        if sys.stdin.readline() == "arm\n":  # once Kafka is down
            die_at_failpoint(lambda: any(tx.outcome == "journaled" for tx in list(seen)))
            sys.stdin.readline()
        processor.stop()
        running.join()
    say("done")


if __name__ == "__main__":
    main()
