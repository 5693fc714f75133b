"""The heart of the contract: does a failed commit certainly leave nothing behind, or is its outcome unknown?"""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import insert
from store_scene import (
    ID,
    STATE,
    assert_nothing_is_checked_out,
    assert_outcome,
    orders,
    recorded,
    rows,
    user_metadata,
)

from dualwrite import migration
from dualwrite.errors import (
    FencedError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreError,
    StoreUnavailableError,
    WriterClosedError,
)
from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.mariadb import MariaDBServer
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT
from fixtures.tiers import thinned

COMMIT = b"COMMIT\0"
"""What PostgreSQL gets for it; MariaDB gets `MARIADB_COMMIT`."""
MARIADB_COMMIT = b"\x03COMMIT"
SERVERS = thinned(["postgresql", "mariadb"], quick=["postgresql"])

RECORDS = ("record", "record_at_commit")


@pytest.fixture(params=RECORDS)
def record(request: pytest.FixtureRequest) -> str:
    """How a test records: PostgreSQL can take the record with the COMMIT, in one message."""
    return str(request.param)


# --- certainly failed -----------------------------------------------------------------------------------------------------


def test_a_serialization_failure(postgres_url: str, record: str) -> None:
    engine = sa.create_engine(postgres_url, isolation_level="SERIALIZABLE")
    store = SqlStateStore(engine)
    user_metadata.create_all(engine)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    count = sa.select(sa.func.count()).select_from(orders)
    transaction = store.begin(claim)
    transaction.handle.execute(count)
    with engine.connect() as other:
        other.execute(count)
        other.execute(insert(orders).values(id=2, item="table"))
        transaction.handle.execute(insert(orders).values(id=1, item="chair"))
        getattr(transaction, record)(STATE, generation=0, transaction_number=1)
        other.commit()
    with pytest.raises(StoreCommitFailedError) as caught:
        transaction.commit()
    assert caught.value.retriable
    assert caught.value.cause is not None
    assert "could not serialize" in caught.value.cause
    transaction.rollback()
    assert store.read_claimed(claim).prepared_state is None
    assert rows(engine) == 1
    assert_nothing_is_checked_out(store)
    engine.dispose()


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
        user_metadata.create_all(store.engine)
        claim = store.claim(ID, "tests", timeout=LIMIT)
        with store.engine.begin() as connection:
            connection.execute(
                sa.text("CREATE TABLE child (id int, parent int REFERENCES orders(id) DEFERRABLE INITIALLY DEFERRED)")
            )
        sa.event.listen(store.engine, "checkout", lambda raw, *_: raw.execute("PRAGMA foreign_keys = ON"))
        transaction = recorded(store, claim, record)
        transaction.handle.execute(sa.text("INSERT INTO child VALUES (1, 99)"))
        with pytest.raises(StoreCommitFailedError, match="FOREIGN KEY"):
            transaction.commit()
        assert_outcome(store, claim, committed=False)
        again = recorded(store, store.claim(ID, "tests", timeout=LIMIT), record)
        again.commit()


def test_a_reader_that_blocks_a_commit_on_sqlite(sqlite_url: str, tmp_path: Path, record: str) -> None:
    """Without WAL, COMMIT waits for readers, and times out with the transaction still open."""
    engine = sa.create_engine(sqlite_url, connect_args={"timeout": 0.1})
    with engine.connect() as connection:
        assert connection.scalar(sa.text("PRAGMA journal_mode = DELETE")) == "delete"
    store = SqlStateStore(engine)
    user_metadata.create_all(engine)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = recorded(store, claim, record)
    reader = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM orders").fetchall()
    with pytest.raises(StoreCommitFailedError, match="locked"):
        transaction.commit()
    reader.execute("COMMIT")
    reader.close()
    assert_outcome(store, claim, committed=False)
    engine.dispose()


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
        with pytest.raises(StoreCommitFailedError, match="earlier statement"):
            transaction.commit()
    else:
        with pytest.raises(StoreError, match="earlier statement") as caught:
            transaction.record(STATE, generation=0, transaction_number=1)
        assert not caught.value.retriable
        transaction.rollback()
    assert_outcome(postgres_store, postgres_claim, committed=False)


def test_a_connection_known_to_be_lost_before_commit(proxied_store: SqlStateStore, postgres_proxy: TcpProxy) -> None:
    claim = proxied_store.claim(ID, "tests", timeout=LIMIT)
    transaction = proxied_store.begin(claim)
    postgres_proxy.cut()
    with pytest.raises(StoreUnavailableError) as caught:
        transaction.record(STATE, generation=0, transaction_number=1)
    assert caught.value.retriable
    transaction.rollback()
    assert_nothing_is_checked_out(proxied_store)
    assert proxied_store.read_claimed(claim).prepared_state is None


