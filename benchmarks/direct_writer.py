"""A process with one writer, for direct.py: it runs transactions on request, with the dualwrite on its PYTHONPATH.

python direct_writer.py URL KAFKA NUMBER ID TOPIC OPTIONS      KAFKA: the settings as JSON; OPTIONS: of connect(), as JSON

It prints `ready`. For each line on its standard input, a number of seconds, it runs transactions for so long, and then prints
a line of JSON: how many it has committed, in how many seconds, and how much CPU time all threads of the process used. When its
input ends, it prints how many it has committed in total. Its rows and messages are the records of writer NUMBER.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Final

import sqlalchemy as sa

import dualwrite
from records import records

_WARM_UP: Final = 20
_INSERT: Final = sa.text("INSERT INTO direct_orders (item) VALUES (:item)")


def main() -> None:
    """Open the writer, then measure until the input ends."""
    url, kafka, number, transactional_id, topic, options = sys.argv[1:]
    contents, total = records(int(number)), 0
    engine = sa.create_engine(url)
    chosen = {"kafka": json.loads(kafka), "transactional_id": transactional_id, **json.loads(options)}
    with dualwrite.connect(engine, **chosen) as writer:

        def transaction() -> None:
            nonlocal total
            item = next(contents).decode()
            with writer.transaction() as tx:
                tx.db.execute(_INSERT, {"item": item})
                tx.send(topic, item, key=transactional_id)
            total += 1

        for _ in range(_WARM_UP):
            transaction()
        print("ready", flush=True)
        for line in sys.stdin:
            done = 0
            cpu, began = time.process_time(), time.perf_counter()
            until = began + float(line)
            while time.perf_counter() < until:
                transaction()
                done += 1
            found = {"transactions": done, "seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
            print(json.dumps(found), flush=True)
    print(total, flush=True)


if __name__ == "__main__":
    main()
