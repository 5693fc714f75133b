"""Dramatiq actors that write to the database and to Kafka atomically, each once, however often Dramatiq runs them.

    export DUALWRITE_DATABASE_URL=postgresql+psycopg://shop@127.0.0.1/shop DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    cd examples
    dramatiq shop_broker dramatiq_service --processes 4    # shop_broker: a module that sets Dramatiq's broker
    python -c 'import shop_broker; from dramatiq_service import take_order; take_order.send("1", "lamp")'

Each worker process opens a pool with its first message, which leases ids: `shop.1`, `shop.2`, … Live pools recover the ids of
processes that have died. Dramatiq runs the message of such a process again; its order may already exist.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import dramatiq
from sqlalchemy import Column, Connection, MetaData, String, Table, insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError

import dualwrite

TOPIC = "orders"
MAX_RETRIES = 20
orders = Table("orders", MetaData(), Column("id", String(40), primary_key=True), Column("item", String(200), nullable=False))


class ProcessPool(dramatiq.Middleware):
    """The pool of this process: its first message opens it, and the worker's end closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a process runs messages in several threads
        self._pool: dualwrite.WriterPool[Any] | None = None

    def get(self) -> dualwrite.WriterPool[Any]:
        """Open the pool if it isn't; after an error the next message tries again."""
        with self._lock:
            if self._pool is None:
                self._pool = open_pool()
            return self._pool

    def after_worker_shutdown(self, *_: Any) -> None:
        """Release the ids, when all messages in progress have ended."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


def open_pool() -> dualwrite.WriterPool[Any]:
    """A pool, and the service's table."""
    created = dualwrite.create_pool(prefix="shop", size=2)  # the other settings come from the environment
    try:
        create_table(created)
    except BaseException:
        created.close()
        raise
    return created


def create_table(created: dualwrite.WriterPool[Any]) -> None:
    """Create the service's table, if it does not exist."""
    try:
        created.run(lambda tx: orders.create(tx.db, checkfirst=True))
    except DBAPIError:  # of several processes that start at once, only one can create it
        created.run(lambda tx: tx.db.execute(select(orders).limit(1)))  # raises if the table does not exist


pool = ProcessPool()
dramatiq.get_broker().add_middleware(pool)


def may_succeed_later(retries: int, error: BaseException) -> bool:
    """Whether the same message may succeed later. Statements raise SQLAlchemy's errors, for example after a deadlock."""
    if retries >= MAX_RETRIES:
        return False
    if isinstance(error, dualwrite.DualWriteError):
        # after FencedError, which has rolled back both sides, the pool continues with another id, or claims it again
        return error.retriable or isinstance(error, dualwrite.InDoubtTransactionError | dualwrite.FencedError)
    if isinstance(error, DBAPIError):
        store = pool.get().store
        return store.is_conflict(error) or store.is_outage(error)
    return isinstance(error, dramatiq.middleware.Interrupt)  # of a time limit, or of the worker's end: the outcome is unknown


@dramatiq.actor(retry_when=may_succeed_later, min_backoff=1_000, max_backoff=60_000)
def take_order(key: str, item: str) -> None:
    """Take an order. A message whose process dies, or whose outcome is unknown, runs again."""
    pool.get().run(write_order, key, item)


def write_order(tx: dualwrite.Transaction[Connection], key: str, item: str) -> None:
    """The unit of work: it acts only through `tx`, since it may run again."""
    try:
        with tx.db.begin_nested():
            tx.db.execute(insert(orders).values(id=key, item=item))
    except IntegrityError:  # it has been taken, perhaps by another process while this one waited for it
        return
    tx.send(TOPIC, json.dumps({"id": key, "item": item}), key=key)