# --- unknown --------------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Callable[[TcpProxy, bytes], None], bool]] = {
    "cut before COMMIT arrives": (lambda p, commit: p.on_client_bytes(commit, Link.cut), False),
    "reset before COMMIT arrives": (lambda p, commit: p.on_client_bytes(commit, Link.cut_with_reset), False),
    "cut after COMMIT was answered": (lambda p, commit: p.on_client_bytes(commit, Link.cut, when="answered"), True),
    "reset after COMMIT was answered": (
        lambda p, commit: p.on_client_bytes(commit, Link.cut_with_reset, when="answered"),
        True,
    ),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_connection_lost_in_commit(request: pytest.FixtureRequest, server: str, fault: str, record: str) -> None:
    break_it, committed = FAULTS[fault]
    postgres = server == "postgresql"
    store: SqlStateStore = request.getfixturevalue("proxied_store" if postgres else "proxied_mariadb_store")
    proxy: TcpProxy = request.getfixturevalue("postgres_proxy" if postgres else "mariadb_proxy")
    user_metadata.create_all(store.engine)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = recorded(store, claim, record)
    break_it(proxy, COMMIT if postgres else MARIADB_COMMIT)
    with pytest.raises(StoreCommitUnknownError) as caught:
        transaction.commit()
    assert not caught.value.retriable
    transaction.rollback()
    assert_outcome(store, claim, committed=committed)


def test_a_connection_lost_while_commit_runs(
    proxied_store: SqlStateStore, postgres_proxy: TcpProxy, postgres_url: str, proxied_claim: Claim, record: str
) -> None:
    """The COMMIT continues without us (a deferred trigger waits for a lock); the next claim waits for it and sees it."""
    with proxied_store.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
            "EXECUTE FUNCTION wait()"
        )
    transaction = recorded(proxied_store, proxied_claim, record)
    postgres_proxy.on_client_bytes(COMMIT, Link.cut, when="after")
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as watcher:
        watcher.execute("SELECT pg_advisory_lock(42)")
        with pytest.raises(StoreCommitUnknownError):
            transaction.commit()
        (number,) = watcher.execute("SELECT transaction_number FROM kafka_transaction_state").fetchone() or (None,)
        assert number == 0  # a plain read shows "not committed" here, which is wrong once the trigger has its lock
        watcher.execute("SELECT pg_advisory_unlock(42)")
    assert_outcome(proxied_store, proxied_claim, committed=True)


def test_a_terminated_backend(postgres_store: SqlStateStore, postgres_claim: Claim, record: str) -> None:
    transaction = recorded(postgres_store, postgres_claim, record)
    pid = transaction.handle.scalar(sa.text("SELECT pg_backend_pid()"))
    with postgres_store.engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    with pytest.raises(StoreCommitUnknownError, match="terminating connection"):
        transaction.commit()
    assert_outcome(postgres_store, postgres_claim, committed=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "server", "when"),
    thinned(
        product(RECORDS, ["postgresql", "mariadb"], ["before", "answered"]),
        kept=[
            ("record", "mariadb", "before"),
            ("record_at_commit", "postgresql", "answered"),
            ("record_at_commit", "mariadb", "answered"),
        ],
    ),
    indirect=["record"],
)
def test_a_server_killed_in_commit(request: pytest.FixtureRequest, server: str, when: Any, record: str) -> None:
    own: PostgresServer | MariaDBServer = request.getfixturevalue(
        "own_postgres_server" if server == "postgresql" else "own_mariadb_server"
    )
    migration.upgrade(own.url)
    with TcpProxy("127.0.0.1", own.port) as proxy, SqlStateStore.from_url(own.url_at(proxy.port)) as store:
        user_metadata.create_all(store.engine)
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(store, claim, record)

        def crash(link: Link) -> None:
            own.kill()
            link.cut()

        proxy.on_client_bytes(COMMIT if server == "postgresql" else MARIADB_COMMIT, crash, when=when)
        with pytest.raises(StoreCommitUnknownError):
            transaction.commit()
        transaction.rollback()
        with pytest.raises(StoreUnavailableError):
            store.claim(ID, "tests", timeout=0.3, expected_fence=claim.fence)
        own.start()
        assert_outcome(store, claim, committed=when == "answered")


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


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_masked_by_an_assertion_of_sqlalchemy_is_raised(
    store: SqlStateStore, claim: Claim, monkeypatch: pytest.MonkeyPatch, record: str, interrupt: type[BaseException]
) -> None:
    """Simulated: SQLAlchemy's cleanup after COMMIT asserts a state that the interrupt kept from being reached."""
    transaction = recorded(store, claim, record)

    def interrupted(_transaction: sa.RootTransaction) -> None:
        raise interrupt

    with monkeypatch.context() as patch:
        patch.setattr(sa.RootTransaction, "_deactivate_from_connection", interrupted)
        with pytest.raises(interrupt):
            transaction.commit()
    assert_nothing_is_checked_out(store)
    assert_outcome(store, claim, committed=True)


def test_an_error_during_the_handling_of_an_interrupt_is_raised_unchanged(store: SqlStateStore, claim: Claim) -> None:
    transaction = recorded(store, claim)
    transaction.rollback()
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        with pytest.raises(WriterClosedError):
            transaction.commit()
        with pytest.raises(FencedError):
            store.begin(Claim(ID, claim.fence + 1, "nobody"))
