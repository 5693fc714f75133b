"""A shop: `POST /orders` takes an order, and a processor counts what was ordered. Its tests are in test_shop.py.

export DUALWRITE_DATABASE_URL=sqlite:///shop.db DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
dualwrite db upgrade
uvicorn --app-dir examples/tested_service --factory shop:app_from_environment
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, status
from pydantic import BaseModel
from sqlalchemy import Connection, String, create_engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import dualwrite
from dualwrite.processor import DualProcessor, Received


class Order(BaseModel):
    """An order; the client chooses its id."""

    id: str
    item: str


ORDERS = dualwrite.Topic.of_models("orders", Order)


class Base(DeclarativeBase):
    """The shop's tables."""


class OrderRow(Base):
    """An order that was taken."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    item: Mapped[str] = mapped_column(String(200))


class Sold(Base):
    """How often an item was ordered."""

    __tablename__ = "sold"
    item: Mapped[str] = mapped_column(String(200), primary_key=True)
    count: Mapped[int]


def take_order(tx: dualwrite.Transaction[Connection], order: Order) -> None:
    """A unit: the order's row, and its event."""
    tx.session.add(OrderRow(id=order.id, item=order.item))
    ORDERS.send(tx, order, key=order.id)


def count_order(message: Received[Order, str], tx: dualwrite.Transaction[Connection]) -> None:
    """A handler: count the item of an order; an order that was cancelled has no value."""
    order = message.value()
    if order is None:
        return
    sold = tx.session.get(Sold, order.item) or Sold(item=order.item, count=0)
    sold.count += 1
    tx.session.add(sold)
    if sold.count % 100 == 0:
        tx.send("bestsellers", order.item)


def make_app(database: str, kafka: str) -> FastAPI:
    """The service on these servers."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = create_engine(database)
        Base.metadata.create_all(engine)
        with dualwrite.create_pool(engine, kafka=kafka, prefix="shop") as pool:
            app.state.pool = pool
            yield
        engine.dispose()

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=status.HTTP_201_CREATED)
    def post_order(order: Order) -> Order:
        try:
            app.state.pool.run(take_order, order)
        except IntegrityError:
            raise HTTPException(status.HTTP_409_CONFLICT, f"Order {order.id} already exists.") from None
        return order

    return app


def make_counter(writer: dualwrite.DualWriter[Connection], kafka: str) -> DualProcessor:
    """The processor that counts."""
    return DualProcessor(writer, {"bootstrap.servers": kafka, "group.id": "counter"}, [ORDERS], handle=count_order)


def app_from_environment() -> FastAPI:
    """For uvicorn."""
    settings = dualwrite.Settings.from_environment()
    if settings.database_url is None:
        raise RuntimeError("Set DUALWRITE_DATABASE_URL.")
    return make_app(settings.database_url, settings.kafka["bootstrap.servers"])
