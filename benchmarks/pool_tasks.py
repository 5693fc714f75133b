"""The alternatives for callers that are asyncio tasks: one object each, which all callers of the event loop use."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Protocol

from psycopg_pool import AsyncConnectionPool

from alternatives import DELIVERY_TIMEOUT, Target
from dualwrite import aio
from orders import INSERT, INSERT_OUTBOX, INSERT_OUTBOX_SQL, INSERT_SQL, Order
from phases import ClockedStore, Recorder
from pool_cases import CORE, DECIDED, NAIVE, OUTBOX, POOL, PoolCase
from pool_threads import arguments_of, conninfo, store_of, unit_of
from shared_delivery import SharedDelivery


class AsyncAlternative(Protocol):
    """One way to place orders."""

    async def write(self, order: Order) -> None:
        """Place one order; returns when it is done, as far as this alternative can know."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


# --- the database alone -------------------------------------------------------------------------------------------------------


class AsyncCommits(Protocol):
    """One commit per request; the callers share the connections."""

    async def open(self) -> None:
        """Connect."""
        ...

    async def commit(self, order: Order, outbox_topic: str | None = None) -> None:
        """Commit an order, with a row in the outbox if a topic is given."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class AsyncCoreCommits:
    """Through SQLAlchemy Core: an AsyncEngine."""

    def __init__(self, url: str, connections: int) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415  (needs greenlet)

        self._engine = create_async_engine(url, pool_size=connections, max_overflow=0)
        self._connections = connections

    async def open(self) -> None:
        """See AsyncCommits."""
        async with AsyncExitStack() as all_at_once:
            for _ in range(self._connections):
                await all_at_once.enter_async_context(self._engine.connect())

    async def commit(self, order: Order, outbox_topic: str | None = None) -> None:
        """See AsyncCommits."""
        async with self._engine.begin() as connection:
            await connection.execute(INSERT, {"body": order.body})
            if outbox_topic is not None:
                await connection.execute(INSERT_OUTBOX, order.outbox_row(outbox_topic))

    async def close(self) -> None:
        """See AsyncCommits."""
        await self._engine.dispose()


class AsyncPsycopgCommits:
    """Through psycopg: psycopg_pool's pool of AsyncConnections."""

    def __init__(self, url: str, connections: int) -> None:
        self._pool = AsyncConnectionPool(conninfo(url), min_size=connections, max_size=connections, open=False)

    async def open(self) -> None:
        """See AsyncCommits."""
        await self._pool.open(wait=True)

    async def commit(self, order: Order, outbox_topic: str | None = None) -> None:
        """See AsyncCommits."""
        async with self._pool.connection() as connection:
            await connection.execute(INSERT_SQL, (order.body,))
            if outbox_topic is not None:
                await connection.execute(INSERT_OUTBOX_SQL, tuple(order.outbox_row(outbox_topic).values()))

    async def close(self) -> None:
        """See AsyncCommits."""
        await self._pool.close()


class AsyncPlain:
    """Only the database's part."""

    def __init__(self, commits: AsyncCommits) -> None:
        self._commits = commits

    async def write(self, order: Order) -> None:
        """See AsyncAlternative."""
        await self._commits.commit(order)

    async def close(self) -> None:
        """See AsyncAlternative."""
        await self._commits.close()


class AsyncNaive(AsyncPlain):
    """Commit, then produce and wait for the delivery."""

    def __init__(self, commits: AsyncCommits, target: Target) -> None:
        super().__init__(commits)
        self._topic = target.topic
        self._delivery = SharedDelivery(target.kafka)

    async def write(self, order: Order) -> None:
        """See AsyncAlternative."""
        await self._commits.commit(order)
        delivered = self._delivery.send(self._topic, order.body, order.key)
        async with asyncio.timeout(DELIVERY_TIMEOUT):
            await asyncio.wrap_future(delivered)

    async def close(self) -> None:
        """See AsyncAlternative."""
        self._delivery.close()
        await super().close()


class AsyncOutbox(AsyncPlain):
    """Commit with a row in the outbox; `relay.py` publishes it."""

    def __init__(self, commits: AsyncCommits, target: Target) -> None:
        super().__init__(commits)
        self._topic = target.topic

    async def write(self, order: Order) -> None:
        """See AsyncAlternative."""
        await self._commits.commit(order, self._topic)


# --- dualwrite ----------------------------------------------------------------------------------------------------------------


class AsyncPool:
    """dualwrite's pool for coroutines; the units are plain functions.

    Attributes:
        pool: The pool.
    """

    def __init__(
        self, pool: aio.AsyncWriterPool, store: ClockedStore, case: PoolCase, topic: str, recorder: Recorder | None
    ) -> None:
        self.pool = pool
        self._store = store
        self._topic = topic
        self._unit = unit_of(case)
        self._recorder = recorder

    async def write(self, order: Order) -> None:
        """See AsyncAlternative."""
        if self._recorder is None:
            await self.pool.run(self._unit, self._topic, order)
        else:
            await self.pool.run(self._recorder.run, time.perf_counter(), self._unit, self._topic, order)

    async def close(self) -> None:
        """See AsyncAlternative."""
        try:
            await self.pool.close()
        finally:
            self._store.close()


async def make(case: PoolCase, target: Target, recorder: Recorder | None) -> AsyncAlternative:
    """A connected alternative, for the running event loop."""
    if case.alternative in (POOL, DECIDED):
        return await _pool(case, target, recorder)
    made = AsyncCoreCommits if case.point.handle == CORE else AsyncPsycopgCommits
    commits: AsyncCommits = made(target.url, case.connections)
    await commits.open()
    if case.alternative == NAIVE:
        return AsyncNaive(commits, target)
    if case.alternative == OUTBOX:
        return AsyncOutbox(commits, target)
    return AsyncPlain(commits)


async def _pool(case: PoolCase, target: Target, recorder: Recorder | None) -> AsyncPool:
    store = store_of(case, target.url, recorder)
    try:
        pool = await aio.create_pool(store, kafka=target.kafka, settings=target.settings, **arguments_of(case))
    except BaseException:
        store.close()
        raise
    return AsyncPool(pool, store, case, target.topic, recorder)
