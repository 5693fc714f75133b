"""The process that soak runs of pools kill: callers with a key each, which write until they are stopped.

python -m pool.soak_worker URL BOOTSTRAP PREFIX TOPIC FIRST CALLERS HISTORY   until standard input ends, or it is killed

Caller K writes FIRST + K * PER_CALLER, and so on, a few units at once with its key. It prints `told N …` when it knows that
these are committed, and records its calls in the folder HISTORY. The number of writers changes at random all the time.

Variables: LEASE is the length of the leases in seconds; each FAILING-th unit raises an error after it has written; with
HANDLE=aio the callers and their units are coroutines.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
from history_recorder import Recorder

import dualwrite
from crash.events import write_event
from crash.worker import say, settings, timeouts
from dualwrite import Transaction, aio
from fixtures.histories import fails
from fixtures.pace import LIMIT
from pool.aio_scene import INSERT
from pool.restless import MOST, make_restless
from pool.worker import NoNeedError

PER_CALLER: Final = 20_000
AT_ONCE: Final = 5
PAUSE: Final = 0.2
"""Seconds that a caller waits when all that it has called at once has failed."""


class Callers:
    """What the callers write, and what is recorded of it.

    Args:
        where: URL, bootstrap servers, prefix, topic, the first number.
        history: The folder.
    """

    def __init__(self, where: list[str], history: str) -> None:
        self._url, _, self._prefix, self._topic, first = where
        self._first, self._failing = int(first), int(os.environ.get("FAILING", "0"))
        self._recorder = Recorder(history, "pool")
        self.stopping = threading.Event()

    def unit(self, tx: Transaction, number: int, caller: int) -> None:
        write_event(self._url, tx.db, self._prefix, number)
        self._send(tx, number, caller)

    async def coroutine(self, tx: aio.AsyncTransaction, number: int, caller: int) -> None:
        await tx.db.execute(INSERT, {"writer": self._prefix, "number": number})
        self._send(tx, number, caller)

    def _send(self, tx: Any, number: int, caller: int) -> None:
        tx.send(self._topic, str(number), key=str(caller))
        if self._failing and number % self._failing == 0:
            raise NoNeedError

    def numbers(self, caller: int) -> Iterator[range]:
        """What a caller calls at once, until it is stopped or has written all."""
        begin = self._first + caller * PER_CALLER
        for number in range(begin, begin + PER_CALLER, AT_ONCE):
            if self.stopping.is_set():
                return
            yield range(number, number + AT_ONCE)

    def begin(self, number: int, caller: int) -> int:
        return self._recorder.invoke(caller, [number], {self._topic: [(str(caller), str(number))]})

    def end(self, operation: int, error: BaseException | None) -> bool:
        """Whether a call is committed."""
        self._recorder.end(operation, error, fails=fails)
        return error is None

    def close(self) -> None:
        self._recorder.close()


def call(callers: Callers, pool: dualwrite.WriterPool, caller: int) -> None:
    with_key = pool.with_options(key=caller)
    for numbers in callers.numbers(caller):
        begun = [(n, callers.begin(n, caller), with_key.submit(callers.unit, n, caller)) for n in numbers]
        told = [n for n, operation, future in begun if callers.end(operation, future.exception())]
        if told:
            say("told", *told)
        else:
            time.sleep(PAUSE)


async def call_at_once(callers: Callers, opened: Callable[..., Any], count: int) -> None:
    async def one(pool: aio.AsyncWriterPool[Any], n: int, caller: int) -> int | None:
        operation, error = callers.begin(n, caller), None
        try:
            await pool.run(callers.coroutine, n, caller)
        except Exception as raised:  # noqa: BLE001  (recorded)
            error = raised
        return n if callers.end(operation, error) else None

    async def call(pool: aio.AsyncWriterPool[Any], caller: int) -> None:
        with_key = pool.with_options(key=caller)
        for numbers in callers.numbers(caller):
            told = [n for n in await asyncio.gather(*(one(with_key, n, caller) for n in numbers)) if n is not None]
            if told:
                say("told", *told)
            else:
                await asyncio.sleep(PAUSE)

    async with opened() as pool:
        say("open")
        await asyncio.gather(*(call(pool, caller) for caller in range(count)))


def main() -> None:
    url, bootstrap, prefix, topic, first, count, history = sys.argv[1:8]
    callers = Callers([url, bootstrap, prefix, topic, first], history)

    def wait_for_the_end() -> None:
        sys.stdin.read()
        callers.stopping.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    make_restless(pytest.MonkeyPatch())
    options = dualwrite.PoolOptions(timeout=LIMIT, max_size=MOST, lease=float(os.environ.get("LEASE", "30")))
    given: dict[str, Any] = {"kafka": settings(bootstrap), "prefix": prefix, "options": options, "timeouts": timeouts()}
    if os.environ.get("HANDLE") == "aio":
        asyncio.run(call_at_once(callers, partial(aio.create_pool, url, **given), int(count)))
    else:
        with dualwrite.create_pool(url, **given) as pool:
            say("open")
            threads = [threading.Thread(target=call, args=(callers, pool, caller)) for caller in range(int(count))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    callers.close()
    say("closed")


if __name__ == "__main__":
    main()
