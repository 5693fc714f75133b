"""A service without a framework: reads orders, one per line, and writes each to the database and to Kafka atomically.

    export DUALWRITE_DATABASE_URL=sqlite:///shop.db DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    echo "4711 lamp" | python examples/plain_service.py --instance 0 --instances 2

At startup it recovers its own id, by opening the writer, and the ids of instances that no longer exist. It does not recover the
ids of running instances, because recovery fences their writers.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Iterable

from sqlalchemy import Column, Connection, MetaData, String, Table, create_engine, insert, select

import dualwrite

log = logging.getLogger("shop")

SERVICE = "shop"
TOPIC = "orders"
orders = Table("orders", MetaData(), Column("id", String(40), primary_key=True), Column("item", String(200), nullable=False))


def main() -> int:
    """Recover, then serve until the end of input or SIGTERM."""
    options = argparse.ArgumentParser()
    options.add_argument(
        "--instance", type=int, required=True, help="number of this instance, from 0; must not change over restarts"
    )
    options.add_argument("--instances", type=int, required=True, help="how many instances there are now")
    chosen = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the `with` block, which closes the writer

    with dualwrite.connect(transactional_id=f"{SERVICE}-{chosen.instance}") as writer:
        recover_removed_instances(chosen.instances)
        create_table()
        print("ready", flush=True)
        serve(writer, sys.stdin)
    return 0


def recover_removed_instances(instances: int) -> None:
    """Recover the ids of instances that were removed by scaling down: no other process opens a writer on them."""
    with dualwrite.open_recoverer() as recoverer:
        numbers = {name: name.removeprefix(f"{SERVICE}-") for name in recoverer.pending(prefix=f"{SERVICE}-")}
        removed = [name for name, number in numbers.items() if number.isdecimal() and int(number) >= instances]
        report = recoverer.recover(removed)
    for found in report:
        log.warning("%s, generation %d: %s", found.transactional_id, found.generation, found.outcome.value)
    for name, lost in report.unacknowledged:  # an operator must publish these again; see `dualwrite recover --acknowledge`
        log.error("%s: transaction %s is %s", name, lost.state, lost.kind.value)


def create_table() -> None:
    """Create the service's own table; a real service would use a migration."""
    url = dualwrite.Settings.from_environment().database_url
    assert url is not None  # connect() has used it
    engine = create_engine(url)
    orders.create(engine, checkfirst=True)
    engine.dispose()


def serve(writer: dualwrite.DualWriter, lines: Iterable[str]) -> None:
    """Read one order per line: an id chosen by the client, and an item."""
    take = writer.transactional(attempts=3)(take_order)  # retries only after errors that left nothing behind
    for line in lines:
        order_id, _, item = line.strip().partition(" ")
        if not item:
            continue
        try:
            taken = take(order_id, item)
        except dualwrite.InDoubtTransactionError as error:
            # The next transaction first resolves this one; take_order then sees whether the order exists.
            log.warning("%s", error)
            taken = take(order_id, item)
        print(f"{order_id} {'taken' if taken else 'already exists'}", flush=True)


def take_order(tx: dualwrite.Transaction, order_id: str, item: str) -> bool:
    """Write the order and send its event; do nothing if the order already exists."""
    if exists(tx.db, order_id):
        return False
    tx.db.execute(insert(orders).values(id=order_id, item=item))
    tx.send(TOPIC, json.dumps({"id": order_id, "item": item}), key=order_id)
    return True


def exists(connection: Connection, order_id: str) -> bool:
    """Whether the order was taken before; this check makes it safe to repeat an order."""
    return connection.execute(select(orders.c.id).where(orders.c.id == order_id)).first() is not None


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    sys.exit(main())
