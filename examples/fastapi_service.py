"""A FastAPI service: POST /orders writes the order to the database and its event to Kafka atomically.

    export DUALWRITE_DATABASE_URL=sqlite:///shop.db DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    SHOP_INSTANCE=0 uvicorn --app-dir examples fastapi_service:app

A writer serves one thread at a time, and FastAPI runs plain `def` endpoints in many threads. A single writer behind a lock
would process one order at a time, each taking as long as a database commit and Kafka's responses. So there is a pool: a few
writers, each with its own transactional id that stays the same over restarts (`shop-<instance>-<number>`). Opening a writer
recovers its id.
"""

from __future__ import annotations

import json
import os
import queue
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request, status
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, insert, select
from sqlalchemy.exc import IntegrityError

import dualwrite

WRITERS = 4
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


class Shop:
    """The state that the endpoints share: an engine and the pool of writers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._free: queue.SimpleQueue[dualwrite.DualWriter] = queue.SimpleQueue()

    def add(self, writer: dualwrite.DualWriter) -> None:
        """Put an open writer into the pool."""
        self._free.put(writer)

    @contextmanager
    def writer(self) -> Iterator[dualwrite.DualWriter]:
        """A writer for exclusive use; waits until one is free."""
        writer = self._free.get()
        try:
            if writer.phase is dualwrite.Phase.FENCED:  # `dualwrite recover` was run on our id; we are alive, so claim it again
                writer.reopen()
            yield writer
        finally:
            self._free.put(writer)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Recover, open the writers, serve, close them."""
    instance = os.environ.get("SHOP_INSTANCE", "0")
    settings = dualwrite.Settings.from_environment()
    if settings.database_url is None:
        raise RuntimeError("Set DUALWRITE_DATABASE_URL.")
    names = [f"shop-{instance}-{number}" for number in range(WRITERS)]
    engine = create_engine(settings.database_url)
    orders.create(engine, checkfirst=True)
    with ExitStack() as opened:
        opened.callback(engine.dispose)
        shop = Shop(engine)
        for name in names:
            shop.add(opened.enter_context(dualwrite.connect(engine, transactional_id=name)))
        # If this instance had more writers before, no process opens their ids any more: recover them. The prefix ends with
        # '-', so that instance 1 does not claim the ids of instance 10.
        with dualwrite.open_recoverer(engine) as recoverer:
            left_over = [name for name in recoverer.pending(prefix=f"shop-{instance}-") if name not in names]
        dualwrite.recover(engine, ids=left_over).raise_for_problems()
        app.state.shop = shop
        yield


app = FastAPI(lifespan=lifespan)


def the_shop(request: Request) -> Shop:
    """The shop of this application."""
    shop: Shop = request.app.state.shop
    return shop


TheShop = Annotated[Shop, Depends(the_shop)]


@app.post("/orders", status_code=status.HTTP_201_CREATED)
def take_order(order: Order, shop: TheShop) -> Order:
    """Take an order: write both the row and the event, or neither."""
    try:
        with shop.writer() as writer, writer.transaction() as tx:
            tx.db.execute(insert(orders).values(**order.model_dump()))
            tx.send(TOPIC, json.dumps(order.model_dump()), key=order.id)
    except IntegrityError:
        raise HTTPException(status.HTTP_409_CONFLICT, f"Order {order.id} already exists.") from None
    return order


@app.get("/orders/{order_id}")
def show_order(order_id: str, shop: TheShop) -> Order:
    """Return an order that was taken."""
    with shop.engine.connect() as connection:
        row = connection.execute(select(orders).where(orders.c.id == order_id)).mappings().first()
    if row is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"There is no order {order_id}.")
    return Order(**row)


@app.exception_handler(dualwrite.DualWriteError)
def answer(_: Request, error: dualwrite.DualWriteError) -> JSONResponse:
    """Report "in doubt" separately: the client checks GET /orders/{id} later, or sends the order again, which is safe."""
    in_doubt = isinstance(error, dualwrite.InDoubtTransactionError)
    code = status.HTTP_503_SERVICE_UNAVAILABLE if in_doubt or error.retriable else status.HTTP_500_INTERNAL_SERVER_ERROR
    return JSONResponse({"detail": error.what, "in_doubt": in_doubt}, code)
