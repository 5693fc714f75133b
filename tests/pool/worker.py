"""The process that the pool's crash tests kill: threads that write events through one pool.

python -m pool.worker URL BOOTSTRAP PREFIX TOPIC FIRST COUNT THREADS   write events FIRST … FIRST+COUNT-1, a unit each

It prints `open IDS` with the pool's transactional ids, and `told N` when the caller of unit N knows that it is committed. The
variable LEASE is the length of the leases in seconds (on ZooKeeper, where a lease lasts as long as the session, sessions then
end after SESSION seconds), SIZE the number of writers.

More variables: HANDLE=psycopg gives the units psycopg connections, whose statements go through libpq's pipeline;
ACKNOWLEDGE=decided; every FAILING-th unit raises after it has written, and every HEAVY-th sends a message that is too large, so
that the units of its group run one by one. RESTLESS=1 makes the number of writers change at random all the time.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
from psycopg_pool import ConnectionPool

import dualwrite
from crash.events import write_event
from crash.worker import say, settings, timeouts
from dualwrite import Transaction
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT
from pool.restless import MOST, make_restless

SESSION: Final = 5
"""Much less than the default of ten, and longer than a process at work may take to answer."""


def is_psycopg() -> bool:
    """Read by the process: its module was imported before it was forked."""
    return os.environ.get("HANDLE") == "psycopg"


class NoNeedError(Exception):
    """A unit's own error."""


@contextmanager
def opened(url: str) -> Iterator[Any]:
    """The database for the pool."""
    if is_psycopg():
        with (
            ConnectionPool(url.replace("+psycopg", ""), max_size=2 * MOST, min_size=4, open=True) as connections,
            SqlStateStore.from_psycopg(connections) as store,
        ):
            yield store
    elif url.startswith("zookeeper:") and "LEASE" in os.environ:
        yield f"{url}?session_timeout={SESSION}"
    else:
        yield url


def main() -> None:
    url, bootstrap, prefix, topic = sys.argv[1:5]
    first, count, threads = map(int, sys.argv[5:8])

    failing, heavy = (int(os.environ.get(name, "0")) for name in ("FAILING", "HEAVY"))

    def unit(tx: Transaction, number: int) -> None:
        if is_psycopg():
            tx.db.execute("INSERT INTO events VALUES (%s, %s)", (prefix, number))
        else:
            write_event(url, tx.db, prefix, number)
        tx.send(topic, str(number), key=prefix)
        if failing and number % failing == 0:
            raise NoNeedError
        if heavy and number % heavy == 0:
            tx.send(topic, b"x" * 1_100_000)

    def call(number: int) -> None:
        try:
            pool.run(unit, number)
        except (dualwrite.DualWriteError, NoNeedError) as error:
            say("error", number, type(error).__name__, error)
        else:
            say("told", number)

    acknowledge: Any = os.environ.get("ACKNOWLEDGE", "visible")
    options = dualwrite.PoolOptions(timeout=LIMIT, lease=float(os.environ.get("LEASE", "30")), acknowledge=acknowledge)
    more = {"size": int(os.environ.get("SIZE", "2")), "options": options, "timeouts": timeouts()}
    if os.environ.get("RESTLESS"):
        make_restless(pytest.MonkeyPatch())
        more |= {"size": None, "options": replace(options, max_size=MOST)}
    with (
        opened(url) as database,
        dualwrite.create_pool(database, kafka=settings(bootstrap), prefix=prefix, **more) as pool,
        ThreadPoolExecutor(threads) as callers,
    ):
        say("open", *pool.transactional_ids)
        list(callers.map(call, range(first, first + count)))
    say("closed")


if __name__ == "__main__":
    main()
