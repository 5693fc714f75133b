"""A writer on the user's psycopg connections: the promise is the same, and `tx.db` is the user's connection."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import psycopg_pool
import pytest
from psycopg.rows import dict_row

from dualwrite import SqlStateStore, Transaction
from dualwrite.errors import StoreError, TransactionControlError
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.tiers import thinned
from writer.scene import Event, Scene

COMMIT = b"COMMIT\0"
Stores = Callable[..., SqlStateStore]


def both(scene: Scene, tx: Transaction, number: int) -> None:
    """Write a row with psycopg, and send a message."""
    tx.db.execute("INSERT INTO events (writer, number) VALUES (%s, %s)", (scene.transactional_id, number))
    scene.send(tx, number)


@pytest.fixture(params=thinned(["connection", "pool", "function"], quick=["pool"]))
def make_store(request: pytest.FixtureRequest, postgres_scene: Scene) -> Iterator[Stores]:
    """A store on each kind of source."""
    with ExitStack() as stack:

        def make(port: int | None = None) -> SqlStateStore:
            url = postgres_scene.engine.url.set(drivername="postgresql", **({} if port is None else {"port": port}))
            dsn = url.render_as_string(hide_password=False)
            if request.param == "function":
                return stack.enter_context(SqlStateStore.from_psycopg(lambda: psycopg.connect(dsn, row_factory=dict_row)))
            if request.param == "pool":
                options: dict[str, Any] = {"row_factory": dict_row}
                pool = psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=2, kwargs=options, open=False)
                return stack.enter_context(SqlStateStore.from_psycopg(stack.enter_context(pool)))
            connection = stack.enter_context(psycopg.connect(dsn, row_factory=dict_row))
            return stack.enter_context(SqlStateStore.from_psycopg(connection))

        yield make


@pytest.mark.parametrize("lanes", thinned([1, 3], quick=[3]))
def test_blocks_become_visible_on_both_sides_or_not_at_all(scene: Scene, make_store: Stores, lanes: int) -> None:
    """All lanes use one connection in turn."""
    with scene.connect(make_store(), lanes=lanes) as writer:
        for number in range(1, 7):
            with writer.transaction() as tx:
                both(scene, tx, number)
                found = tx.db.execute("SELECT count(*) AS n FROM events WHERE writer = %s", (scene.transactional_id,))
                assert found.fetchone() == {"n": number}
        with pytest.raises(psycopg.errors.UniqueViolation), writer.transaction() as tx:
            both(scene, tx, 7)
            both(scene, tx, 7)
        with pytest.raises(TransactionControlError), writer.transaction() as tx:
            both(scene, tx, 8)
            tx.db.commit()
        with writer.transaction() as tx:
            tx.session.add(Event(writer=scene.transactional_id, number=9))
            scene.send(tx, 9)
    assert scene.agree() == [1, 2, 3, 4, 5, 6, 9]
    scene.assert_resolved()


def test_a_conflict_is_retried(postgres_scene: Scene) -> None:
    scene, runs = postgres_scene, []
    dsn = scene.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn) as connection, psycopg.connect(dsn, autocommit=True) as other:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with SqlStateStore.from_psycopg(connection) as store, scene.connect(store) as writer:
            with writer.transaction() as tx:
                both(scene, tx, 1)

            @writer.transactional(attempts=3)
            def save(tx: Transaction) -> None:
                runs.append(tx)
                both(scene, tx, 2)
                if len(runs) == 1:
                    other.execute("UPDATE events SET number = number WHERE writer = %s", (scene.transactional_id,))
                tx.db.execute("UPDATE events SET number = number WHERE writer = %s", (scene.transactional_id,))

            save()
    assert len(runs) == 2
    assert scene.agree() == [1, 2]


@pytest.mark.parametrize("when", thinned(["before", "answered"], quick=["answered"]))
def test_an_unknown_commit_is_resolved(
    scene: Scene, make_store: Stores, postgres_proxy: TcpProxy, request: pytest.FixtureRequest, when: Any
) -> None:
    with scene.connect(make_store(postgres_proxy.port)) as writer:
        with writer.transaction() as tx:
            both(scene, tx, 1)
        postgres_proxy.on_client_bytes(COMMIT, Link.cut, when=when)
        if when == "before":
            with pytest.raises(StoreError), writer.transaction() as tx:
                both(scene, tx, 2)
        else:
            with writer.transaction() as tx:
                both(scene, tx, 2)
        if "connection" in request.node.callspec.params.values():
            with pytest.raises(StoreError, match="connect again"), writer.transaction() as tx:
                both(scene, tx, 3)
        else:
            with writer.transaction() as tx:
                both(scene, tx, 3)
    last = [] if "connection" in request.node.callspec.params.values() else [3]
    assert scene.agree() == [1, *([2] if when == "answered" else []), *last]
    scene.assert_resolved()
