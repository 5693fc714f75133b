"""SQLite: Ctrl-C while a statement's `execute` returns leaves no lock behind, whatever still references the connection; and it
ends a wait for the write lock at once.

The traceback of the interrupt references the cursor here, as a reference cycle in a program does until garbage collection.
"""

from __future__ import annotations

import gc
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

import dualwrite
from dualwrite import Timeouts
from dualwrite.errors import StoreUnavailableError
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.rows import Claim
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.store_transaction import StoreTransaction
from fixtures.pace import LIMIT, limit


@pytest.fixture(params=["our engine", "the user's engine"])
def store(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[SqlStateStore]:
    if request.param == "our engine":
        with SqlStateStore.from_url(sqlite_url) as made:
            yield made
    else:
        engine = sa.create_engine(sqlite_url, connect_args={"timeout": LIMIT})
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


# --- while another connection has the write lock --------------------------------------------------------------------------


@contextmanager
def locked(engine: sa.Engine, seconds: float) -> Iterator[threading.Event]:
    """Another connection has the write lock, for so many seconds; the event says that it no longer has it."""
    released = threading.Event()
    other = sqlite3.connect(str(engine.url.database), isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")

    def release() -> None:
        released.set()
        other.execute("ROLLBACK")

    timer = threading.Timer(seconds, release)
    timer.start()
    try:
        yield released
    finally:
        timer.cancel()
        timer.join()
        other.close()


def busy_timeout(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one())


WAITS: dict[str, Callable[[SqlStateStore, Claim], object]] = {
    "a transaction": lambda store, claim: store.begin(claim),
    "a claim": lambda store, claim: store.claim(claim.transactional_id, "ours", timeout=LIMIT),
    "a resolution": lambda store, claim: store.forget(claim.transactional_id),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_an_interrupt_ends_a_wait_for_the_write_lock_at_once(
    store: SqlStateStore, wait: Callable[[SqlStateStore, Claim], object]
) -> None:
    """SQLite's own wait ends only with the lock, and Python handles no signal meanwhile."""
    claim = store.claim("id", "tests", timeout=LIMIT)
    before = busy_timeout(store.engine)
    with locked(store.engine, limit(4)) as released:
        timer = threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait(store, claim)
        assert not released.is_set()
        timer.join()
    store.begin(claim).rollback()
    assert busy_timeout(store.engine) == before


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_who_waits_for_the_write_lock_gets_it(store: SqlStateStore, wait: Callable[[SqlStateStore, Claim], object]) -> None:
    """After more than one slice of the wait."""
    claim = store.claim("id", "tests", timeout=LIMIT)
    before = busy_timeout(store.engine)
    with locked(store.engine, 0.5) as released:
        result = wait(store, claim)
        assert released.is_set()
    if isinstance(result, StoreTransaction):
        result.rollback()
    assert_nobody_has_a_lock(store.engine)
    assert busy_timeout(store.engine) == before


def test_a_transaction_waits_for_the_write_lock_as_long_as_the_writers_claim(sqlite_url: str) -> None:
    with store_from_url(sqlite_url, write_lock_timeout=0.3) as store:
        assert isinstance(store, SqlStateStore)
        claim = store.claim("id", "tests", timeout=LIMIT)
        with locked(store.engine, limit(4)) as released:
            with pytest.raises(StoreUnavailableError, match="another connection"):
                store.begin(claim)
            assert not released.is_set()
    with dualwrite.open_recoverer(sqlite_url, kafka="127.0.0.1:1", timeouts=Timeouts(claim=0.7)) as recoverer:
        assert isinstance(recoverer.store, SqlStateStore)
        assert busy_timeout(recoverer.store.engine) == 700
