"""A pipeline: reads orders, books each on its customer's balance, and sends a payment; each order counts once.

    export DUALWRITE_DATABASE_URL=postgresql+psycopg://… DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    python examples/order_pipeline.py

Start it as often as you like, on any machine: the processes share the topic's partitions. They may be killed at any moment.
An order is JSON, such as {"customer": "ann", "amount": 12}; an order that can't be booked goes to the topic orders.dead.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, create_engine, text

import dualwrite
from dualwrite.processor import DualProcessor, ProcessorOptions

ORDERS = "orders"
PAYMENTS = "payments"
GROUP = "balances"

balances = Table(
    "balances", MetaData(), Column("customer", String(100), primary_key=True), Column("amount", Integer, nullable=False)
)
BOOK = text(
    "INSERT INTO balances (customer, amount) VALUES (:customer, :amount) "
    "ON CONFLICT (customer) DO UPDATE SET amount = balances.amount + excluded.amount"
)


def book(message: Any, tx: dualwrite.Transaction[Connection]) -> None:
    """Book one order. It acts only through `tx`, and may run more than once: only one run takes effect."""
    order = json.loads(message.value())
    customer, amount = order["customer"], order["amount"]
    if not isinstance(customer, str) or type(amount) is not int:  # the database would round 12.5, and store true as 1
        raise ValueError(f"not an order: {order!r}")
    tx.db.execute(BOOK, {"customer": customer, "amount": amount})
    tx.send(PAYMENTS, json.dumps({"customer": customer, "paid": amount}), key=customer)


def main() -> None:
    """Process orders until SIGTERM."""
    logging.basicConfig(level=logging.WARNING)
    url = dualwrite.Settings.from_environment().database_url
    assert url is not None
    engine = create_engine(url)
    balances.create(engine, checkfirst=True)  # a real service would use a migration
    with dualwrite.create_pool(engine, prefix=GROUP, size=1) as pool:
        processor = DualProcessor(
            pool,
            {"group.id": GROUP},
            [ORDERS],
            handle=book,
            options=ProcessorOptions(dead_letter_topic=f"{ORDERS}.dead"),
        )
        print("ready", flush=True)
        processor.run()


if __name__ == "__main__":
    main()
