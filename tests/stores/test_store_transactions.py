"""Transactions on SQL databases: newer claims, engines of the user, sessions, the end of handles."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event, insert
from sqlalchemy.exc import IntegrityError
from store_scene import ID, STATE, Order, assert_nothing_is_checked_out, commit, orders, rows, write

from dualwrite.errors import StoreError, TransactionControlError, WriterClosedError
from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT

# --- the user's own engine ------------------------------------------------------------------------------------------------


def test_connections_that_are_in_use_when_the_store_is_closed_are_closed_after_it(database_url: str) -> None:
    """A thread of ours may still have one, or begin to use one."""
    store = SqlStateStore.from_url(database_url)
    opened: list[Any] = []
    event.listen(store.engine, "connect", lambda raw, _: opened.append(raw))
    closed: list[Any] = []
    event.listen(store.engine, "close", lambda raw, _: closed.append(raw))
    with store.engine.connect() as early:
        early.execute(sa.select(1))
        store.close()
    with store.engine.connect() as late:
        late.execute(sa.select(1))
    assert len(opened) == 2
    assert closed == opened


def _nothing(engine: sa.Engine) -> None:
    del engine


def _autocommit(engine: sa.Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(raw: Any, _record: Any) -> None:
        raw.isolation_level = None


def _own_begin(engine: sa.Engine) -> None:
    _autocommit(engine)

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")


@pytest.mark.parametrize("isolation_level", [None, "DEFERRED", "EXCLUSIVE"])
@pytest.mark.parametrize("listen", [_nothing, _autocommit, _own_begin])
def test_an_engine_of_the_user(sqlite_url: str, isolation_level: str | None, listen: Any) -> None:
    engine = sa.create_engine(sqlite_url, connect_args={"isolation_level": isolation_level})
    listen(engine)
    store = SqlStateStore(engine)
    claim = store.claim(ID, "ours", timeout=LIMIT)
    orders.create(engine, checkfirst=True)
    transaction = store.begin(claim)
    write(transaction)
    transaction.rollback()
    assert rows(engine) == 0
    transaction = store.begin(claim)
    write(transaction)
    commit(transaction)
    assert rows(engine) == 1
    assert store.read_claimed(claim).prepared_state == STATE
    store.close()
    assert rows(engine) == 1  # close does not dispose of an engine that was passed in
    engine.dispose()


@pytest.mark.usefixtures("claim")
def test_an_engine_in_autocommit(database_url: str, store: SqlStateStore) -> None:
    engine = sa.create_engine(database_url, isolation_level="AUTOCOMMIT")
    own = SqlStateStore(engine)
    claim = own.claim(ID, "ours", timeout=LIMIT)
    transaction = own.begin(claim)
    write(transaction)
    transaction.rollback()
    assert rows(store.engine) == 0
    transaction = own.begin(claim)
    write(transaction)
    commit(transaction)
    assert rows(store.engine) == 1
    with engine.connect() as connection:  # still in autocommit
        connection.execute(insert(orders).values(id=2, item="table"))
    assert rows(store.engine) == 2
    engine.dispose()


# --- the ORM session ------------------------------------------------------------------------------------------------------


def test_the_session_writes_in_the_same_transaction(store: SqlStateStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    assert transaction.session is transaction.session
    order = Order(id=1, item="chair")
    transaction.session.add(order)
    write(transaction)
    transaction.record(STATE, generation=0, transaction_number=1)  # flushes
    transaction.commit()
    assert (rows(store.engine), rows(store.engine, Order)) == (1, 1)
    assert order.item == "chair"  # detached, but still readable
    assert sa.inspect(order).detached


def test_savepoints_of_the_session(store: SqlStateStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    session = transaction.session
    session.add(Order(id=1, item="chair"))
    session.flush()
    with pytest.raises(IntegrityError), session.begin_nested():
        session.add(Order(id=1, item="chair again"))
    with session.begin(nested=True):
        session.add(Order(id=2, item="table"))
    commit(transaction)
    assert rows(store.engine, Order) == 2


def _clash(session: Any) -> None:
    session.add(Order(id=1, item="chair"))
    session.flush()
    session.expunge_all()
    session.add(Order(id=1, item="chair again"))


@pytest.mark.parametrize("recorded", [False, True])
def test_an_error_in_flush_is_raised_and_rollback_works(store: SqlStateStore, claim: Claim, recorded: bool) -> None:
    """By the user's own flush, or by that of `record`."""
    transaction = store.begin(claim)
    _clash(transaction.session)
    with pytest.raises(IntegrityError):
        transaction.record(STATE, generation=0, transaction_number=1) if recorded else transaction.session.flush()
    transaction.rollback()
    assert rows(store.engine, Order) == 0
    assert store.read_claimed(claim).prepared_state is None
    assert_nothing_is_checked_out(store)


def test_a_failed_flush_that_was_swallowed_is_not_committed(store: SqlStateStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    _clash(transaction.session)
    with pytest.raises(IntegrityError):
        transaction.session.flush()
    with pytest.raises(TransactionControlError):
        transaction.session.rollback()
    with pytest.raises(StoreError, match="flush"):
        transaction.record(STATE, generation=0, transaction_number=1)
    transaction.rollback()
    assert rows(store.engine, Order) == 0


# --- after the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_handles_are_refused_after_the_end(store: SqlStateStore, claim: Claim, end: str) -> None:
    transaction = store.begin(claim)
    handle, session = transaction.handle, transaction.session
    session.execute(sa.text("SELECT 1"))
    if end == "commit":
        transaction.record(STATE, generation=0, transaction_number=1)
    getattr(transaction, end)()
    for use in (
        lambda: transaction.handle,
        lambda: transaction.session,
        lambda: transaction.record(STATE, generation=0, transaction_number=2),
        transaction.commit,
        lambda: handle.execute(sa.text("SELECT 1")),
        lambda: handle.scalar(sa.text("SELECT 1")),
        lambda: handle.scalars(sa.text("SELECT 1")),
        lambda: handle.exec_driver_sql("SELECT 1"),
        lambda: handle.connection,
        handle.begin,
        handle.begin_nested,
        handle.commit,
        handle.rollback,
        handle.close,
        lambda: session.execute(sa.text("SELECT 1")),
        lambda: session.add(Order(id=1, item="chair")),
        lambda: session.get(Order, 1),
        session.connection,
        session.begin_nested,
        session.commit,
        session.close,
    ):
        with pytest.raises(WriterClosedError):
            use()
    assert rows(store.engine, Order) == 0
