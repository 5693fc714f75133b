"""The process that the pool's crash tests kill: threads that write events through one pool.

python -m pool.worker URL BOOTSTRAP PREFIX TOPIC FIRST COUNT THREADS   write events FIRST … FIRST+COUNT-1, a unit each

It prints `open IDS` with the pool's transactional ids, and `told N` when the caller of unit N knows that it is committed. The
variable LEASE is the length of the leases in seconds (on ZooKeeper, where a lease lasts as long as the session, sessions then
end after SESSION seconds), SIZE the number of writers.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import dualwrite
from crash.events import write_event
from crash.worker import say, settings, timeouts
from dualwrite import Transaction
from fixtures.pace import LIMIT

SESSION: Final = 5
"""Much less than the default of ten, and longer than a process at work may take to answer."""


def main() -> None:
    url, bootstrap, prefix, topic = sys.argv[1:5]
    first, count, threads = map(int, sys.argv[5:8])

    def unit(tx: Transaction, number: int) -> None:
        write_event(url, tx.db, prefix, number)
        tx.send(topic, str(number), key=prefix)

    def call(number: int) -> None:
        try:
            pool.run(unit, number)
        except dualwrite.DualWriteError as error:
            say("error", number, type(error).__name__, error)
        else:
            say("told", number)

    options = dualwrite.PoolOptions(timeout=LIMIT, lease=float(os.environ.get("LEASE", "30")))
    database = f"{url}?session_timeout={SESSION}" if url.startswith("zookeeper:") and "LEASE" in os.environ else url
    more = {"size": int(os.environ.get("SIZE", "2")), "options": options, "timeouts": timeouts()}
    with (
        dualwrite.create_pool(database, kafka=settings(bootstrap), prefix=prefix, **more) as pool,
        ThreadPoolExecutor(threads) as callers,
    ):
        say("open", *pool.transactional_ids)
        list(callers.map(call, range(first, first + count)))
    say("closed")


if __name__ == "__main__":
    main()
