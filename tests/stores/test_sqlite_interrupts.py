"""SQLite: Ctrl-C while a statement's `execute` returns leaves no lock behind, whatever still references the connection.

The traceback of the interrupt references the cursor here, as a reference cycle in a program does until garbage collection.
"""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT


@pytest.fixture(params=["our engine", "the user's engine"])
def store(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[SqlStateStore]:
    if request.param == "our engine":
        with SqlStateStore.from_url(sqlite_url) as made:
            yield made
    else:
        engine = sa.create_engine(sqlite_url)
        SqlStateStore(engine)  # a second store on one engine changes nothing
        yield SqlStateStore(engine)
        engine.dispose()


@contextmanager
def interrupted_once(engine: sa.Engine, statement: str) -> Iterator[None]:
    """Ctrl-C when the next statement that begins with this text was executed and its `execute` is about to return."""
    left = [statement]

    def listen(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        if left and text.startswith(left[0]):
            left.clear()
            raise KeyboardInterrupt

    sa.event.listen(engine, "after_cursor_execute", listen)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sa.event.remove(engine, "after_cursor_execute", listen)
    assert not left


def assert_nobody_has_a_lock(engine: sa.Engine) -> None:
    other = sqlite3.connect(str(engine.url.database), timeout=0, isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE kafka_transaction_state SET owner = 'another'")
        other.execute("COMMIT")  # without WAL it also waits for readers
    finally:
        other.close()


def test_an_interrupted_read_of_the_fence_leaves_no_lock(store: SqlStateStore) -> None:
    claim = store.claim("id", "tests", timeout=LIMIT)
    with interrupted_once(store.engine, "SELECT"):
        with pytest.raises(KeyboardInterrupt) as caught:
            store.begin(claim)
        assert_nobody_has_a_lock(store.engine)
    assert caught.value.__traceback__ is not None
    store.begin(claim).rollback()


@pytest.mark.parametrize("fetch", [lambda result: result.all(), lambda result: result.first()])
def test_an_interrupted_select_of_the_user_leaves_no_lock(
    store: SqlStateStore, fetch: Callable[[sa.CursorResult[Any]], object]
) -> None:
    claim = store.claim("id", "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    with interrupted_once(store.engine, "SELECT 1"):
        with pytest.raises(KeyboardInterrupt) as caught:
            fetch(transaction.handle.execute(sa.text("SELECT 1 UNION SELECT 2")))
        transaction.rollback()
        assert_nobody_has_a_lock(store.engine)
    assert caught.value.__traceback__ is not None
    store.begin(claim).rollback()


def test_an_interrupted_claim_leaves_no_lock(store: SqlStateStore) -> None:
    store.claim("id", "tests", timeout=LIMIT)
    with interrupted_once(store.engine, "SELECT"):
        with pytest.raises(KeyboardInterrupt) as caught:
            store.claim("id", "tests", timeout=LIMIT)
        assert_nobody_has_a_lock(store.engine)
    assert caught.value.__traceback__ is not None
    assert store.claim("id", "tests", timeout=LIMIT).fence == 2


def test_an_interrupted_commit_leaves_no_lock_in_the_pool(store: SqlStateStore) -> None:
    """SQLAlchemy then considers the transaction ended, and returns the connection to the pool without a rollback."""

    def interrupt(_connection: sa.Connection) -> None:
        raise KeyboardInterrupt

    with store.engine.connect() as connection:
        connection.begin()
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        sa.event.listen(store.engine, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            connection.commit()
        sa.event.remove(store.engine, "commit", interrupt)
    assert_nobody_has_a_lock(store.engine)
