"""The alternatives that pool.py and recipe.py compare: each opens what it needs, and then places orders for many callers."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import psycopg
from confluent_kafka import KafkaException, Producer
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import create_engine, make_url

import dualwrite
from dualwrite import aio
from dualwrite.console.recent import Recent
from dualwrite.observability import Event, observing, otel_metrics, otel_traces, prometheus
from dualwrite.relay import Notifier
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.engines import KEPT_CONNECTIONS
from orders import (
    CHANNEL,
    INSERT_OUTBOX,
    INSERT_OUTBOX_SQL,
    INSERT_SQL,
    Order,
    debit_and_insert,
    insert_core,
    insert_of_a_tenant,
    insert_psycopg,
)

UNDECLARED: Final = "undeclared"
DECLARED: Final = "declared"
THREADS: Final = "threads"
ASYNCIO: Final = "asyncio"
KINDS: Final = (THREADS, ASYNCIO)
CORE: Final = "core"
PSYCOPG: Final = "psycopg"
HANDLES: Final = (CORE, PSYCOPG)
PLAIN: Final = "plain"
NAIVE: Final = "naive"
OUTBOX: Final = "outbox"
OUTBOX_OURS: Final = "outbox-dualwrite"
OUTBOX_NOTIFIED: Final = "outbox-notified"
OUTBOXES: Final = (OUTBOX, OUTBOX_OURS, OUTBOX_NOTIFIED)
WRITERS: Final = "writers"
OWN: Final = "own"
POOL: Final = "pool"
JOINED: Final = "joined"
JOURNALED: Final = "pool-journaled"
JOINED_JOURNALED: Final = "joined-journaled"
ALTERNATIVES: Final = (PLAIN, NAIVE, *OUTBOXES, WRITERS, OWN, JOINED, JOINED_JOURNALED, POOL, JOURNALED)
COUNTED: Final = "pool-counted"
PROMETHEUS: Final = "pool-prometheus"
OTEL: Final = "pool-otel"
UNSAMPLED: Final = "pool-traces-0"
SAMPLED: Final = "pool-traces-5"
TRACED: Final = "pool-traces-100"
EVERYTHING: Final = "pool-everything"
OBSERVED: Final = (COUNTED, PROMETHEUS, OTEL, UNSAMPLED, SAMPLED, TRACED, EVERYTHING)
"""The pool, with what observes it."""
_SAMPLED: Final = {UNSAMPLED: 0.0, SAMPLED: 0.05, TRACED: 1.0, EVERYTHING: 0.05}
"""The part of the units that is traced."""

POOLS: Final = (OWN, POOL, JOURNALED, *OBSERVED)
JOINS: Final = (JOINED, JOINED_JOURNALED)
"""The pool, joined by the callers' own connections."""
TITLES: Final = {
    PLAIN: "plain commit",
    NAIVE: "commit, then produce",
    OUTBOX: "outbox + relay",
    OUTBOX_OURS: "outbox + dualwrite.Relay",
    OUTBOX_NOTIFIED: "the same, with dualwrite.relay.Notifier",
    WRITERS: "a writer each",
    OWN: "pool.transaction()",
    POOL: "pool",
    JOINED: "joined, on the caller's own",
    JOURNALED: 'pool, "journaled"',
    JOINED_JOURNALED: 'joined, "journaled"',
    COUNTED: "an observer that counts",
    PROMETHEUS: "metrics, Prometheus",
    OTEL: "metrics, OpenTelemetry",
    UNSAMPLED: "traces, of no unit",
    SAMPLED: "traces, of 5 % of the units",
    TRACED: "traces, of each unit",
    EVERYTHING: "Prometheus, traces of 5 %, console",
}
_JOURNALED: Final = (JOURNALED, JOINED_JOURNALED)
_LIMIT: Final = 60.0
_POLL: Final = 0.1


