"""What MariaDB (and MySQL) do differently in a transaction: implicit commits and rollbacks, snapshots, comparing ids."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import insert
from store_scene import (
    ID,
    STATE,
    assert_nothing_is_checked_out,
    commit,
    execute_past_the_guard,
    orders,
    recorded,
    rows,
    store_on_engine,
    user_metadata,
    write,
)

from dualwrite import migration
from dualwrite.errors import ClaimTimeoutError, FencedError, StoreCommitFailedError, TransactionControlError
from dualwrite.stores.base import Claim, LostKind, LostTransaction, Resolution, StoreTransaction
from dualwrite.stores.sql import SqlStateStore
from fixtures.mariadb_server import MariaDBServer
from fixtures.mysql_server import MYSQLD, mariadb_only
from fixtures.pace import LIMIT, done

# --- what ends a transaction by itself ------------------------------------------------------------------------------------

IMPLICIT_COMMITS = [
    "CREATE TABLE another (id int)",
    "ALTER TABLE orders ADD COLUMN note int",
    "TRUNCATE TABLE orm_orders",
    "LOCK TABLES orders WRITE, kafka_transaction_state WRITE",
    "SET autocommit = 1",
    "ANALYZE TABLE orders",
    "FLUSH TABLES",
]


@pytest.mark.parametrize("statement", IMPLICIT_COMMITS)
def test_a_statement_that_would_commit_by_itself_is_refused_before_it_runs(
    mariadb_store: SqlStateStore, mariadb_claim: Claim, statement: str
) -> None:
    transaction = mariadb_store.begin(mariadb_claim)
    write(transaction)
    for call in (transaction.handle.exec_driver_sql, lambda text: transaction.session.execute(sa.text(text))):
        with pytest.raises(TransactionControlError, match="would commit the transaction implicitly"):
            call(statement)
    with pytest.raises(TransactionControlError):
        sa.Table("another", sa.MetaData(), sa.Column("id", sa.Integer)).create(transaction.handle)
    assert rows(mariadb_store.engine) == 0
    commit(transaction)
    assert rows(mariadb_store.engine) == 1
    assert mariadb_store.read_claimed(mariadb_claim).prepared_state == STATE


def test_a_block_may_use_temporary_tables(mariadb_store: SqlStateStore, mariadb_claim: Claim) -> None:
    transaction = mariadb_store.begin(mariadb_claim)
    for statement in ("CREATE TEMPORARY TABLE mine (id int)", "INSERT INTO mine VALUES (1)", "DROP TEMPORARY TABLE mine"):
        transaction.handle.exec_driver_sql(statement)
    commit(transaction)
    assert mariadb_store.read_claimed(mariadb_claim).prepared_state == STATE


@pytest.mark.parametrize("statement", IMPLICIT_COMMITS)
def test_a_statement_that_commits_by_itself_is_found(
    mariadb_store: SqlStateStore, mariadb_claim: Claim, statement: str
) -> None:
    transaction = mariadb_store.begin(mariadb_claim)
    write(transaction)
    execute_past_the_guard(transaction, statement)
    with pytest.raises(TransactionControlError, match="WITHOUT its messages"):
        transaction.record(STATE, generation=0, transaction_number=1)
    transaction.rollback()
    assert mariadb_store.read_claimed(mariadb_claim).prepared_state is None
    assert_nothing_is_checked_out(mariadb_store)


def test_statements_after_one_that_commits_are_rolled_back_on_an_engine_with_autocommit(mariadb_url: str) -> None:
    with store_on_engine(mariadb_url, isolation_level="AUTOCOMMIT") as store:
        transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
        execute_past_the_guard(transaction, "CREATE TABLE another (id int)")
        write(transaction)
        with pytest.raises(TransactionControlError):
            transaction.record(STATE, generation=0, transaction_number=1)
        transaction.rollback()
        assert rows(store.engine) == 0


def _swallow_a_deadlock(store: SqlStateStore, transaction: StoreTransaction) -> None:
    """The block is chosen as the victim, since it has changed less, and ignores the error."""
    db = transaction.handle
    db.execute(sa.text("UPDATE orders SET item = 'ours' WHERE id = 1"))
    with store.engine.connect() as other, ThreadPoolExecutor(1) as thread:
        for number in range(2, 20):
            other.execute(sa.text("UPDATE orders SET item = 'theirs' WHERE id = :id"), {"id": number})
        waiting = thread.submit(other.execute, sa.text("UPDATE orders SET item = 'theirs' WHERE id = 1"))
        time.sleep(0.2)
        with pytest.raises(sa.exc.OperationalError, match="1213") as caught:
            db.execute(sa.text("UPDATE orders SET item = 'ours' WHERE id = 2"))
        assert store.is_conflict(caught.value)
        done(waiting)
        other.rollback()


def test_a_deadlock_that_the_block_swallowed_is_found(mariadb_store: SqlStateStore, mariadb_claim: Claim) -> None:
    with mariadb_store.engine.begin() as connection:
        connection.execute(insert(orders), [{"id": number, "item": "chair"} for number in range(1, 20)])
    transaction = mariadb_store.begin(mariadb_claim)
    transaction.handle.execute(insert(orders).values(id=100, item="before the deadlock"))
    _swallow_a_deadlock(mariadb_store, transaction)
    transaction.handle.execute(insert(orders).values(id=101, item="after the deadlock"))
    with pytest.raises(TransactionControlError):
        transaction.record(STATE, generation=0, transaction_number=1)
    transaction.rollback()
    assert rows(mariadb_store.engine) == 19
    assert mariadb_store.read_claimed(mariadb_claim).prepared_state is None


@pytest.mark.slow
def test_a_lock_wait_timeout_rolls_back_its_statement_only(mariadb_store: SqlStateStore, mariadb_claim: Claim) -> None:
    with mariadb_store.engine.begin() as connection:
        connection.execute(insert(orders).values(id=1, item="chair"))
    transaction = mariadb_store.begin(mariadb_claim)
    transaction.handle.execute(insert(orders).values(id=2, item="table"))
    transaction.handle.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
    with mariadb_store.engine.begin() as other:
        other.execute(sa.text("UPDATE orders SET item = 'theirs' WHERE id = 1"))
        with pytest.raises(sa.exc.OperationalError, match="1205") as caught:
            transaction.handle.execute(sa.text("UPDATE orders SET item = 'ours' WHERE id = 1"))
    assert not mariadb_store.is_conflict(caught.value)
    commit(transaction)
    assert mariadb_store.read_claimed(mariadb_claim).prepared_state == STATE
    assert rows(mariadb_store.engine) == 2


@pytest.mark.slow
def test_a_lock_wait_timeout_that_rolls_back_everything_is_found() -> None:
    with MariaDBServer(settings={"innodb-rollback-on-timeout": "ON"}) as server:
        migration.upgrade(server.url)
        with SqlStateStore.from_url(server.url) as store:
            user_metadata.create_all(store.engine)
            with store.engine.begin() as connection:
                connection.execute(insert(orders).values(id=1, item="chair"))
            transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
            transaction.handle.execute(insert(orders).values(id=2, item="table"))
            transaction.handle.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
            with store.engine.begin() as other:
                other.execute(sa.text("UPDATE orders SET item = 'theirs' WHERE id = 1"))
                with pytest.raises(sa.exc.OperationalError, match="1205"):
                    transaction.handle.execute(sa.text("UPDATE orders SET item = 'ours' WHERE id = 1"))
            with pytest.raises(TransactionControlError):
                transaction.record(STATE, generation=0, transaction_number=1)
            transaction.rollback()
            assert rows(store.engine) == 1


# --- the fence ------------------------------------------------------------------------------------------------------------


SNAPSHOT_ISOLATION = {"connect_args": {"init_command": "SET SESSION innodb_snapshot_isolation = ON"}}
"""On by default since MariaDB 11.6: an UPDATE of a row that was changed meanwhile fails (1020) instead of changing no row."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"isolation_level": "READ COMMITTED"}, id="READ COMMITTED"),
        pytest.param({"isolation_level": "REPEATABLE READ"}, id="REPEATABLE READ"),
        pytest.param(SNAPSHOT_ISOLATION, id="snapshot isolation", marks=mariadb_only),
    ],
)
def test_a_newer_claim_than_the_snapshot_is_found(mariadb_url: str, mariadb_store: SqlStateStore, options: Any) -> None:
    """The UPDATE checks the newest committed row, not the one in the transaction's snapshot."""
    with store_on_engine(mariadb_url, **options) as store:
        claim = store.claim(ID, "ours", timeout=LIMIT)
        transaction = store.begin(claim)
        write(transaction)
        theirs = mariadb_store.claim(ID, "theirs", timeout=LIMIT)
        with pytest.raises(FencedError) as caught:
            transaction.record(STATE, generation=0, transaction_number=1)
        assert (caught.value.current_fence, caught.value.current_owner) == (theirs.fence, "theirs")
        transaction.rollback()
        assert mariadb_store.read_claimed(theirs).prepared_state is None
        assert rows(store.engine) == 0
        assert_nothing_is_checked_out(store)


