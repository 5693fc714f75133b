"""Units of a group on SQL databases: what a unit can leave behind, and what happens if the database has undone more than it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy import event, insert
from sqlalchemy.orm import Session
from store_scene import ID, Order, commit, orders, user_metadata, write

from dualwrite.errors import StoreCommitFailedError, StoreError, TransactionControlError
from dualwrite.stores.base import StoreTransaction
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.dialect import driver_connection  # by a way that nobody sees
from dualwrite.testing.proxy import TcpProxy
from fixtures.pace import LIMIT, done


def begun(store: SqlStateStore) -> StoreTransaction:
    user_metadata.create_all(store.engine)
    return store.begin(store.claim(ID, "tests", timeout=LIMIT))


def numbers(store: SqlStateStore, column: Any = orders.c.id) -> list[int]:
    with store.engine.connect() as connection:
        return sorted(connection.scalars(sa.select(column)))


def test_a_statement_that_fails_takes_only_its_unit_with_it(store: SqlStateStore) -> None:
    transaction = begun(store)
    for other, number in enumerate((1, 1, 2, 2, 3), start=11):
        transaction.begin_unit()
        try:
            write(transaction, other)
            write(transaction, number)
        except sa.exc.IntegrityError as error:
            transaction.undo_unit(error)
        else:
            transaction.end_unit()
    commit(transaction)
    assert numbers(store) == [1, 2, 3, 11, 13, 15]


def test_an_error_that_a_unit_has_swallowed_is_its_own(postgres_store: SqlStateStore) -> None:
    """PostgreSQL could not commit any more: that must not be found only at the COMMIT of all."""
    transaction = begun(postgres_store)
    transaction.begin_unit()
    write(transaction, 1)
    transaction.end_unit()
    transaction.begin_unit()
    write(transaction, 2)
    with pytest.raises(sa.exc.ProgrammingError):
        transaction.handle.execute(sa.text("SELECT nothing"))
    with pytest.raises(StoreCommitFailedError, match="an earlier statement of the transaction failed") as caught:
        transaction.end_unit()
    transaction.undo_unit(caught.value)
    transaction.begin_unit()
    write(transaction, 3)
    transaction.end_unit()
    commit(transaction)
    assert numbers(postgres_store) == [1, 3]


def test_a_with_block_that_a_unit_never_leaves_is_rolled_back_with_it(store: SqlStateStore) -> None:
    """A coroutine that is given up: SQLAlchemy would refuse every statement until the block is left."""
    transaction = begun(store)
    transaction.begin_unit()
    transaction.handle.begin_nested().__enter__()
    transaction.handle.begin_nested().__enter__()
    write(transaction, 1)
    transaction.undo_unit(ValueError())
    transaction.begin_unit()
    write(transaction, 2)
    transaction.end_unit()
    commit(transaction)
    assert numbers(store) == [2]


@pytest.mark.parametrize("undone", [False, True])
def test_a_savepoint_that_a_unit_leaves_open_ends_with_it(store: SqlStateStore, undone: bool) -> None:
    transaction = begun(store)
    transaction.begin_unit()
    transaction.handle.begin_nested()
    transaction.handle.begin_nested()
    write(transaction, 1)
    if undone:
        transaction.undo_unit(ValueError())
    else:
        transaction.end_unit()
    transaction.begin_unit()
    with transaction.handle.begin_nested():
        write(transaction, 2)
    transaction.end_unit()
    commit(transaction)
    assert numbers(store) == [2] if undone else [1, 2]


# --- the ORM --------------------------------------------------------------------------------------------------------------


def test_each_unit_has_its_own_session(store: SqlStateStore) -> None:
    """What one unit left pending is written with it, and the next does not see its objects."""
    transaction = begun(store)
    transaction.begin_unit()
    first = transaction.session
    first.add(Order(id=1, item="chair"))
    transaction.end_unit()
    transaction.begin_unit()
    second = transaction.session
    assert second is not first
    assert not list(second)
    assert second.get(Order, 1).item == "chair"
    second.add(Order(id=2, item="table"))
    transaction.undo_unit(ValueError())
    transaction.begin_unit()
    transaction.session.add(Order(id=3, item="lamp"))
    transaction.end_unit()
    commit(transaction)
    assert numbers(store, Order.id) == [1, 3]


def test_sessions_get_the_outcome_of_their_unit(store: SqlStateStore) -> None:
    heard: list[tuple[str, int]] = []

    def listen(session: Session, number: int) -> None:
        for name in ("before_commit", "after_commit", "after_rollback"):
            event.listen(session, name, lambda _session, name=name: heard.append((name, number)))

    transaction = begun(store)
    for number in (1, 2, 3):
        transaction.begin_unit()
        listen(transaction.session, number)
        transaction.session.add(Order(id=number, item="chair"))
        if number == 2:
            transaction.undo_unit(ValueError())
        else:
            transaction.end_unit()
    assert heard == [("before_commit", 1), ("after_rollback", 2), ("before_commit", 3)]
    commit(transaction)
    assert numbers(store, Order.id) == [1, 3]
    assert heard[3:] == [("after_commit", 1), ("after_commit", 3)]


def test_a_failing_listener_of_one_unit_keeps_nothing_from_the_others(
    store: SqlStateStore, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    def listen(session: Session, number: int) -> None:
        def after_commit(_session: Session) -> None:
            heard.append(number)
            raise StoreCommitFailedError(f"listener {number}", transactional_id="another")

        event.listen(session, "after_commit", after_commit)

    transaction = begun(store)
    for number in (1, 2, 3):
        transaction.begin_unit()
        listen(transaction.session, number)
        transaction.session.add(Order(id=number, item="chair"))
        transaction.end_unit()
    commit(transaction)
    assert heard == [1, 2, 3]
    assert str(transaction.after_commit_error).startswith("listener 1")
    assert "listener 2" in caplog.text
    assert "listener 3" in caplog.text
    assert numbers(store, Order.id) == [1, 2, 3]


def test_a_flush_that_fails_takes_only_its_unit_with_it(store: SqlStateStore) -> None:
    transaction = begun(store)
    for number in (1, 1, 2):
        transaction.begin_unit()
        transaction.session.add(Order(id=number, item="chair"))
        try:
            transaction.end_unit()
        except sa.exc.IntegrityError as error:
            transaction.undo_unit(error)
    commit(transaction)
    assert numbers(store, Order.id) == [1, 2]


# --- more is undone than the unit -------------------------------------------------------------------------------------------


def test_a_unit_that_ends_the_transaction_itself_is_found(store: SqlStateStore) -> None:
    """Its own writes and those of earlier units may be committed: nobody may run them again."""
    transaction = begun(store)
    transaction.begin_unit()
    write(transaction, 1)
    transaction.end_unit()
    transaction.begin_unit()
    driver_connection(transaction.handle).commit()
    with pytest.raises((TransactionControlError, StoreCommitFailedError)) as caught:  # noqa: PT012  (depends on the driver)
        transaction.end_unit()
        transaction.begin_unit()
    if not isinstance(caught.value, TransactionControlError):
        with pytest.raises(TransactionControlError):
            transaction.undo_unit(caught.value)
    transaction.rollback()


@pytest.mark.parametrize(
    ("way", "is_conflict"), [("plain", True), ("under a savepoint", True), ("wrapped by the application", False)]
)
def test_a_deadlock_that_rolled_back_everything_can_be_repeated(
    mariadb_store: SqlStateStore, way: str, is_conflict: bool
) -> None:
    """MariaDB rolls back the whole transaction: the unit can't be undone alone, and no unit has had any effect."""
    transaction = begun(mariadb_store)
    with mariadb_store.engine.begin() as connection:
        connection.execute(insert(orders), [{"id": number, "item": "chair"} for number in range(1, 20)])
    transaction.begin_unit()
    write(transaction, 100)
    transaction.end_unit()
    transaction.begin_unit()
    raises = {"plain": _deadlock, "under a savepoint": _under_a_savepoint, "wrapped by the application": _wrapped}[way]
    with pytest.raises((sa.exc.OperationalError, ValueError)) as raised:
        raises(mariadb_store, transaction)
    assert mariadb_store.is_conflict(raised.value) is is_conflict
    with pytest.raises(StoreError) as caught:
        transaction.undo_unit(raised.value)
    assert caught.value.retriable
    assert not isinstance(caught.value, TransactionControlError)
    transaction.rollback()
    assert 100 not in numbers(mariadb_store)


