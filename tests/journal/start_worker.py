"""The process that starts while Kafka is down: a writer with a journal of its own, which the tests kill.

python -m journal.start_worker URL BOOTSTRAP ID TOPIC COUNT   write COUNT events after the last one, each in a transaction

It prints `open`, `done NUMBER OUTCOME` after each event, and then waits for a line from standard input before it closes.
"""

from __future__ import annotations

import sys
from typing import Any

import sqlalchemy as sa

import dualwrite
from crash.events import write_event
from crash.worker import say, settings, timeouts
from dualwrite import Transaction
from journal.chains import shorten_leases


def last_event(engine: sa.Engine, writer: str) -> int:
    """The number of the last event in the database; 0 if there is none."""
    with engine.begin() as connection:
        found = connection.scalar(sa.text("SELECT max(number) FROM events WHERE writer = :writer"), {"writer": writer})
    return int(found or 0)


def main() -> None:
    url, bootstrap, name, topic, count = sys.argv[1:6]
    engine = sa.create_engine(url)
    shorten_leases()
    with dualwrite.connect(
        engine, kafka=settings(bootstrap), transactional_id=name, timeouts=timeouts(), when_kafka_is_down="journal"
    ) as writer:
        say("open")

        @writer.transactional
        def event(tx: Transaction[Any], number: int) -> Transaction[Any]:
            write_event(url, tx.db, name, number)
            tx.send(topic, str(number))
            return tx

        first = last_event(engine, name) + 1
        for number in range(first, first + int(count)):
            say("done", number, event(number).outcome)
        sys.stdin.readline()
    say("closed")


if __name__ == "__main__":
    main()
