"""The process that the soak run of hot keys kills: threads that count keys up, and send each number, through a journaled pool.

python -m journaled.hot_key_worker URL BOOTSTRAP PREFIX TOPIC THREADS   until a line comes from standard input, or it is killed

It prints `open`, and `units N` when it ends.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from typing import Any

import sqlalchemy as sa

from crash.worker import say, settings
from dualwrite import Transaction, WriterPool
from journal.chain_worker import opened

KEYS = 10
COUNT = "UPDATE hot_keys SET number = number + 1 WHERE topic = :topic AND hot_key = :key"
READ = "SELECT number FROM hot_keys WHERE topic = :topic AND hot_key = :key"


def count(tx: Transaction[sa.Connection], topic: str) -> None:
    """Count a key up, and send its number."""
    where = {"topic": topic, "key": random.randrange(KEYS)}
    tx.db.execute(sa.text(COUNT), where)
    tx.send(topic, str(tx.db.scalar(sa.text(READ), where)), key=str(where["key"]))


def main() -> None:
    url, bootstrap, prefix, topic, threads = sys.argv[1:6]
    os.environ |= {"ACKNOWLEDGE": "journaled", "SIZE": threads}
    stopping, done = threading.Event(), [0] * int(threads)

    def write(pool: WriterPool[Any], number: int) -> None:
        while not stopping.is_set():
            try:
                pool.run(count, topic)
            except Exception as error:  # noqa: BLE001  (counted by the test through what both sides have)
                say("error", type(error).__name__, str(error)[:300].replace("\n", " "))
            else:
                done[number] += 1

    with opened(url, settings(bootstrap), prefix) as pool:
        say("open")
        writers = [threading.Thread(target=write, args=(pool, number)) for number in range(int(threads))]
        for thread in writers:
            thread.start()
        sys.stdin.readline()
        stopping.set()
        for thread in writers:
            thread.join()
    say("units", sum(done))


if __name__ == "__main__":
    main()
