"""The alternatives for callers that are threads: one object each, which all callers use."""

from __future__ import annotations

import time
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, Final, Protocol

import psycopg
from sqlalchemy import create_engine, make_url

import dualwrite
from alternatives import DELIVERY_TIMEOUT, Target
from dualwrite.stores.sql.engines import KEPT_CONNECTIONS
from orders import INSERT, INSERT_OUTBOX, INSERT_OUTBOX_SQL, INSERT_SQL, Order
from phases import ClockedStore, Recorder
from pool_cases import CORE, DECIDED, NAIVE, OUTBOX, OWN, POOLS, WRITERS, PoolCase
from shared_delivery import SharedDelivery

PREFIX: Final = "benchmark-pool"


class Alternative(Protocol):
    """One way to place orders."""

    def write(self, caller: int, order: Order) -> None:
        """Place one order; returns when it is done, as far as this alternative can know. Called by many threads."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


# --- the database alone -------------------------------------------------------------------------------------------------------


class Commits(Protocol):
    """One commit per request; the callers share the connections."""

    def commit(self, order: Order, outbox_topic: str | None = None) -> None:
        """Commit an order, with a row in the outbox if a topic is given."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class CoreCommits:
    """Through SQLAlchemy Core: an engine whose pool has this many connections."""

    def __init__(self, url: str, connections: int) -> None:
        self._engine = create_engine(url, pool_size=connections, max_overflow=0)
        with ExitStack() as all_at_once:
            for _ in range(connections):
                all_at_once.enter_context(self._engine.connect())

    def commit(self, order: Order, outbox_topic: str | None = None) -> None:
        """See Commits."""
        with self._engine.begin() as connection:
            connection.execute(INSERT, {"body": order.body})
            if outbox_topic is not None:
                connection.execute(INSERT_OUTBOX, order.outbox_row(outbox_topic))

    def close(self) -> None:
        """See Commits."""
        self._engine.dispose()


class PsycopgCommits:
    """Through psycopg: this many connections; a caller takes a free one."""

    def __init__(self, url: str, connections: int) -> None:
        self._free: SimpleQueue[psycopg.Connection[Any]] = SimpleQueue()
        with ExitStack() as opened:
            for _ in range(connections):
                self._free.put(opened.enter_context(psycopg.connect(conninfo(url))))
            self._opened = opened.pop_all()

    def commit(self, order: Order, outbox_topic: str | None = None) -> None:
        """See Commits."""
        connection = self._free.get()
        try:
            connection.execute(INSERT_SQL, (order.body,))
            if outbox_topic is not None:
                connection.execute(INSERT_OUTBOX_SQL, tuple(order.outbox_row(outbox_topic).values()))
            connection.commit()
        finally:
            self._free.put(connection)

    def close(self) -> None:
        """See Commits."""
        self._opened.close()


def conninfo(url: str) -> str:
    """The form for libpq of SQLAlchemy's URL."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _commits(case: PoolCase, url: str) -> Commits:
    made = CoreCommits if case.point.handle == CORE else PsycopgCommits
    return made(url, case.connections)


class Plain:
    """Only the database's part."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits

    def write(self, caller: int, order: Order) -> None:
        """See Alternative."""
        del caller
        self._commits.commit(order)

    def close(self) -> None:
        """See Alternative."""
        self._commits.close()


class Naive(Plain):
    """Commit, then produce and wait for the delivery."""

    def __init__(self, commits: Commits, target: Target) -> None:
        super().__init__(commits)
        self._topic = target.topic
        self._delivery = SharedDelivery(target.kafka)

    def write(self, caller: int, order: Order) -> None:
        """See Alternative."""
        super().write(caller, order)
        self._delivery.send(self._topic, order.body, order.key).result(DELIVERY_TIMEOUT)

    def close(self) -> None:
        """See Alternative."""
        self._delivery.close()
        super().close()


class Outbox(Plain):
    """Commit with a row in the outbox; `relay.py` publishes it."""

    def __init__(self, commits: Commits, target: Target) -> None:
        super().__init__(commits)
        self._topic = target.topic

    def write(self, caller: int, order: Order) -> None:
        """See Alternative."""
        del caller
        self._commits.commit(order, self._topic)


