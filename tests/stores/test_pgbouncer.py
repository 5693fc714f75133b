"""The store through PgBouncer: transaction mode works, statement mode is refused, an unknown COMMIT is reported as such."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa
from pgbouncer import PgBouncer, Program, find_program
from store_scene import ID, STATE, assert_outcome, orders, recorded, rows, user_metadata

from dualwrite import migration
from dualwrite.errors import (
    ClaimTimeoutError,
    ConfigurationError,
    MissingDependencyError,
    StoreCommitUnknownError,
    StoreError,
    StoreUnavailableError,
)
from dualwrite.relay.listener import Listener
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.missing import missing
from fixtures.pace import LIMIT, until

COMMIT = b"COMMIT\0"


@pytest.fixture(scope="session")
def program() -> Program:
    try:
        return find_program()
    except MissingDependencyError as error:
        missing(error)


@pytest.fixture
def bouncer(program: Program, postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    """In transaction mode, with two connections to the server."""
    with PgBouncer(postgres_server, program=program) as started:
        yield started


@pytest.fixture
def bounced_url(bouncer: PgBouncer, postgres_url: str) -> str:
    engine = sa.create_engine(postgres_url)
    user_metadata.create_all(engine)
    engine.dispose()
    return bouncer.url_of(postgres_url.rpartition("/")[2])


@pytest.fixture
def bounced(bounced_url: str) -> Iterator[SqlStateStore]:
    with SqlStateStore.from_url(bounced_url, lock_timeout=LIMIT) as made:
        yield made


# --- transaction mode ---------------------------------------------------------------------------------------------------------


def on_every_server_connection(url: str, others: int) -> ExitStack:
    """Transactions of others, which hold the first connections to the server, so that the next client gets another."""
    stack = ExitStack()
    for _ in range(others):
        held = stack.enter_context(psycopg.connect(url.replace("+psycopg", ""), prepare_threshold=None))
        held.execute("SELECT 1")
    return stack


def test_transactions_commit_on_every_server_connection(bounced: SqlStateStore, bounced_url: str) -> None:
    claim = bounced.claim(ID, "tests", timeout=LIMIT)
    backends = set()
    for number in range(1, 31):
        with on_every_server_connection(bounced_url, number % 2):
            transaction = recorded(bounced, claim, number=number)
            backends.add(transaction.handle.scalar(sa.text("SELECT pg_backend_pid()")))
            transaction.commit()
    assert len(backends) == 2
    row = bounced.read_claimed(claim)
    assert (row.transaction_number, rows(bounced.engine)) == (30, 30)
    bounced.check()
    assert bounced.durability()["fsync"] == "on"
    assert bounced.list() == [ID]
    with bounced.engine.connect() as connection:
        assert connection.connection.dbapi_connection.prepare_threshold is None  # type: ignore[union-attr]


def test_a_search_path_that_another_client_has_left_on_the_servers_connection(bounced_url: str, postgres_url: str) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as admin:
        admin.execute("DROP SCHEMA IF EXISTS tenant CASCADE; CREATE SCHEMA tenant")
        migration.upgrade(postgres_url, schema="tenant")
        with psycopg.connect(bounced_url.replace("+psycopg", ""), prepare_threshold=None, autocommit=True) as another:
            another.execute("SET search_path TO tenant")
        with SqlStateStore.from_url(bounced_url) as store, pytest.raises(ConfigurationError, match="schema='public'"):
            store.claim(ID, "tests", timeout=LIMIT)
        with SqlStateStore.from_url(bounced_url, schema="public") as store:
            store.claim(ID, "tests", timeout=LIMIT)
        with SqlStateStore.from_url(postgres_url) as directly:
            assert directly.list() == [ID]
        admin.execute("DROP SCHEMA tenant CASCADE")
        with SqlStateStore.from_url(bounced_url) as store:  # the path leads nowhere, so only one table may be meant
            assert store.list() == [ID]


@pytest.mark.parametrize("threshold", [None, 1000])
def test_begin_waits_for_the_first_statement_only_if_the_pooler_is_not_known(bounced_url: str, threshold: int | None) -> None:
    """Not all poolers know pipelines; PgBouncer does, and prepared statements as well."""
    engine = sa.create_engine(bounced_url, connect_args={"prepare_threshold": threshold})
    store = SqlStateStore(engine, lock_timeout=LIMIT)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    for number in range(1, 21):
        with on_every_server_connection(bounced_url, number % 2):
            transaction = store.begin_soon(claim)
            assert transaction.is_fence_checked is (threshold is None or number == 1)
            transaction.handle.execute(sa.insert(orders).values(id=number, item="chair"))
            transaction.record_at_commit(STATE, generation=0, transaction_number=number)
            transaction.commit()
    assert rows(engine) == 20
    engine.dispose()


@pytest.mark.parametrize("kind", ["connection", "function"])
def test_on_psycopg_connections_statements_of_dualwrite_are_not_prepared(bounced_url: str, kind: str) -> None:
    """The user's threshold is kept, and 0 prepares everything at once."""
    dsn = bounced_url.replace("+psycopg", "")
    with psycopg.connect(dsn, prepare_threshold=0) as one:
        source: Any = one if kind == "connection" else lambda: psycopg.connect(dsn, prepare_threshold=0)
        with SqlStateStore.from_psycopg(source, lock_timeout=LIMIT) as store:
            claim = store.claim(ID, "tests", timeout=LIMIT)
            for number in range(1, 11):
                with on_every_server_connection(bounced_url, number % 2):
                    transaction = store.begin(claim)
                    transaction.handle.execute("INSERT INTO orders VALUES (%s, 'chair')", (number,), prepare=False)
                    transaction.record(STATE, generation=0, transaction_number=number)
                    transaction.commit()
            assert rows(store.engine) == 10
            assert one.prepare_threshold == 0