@dataclass(frozen=True)
class Case:
    """One alternative under some conditions: callers of a kind, which write with a handle, in some processes.

    Each caller waits for the result before its next order. `round_trip` is the seconds of a round trip to the servers, or 0
    without a network. `pool_size` None is what the pool chooses; `debits`: an order also debits an account; `tenants`: it sets
    its tenant first, as a service with row-level security does, or its pool does that (`DECLARED`).
    """

    alternative: str
    callers: int
    kind: str = THREADS
    handle: str = CORE
    round_trip: float = 0.0
    processes: int = 1
    pool_size: int | None = None
    debits: bool = False
    tenants: str | None = None

    @property
    def point(self) -> tuple[float, str, str, int]:
        """The conditions under which alternatives are compared."""
        return self.round_trip, self.kind, self.handle, self.callers

    @property
    def connections(self) -> int:
        """How many connections to the database a process has without dualwrite: one per caller."""
        return self.callers // self.processes

    def __str__(self) -> str:
        distance = f", {self.round_trip * 1e3:g} ms away" if self.round_trip else ""
        return f"{self.callers} {self.kind}, {self.handle}{distance}, {TITLES[self.alternative]}"

    @property
    def declares(self) -> bool:
        """Whether its pool is given the tenants."""
        return self.tenants == DECLARED and self.alternative in POOLS

    @property
    def insert(self) -> Callable[[Any, Order], None]:
        """The database's part of an order, through a synchronous connection."""
        if self.tenants is not None and not self.declares:
            return insert_of_a_tenant
        return insert_psycopg if self.handle == PSYCOPG else debit_and_insert if self.debits else insert_core


@dataclass(frozen=True)
class Target:
    """Where to write to, and `producer` of `dualwrite.connect`."""

    url: str
    kafka: Mapping[str, Any]
    topic: str
    producer: str = "auto"

    @property
    def settings(self) -> dualwrite.Settings:
        """Settings for a writer or a pool."""
        return dualwrite.Settings(producer=self.producer)  # type: ignore[arg-type]  # checked there

    @property
    def conninfo(self) -> str:
        """The database in libpq's form."""
        return make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)


@dataclass(frozen=True)
class Opened:
    """An alternative that is ready: `place` returns, or is done, when a caller's order is placed, as far as it can know."""

    place: Callable[[int, Order], Any]
    pool: Any = None


class Delivery:
    """An idempotent producer for all callers of a process, which doesn't wait for more messages (`linger.ms` 0)."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._producer = Producer({**kafka, "enable.idempotence": True, "acks": "all", "linger.ms": 0})
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def send(self, topic: str, order: Order) -> Future[None]:
        """Queue a message; the future is done when it is acknowledged, or has failed."""
        future: Future[None] = Future()

        def delivered(error: Any, message: Any) -> None:
            del message
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(KafkaException(error))

        self._producer.produce(topic, order.body, order.key, on_delivery=delivered)
        return future

    def close(self) -> None:
        """Stop. Every caller must have its result."""
        self._closing.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(_POLL)


def _store(case: Case, target: Target) -> SqlStateStore:
    if case.handle == CORE:
        return SqlStateStore(create_engine(target.url, pool_size=KEPT_CONNECTIONS), owns_engine=True)
    return SqlStateStore.from_psycopg(partial(psycopg.connect, target.conninfo))


def _unit(tx: dualwrite.Transaction, insert: Callable[[Any, Order], None], topic: str, order: Order) -> None:
    insert(tx.db, order)
    tx.send(topic, order.body, key=order.key)


def _arguments(case: Case, target: Target) -> dict[str, Any]:
    """Of `create_pool`."""
    options = dualwrite.PoolOptions(acknowledge="journaled" if case.alternative in _JOURNALED else "visible")
    size = {} if case.pool_size is None else {"size": case.pool_size}
    return {"prefix": "benchmark-pool", "kafka": target.kafka, "settings": target.settings, "options": options, **size}


@contextmanager
def _observed(case: Case) -> Iterator[None]:
    """Install what observes the pool, in this process."""
    with ExitStack() as installed:
        if case.alternative == COUNTED:
            installed.enter_context(_counted())
        if case.alternative in (PROMETHEUS, EVERYTHING):
            registry = CollectorRegistry()
            prometheus.install(registry)
            installed.callback(prometheus.uninstall, registry)
        if case.alternative == OTEL:
            meters = MeterProvider(metric_readers=[InMemoryMetricReader()])
            otel_metrics.install(meters)
            installed.callback(meters.shutdown)
            installed.callback(otel_metrics.uninstall, meters)
        if case.alternative in _SAMPLED:
            installed.enter_context(_traced(_SAMPLED[case.alternative]))
        if case.alternative == EVERYTHING:
            installed.enter_context(observing(Recent()))
        yield


@contextmanager
def _counted() -> Iterator[None]:
    counted: Counter[type[Event]] = Counter()
    with observing(lambda event: counted.update((type(event),))):
        yield
    if not counted:
        raise RuntimeError("the observer has got no events")


class _CountedSpans(SpanExporter):
    """Counts the spans, so that only the process's own part is measured."""

    def __init__(self) -> None:
        self.count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.count += len(spans)
        return SpanExportResult.SUCCESS