def test_a_lock_timeout_that_rolled_back_everything_can_be_repeated(mariadb_store: SqlStateStore) -> None:
    """As with `innodb_rollback_on_timeout`, which only a restart of the server can set: the test rolls back instead."""
    transaction = begun(mariadb_store)
    transaction.begin_unit()
    write(transaction, 1)
    timeout = sa.exc.OperationalError("UPDATE", {}, pymysql.err.OperationalError(1205, "Lock wait timeout exceeded"))
    driver_connection(transaction.handle).rollback()
    with pytest.raises(StoreError) as caught:
        transaction.undo_unit(timeout)
    assert caught.value.retriable
    transaction.rollback()
    assert numbers(mariadb_store) == []


def test_a_deadlock_that_was_handled_before_the_unit_began_is_not_its_own(mariadb_store: SqlStateStore) -> None:
    transaction = begun(mariadb_store)
    try:
        _raise(sa.exc.OperationalError("UPDATE", {}, pymysql.err.OperationalError(1213, "Deadlock found")))
    except sa.exc.OperationalError:
        transaction.begin_unit()
        write(transaction, 1)
        driver_connection(transaction.handle).commit()
        with pytest.raises(ValueError) as raised:  # noqa: PT011  (it has no text)
            _raise(ValueError())
        assert isinstance(raised.value.__context__, sa.exc.OperationalError)
        with pytest.raises(TransactionControlError):
            transaction.undo_unit(raised.value)
    transaction.rollback()


