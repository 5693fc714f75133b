"""A FastAPI service: POST /orders writes the order to the database and its event to Kafka atomically.

    export DUALWRITE_DATABASE_URL=sqlite:///shop.db DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    uvicorn --app-dir examples --workers 4 fastapi_service:app

FastAPI runs plain `def` endpoints in many threads. They share one pool, and orders that arrive at the same time share a commit.
Each process leases transactional ids (`shop.1`, `shop.2`, …), so you can run any number of processes; live processes recover
what dead ones have left.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request, status
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, String, Table, create_engine, insert, inspect, select
from sqlalchemy.exc import DBAPIError, IntegrityError

import dualwrite

TOPIC = "orders"
orders = Table(
    "orders",
    MetaData(),
    Column("id", String(40), primary_key=True),
    Column("item", String(200), nullable=False),
    Column("quantity", Integer, nullable=False),
)


class Order(BaseModel):
    """An order; the client chooses its id, so it is safe to send it again."""

    id: str = Field(min_length=1, max_length=40)
    item: str = Field(min_length=1, max_length=200)
    quantity: int = Field(gt=0)


@dataclass(frozen=True)
class Shop:
    """What the endpoints share."""

    engine: Engine
    pool: dualwrite.WriterPool[Connection]


def create_table(engine: Engine) -> None:
    """Create the table; of several workers that start at once, only one can."""
    try:
        orders.create(engine, checkfirst=True)
    except DBAPIError:
        if not inspect(engine).has_table(orders.name):
            raise


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the pool; serve; finish the orders in progress."""
    settings = dualwrite.Settings.from_environment()
    if settings.database_url is None:
        raise RuntimeError("Set DUALWRITE_DATABASE_URL.")
    engine = create_engine(settings.database_url)
    try:
        create_table(engine)
        with dualwrite.create_pool(engine, prefix="shop") as pool:
            app.state.shop = Shop(engine, pool)
            yield
    finally:
        engine.dispose()


app = FastAPI(lifespan=lifespan)


def get_shop(request: Request) -> Shop:
    """The shop of this application."""
    shop: Shop = request.app.state.shop
    return shop


ShopDependency = Annotated[Shop, Depends(get_shop)]


@app.post("/orders", status_code=status.HTTP_201_CREATED)
def take_order(order: Order, shop: ShopDependency) -> Order:
    """Take an order: write both the row and the event, or neither."""
    try:
        shop.pool.run(write_order, order)
    except IntegrityError:
        raise HTTPException(status.HTTP_409_CONFLICT, f"Order {order.id} already exists.") from None
    return order


def write_order(tx: dualwrite.Transaction[Connection], order: Order) -> None:
    """The unit of work: it acts only through `tx`, since it may run again."""
    tx.db.execute(insert(orders).values(**order.model_dump()))
    tx.send(TOPIC, json.dumps(order.model_dump()), key=order.id)


@app.get("/orders/{order_id}")
def show_order(order_id: str, shop: ShopDependency) -> Order:
    """Return an order that was taken."""
    with shop.engine.connect() as connection:
        row = connection.execute(select(orders).where(orders.c.id == order_id)).mappings().first()
    if row is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"There is no order {order_id}.")
    return Order(**row)


@app.get("/health/live")
async def live() -> dict[str, bool]:
    """For a liveness probe: the process answers. An outage of Kafka or the database must not restart it."""
    return {"alive": True}


@app.get("/health/ready")
def ready(shop: ShopDependency) -> JSONResponse:
    """For a readiness probe: orders can be written now. A plain `def`: it also fails if all threads are waiting."""
    health = shop.pool.check(timeout=2)
    return JSONResponse(health.record(), status.HTTP_200_OK if health.is_ready else status.HTTP_503_SERVICE_UNAVAILABLE)


MAY_BE_THERE = (
    dualwrite.InDoubtTransactionError,
    dualwrite.LostTransactionError,  # the row is there, and its event has to be published again
    dualwrite.UnverifiedTransactionError,
)
"""Errors after which the order is in the database, or may be."""


@app.exception_handler(dualwrite.DualWriteError)
def error_response(_: Request, error: dualwrite.DualWriteError) -> JSONResponse:
    """Report "in doubt" separately: the client checks GET /orders/{id} later, or sends the order again, which is safe."""
    in_doubt = isinstance(error, MAY_BE_THERE)
    is_fenced = isinstance(error, dualwrite.FencedError)  # rolled back; the pool continues with another id, or claims it again
    may_repeat = in_doubt or is_fenced or error.retriable
    code = status.HTTP_503_SERVICE_UNAVAILABLE if may_repeat else status.HTTP_500_INTERNAL_SERVER_ERROR
    return JSONResponse({"detail": error.what, "in_doubt": in_doubt}, code)


@app.exception_handler(DBAPIError)
def database_error_response(request: Request, error: DBAPIError) -> JSONResponse:
    """Report the error of a statement: both sides are rolled back, and after a conflict the same order may succeed."""
    store = get_shop(request).pool.store
    retriable = store.is_conflict(error) or store.is_outage(error)
    code = status.HTTP_503_SERVICE_UNAVAILABLE if retriable else status.HTTP_500_INTERNAL_SERVER_ERROR
    return JSONResponse({"detail": "The database returned an error.", "in_doubt": False}, code)
