"""The processor that tests kill: it books each number of a topic, and answers it in another topic, until SIGTERM.

python -m processor.processor_worker URL BOOTSTRAP GROUP SOURCE TARGET ID BATCH [NAME=VALUE …]

ID ends with `*` for a pool with this prefix, whose leases last a few seconds. NAME is a setting of the consumer, or one of the
processor's options: `offsets`, `attempts`, `dead_letter_topic`; or `answers=no` for a processor that writes the
database only.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import dualwrite
from dualwrite.processor import DualProcessor, ProcessorOptions
from processor.ledger import book

GENTLE = {"session.timeout.ms": "2000", "heartbeat.interval.ms": "300", "fetch.wait.max.ms": "10"}
LEASE = 3.0


def main() -> None:
    url, servers, group, source, target, name, batch, *more = sys.argv[1:]
    settings = {"bootstrap.servers": servers, "group.id": group, **GENTLE, **dict(text.split("=", 1) for text in more)}
    settings = {key: value for key, value in settings.items() if value}
    answers = settings.pop("answers", "yes") == "yes"
    offsets: Any = settings.pop("offsets", "database")
    options = ProcessorOptions(
        batch=int(batch),
        pause=0.05,
        longest_pause=0.5,
        offsets=offsets,
        attempts=int(settings.pop("attempts", 5)),
        dead_letter_topic=settings.pop("dead_letter_topic", None),
    )

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        number = int(message.value())
        book(tx.db, url, group, number)
        if answers:
            tx.send(target, message.value(), key=message.value())

    with ExitStack() as opened:
        runner: Any
        if name.endswith("*"):
            pool = dualwrite.create_pool(
                url, kafka=servers, prefix=name[:-1], size=1, options=dualwrite.PoolOptions(lease=LEASE)
            )
            runner = opened.enter_context(pool)
        else:
            runner = opened.enter_context(dualwrite.connect(url, kafka=servers, transactional_id=name))
        processor = DualProcessor(runner, settings, [source], handle=handle, options=options)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        processor.run()


if __name__ == "__main__":
    main()
