"""The process that the soak run of hot keys kills: threads that write numbers, each with a key and seeing the key's last one.

python -m journaled.hot_key_worker URL BOOTSTRAP PREFIX TOPIC THREADS FIRST HISTORY
    until a line comes from standard input, or it is killed

Its numbers begin with FIRST; each attempt of a unit has another one. It records its calls in the folder HISTORY, and prints
`open`, and `units N` when it ends.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from itertools import count
from typing import Any

import sqlalchemy as sa
from history_recorder import Recorder

from crash.events import write_event
from crash.scene import Scene
from crash.worker import say, settings
from dualwrite import Transaction, WriterPool
from fixtures.histories import fails
from journal.chain_worker import opened

KEYS = 10
PAUSE = 0.05
"""Seconds between an error and the next unit."""
CREATE = """
CREATE TABLE IF NOT EXISTS hot_keys
(topic varchar(100), hot_key integer, number integer, last integer, PRIMARY KEY (topic, hot_key))
"""
READ = "SELECT last FROM hot_keys WHERE topic = :topic AND hot_key = :key FOR UPDATE"
WRITE = "UPDATE hot_keys SET number = number + 1, last = :last WHERE topic = :topic AND hot_key = :key"


def begin(scene: Scene) -> None:
    """The keys of a scene, without a number."""
    with scene.engine.begin() as connection:
        connection.execute(sa.text(CREATE))
        insert = sa.text("INSERT INTO hot_keys VALUES (:topic, :key, 0, NULL)")
        connection.execute(insert, [{"topic": scene.topic, "key": key} for key in range(KEYS)])


def main() -> None:
    url, bootstrap, prefix, topic, threads, first, history = sys.argv[1:8]
    os.environ |= {"ACKNOWLEDGE": "journaled", "SIZE": threads}
    stopping, done = threading.Event(), [0] * int(threads)
    recorder, numbers = Recorder(history, "hot-keys"), count(int(first))

    def unit(tx: Transaction[sa.Connection], operation: int) -> None:
        number, where = next(numbers), {"topic": topic, "key": random.randrange(KEYS)}
        last, key = tx.db.scalar(sa.text(READ), where), str(where["key"])
        recorder.wrote(operation, [number], {topic: [(key, str(number))]}, seen=[last] if last else [])
        write_event(url, tx.db, prefix, number)
        tx.db.execute(sa.text(WRITE), {**where, "last": number})
        tx.send(topic, str(number), key=key)

    def write(pool: WriterPool[Any], number: int) -> None:
        while not stopping.is_set():
            try:
                with recorder.operation(number, fails=fails) as operation:
                    pool.run(unit, operation)
            except Exception as error:  # noqa: BLE001  (the history has it)
                say("error", type(error).__name__, str(error)[:300].replace("\n", " "))
                time.sleep(PAUSE)
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
    recorder.close()
    say("units", sum(done))


if __name__ == "__main__":
    main()
