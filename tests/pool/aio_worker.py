"""The process that the crash tests of the pool for asyncio kill: coroutines that write events through one pool.

python -m pool.aio_worker URL BOOTSTRAP PREFIX TOPIC FIRST COUNT CALLERS   write events FIRST … FIRST+COUNT-1, a unit each

Units are coroutines and plain functions in turn. It prints `told N` when the caller of unit N knows that it is committed.
SIZE is the number of writers.
"""

import asyncio
import os
import sys

import sqlalchemy as sa

import dualwrite
from crash.events import write_event
from crash.worker import say, settings, timeouts
from dualwrite import Transaction, aio
from fixtures.pace import LIMIT

INSERT = sa.text("INSERT INTO events (writer, number) VALUES (:writer, :number)")


async def write() -> None:
    url, bootstrap, prefix, topic = sys.argv[1:5]
    first, count, callers = map(int, sys.argv[5:8])
    left = iter(range(first, first + count))

    def plain(tx: Transaction, number: int) -> None:
        write_event(url, tx.db, prefix, number)
        tx.send(topic, str(number), key=prefix)

    async def unit(tx: aio.AsyncTransaction, number: int) -> None:
        if isinstance(tx.db, aio.AsyncConnection):
            await tx.db.execute(INSERT, {"writer": prefix, "number": number})
        else:
            write_event(url, tx.db, prefix, number)
        tx.send(topic, str(number), key=prefix)
        await asyncio.sleep(0)

    async def caller() -> None:
        for number in left:
            try:
                await pool.run(unit if number % 2 else plain, number)
            except dualwrite.DualWriteError as error:
                say("error", number, type(error).__name__, error)
            else:
                say("told", number)

    options = dualwrite.PoolOptions(timeout=LIMIT)
    size = int(os.environ.get("SIZE", "2"))
    async with await aio.create_pool(
        url, kafka=settings(bootstrap), prefix=prefix, size=size, options=options, timeouts=timeouts()
    ) as pool:
        say("open")
        await asyncio.gather(*(caller() for _ in range(callers)))
    say("closed")


def main() -> None:
    asyncio.run(write())


if __name__ == "__main__":
    main()