def test_without_a_pooler_statements_are_prepared(postgres_store: SqlStateStore, caplog: pytest.LogCaptureFixture) -> None:
    postgres_store.claim(ID, "tests", timeout=LIMIT)
    with postgres_store.engine.connect() as connection:
        assert connection.connection.dbapi_connection.prepare_threshold == 5  # type: ignore[union-attr]
    assert "pooler" not in caplog.text


def test_an_engine_of_the_user_keeps_its_prepare_threshold_with_a_warning(
    bounced_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sa.create_engine(bounced_url)
    SqlStateStore(engine).claim(ID, "tests", timeout=LIMIT)
    assert "prepare_threshold" in caplog.text
    engine.dispose()
    caplog.clear()
    with SqlStateStore.from_url(bounced_url, connect_args={"prepare_threshold": 7}) as told:
        told.claim(ID, "tests", timeout=LIMIT)
        assert "prepare_threshold" in caplog.text
        with told.engine.connect() as connection:
            assert connection.connection.dbapi_connection.prepare_threshold == 7  # type: ignore[union-attr]
    caplog.clear()
    engine = sa.create_engine(bounced_url, connect_args={"prepare_threshold": None})
    SqlStateStore(engine).claim(ID, "tests", timeout=LIMIT)
    assert caplog.text == ""
    engine.dispose()


def test_a_claim_that_waits_names_the_real_backend(bounced: SqlStateStore) -> None:
    claim = bounced.claim(ID, "tests", timeout=LIMIT)
    transaction = recorded(bounced, claim)
    pid = transaction.handle.scalar(sa.text("SELECT pg_backend_pid()"))
    with pytest.raises(ClaimTimeoutError) as caught:
        bounced.claim(ID, "rival", timeout=0.3)
    assert caught.value.blocker_pid == pid
    transaction.commit()


def test_migrations_run_through_pgbouncer(bouncer: PgBouncer, caplog: pytest.LogCaptureFixture) -> None:
    """On connections of ours, which prepare no statements: nobody needs to be told to."""
    url = bouncer.create_database(f"migrated_{uuid4().hex}")
    migration.upgrade(url)
    assert migration.current(url) == migration.newest()
    assert "prepare_threshold" not in caplog.text


# --- other modes, and what it refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["session", "statement"])
def test_other_pool_modes(program: Program, postgres_server: PostgresServer, postgres_url: str, mode: Any) -> None:
    database = postgres_url.rpartition("/")[2]
    with (
        PgBouncer(postgres_server, pool_mode=mode, program=program) as bouncer,
        SqlStateStore.from_url(bouncer.url_of(database)) as store,
    ):
        if mode == "session":
            user_metadata.create_all(store.engine)
            recorded(store, store.claim(ID, "tests", timeout=LIMIT)).commit()
            return
        with pytest.raises(
            StoreError, match=r"(?s)statement mode.*statement pooling mode.*set pool_mode=transaction"
        ) as caught:
            store.claim(ID, "tests", timeout=LIMIT)
        assert not caught.value.retriable


def test_a_startup_parameter_that_pgbouncer_refuses(bounced_url: str) -> None:
    with (
        SqlStateStore.from_url(bounced_url, connect_args={"options": "-c search_path=public"}) as store,
        pytest.raises(StoreUnavailableError, match=r"(?s)refused.*unsupported startup parameter"),
    ):
        store.claim(ID, "tests", timeout=LIMIT)


# --- unknown outcomes ---------------------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[PgBouncer], None]] = {
    "PgBouncer is killed": PgBouncer.kill,
    "PgBouncer is stopped": PgBouncer.stop,
    "its connection to the server is cut": lambda _bouncer: None,
}


