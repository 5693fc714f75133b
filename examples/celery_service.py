"""Celery tasks that write to the database and to Kafka atomically, each once, however often Celery runs them.

    export DUALWRITE_DATABASE_URL=sqlite:///shop.db DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    export CELERY_CONFIG_MODULE=celeryconfig    # the module with the address of Celery's broker
    celery --workdir examples -A celery_service worker --concurrency 4
    python -c 'from celery_service import take_order; take_order.delay("1", "lamp")'

Celery forks its worker processes. Each opens a pool with its first task, which leases an id: `shop.1`, `shop.2`, … Live pools
recover the ids of processes that have died. Celery runs the task of such a process again; its order may already exist.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from celery import Celery
from celery.signals import worker_process_shutdown
from sqlalchemy import Column, Connection, MetaData, String, Table, insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError

import dualwrite

TOPIC = "orders"
orders = Table("orders", MetaData(), Column("id", String(40), primary_key=True), Column("item", String(200), nullable=False))

app = Celery("celery_service")
app.config_from_envvar("CELERY_CONFIG_MODULE", silent=True)


@functools.cache
def pool() -> dualwrite.WriterPool[Any]:
    """The pool of this process; call it only after the fork. A process runs one task at a time, so it needs one writer."""
    created = dualwrite.create_pool(prefix="shop", size=1)  # the other settings come from the environment
    try:
        create_table(created)
    except BaseException:  # the next task tries again
        created.close()
        raise
    return created


def create_table(created: dualwrite.WriterPool[Any]) -> None:
    """Create the service's table, if it does not exist."""
    try:
        created.run(lambda tx: orders.create(tx.db, checkfirst=True))
    except DBAPIError:  # of several processes that start at once, only one can create it
        created.run(lambda tx: tx.db.execute(select(orders).limit(1)))  # raises if the table does not exist


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True, max_retries=5)
def take_order(task: Any, key: str, item: str) -> bool:
    """Take an order; returns whether it is new. A task whose process dies, or whose outcome is unknown, runs again."""
    try:
        return pool().run(write_order, key, item)
    except (dualwrite.DualWriteError, DBAPIError) as error:
        if may_succeed_later(error):
            raise task.retry(exc=error, countdown=1) from error
        raise


def may_succeed_later(error: dualwrite.DualWriteError | DBAPIError) -> bool:
    """Whether the same task may succeed later. Statements raise SQLAlchemy's errors, for example after a deadlock."""
    if isinstance(error, dualwrite.DualWriteError):
        # after FencedError, which has rolled back both sides, the pool continues with another id, or claims it again
        return error.retriable or isinstance(error, dualwrite.InDoubtTransactionError | dualwrite.FencedError)
    return pool().store.is_conflict(error) or pool().store.is_outage(error)


def write_order(tx: dualwrite.Transaction[Connection], key: str, item: str) -> bool:
    """The unit of work: it acts only through `tx`, since it may run again."""
    try:
        with tx.db.begin_nested():
            tx.db.execute(insert(orders).values(id=key, item=item))
    except IntegrityError:  # it has been taken, perhaps by another process while this one waited for it
        return False
    tx.send(TOPIC, json.dumps({"id": key, "item": item}), key=key)
    return True


@worker_process_shutdown.connect
def close_pool(**_: Any) -> None:
    """Release the id; Celery ends its processes without Python's own cleanup."""
    if pool.cache_info().currsize:
        pool().close()
