"""A WSGI service for gunicorn: POST /orders writes the order to the database and its event to Kafka atomically.

    export DUALWRITE_DATABASE_URL=sqlite:///shop.db DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    gunicorn --chdir examples --workers 4 --threads 8 'gunicorn_service:create_app()'

gunicorn calls `create_app` in each worker, after the fork. The workers don't need names: their pools lease the ids `shop.1`,
`shop.2`, … Live pools recover the ids of workers that have died. The pool closes when its process ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, create_engine, insert, inspect, select
from sqlalchemy.exc import DBAPIError

import dualwrite

TOPIC = "orders"
orders = Table("orders", MetaData(), Column("id", String(40), primary_key=True), Column("item", String(200), nullable=False))

Application = Callable[[dict[str, Any], Callable[[str, list[tuple[str, str]]], Any]], Iterable[bytes]]


def create_table(engine: Engine) -> None:
    """Create the table; of several workers that start at once, only one can."""
    try:
        orders.create(engine, checkfirst=True)
    except DBAPIError:
        if not inspect(engine).has_table(orders.name):
            raise


def create_app() -> Application:
    """Open the pool, and return the application that uses it."""
    settings = dualwrite.Settings.from_environment()
    if settings.database_url is None:
        raise RuntimeError("Set DUALWRITE_DATABASE_URL.")
    engine = create_engine(settings.database_url)
    create_table(engine)
    pool = dualwrite.create_pool(engine, prefix="shop")

    def app(environ: dict[str, Any], start_response: Callable[[str, list[tuple[str, str]]], Any]) -> Iterable[bytes]:
        if (environ["REQUEST_METHOD"], environ["PATH_INFO"]) != ("POST", "/orders"):
            start_response("404 Not Found", [])
            return []
        try:
            order = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
            key, item = str(order["id"]), str(order["item"])
        except (ValueError, KeyError, TypeError):
            start_response("400 Bad Request", [])
            return []
        try:
            is_new = pool.run(take_order, key, item)
        except dualwrite.DualWriteError as error:
            # after FencedError, which has rolled back both sides, the pool continues with another id, or claims it again
            may_repeat = error.retriable or isinstance(error, dualwrite.InDoubtTransactionError | dualwrite.FencedError)
            start_response("503 Service Unavailable" if may_repeat else "500 Internal Server Error", [])
            return [str(error.what).encode()]
        except DBAPIError as error:  # of a statement; both sides are rolled back
            retriable = pool.store.is_conflict(error) or pool.store.is_outage(error)
            start_response("503 Service Unavailable" if retriable else "500 Internal Server Error", [])
            return [b"The database returned an error."]
        start_response("201 Created" if is_new else "200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"id": key, "item": item}).encode()]

    return app


def take_order(tx: dualwrite.Transaction[Connection], key: str, item: str) -> bool:
    """The unit of work: take an order once, however often it is sent. It acts only through `tx`, since it may run again."""
    if tx.db.execute(select(orders.c.id).where(orders.c.id == key)).first() is not None:
        return False
    tx.db.execute(insert(orders).values(id=key, item=item))
    tx.send(TOPIC, json.dumps({"id": key, "item": item}), key=key)
    return True
