"""The process that the crash tests kill: threads, or coroutines, that write events on sessions of their own and join a pool.

python -m joined.worker URL BOOTSTRAP PREFIX TOPIC FIRST COUNT CALLERS   write events FIRST … FIRST+COUNT-1

It prints `open`, and `told N` when the caller knows that event N is committed. DRIVER is that of the sessions, SIZE the number
of writers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import dualwrite
from crash.worker import say, settings, timeouts
from fixtures.pace import LIMIT
from joined.own_sessions import ASYNC, INSERT, users_url


@contextmanager
def outcome(number: int) -> Iterator[None]:
    """Say what the caller is told."""
    try:
        yield
    except (dualwrite.DualWriteError, SQLAlchemyError) as error:
        say("error", number, type(error).__name__, error)
    else:
        say("told", number)


def main() -> None:
    url, bootstrap, prefix, topic = sys.argv[1:5]
    first, count, callers = map(int, sys.argv[5:8])
    driver = os.environ["DRIVER"]
    users = users_url(url, driver)
    numbers = range(first, first + count)
    options = dualwrite.PoolOptions(timeout=LIMIT)
    size = int(os.environ.get("SIZE", "2"))
    with dualwrite.create_pool(
        url, kafka=settings(bootstrap), prefix=prefix, options=options, timeouts=timeouts(), size=size
    ) as pool:
        say("open", *pool.transactional_ids)
        if driver in ASYNC:
            asyncio.run(_with_coroutines(users, pool, prefix, topic, numbers, callers))
        else:
            _with_threads(users, pool, prefix, topic, numbers, callers)
    say("closed")


def _values(prefix: str, number: int) -> dict[str, Any]:
    return {"writer": prefix, "number": number}


def _with_threads(users: sa.URL, pool: Any, prefix: str, topic: str, numbers: range, callers: int) -> None:
    engine = sa.create_engine(users, pool_size=callers)

    def one(number: int) -> None:
        with outcome(number), Session(engine) as session:
            session.execute(INSERT, _values(prefix, number))
            pool.join(session).send(topic, str(number), key=prefix)
            session.commit()

    with ThreadPoolExecutor(1 if engine.dialect.name == "sqlite" else callers) as threads:
        list(threads.map(one, numbers))
    engine.dispose()


async def _with_coroutines(users: sa.URL, pool: Any, prefix: str, topic: str, numbers: range, callers: int) -> None:
    engine = create_async_engine(users, **({} if users.drivername.startswith("sqlite") else {"pool_size": callers}))
    left = iter(numbers)

    async def some() -> None:
        for number in left:
            with outcome(number):
                async with AsyncSession(engine) as session:
                    await session.execute(INSERT, _values(prefix, number))
                    pool.join(session).send(topic, str(number), key=prefix)
                    await session.commit()

    await asyncio.gather(*(some() for _ in range(1 if users.drivername.startswith("sqlite") else callers)))
    await engine.dispose()


if __name__ == "__main__":
    main()
