"""The processor that tests kill: it books each number of a topic, and answers it in another topic, until SIGTERM.

python -m processor.processor_worker URL BOOTSTRAP GROUP SOURCE TARGET ID BATCH [NAME=VALUE …]

ID ends with `*` for a pool with this prefix, whose leases last a few seconds. NAME is a setting of the consumer, or one of the
processor's options: `offsets`, `attempts`, `dead_letter_topic`; or `answers=no` for a processor that writes the
database only; or `processors=N` for N processors that share the pool. With `history=FOLDER` it records what it processes, and
adds `process=K` times PROCESS to each number, so that no other process writes the same.
"""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from history_recorder import Recorder

import dualwrite
from dualwrite import observability
from dualwrite.processor import DualProcessor, ProcessorOptions
from processor.ledger import ledger

GENTLE = {"session.timeout.ms": "2000", "heartbeat.interval.ms": "300", "fetch.wait.max.ms": "10"}
LEASE = 3.0
PROCESS = 1_000_000


class Committed(threading.local):
    """An observer, for each thread: what its transaction has processed is committed when that is.

    Args:
        recorder: The process's.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.begun: set[int] = set()

    def __call__(self, event: observability.Event) -> None:
        match event:
            case observability.TransactionBegun():
                self.begun.clear()
            case observability.TransactionCommitted():
                while self.begun:
                    self._recorder.ok(self.begun.pop())


def main() -> None:
    url, servers, group, source, target, name, batch, *more = sys.argv[1:]
    settings = {"bootstrap.servers": servers, "group.id": group, **GENTLE, **dict(text.split("=", 1) for text in more)}
    settings = {key: value for key, value in settings.items() if value}
    answers = settings.pop("answers", "yes") == "yes"
    count = int(settings.pop("processors", 1))
    offsets: Any = settings.pop("offsets", "database")
    options = ProcessorOptions(
        batch=int(batch),
        pause=0.05,
        longest_pause=0.5,
        offsets=offsets,
        attempts=int(settings.pop("attempts", 5)),
        dead_letter_topic=settings.pop("dead_letter_topic", None),
    )

    folder, process = settings.pop("history", None), int(settings.pop("process", 0))
    recorder = Recorder(folder, "processor") if folder else None
    operations: dict[int, int] = {}
    committed = Committed(recorder) if recorder else None
    if committed:
        observability.add_observer(committed)

    booking = ledger(url)

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        number = int(message.value()) + process * PROCESS
        answer = str(number)
        if recorder:
            content = [number], {target: [(answer, answer)]} if answers else {}
            moves = [(group, source, message.partition(), message.offset(), message.offset())]
            if number in operations:
                recorder.wrote(operations[number], *content, moves=moves)
            else:
                operations[number] = recorder.invoke(threading.get_ident(), *content, moves=moves)
            assert committed
            committed.begun.add(operations[number])
        booking.write(tx.db, group, number)
        if answers:
            tx.send(target, answer, key=answer)

    with ExitStack() as opened:
        runner: Any
        if name.endswith("*"):
            pool = dualwrite.create_pool(
                url, kafka=servers, prefix=name[:-1], size=count, options=dualwrite.PoolOptions(lease=LEASE)
            )
            runner = opened.enter_context(pool)
        else:
            runner = opened.enter_context(dualwrite.connect(url, kafka=servers, transactional_id=name))
        processors = [DualProcessor(runner, settings, [source], handle=handle, options=options) for _ in range(count)]
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        if count == 1:
            processors[0].run()
        else:
            run_all(processors)


def run_all(processors: list[DualProcessor]) -> None:
    """Each in a thread, until SIGTERM or until one has failed."""
    over = threading.Event()

    def stop(*_: object) -> None:
        for processor in processors:
            processor.stop()

    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(len(processors)) as threads:
        running = [threads.submit(processor.run) for processor in processors]
        for each in running:
            each.add_done_callback(lambda _: over.set())
        over.wait()
        stop()
    for each in running:
        each.result()


if __name__ == "__main__":
    main()
