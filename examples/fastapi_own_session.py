"""A FastAPI service with sessions of its own: POST /orders writes the order and its event to Kafka atomically.

    export DUALWRITE_DATABASE_URL=postgresql+asyncpg://shop@127.0.0.1/shop DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    uvicorn --app-dir examples fastapi_own_session:app

A dependency begins and commits an AsyncSession, as in many services; another one joins it to the pool. Any asynchronous driver
of SQLAlchemy's will do.
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
from sqlalchemy import String
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import dualwrite
from dualwrite import aio

TOPIC = "orders"


class Base(DeclarativeBase):
    """The service's tables."""


class OrderRow(Base):
    """An order that was taken."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    item: Mapped[str] = mapped_column(String(200))
    quantity: Mapped[int]


class Order(BaseModel):
    """An order; the client chooses its id, so it is safe to send it again."""

    id: str = Field(min_length=1, max_length=40)
    item: str = Field(min_length=1, max_length=200)
    quantity: int = Field(gt=0)


@dataclass(frozen=True)
class Shop:
    """What the endpoints share."""

    engine: AsyncEngine
    pool: aio.AsyncWriterPool


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the pool, which recovers its ids, from the engine of the sessions; serve; finish the orders in progress."""
    settings = dualwrite.Settings.from_environment()
    if settings.database_url is None:
        raise RuntimeError("Set DUALWRITE_DATABASE_URL.")
    engine = create_async_engine(settings.database_url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with aio.create_pool(engine, prefix="shop") as pool:
            app.state.shop = Shop(engine, pool)
            yield
    finally:
        await engine.dispose()


app = FastAPI(lifespan=lifespan)


def get_shop(request: Request) -> Shop:
    """The shop of this application."""
    shop: Shop = request.app.state.shop
    return shop


ShopDependency = Annotated[Shop, Depends(get_shop)]


async def get_session(shop: ShopDependency) -> AsyncIterator[AsyncSession]:
    """A session that is committed when the endpoint has returned, or rolled back if it has raised an error."""
    async with AsyncSession(shop.engine) as session, session.begin():
        yield session


SessionDependency = Annotated[AsyncSession, Depends(get_session, scope="function")]  # so that the commit precedes the response


def get_transaction(session: SessionDependency, shop: ShopDependency) -> dualwrite.Transaction[AsyncSession]:
    """Sends messages that are committed with the session."""
    return shop.pool.join(session)


TransactionDependency = Annotated[dualwrite.Transaction[AsyncSession], Depends(get_transaction)]


@app.post("/orders", status_code=status.HTTP_201_CREATED)
async def take_order(order: Order, session: SessionDependency, tx: TransactionDependency) -> Order:
    """Take an order: the row and the event are committed together by `get_session`."""
    session.add(OrderRow(**order.model_dump()))
    try:
        await session.flush()
    except IntegrityError:
        raise HTTPException(status.HTTP_409_CONFLICT, f"Order {order.id} already exists.") from None
    tx.send(TOPIC, json.dumps(order.model_dump()), key=order.id)
    return order


@app.get("/orders/{order_id}")
async def show_order(order_id: str, session: SessionDependency) -> Order:
    """Return an order that was taken."""
    row = await session.get(OrderRow, order_id)
    if row is None:
        raise HTTPException(status.HTTP_404_NOT_FOUND, f"There is no order {order_id}.")
    return Order(id=row.id, item=row.item, quantity=row.quantity)


@app.get("/health/live")
async def live() -> dict[str, bool]:
    """For a liveness probe: the event loop answers. An outage of Kafka or the database must not restart the process."""
    return {"alive": True}


@app.get("/health/ready")
async def ready(shop: ShopDependency) -> JSONResponse:
    """For a readiness probe: orders can be written now."""
    health = await shop.pool.check(timeout=2)
    return JSONResponse(health.record(), status.HTTP_200_OK if health.is_ready else status.HTTP_503_SERVICE_UNAVAILABLE)


MAY_BE_THERE = (
    dualwrite.InDoubtTransactionError,
    dualwrite.LostTransactionError,  # the row is there, and its event has to be published again
    dualwrite.UnverifiedTransactionError,
    dualwrite.AfterCommitError,  # the session's connection was lost at COMMIT
)
"""Errors after which the order is in the database, or may be."""


@app.exception_handler(dualwrite.DualWriteError)
async def error_response(_: Request, error: dualwrite.DualWriteError) -> JSONResponse:
    """Report "in doubt" separately: the client checks GET /orders/{id} later, or sends the order again, which is safe."""
    in_doubt = isinstance(error, MAY_BE_THERE)
    is_fenced = isinstance(error, dualwrite.FencedError)  # rolled back; the pool continues with another id, or claims it again
    may_repeat = in_doubt or is_fenced or error.retriable
    code = status.HTTP_503_SERVICE_UNAVAILABLE if may_repeat else status.HTTP_500_INTERNAL_SERVER_ERROR
    return JSONResponse({"detail": error.what, "in_doubt": in_doubt}, code)


@app.exception_handler(DBAPIError)
async def database_error_response(request: Request, error: DBAPIError) -> JSONResponse:
    """Report the error of a statement: both sides are rolled back, and after a conflict the same order may succeed."""
    store = get_shop(request).pool.store
    retriable = store.is_conflict(error) or store.is_outage(error)
    code = status.HTTP_503_SERVICE_UNAVAILABLE if retriable else status.HTTP_500_INTERNAL_SERVER_ERROR
    return JSONResponse({"detail": "The database returned an error.", "in_doubt": False}, code)