@pytest.mark.slow
def test_a_claim_waits_for_a_serializable_transaction_from_its_beginning(
    mariadb_url: str, mariadb_store: SqlStateStore
) -> None:
    """There the check of the fence takes a shared lock on the row: a claim comes before the transaction or after it."""
    with store_on_engine(mariadb_url, isolation_level="SERIALIZABLE") as store:
        claim = store.claim(ID, "ours", timeout=LIMIT)
        transaction = store.begin(claim)
        with pytest.raises(ClaimTimeoutError, match="stayed locked for 1 s"):
            mariadb_store.claim(ID, "theirs", timeout=1)
        commit(transaction)
        theirs = mariadb_store.claim(ID, "theirs", timeout=LIMIT)
        assert mariadb_store.read_claimed(theirs).prepared_state == STATE
        with pytest.raises(FencedError):
            store.begin(claim)


@mariadb_only
def test_a_change_other_than_a_claim_is_retriable_under_snapshot_isolation(mariadb_url: str) -> None:
    with store_on_engine(mariadb_url, **SNAPSHOT_ISOLATION) as store:
        claim = store.claim(ID, "ours", timeout=LIMIT)
        transaction = store.begin(claim)
        store.record_resolution(claim, Resolution(resolved_generation=0))
        with pytest.raises(StoreCommitFailedError) as caught:
            transaction.record(STATE, generation=0, transaction_number=1)
        assert caught.value.retriable
        transaction.rollback()
        recorded(store, claim).commit()


