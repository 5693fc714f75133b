"""The process that the pool's soak test kills: callers with a key each, which write until they are stopped.

python -m pool.soak_worker URL BOOTSTRAP PREFIX TOPIC FIRST CALLERS HISTORY

Caller K writes FIRST + K * PER_CALLER, and so on, a few units at once with its key. It prints `told N …` when it knows that
these are committed, and records its calls in the folder HISTORY. The number of writers changes at random all the time.
"""

import sys
import threading
from typing import Final

import pytest
from history_recorder import Recorder

import dualwrite
from crash.events import write_event
from crash.worker import say, settings, timeouts
from dualwrite import Transaction
from fixtures.histories import fails
from fixtures.pace import LIMIT
from pool.restless import MOST, make_restless

PER_CALLER: Final = 20_000
AT_ONCE: Final = 5


def main() -> None:
    url, bootstrap, prefix, topic = sys.argv[1:5]
    first, callers = map(int, sys.argv[5:7])
    recorder = Recorder(sys.argv[7], "pool")

    def unit(tx: Transaction, number: int, caller: int) -> None:
        write_event(url, tx.db, prefix, number)
        tx.send(topic, str(number), key=str(caller))

    def call(pool: dualwrite.WriterPool, caller: int) -> None:
        with_key = pool.with_options(key=caller)
        begin = first + caller * PER_CALLER
        for number in range(begin, begin + PER_CALLER, AT_ONCE):
            begun = []
            for n in range(number, number + AT_ONCE):
                operation = recorder.invoke(caller, [n], {topic: [(str(caller), str(n))]})
                begun.append((n, operation, with_key.submit(unit, n, caller)))
            told = []
            for n, operation, future in begun:
                recorder.end(operation, error := future.exception(), fails=fails)
                if error is None:
                    told.append(n)
            if told:
                say("told", *told)

    make_restless(pytest.MonkeyPatch())
    options = dualwrite.PoolOptions(timeout=LIMIT, max_size=MOST)
    with dualwrite.create_pool(url, kafka=settings(bootstrap), prefix=prefix, options=options, timeouts=timeouts()) as pool:
        say("open")
        threads = [threading.Thread(target=call, args=(pool, caller)) for caller in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    recorder.close()
    say("closed")


if __name__ == "__main__":
    main()