@contextmanager
def _traced(part: float) -> Iterator[None]:
    """Trace this part of the units; each is the root of its trace."""
    exporter = _CountedSpans()
    tracers = TracerProvider(sampler=ParentBased(TraceIdRatioBased(part)))
    tracers.add_span_processor(BatchSpanProcessor(exporter))
    otel_traces.install(tracers)
    try:
        yield
    finally:
        otel_traces.uninstall()
        tracers.shutdown()
    if (exporter.count > 0) != (part > 0):
        raise RuntimeError(f"{exporter.count} spans, though {part:.0%} of the units are traced")


# --- threads ------------------------------------------------------------------------------------------------------------------


@contextmanager
def for_threads(case: Case, target: Target, callers: range) -> Iterator[Opened]:
    """Open an alternative for these callers, which are threads."""
    topic, insert = target.topic, case.insert
    with ExitStack() as opened:
        if case.alternative == WRITERS:
            writers = {}
            for caller in callers:
                store = opened.enter_context(closing(_store(case, target)))
                name = f"benchmark-{caller}"
                writers[caller] = opened.enter_context(
                    dualwrite.connect(store, kafka=target.kafka, transactional_id=name, settings=target.settings)
                )

            def place(caller: int, order: Order) -> None:
                with writers[caller].transaction() as tx:
                    _unit(tx, insert, topic, order)

            yield Opened(place)
        elif case.alternative in POOLS:
            opened.enter_context(_observed(case))
            store = opened.enter_context(closing(_store(case, target)))
            pool = opened.enter_context(dualwrite.create_pool(store, **_arguments(case, target)))

            def place_in_pool(caller: int, order: Order) -> None:
                del caller
                local = {"app.tenant": order.key} if case.declares else None
                if case.alternative == OWN:
                    with pool.transaction(local=local) as tx:
                        _unit(tx, insert, topic, order)
                else:
                    (pool if local is None else pool.with_options(local=local)).run(_unit, insert, topic, order)

            yield Opened(place_in_pool, pool)
        else:
            pool = None
            if case.alternative in JOINS:
                store = opened.enter_context(closing(_store(case, target)))
                pool = opened.enter_context(dualwrite.create_pool(store, **_arguments(case, target)))
            commit = opened.enter_context((_core if case.handle == CORE else _psycopg)(case, target, pool))
            delivery = opened.enter_context(closing(Delivery(target.kafka))) if case.alternative == NAIVE else None

            def place_alone(caller: int, order: Order) -> None:
                del caller
                commit(order)
                if delivery is not None:
                    delivery.send(topic, order).result(_LIMIT)

            yield Opened(place_alone, pool)


@contextmanager
def _notified(case: Case, target: Target) -> Iterator[Callable[[], None]]:
    """What a caller calls after its commit."""
    if case.alternative != OUTBOX_NOTIFIED:
        yield lambda: None
        return
    with Notifier(target.url, CHANNEL) as notifier:
        yield notifier.notify