# --- dualwrite ----------------------------------------------------------------------------------------------------------------


def core_unit(tx: dualwrite.Transaction, topic: str, order: Order) -> None:
    """The unit of work; `tx.db` is a SQLAlchemy Connection."""
    tx.db.execute(INSERT, {"body": order.body})
    tx.send(topic, order.body, key=order.key)


def psycopg_unit(tx: dualwrite.Transaction, topic: str, order: Order) -> None:
    """The unit of work; `tx.db` is a psycopg Connection."""
    tx.db.execute(INSERT_SQL, (order.body,))
    tx.send(topic, order.body, key=order.key)


def unit_of(case: PoolCase) -> Any:
    """The unit of work for the case's handle."""
    return core_unit if case.point.handle == CORE else psycopg_unit


def store_of(case: PoolCase, url: str, recorder: Recorder | None = None) -> ClockedStore:
    """A store for the case's handle."""
    if case.point.handle == CORE:
        store = ClockedStore(create_engine(url, pool_size=KEPT_CONNECTIONS), owns_engine=True)
    else:
        store = ClockedStore.from_psycopg(lambda: psycopg.connect(conninfo(url)))
    store.recorder = recorder
    return store


class Writers:
    """A DualWriter for each caller."""

    def __init__(self, case: PoolCase, target: Target) -> None:
        self._topic = target.topic
        self._unit = unit_of(case)
        with ExitStack() as opened:
            self._writers = [self._open(opened, case, target, number) for number in range(case.point.callers)]
            self._opened = opened.pop_all()

    def _open(self, opened: ExitStack, case: PoolCase, target: Target, number: int) -> dualwrite.DualWriter[Any]:
        store = store_of(case, target.url)
        opened.callback(store.close)
        connected = dualwrite.connect(
            store, kafka=target.kafka, transactional_id=f"benchmark-{number}", settings=target.settings
        )
        return opened.enter_context(connected)

    def write(self, caller: int, order: Order) -> None:
        """See Alternative."""
        with self._writers[caller].transaction() as tx:
            self._unit(tx, self._topic, order)

    def close(self) -> None:
        """See Alternative."""
        self._opened.close()


class Pool:
    """dualwrite's pool: the callers share their commits.

    Attributes:
        pool: The pool.
    """

    def __init__(self, case: PoolCase, target: Target, recorder: Recorder | None) -> None:
        self._topic = target.topic
        self._unit = unit_of(case)
        self._recorder = recorder
        self._store = store_of(case, target.url, recorder)
        try:
            self.pool = dualwrite.create_pool(self._store, kafka=target.kafka, settings=target.settings, **arguments_of(case))
        except BaseException:
            self._store.close()
            raise

    def write(self, caller: int, order: Order) -> None:
        """See Alternative."""
        del caller
        if self._recorder is None:
            self.pool.run(self._unit, self._topic, order)
        else:
            self.pool.run(self._recorder.run, time.perf_counter(), self._unit, self._topic, order)

    def close(self) -> None:
        """See Alternative."""
        try:
            self.pool.close()
        finally:
            self._store.close()


class Own(Pool):
    """dualwrite's pool; each caller has a transaction of its own, and waits for a free writer."""

    def write(self, caller: int, order: Order) -> None:
        """See Alternative."""
        del caller
        with self.pool.transaction() as tx:
            self._unit(tx, self._topic, order)


def arguments_of(case: PoolCase) -> dict[str, Any]:
    """The pool's prefix, its size if one was chosen, and when its calls return."""
    size = {} if case.pool_size is None else {"size": case.pool_size}
    acknowledge = "decided" if case.alternative == DECIDED else "visible"
    return {"prefix": PREFIX, "options": dualwrite.PoolOptions(acknowledge=acknowledge), **size}


def make(case: PoolCase, target: Target, recorder: Recorder | None) -> Alternative:
    """A connected alternative."""
    if case.alternative in POOLS:
        return (Own if case.alternative == OWN else Pool)(case, target, recorder)
    if case.alternative == WRITERS:
        return Writers(case, target)
    commits = _commits(case, target.url)
    if case.alternative == NAIVE:
        return Naive(commits, target)
    if case.alternative == OUTBOX:
        return Outbox(commits, target)
    return Plain(commits)
