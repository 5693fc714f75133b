"""Consumes one batch, and sends its offsets in the transaction of what it writes; for tests that kill it.

python -m processor.offsets_worker URL BOOTSTRAP GROUP SOURCE TARGET ID PROTOCOL
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from confluent_kafka import Consumer

import dualwrite
from processor.ledger import ledger

BATCH = 5
PROTOCOL_SETTINGS = {
    "classic": {"session.timeout.ms": 2000, "heartbeat.interval.ms": 300},
    "consumer": {"group.protocol": "consumer"},
}


@contextmanager
def consuming(servers: str, group: str, source: str, protocol: str) -> Iterator[Consumer]:
    settings: dict[str, Any] = {
        "bootstrap.servers": servers,
        "group.id": group,
        **PROTOCOL_SETTINGS[protocol],
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
    with closing(Consumer(settings)) as consumer:
        consumer.subscribe([source])
        yield consumer


def main() -> None:
    url, servers, group, source, target, name, protocol = sys.argv[1:]
    booking = ledger(url)
    with (
        consuming(servers, group, source, protocol) as consumer,
        dualwrite.connect(url, kafka=servers, transactional_id=name) as writer,
    ):
        messages = []
        while len(messages) < BATCH:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                messages.append(message)
        with writer.transaction() as tx:
            for message in messages:
                booking.write(tx.db, group, int(message.value()))
                tx.send(target, message.value())
            tx.send_offsets(consumer)


if __name__ == "__main__":
    main()
