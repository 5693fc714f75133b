"""The process that the pool's crash tests kill: threads, or coroutines, that write events through one pool.

python -m pool.worker URL BOOTSTRAP PREFIX TOPIC FIRST COUNT CALLERS   write events FIRST … FIRST+COUNT-1, a unit each

It prints `open IDS` with the pool's transactional ids, and `told N` when the caller of unit N knows that it is committed. The
variable LEASE is the length of the leases in seconds (on ZooKeeper, where a lease lasts as long as the session, sessions then
end after SESSION seconds), SIZE the number of writers.

More variables: HANDLE=psycopg gives the units psycopg connections, whose statements go through libpq's pipeline, and with
HANDLE=aio every other unit is a coroutine; every FAILING-th unit raises after it has written, and every
HEAVY-th sends a message that is too large, so that the units of its group run one by one. RESTLESS=1 makes the number of
writers change at random all the time.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest

import dualwrite
from crash.events import write_event
from crash.worker import say, settings, timeouts
from dualwrite import Transaction, aio
from fixtures.pace import LIMIT
from pool.aio_scene import INSERT
from pool.pool_scene import psycopg_store
from pool.restless import MOST, make_restless

SESSION: Final = 5
"""Much less than the default of ten, and longer than a process at work may take to answer."""


def has_handle(kind: str) -> bool:
    """Read by the process: its module was imported before it was forked."""
    return os.environ.get("HANDLE") == kind


class NoNeedError(Exception):
    """A unit's own error."""


@contextmanager
def opened(url: str) -> Iterator[Any]:
    """The database for the pool."""
    if has_handle("psycopg"):
        with psycopg_store(url, max_size=2 * MOST) as store:
            yield store
    elif url.startswith("zookeeper:") and "LEASE" in os.environ:
        yield f"{url}?session_timeout={SESSION}"
    else:
        yield url


@contextmanager
def outcome(number: int) -> Iterator[None]:
    """Say what the caller of a unit is told."""
    try:
        yield
    except (dualwrite.DualWriteError, NoNeedError) as error:
        say("error", number, type(error).__name__, error)
    else:
        say("told", number)


def made_unit(url: str, prefix: str, topic: str) -> Callable[[Transaction, int], None]:
    failing, heavy = (int(os.environ.get(name, "0")) for name in ("FAILING", "HEAVY"))

    def unit(tx: Transaction, number: int) -> None:
        if has_handle("psycopg"):
            tx.db.execute("INSERT INTO events VALUES (%s, %s)", (prefix, number))
        else:
            write_event(url, tx.db, prefix, number)
        tx.send(topic, str(number), key=prefix)
        if failing and number % failing == 0:
            raise NoNeedError
        if heavy and number % heavy == 0:
            tx.send(topic, b"x" * 1_100_000)

    return unit


def made_coroutine(url: str, prefix: str, topic: str) -> Callable[[aio.AsyncTransaction, int], Coroutine[Any, Any, None]]:
    async def unit(tx: aio.AsyncTransaction, number: int) -> None:
        if isinstance(tx.db, aio.AsyncConnection):
            await tx.db.execute(INSERT, {"writer": prefix, "number": number})
        else:
            write_event(url, tx.db, prefix, number)
        tx.send(topic, str(number), key=prefix)
        await asyncio.sleep(0)

    return unit


async def call_at_once(database: Any, units: tuple[Any, Any], numbers: Iterator[int], callers: int, options: Any) -> None:
    async def call(pool: aio.AsyncWriterPool[Any]) -> None:
        for number in numbers:
            with outcome(number):
                await pool.run(units[number % 2], number)

    async with aio.create_pool(database, **options) as pool:
        say("open")
        await asyncio.gather(*(call(pool) for _ in range(callers)))


def main() -> None:
    url, bootstrap, prefix, topic = sys.argv[1:5]
    first, count, callers = map(int, sys.argv[5:8])
    numbers, unit = iter(range(first, first + count)), made_unit(url, prefix, topic)

    def call(number: int) -> None:
        with outcome(number):
            pool.run(unit, number)

    options = dualwrite.PoolOptions(timeout=LIMIT, lease=float(os.environ.get("LEASE", "30")))
    given: dict[str, Any] = {"kafka": settings(bootstrap), "prefix": prefix, "options": options, "timeouts": timeouts()}
    given["size"] = int(os.environ.get("SIZE", "2"))
    if os.environ.get("RESTLESS"):
        make_restless(pytest.MonkeyPatch())
        given |= {"size": None, "options": replace(options, max_size=MOST)}
    with opened(url) as database:
        if has_handle("aio"):
            asyncio.run(call_at_once(database, (unit, made_coroutine(url, prefix, topic)), numbers, callers, given))
        else:
            with dualwrite.create_pool(database, **given) as pool, ThreadPoolExecutor(callers) as threads:
                say("open", *pool.transactional_ids)
                list(threads.map(call, numbers))
    say("closed")


if __name__ == "__main__":
    main()
