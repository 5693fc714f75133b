"""The processor without a database that tests kill: it answers each number of a topic in another topic, until SIGTERM.

python -m processor.kafka_worker BOOTSTRAP GROUP SOURCE TARGET ID PRODUCER [NAME=VALUE …]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import dualwrite
from dualwrite.processor import DualProcessor, KafkaWriter, ProcessorOptions
from processor.processor_worker import GENTLE


def answer(target: str) -> Callable[[Any, dualwrite.Transaction[Any]], None]:
    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        tx.send(target, message.value(), key=message.value())

    return handle


def main() -> None:
    servers, group, source, target, name, producer, *more = sys.argv[1:]
    settings: dict[str, Any] = {"bootstrap.servers": servers, "group.id": group, **GENTLE}
    settings |= dict(text.split("=", 1) for text in more)
    chosen: Any = producer
    with KafkaWriter(servers, transactional_id=name, producer=chosen) as writer:
        options = ProcessorOptions(batch=5, pause=0.05, longest_pause=0.5, offsets="kafka")
        DualProcessor(writer, settings, [source], handle=answer(target), options=options).run()


if __name__ == "__main__":
    main()