@contextmanager
def _core(case: Case, target: Target, pool: dualwrite.WriterPool[Any] | None) -> Iterator[Callable[[Order], None]]:
    """One commit per order, on an engine whose pool has a fixed number of connections."""
    engine, insert = create_engine(target.url, pool_size=case.connections, max_overflow=0), case.insert
    with ExitStack() as all_at_once:
        for _ in range(case.connections):
            all_at_once.enter_context(engine.connect())

    with _notified(case, target) as notify:

        def commit(order: Order) -> None:
            with engine.begin() as connection:
                insert(connection, order)
                if case.alternative in OUTBOXES:
                    connection.execute(INSERT_OUTBOX, order.outbox_row(target.topic))
                if pool is not None:
                    pool.join(connection).send(target.topic, order.body, key=order.key)
            notify()

        yield commit
    engine.dispose()


@contextmanager
def _psycopg(case: Case, target: Target, pool: dualwrite.WriterPool[Any] | None) -> Iterator[Callable[[Order], None]]:
    """The same on this many psycopg connections; a caller takes a free one."""
    free: SimpleQueue[psycopg.Connection[Any]] = SimpleQueue()
    with ExitStack() as opened:
        notify = opened.enter_context(_notified(case, target))
        for _ in range(case.connections):
            free.put(opened.enter_context(psycopg.connect(target.conninfo)))

        def commit(order: Order) -> None:
            connection = free.get()
            try:
                if pool is not None:
                    with pool.transaction(connection=connection) as tx:
                        connection.execute(INSERT_SQL, (order.body,))
                        tx.send(target.topic, order.body, key=order.key)
                    return
                connection.execute(INSERT_SQL, (order.body,))
                if case.alternative in OUTBOXES:
                    connection.execute(INSERT_OUTBOX_SQL, tuple(order.outbox_row(target.topic).values()))
                connection.commit()
                notify()
            finally:
                free.put(connection)

        yield commit


# --- tasks --------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def for_tasks(case: Case, target: Target) -> AsyncIterator[Opened]:
    """Open an alternative for callers that are tasks of the running event loop; the pool's units are plain functions."""
    async with AsyncExitStack() as opened:
        if case.alternative in POOLS:
            store = opened.enter_context(closing(_store(case, target)))
            pool = await opened.enter_async_context(aio.create_pool(store, **_arguments(case, target)))
            yield Opened(lambda _, order: pool.run(_unit, case.insert, target.topic, order), pool)
            return
        joined: aio.AsyncWriterPool[Any] | None = None
        if case.alternative in JOINS:
            store = opened.enter_context(closing(_store(case, target)))
            joined = await opened.enter_async_context(aio.create_pool(store, **_arguments(case, target)))
        commit = await opened.enter_async_context(_psycopg_tasks(case, target, joined))
        delivery = opened.enter_context(closing(Delivery(target.kafka))) if case.alternative == NAIVE else None

        async def place(caller: int, order: Order) -> None:
            del caller
            await commit(order)
            if delivery is not None:
                async with asyncio.timeout(_LIMIT):
                    await asyncio.wrap_future(delivery.send(target.topic, order))

        yield Opened(place, joined)


@asynccontextmanager
async def _psycopg_tasks(
    case: Case, target: Target, joined: aio.AsyncWriterPool[Any] | None
) -> AsyncIterator[Callable[[Order], Awaitable[None]]]:
    number = case.connections
    async with AsyncConnectionPool(conninfo=target.conninfo, min_size=number, max_size=number, open=False) as pool:
        await pool.wait()

        async def commit(order: Order) -> None:
            async with pool.connection() as connection:
                if joined is not None:
                    async with joined.transaction(connection=connection) as tx:
                        await connection.execute(INSERT_SQL, (order.body,))
                        tx.send(target.topic, order.body, key=order.key)
                    return
                await connection.execute(INSERT_SQL, (order.body,))
                if case.alternative in OUTBOXES:
                    await connection.execute(INSERT_OUTBOX_SQL, tuple(order.outbox_row(target.topic).values()))
            notify()

        with _notified(case, target) as notify:
            yield commit
