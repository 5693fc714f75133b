"""The heart of the contract: does a failed commit certainly leave nothing behind, or is its outcome unknown?

Connections that break at COMMIT, servers that are killed or silent: the kit's ConnectionLossConformance, and
tests/crash/test_unknown_outcome.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import insert
from store_scene import (
    ID,
    STATE,
    assert_nothing_is_checked_out,
    assert_outcome,
    first_claim,
    orders,
    recorded,
    rows,
    store_on_engine,
)

from dualwrite.errors import (
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreError,
)
from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from fixtures.mariadb_server import MariaDBServer
from fixtures.pace import LIMIT, done

RECORDS = ("record", "record_at_commit")


@pytest.fixture(params=RECORDS)
def record(request: pytest.FixtureRequest) -> str:
    """How a test records: PostgreSQL can take the record with the COMMIT, in one message."""
    return str(request.param)


@contextmanager
def commits_held_back(store: SqlStateStore) -> Iterator[sa.Connection]:
    """Each COMMIT of MariaDB waits, as for a backup, until the block ends."""
    with store.engine.connect() as connection:
        connection.exec_driver_sql("FLUSH TABLES WITH READ LOCK")
        yield connection
        connection.exec_driver_sql("UNLOCK TABLES")


# --- certainly failed -----------------------------------------------------------------------------------------------------


def test_a_serialization_failure(postgres_url: str, record: str) -> None:
    with store_on_engine(postgres_url, isolation_level="SERIALIZABLE") as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        count = sa.select(sa.func.count()).select_from(orders)
        transaction = store.begin(claim)
        transaction.handle.execute(count)
        with store.engine.connect() as other:
            other.execute(count)
            other.execute(insert(orders).values(id=2, item="table"))
            transaction.handle.execute(insert(orders).values(id=1, item="chair"))
            getattr(transaction, record)(STATE, generation=0, transaction_number=1)
            other.commit()
        with pytest.raises(StoreCommitFailedError) as caught:
            transaction.commit()
        assert caught.value.retriable
        assert "could not serialize" in (caught.value.cause or "")
        transaction.rollback()
        assert store.read_claimed(claim).prepared_state is None
        assert rows(store.engine) == 1
        assert_nothing_is_checked_out(store)


def test_a_deferred_constraint_of_postgresql(postgres_store: SqlStateStore, postgres_claim: Claim, record: str) -> None:
    with postgres_store.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    transaction = recorded(postgres_store, postgres_claim, record)
    transaction.handle.execute(sa.text("INSERT INTO once VALUES (1), (1)"))
    with pytest.raises(StoreCommitFailedError, match="once_id_key"):
        transaction.commit()
    assert_outcome(postgres_store, postgres_claim, committed=False)


def test_a_deferred_constraint_of_sqlite(sqlite_url: str, record: str) -> None:
    with SqlStateStore.from_url(sqlite_url) as store:
        claim = first_claim(store)
        with store.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE child (parent int REFERENCES orders(id) DEFERRABLE INITIALLY DEFERRED)")
        sa.event.listen(store.engine, "checkout", lambda raw, *_: raw.execute("PRAGMA foreign_keys = ON"))
        transaction = recorded(store, claim, record)
        transaction.handle.execute(sa.text("INSERT INTO child VALUES (99)"))
        with pytest.raises(StoreCommitFailedError, match="FOREIGN KEY"):
            transaction.commit()
        assert_outcome(store, claim, committed=False)
        again = recorded(store, store.claim(ID, "tests", timeout=LIMIT), record)
        again.commit()


def test_a_reader_that_blocks_a_commit_on_sqlite(sqlite_url: str, tmp_path: Path, record: str) -> None:
    """Without WAL, COMMIT waits for readers, and times out with the transaction still open."""
    with store_on_engine(sqlite_url, connect_args={"timeout": 0.1}) as store:
        with store.engine.connect() as connection:
            assert connection.scalar(sa.text("PRAGMA journal_mode = DELETE")) == "delete"
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(store, claim, record)
        with closing(sqlite3.connect(tmp_path / "test.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM orders").fetchall()
            with pytest.raises(StoreCommitFailedError, match="locked"):
                transaction.commit()
            reader.execute("COMMIT")
        assert_outcome(store, claim, committed=False)


@pytest.mark.parametrize("after", [None, *RECORDS])
def test_an_aborted_transaction_is_never_reported_committed(
    postgres_store: SqlStateStore, postgres_claim: Claim, after: str | None
) -> None:
    """PostgreSQL answers the COMMIT of a failed transaction with ROLLBACK, and psycopg raises nothing."""
    transaction = postgres_store.begin(postgres_claim)
    if after is not None:
        getattr(transaction, after)(STATE, generation=0, transaction_number=1)
    with pytest.raises(sa.exc.ProgrammingError):
        transaction.handle.execute(sa.text("SELECT * FROM nowhere"))
    if after is not None:
        with pytest.raises(StoreError, match="earlier statement"):
            transaction.commit()
    else:
        with pytest.raises(StoreError, match="earlier statement") as caught:
            transaction.record(STATE, generation=0, transaction_number=1)
        assert not caught.value.retriable
        transaction.rollback()
    assert_outcome(postgres_store, postgres_claim, committed=False)


@pytest.mark.slow
def test_a_commit_that_waited_too_long_for_a_backup_lock(
    mariadb_url: str, mariadb_store: SqlStateStore, mariadb_claim: Claim
) -> None:
    with SqlStateStore.from_url(mariadb_url, lock_timeout=1) as store:
        transaction = recorded(store, mariadb_claim)
        with commits_held_back(mariadb_store), pytest.raises(StoreCommitFailedError, match="1205"):
            transaction.commit()
        assert_outcome(store, mariadb_claim, committed=False)


def test_a_server_that_became_read_only(
    mariadb_server: MariaDBServer, mariadb_store: SqlStateStore, mariadb_claim: Claim
) -> None:
    """As during a switchover to another primary."""
    with mariadb_store.engine.begin() as connection:
        connection.exec_driver_sql("CREATE OR REPLACE USER weak@'127.0.0.1'")
        connection.exec_driver_sql("GRANT ALL ON test.* TO weak@'127.0.0.1'")
    with SqlStateStore.from_url(mariadb_server.url_at(mariadb_server.port, "test", user="weak")) as store:
        transaction = recorded(store, mariadb_claim)
        with mariadb_store.engine.connect() as connection:
            connection.exec_driver_sql("SET GLOBAL read_only = ON")
            try:
                with pytest.raises(StoreCommitFailedError, match="read-only"):
                    transaction.commit()
            finally:
                connection.exec_driver_sql("SET GLOBAL read_only = OFF")
        assert_outcome(store, mariadb_claim, committed=False)


def test_a_transaction_that_was_lost_after_record_is_not_committed(mariadb_store: SqlStateStore, mariadb_claim: Claim) -> None:
    """Nothing should be written after `record`; DDL at that point commits, without our COMMIT."""
    transaction = mariadb_store.begin(mariadb_claim)
    transaction.record(STATE, generation=0, transaction_number=1)
    transaction.handle.connection.rollback()
    with pytest.raises(StoreCommitFailedError, match="no transaction any more"):
        transaction.commit()
    assert_outcome(mariadb_store, mariadb_claim, committed=False)


# --- unknown --------------------------------------------------------------------------------------------------------------


ENDED = {
    "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend({}, 5000)"),
    "mariadb": ("SELECT connection_id()", "KILL {}"),
}


@pytest.mark.parametrize("kind", ENDED)
def test_an_administrator_ends_the_connection_before_commit(request: pytest.FixtureRequest, kind: str, record: str) -> None:
    store: SqlStateStore = request.getfixturevalue("postgres_store" if kind == "postgresql" else "mariadb_store")
    claim, (asks, ends) = first_claim(store), ENDED[kind]
    transaction = recorded(store, claim, record)
    number = transaction.handle.scalar(sa.text(asks))
    with store.engine.connect() as connection:
        connection.exec_driver_sql(ends.format(number))
    with pytest.raises(StoreCommitUnknownError):
        transaction.commit()
    assert_outcome(store, claim, committed=False)


@pytest.mark.parametrize("how", ["KILL", "KILL QUERY"])
def test_an_administrator_kills_the_connection_in_commit(mariadb_store: SqlStateStore, mariadb_claim: Claim, how: str) -> None:
    transaction = recorded(mariadb_store, mariadb_claim)
    number = transaction.handle.scalar(sa.text("SELECT connection_id()"))
    state = sa.text("SELECT state FROM information_schema.PROCESSLIST WHERE id = :id AND info = 'COMMIT'")
    with ThreadPoolExecutor(1) as thread:
        with commits_held_back(mariadb_store) as admin:
            committing = thread.submit(transaction.commit)
            while admin.scalar(state, {"id": number}) is None:
                assert not committing.done()
            admin.exec_driver_sql(f"{how} {number}")
            with pytest.raises(StoreCommitUnknownError):
                done(committing)
        assert_outcome(mariadb_store, mariadb_claim, committed=False)


def test_an_interrupt_in_commit_is_raised_unchanged(
    store: SqlStateStore, claim: Claim, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    transaction = recorded(store, claim, record)
    closed: list[Any] = []
    sa.event.listen(store.engine, "close", lambda *connection: closed.append(connection))

    def interrupted(_connection: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.engine.dialect, "do_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transaction.commit()
    transaction.rollback()
    assert_nothing_is_checked_out(store)
    assert len(closed) == 1
    has_committed = record == "record_at_commit" and store.engine.name == "postgresql"  # before SQLAlchemy's turn
    assert_outcome(store, claim, committed=has_committed)