@pytest.mark.parametrize("when", ["before", "answered"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_pgbouncer_and_the_server_in_commit(
    program: Program, postgres_server: PostgresServer, postgres_url: str, fault: str, when: Any
) -> None:
    database = postgres_url.rpartition("/")[2]
    with (
        TcpProxy("127.0.0.1", postgres_server.port) as proxy,
        PgBouncer(postgres_server, server_port=proxy.port, program=program) as bouncer,
        SqlStateStore.from_url(bouncer.url_of(database), lock_timeout=LIMIT) as store,
    ):
        user_metadata.create_all(store.engine)
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(store, claim)

        def break_it(link: Link) -> None:
            FAULTS[fault](bouncer)
            link.cut()

        proxy.on_client_bytes(COMMIT, break_it, when=when)
        with pytest.raises(StoreCommitUnknownError):
            transaction.commit()
        transaction.rollback()
        if "PgBouncer" in fault:
            bouncer.start()
        assert_outcome(store, claim, committed=when == "answered")


@pytest.mark.parametrize("when", ["before", "answered"])
def test_a_fault_between_the_client_and_pgbouncer_in_commit(bouncer: PgBouncer, bounced_url: str, when: Any) -> None:
    """PgBouncer closes the server connection of a client that disconnected during a transaction."""
    with TcpProxy("127.0.0.1", bouncer.port) as proxy:
        url = sa.make_url(bounced_url).set(port=proxy.port)
        with SqlStateStore.from_url(url, lock_timeout=LIMIT) as store:
            claim = store.claim(ID, "tests", timeout=LIMIT)
            transaction = recorded(store, claim)
            proxy.on_client_bytes(COMMIT, Link.cut, when=when)
            with pytest.raises(StoreCommitUnknownError):
                transaction.commit()
            transaction.rollback()
            assert_outcome(store, claim, committed=when == "answered")


@pytest.mark.parametrize("who", ["PgBouncer", "the client"])
def test_a_claim_waits_for_a_commit_whose_client_is_gone(
    bouncer: PgBouncer, bounced_url: str, postgres_url: str, who: str
) -> None:
    """Even if the client is gone, the server's transaction locks the row until it ends (a deferred trigger makes it slow)."""
    direct = postgres_url.replace("+psycopg", "")
    with psycopg.connect(direct) as connection:
        connection.execute(
            "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$"
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
            "EXECUTE FUNCTION slowly()"
        )
    with (
        TcpProxy("127.0.0.1", bouncer.port) as proxy,
        SqlStateStore.from_url(sa.make_url(bounced_url).set(port=proxy.port), lock_timeout=LIMIT) as store,
    ):
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(store, claim)
        with psycopg.connect(direct) as holder:
            holder.execute("SELECT pg_advisory_xact_lock(42)")
            proxy.on_client_bytes(COMMIT, lambda link: _when_it_waits(direct, link, bouncer, who), when="after")
            with pytest.raises(StoreCommitUnknownError):
                transaction.commit()
            if who == "PgBouncer":
                bouncer.start()
            with pytest.raises(ClaimTimeoutError):
                store.claim(ID, "tests", timeout=0.3, expected_fence=claim.fence)
        assert_outcome(store, claim, committed=True)


def _when_it_waits(direct: str, link: Link, bouncer: PgBouncer, who: str) -> None:
    """Break once the server's COMMIT waits for the advisory lock."""
    with psycopg.connect(direct, autocommit=True) as watcher:
        while watcher.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone() is None:
            pass
    if who == "PgBouncer":
        bouncer.kill()
    link.cut()


@pytest.mark.slow
def test_a_server_restarted_between_transactions(program: Program, own_postgres_server: PostgresServer) -> None:
    server = own_postgres_server
    migration.upgrade(server.url)
    with PgBouncer(server, program=program) as bouncer, SqlStateStore.from_url(bouncer.url, lock_timeout=LIMIT) as store:
        user_metadata.create_all(store.engine)
        claim = store.claim(ID, "tests", timeout=LIMIT)
        recorded(store, claim, number=1).commit()
        server.restart()
        recorded(store, claim, number=2).commit()
        bouncer.restart()
        recorded(store, claim, number=3).commit()
        assert rows(store.engine) == 3


# --- the server of these tests ------------------------------------------------------------------------------------------------


def test_a_relay_says_that_no_notification_arrives_through_it(
    bounced_url: str, postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In transaction mode LISTEN succeeds, and nothing ever comes: a notification of its own at the start shows it."""
    monkeypatch.setattr("dualwrite.relay.listener._ARRIVAL_SECONDS", 1.0)
    for url, warns in ((bounced_url, True), (postgres_url, False)):
        caplog.clear()
        engine = sa.create_engine(url, connect_args={"prepare_threshold": None})
        rung = threading.Event()
        with Listener(engine, "out:box %", "relay.outbox", rung.set):
            assert rung.wait(LIMIT)  # it listens
            rung.clear()
            if warns:
                until(lambda: "no notification arrives on 'out:box %'" in caplog.text)
            else:
                assert rung.wait(LIMIT)
        engine.dispose()
        assert ("no notification" in caplog.text) is warns