# --- ids and values -------------------------------------------------------------------------------------------------------


def test_times_are_in_utc_in_every_session_time_zone(mariadb_url: str, mariadb_store: SqlStateStore) -> None:
    with store_on_engine(mariadb_url, connect_args={"init_command": "SET SESSION time_zone = '+09:00'"}) as store:
        claim = store.claim(ID, "ours", timeout=LIMIT)
        here, there = store.read_claimed(claim), mariadb_store.read_claimed(claim)
    assert here == there
    assert here.updated_at.utcoffset() is not None
    with mariadb_store.engine.connect() as connection:
        moment = connection.scalar(
            sa.text("SELECT TIMESTAMPDIFF(SECOND, updated_at, UTC_TIMESTAMP) FROM kafka_transaction_state")
        )
    assert 0 <= moment < 60


def test_a_long_list_of_lost_transactions(mariadb_store: SqlStateStore, mariadb_claim: Claim) -> None:
    """MySQL's TEXT would end at 64 KiB."""
    now = mariadb_store.read_claimed(mariadb_claim).updated_at
    with mariadb_store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE kafka_transaction_state SET lost = CONCAT('[', REPEAT(' ', 70000), ']')"))
    mariadb_store.record_resolution(mariadb_claim, Resolution(lost=LostTransaction(LostKind.LOST, STATE, 0, now)))
    with mariadb_store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE kafka_transaction_state SET lost = CONCAT(lost, REPEAT(' ', 70000))"))
    assert len(mariadb_store.read_claimed(mariadb_claim).lost) == 1


# --- migrations -----------------------------------------------------------------------------------------------------------


def test_the_table_is_made_for_transactions_and_exact_ids(mariadb_store: SqlStateStore) -> None:
    with mariadb_store.engine.connect() as connection:
        _, text = connection.exec_driver_sql("SHOW CREATE TABLE kafka_transaction_state").one()
    assert "ENGINE=InnoDB" in text
    assert f"COLLATE={'utf8mb4_nopad_bin' if MYSQLD is None else 'utf8mb4_0900_bin'}" in text
    assert "`updated_at` datetime(6)" in text


@pytest.mark.parametrize("scheme", ["mariadb+pymysql", "mysql+pymysql"])
def test_a_killed_upgrade_can_be_finished(new_database: Callable[[str], str], scheme: str) -> None:
    """DDL commits at once: tables may exist before the version is recorded."""
    url = new_database("mariadb").replace("mariadb+pymysql", scheme)
    migration.upgrade(url)
    engine = sa.create_engine(url)
    for tables in ((), ("kafka_consumed_offset", "kafka_job_chunk"), ("kafka_job_attempt",)):
        with engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM kafka_transaction_state_version")
            for table in tables:
                connection.exec_driver_sql(f"DROP TABLE {table}")
        migration.upgrade(url)
        assert migration.current(url) == migration.newest()
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE kafka_job_chunk")
    migration.downgrade(url, "base")
    migration.upgrade(url)
    with SqlStateStore.from_url(url) as store:
        assert store.claim(ID, "tests", timeout=LIMIT).fence == 1
    engine.dispose()


def test_the_script_for_mysql_uses_a_collation_of_mysql() -> None:
    assert "COLLATE utf8mb4_0900_bin" in migration.sql("mysql://nowhere/x")
