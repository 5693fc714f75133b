"""A FastStream service: each order that it consumes becomes a row and an event, which are committed together.

    export DUALWRITE_DATABASE_URL=postgresql+asyncpg://shop@127.0.0.1/shop DUALWRITE_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:9092
    dualwrite db upgrade
    faststream run --app-dir examples faststream_own_session:app

`publish(…, session=session)` takes the options of `broker.publish`, and FastStream encodes the message; it is sent when the
session commits.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any

from faststream import AckPolicy, BaseMiddleware, Context, ContextRepo, Depends, FastStream
from faststream.confluent import KafkaBroker, KafkaPublishCommand
from pydantic import BaseModel
from sqlalchemy import String
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import dualwrite
from dualwrite import aio

INCOMING, TOPIC = "incoming-orders", "orders"


class Base(DeclarativeBase):
    """The service's tables."""


class OrderRow(Base):
    """An order that was taken."""

    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    item: Mapped[str] = mapped_column(String(200))


class Order(BaseModel):
    """An order; the sender chooses its id, by which a message that comes again is recognized."""

    id: str
    item: str


@dataclass(frozen=True)
class Shop:
    """What the handlers share."""

    engine: AsyncEngine
    pool: aio.AsyncWriterPool


@asynccontextmanager
async def lifespan(context: ContextRepo) -> AsyncIterator[None]:
    """Open the pool, which recovers its ids, from the engine of the sessions; consume; finish the orders in progress."""
    engine = create_async_engine(os.environ["DUALWRITE_DATABASE_URL"])
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with aio.create_pool(engine, prefix="shop") as pool:
            context.set_global("shop", Shop(engine, pool))
            yield
    finally:
        await engine.dispose()


broker = KafkaBroker(os.environ["DUALWRITE_KAFKA_BOOTSTRAP_SERVERS"])
app = FastStream(broker, lifespan=lifespan)


class Joining(BaseMiddleware[KafkaPublishCommand, Any]):
    """Sends with the current transaction, if there is one, what would go to FastStream's own producer."""

    current: ContextVar[dualwrite.Transaction[AsyncSession] | None] = ContextVar("current", default=None)

    async def publish_scope(self, call_next: Callable[[KafkaPublishCommand], Awaitable[Any]], cmd: KafkaPublishCommand) -> Any:
        """Encode and send as FastStream's producer does."""
        tx = self.current.get()
        if tx is None:
            return await call_next(cmd)
        value, content_type = None, None
        if cmd.body is not None:
            producer = broker.config.producer
            value, content_type = await producer.codec.encode(cmd.body, producer.serializer)
        headers = {"content-type": content_type or "", **{name: text or "" for name, text in cmd.headers_to_publish().items()}}
        tx.send(cmd.destination, value, key=cmd.key, headers=headers, partition=cmd.partition, timestamp=cmd.timestamp_ms)
        return None


broker.add_middleware(Joining)  # the last one, so that the others, such as that of telemetry, are called before it


async def publish(message: Any, topic: str, *, session: AsyncSession, **options: Any) -> None:
    """Publish as `broker.publish` does, when the session's transaction commits."""
    shop: Shop = broker.context.get("shop")
    token = Joining.current.set(shop.pool.join(session))
    try:
        await broker.publish(message, topic, **options)
    finally:
        Joining.current.reset(token)


async def get_session(shop: Annotated[Shop, Context()]) -> AsyncIterator[AsyncSession]:
    """A session that is committed when the handler has returned, or rolled back if it has raised an error."""
    async with AsyncSession(shop.engine) as session, session.begin():
        yield session


@broker.subscriber(INCOMING, group_id="shop", ack_policy=AckPolicy.NACK_ON_ERROR, auto_offset_reset="earliest")
async def take_order(order: Order, session: Annotated[AsyncSession, Depends(get_session)]) -> None:
    """Take an order once: its message may come again, since its offset is committed after the session."""
    if await session.get(OrderRow, order.id) is not None:
        return
    session.add(OrderRow(**order.model_dump()))
    await publish(order, TOPIC, session=session, key=order.id)