def _raise(error: BaseException) -> NoReturn:
    raise error


def _under_a_savepoint(store: SqlStateStore, transaction: StoreTransaction) -> None:
    with transaction.handle.begin_nested():
        _deadlock(store, transaction)


def _wrapped(store: SqlStateStore, transaction: StoreTransaction) -> None:
    try:
        _deadlock(store, transaction)
    except sa.exc.OperationalError as error:
        raise ValueError("The order failed.") from error


def _deadlock(store: SqlStateStore, transaction: StoreTransaction) -> None:
    """Make the transaction the victim of a deadlock, since it has changed less."""
    update: Callable[[str, int], Any] = lambda item, number: sa.update(orders).where(orders.c.id == number).values(item=item)  # noqa: E731
    transaction.handle.execute(update("ours", 1))
    with store.engine.connect() as other, ThreadPoolExecutor(1) as thread:
        for number in range(2, 20):
            other.execute(update("theirs", number))
        waiting = thread.submit(other.execute, update("theirs", 1))
        time.sleep(0.2)
        try:
            transaction.handle.execute(update("ours", 2))
        finally:
            done(waiting)
            other.rollback()


def test_a_connection_that_breaks_in_a_unit(
    proxied_store: SqlStateStore, postgres_proxy: TcpProxy, postgres_store: SqlStateStore
) -> None:
    transaction = begun(proxied_store)
    transaction.begin_unit()
    write(transaction, 1)
    postgres_proxy.cut()
    with pytest.raises(sa.exc.OperationalError) as caught:
        write(transaction, 2)
    with pytest.raises(StoreError) as undoing:
        transaction.undo_unit(caught.value)
    assert undoing.value.retriable
    transaction.rollback()
    assert numbers(postgres_store) == []
