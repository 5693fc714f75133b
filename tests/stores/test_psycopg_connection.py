"""The store on the user's psycopg connections: one, a pool, or a function that makes them."""

from __future__ import annotations

import decimal
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import psycopg_pool
import pytest
import sqlalchemy as sa
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg.types.numeric import FloatLoader
from psycopg.types.string import TextLoader
from store_scene import ID, STATE, Order, commit, orders, user_metadata

from dualwrite import migration
from dualwrite.errors import (
    ConcurrentUseError,
    ConfigurationError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
    UsageError,
    WriterClosedError,
)
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT
from fixtures.tables import table

COMMIT = b"COMMIT\0"


@pytest.fixture
def dsn(postgres_url: str) -> str:
    engine = sa.create_engine(postgres_url)
    user_metadata.create_all(engine)
    engine.dispose()
    return postgres_url.replace("+psycopg", "")


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    made = psycopg.connect(dsn, row_factory=dict_row, application_name="the user's")
    yield made
    made.close()


@pytest.fixture
def mine(connection: psycopg.Connection[Any]) -> Iterator[SqlStateStore]:
    """A store on that connection."""
    with SqlStateStore.from_psycopg(connection, lock_timeout=LIMIT) as made:
        yield made


@pytest.fixture(params=["connection", "pool", "function"])
def any_source(request: pytest.FixtureRequest, dsn: str) -> Iterator[SqlStateStore]:
    """A store on each kind of source; none of them leaves a connection open."""
    if request.param == "connection":
        with psycopg.connect(dsn, row_factory=dict_row) as one, SqlStateStore.from_psycopg(one, lock_timeout=LIMIT) as made:
            yield made
    elif request.param == "pool":
        options = {"row_factory": dict_row}
        with psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=2, kwargs=options, timeout=LIMIT) as pool:
            with SqlStateStore.from_psycopg(pool, lock_timeout=LIMIT) as made:
                yield made
            for back in [pool.getconn(), pool.getconn()]:  # all there are
                pool.putconn(back)
    else:
        with SqlStateStore.from_psycopg(lambda: psycopg.connect(dsn, row_factory=dict_row), lock_timeout=LIMIT) as made:
            yield made
        assert made.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def claim_of(store: SqlStateStore) -> Claim:
    return store.claim(ID, "tests", timeout=LIMIT)


def written(store: SqlStateStore, claim: Claim, number: int = 1) -> StoreTransaction:
    transaction = store.begin(claim)
    transaction.handle.execute("INSERT INTO orders VALUES (%s, 'chair')", (number,))
    return transaction


def recorded(store: SqlStateStore, claim: Claim, number: int = 1) -> StoreTransaction:
    transaction = written(store, claim, number)
    transaction.record(STATE, generation=0, transaction_number=number)
    return transaction


def count(dsn: str) -> int:
    with psycopg.connect(dsn) as watcher:
        (found,) = watcher.execute("SELECT count(*) FROM orders").fetchone() or (-1,)
    return int(found)


# --- each kind of source ----------------------------------------------------------------------------------------------------


def test_transactions_commit_and_roll_back(any_source: SqlStateStore, dsn: str) -> None:
    store = any_source
    store.check()
    claim = claim_of(store)
    for number, record in enumerate(("record", "record_at_commit"), 1):
        transaction = written(store, claim, number)
        getattr(transaction, record)(STATE, generation=0, transaction_number=number)
        transaction.commit()
        row = store.read_claimed(claim)
        assert (row.prepared_state, row.transaction_number) == (STATE, number)
    recorded(store, claim, 3).rollback()
    assert store.read_claimed(claim).transaction_number == 2
    assert count(dsn) == 2


def test_the_session_writes_in_the_same_transaction(any_source: SqlStateStore, dsn: str) -> None:
    claim = claim_of(any_source)
    transaction = any_source.begin(claim)
    transaction.session.add(Order(id=7, item="desk"))
    transaction.session.flush()
    assert transaction.handle.execute("SELECT item FROM orm_orders").fetchone() == {"item": "desk"}
    transaction.handle.execute("UPDATE orm_orders SET item = 'table'")
    assert transaction.session.scalar(sa.select(Order.item).where(Order.id == 7)) == "table"
    transaction.session.add(Order(id=8, item="flushed by record"))
    commit(transaction)
    with psycopg.connect(dsn) as watcher:
        assert watcher.execute("SELECT count(*) FROM orm_orders").fetchone() == (2,)


def test_a_failing_listener_leaves_the_source_usable(any_source: SqlStateStore, dsn: str) -> None:
    claim = any_source.claim(ID, "tests", timeout=LIMIT)
    for number in (1, 2):
        transaction = any_source.begin(claim)
        sa.event.listen(transaction.session, "after_commit", lambda _: 1 / 0)
        transaction.session.add(Order(id=number, item="chair"))
        transaction.record(STATE, generation=1, transaction_number=number)
        transaction.commit()
        assert isinstance(transaction.after_commit_error, ZeroDivisionError)
    assert any_source.read_claimed(claim).transaction_number == 2


def test_a_failed_commit_leaves_the_source_usable(any_source: SqlStateStore, dsn: str) -> None:
    store = any_source
    claim = claim_of(store)
    with psycopg.connect(dsn) as other:
        other.execute("CREATE TABLE once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    transaction = recorded(store, claim)
    transaction.handle.execute("INSERT INTO once VALUES (1), (1)")
    with pytest.raises(StoreCommitFailedError, match="once_id_key"):
        transaction.commit()
    with pytest.raises(psycopg.errors.UndefinedTable):
        store.begin(claim).handle.execute("SELECT * FROM nowhere")
    gc.collect()
    recorded(store, claim).commit()
    assert count(dsn) == 1


@pytest.mark.slow
def test_a_transaction_is_not_garbage_collected_while_its_handle_is_used(any_source: SqlStateStore, dsn: str) -> None:
    """Its end, a rollback, would wait for psycopg's lock, which the statement that runs holds: forever, in one thread."""
    store = any_source
    handle = store.begin(claim_of(store)).handle
    gc.collect()  # as it may happen in the middle of a statement
    assert handle.info.transaction_status is TransactionStatus.INTRANS
    cursor = handle.cursor()
    del handle
    gc.collect()
    assert cursor.connection.info.transaction_status is TransactionStatus.INTRANS
    del cursor
    gc.collect()
    recorded(store, claim_of(store)).commit()
    assert count(dsn) == 1


def test_a_conflict_is_recognized_in_an_error_of_the_user(any_source: SqlStateStore) -> None:
    claim = claim_of(any_source)
    transaction = any_source.begin(claim)
    with pytest.raises(psycopg.errors.SerializationFailure) as caught:
        transaction.handle.execute("DO $$ BEGIN RAISE 'given up' USING ERRCODE = '40001'; END $$")
    assert any_source.is_conflict(caught.value)
    transaction.rollback()


def sources(dsn: str) -> dict[str, Callable[[], Any]]:
    return {
        "connection": lambda: psycopg.connect(dsn),
        "pool": lambda: psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=2, open=True),
        "function": lambda: lambda: psycopg.connect(dsn),
    }


@pytest.mark.parametrize("kind", ["connection", "pool", "function"])
@pytest.mark.parametrize("committed", [False, True])
def test_an_unknown_commit(
    proxied_postgres_url: str, postgres_proxy: TcpProxy, dsn: str, kind: str, *, committed: bool
) -> None:
    """The connection is closed, since its transaction might still be open; pool and function provide a new one."""
    source = sources(proxied_postgres_url.replace("+psycopg", ""))[kind]()
    with SqlStateStore.from_psycopg(source, lock_timeout=LIMIT) as store:
        claim = claim_of(store)
        transaction = recorded(store, claim)
        postgres_proxy.on_client_bytes(COMMIT, Link.cut, when="answered" if committed else "before")
        with pytest.raises(StoreCommitUnknownError):
            transaction.commit()
        transaction.rollback()
        again = store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
        assert store.read_claimed(again).transaction_number == (1 if committed else 0)
        assert count(dsn) == (1 if committed else 0)
        if kind == "connection":
            assert source.closed
            with pytest.raises(StoreError, match=r"(?s)closed.*COMMIT|closed.*broke.*connect again"):
                store.begin(again)
        else:
            recorded(store, again, 2).commit()
    if kind == "pool":
        source.close()


@pytest.mark.parametrize("kind", ["connection", "pool", "function"])
def test_a_connection_that_died_while_idle(dsn: str, kind: str) -> None:
    source = sources(dsn)[kind]()
    with SqlStateStore.from_psycopg(source, lock_timeout=LIMIT) as store:
        claim = claim_of(store)
        recorded(store, claim).commit()
        with psycopg.connect(dsn, autocommit=True) as killer:
            killer.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        if kind == "connection":
            with pytest.raises(StoreError, match="terminating connection") as caught:
                store.begin(claim)
            assert not isinstance(caught.value, StoreUnavailableError)
            assert not caught.value.retriable
        else:
            recorded(store, claim, 2).commit()
    if kind == "pool":
        source.close()


# --- the user's own connection ------------------------------------------------------------------------------------------------


class Mine(psycopg.Connection[Any]):
    """A subclass defined by the user."""

    def chairs(self) -> int:
        found = self.execute("SELECT count(*) AS n FROM orders").fetchone()
        return int(found["n"])


def test_settings_of_the_users_connection_are_kept(dsn: str) -> None:
    connection = Mine.connect(
        dsn, row_factory=dict_row, cursor_factory=psycopg.ClientCursor, prepare_threshold=0, autocommit=True
    )
    connection.adapters.register_loader("numeric", FloatLoader)
    connection.adapters.register_loader("int8", TextLoader)  # which would break the recipe, if it saw it
    notices: list[str] = []
    connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    with connection, SqlStateStore.from_psycopg(connection) as store:
        claim = claim_of(store)
        for number in (1, 2, 3):
            transaction = written(store, claim, number)
            db = transaction.handle
            assert isinstance(db, Mine)
            assert transaction.handle is db
            assert db.chairs() == number
            assert isinstance(db.cursor(), psycopg.ClientCursor)
            assert db.execute("SELECT 1.5 AS f, to_jsonb(2) AS j").fetchone() == {"f": 1.5, "j": 2}
            assert not db.autocommit
            db.execute(f"DO $$ BEGIN RAISE NOTICE 'n{number}'; END $$")
            commit(transaction, number)
            assert connection.autocommit
        assert notices == ["n1", "n2", "n3"]
        assert connection.execute("SELECT 3::bigint AS n").fetchone() == {"n": "3"}
        assert type(connection) is Mine
        assert connection.prepare_threshold == 0
        assert connection.row_factory is dict_row
        assert len(connection._notice_handlers) == 1
    assert connection.closed


def test_operations_allowed_in_a_block(mine: SqlStateStore, dsn: str) -> None:
    transaction = mine.begin(claim_of(mine))
    db = transaction.handle
    cursor = db.cursor()
    cursor.executemany("INSERT INTO orders VALUES (%s, %s)", [(1, "a"), (2, "b")])
    with cursor.copy("COPY orders FROM STDIN") as copy:
        copy.write_row((3, "c"))
    with db.pipeline():
        db.execute("INSERT INTO orders VALUES (4, 'd')")
        db.execute("INSERT INTO orders VALUES (5, 'e')")
    with pytest.raises(psycopg.errors.UniqueViolation), db.transaction():
        db.execute("INSERT INTO orders VALUES (6, 'f'), (1, 'again')")
    with db.transaction(force_rollback=True):
        db.execute("INSERT INTO orders VALUES (7, 'g')")
    db.execute(sql.SQL("INSERT INTO {} VALUES (8, 'COMMIT')").format(sql.Identifier("orders")))
    db.execute("SAVEPOINT s; ROLLBACK TO SAVEPOINT s")
    assert [row["id"] for row in cursor.stream("SELECT id FROM orders ORDER BY id")] == [1, 2, 3, 4, 5, 8]
    with db.cursor("on_the_server") as named:
        named.execute("SELECT id FROM orders ORDER BY id")
        assert named.fetchone() == {"id": 1}
    assert psycopg.types.TypeInfo.fetch(db, "numeric") is not None
    assert isinstance(db.execute("SELECT 1.5 AS n").fetchone()["n"], decimal.Decimal)
    commit(transaction)
    assert count(dsn) == 6


REFUSED: dict[str, Callable[[Any], Any]] = {
    "commit": lambda db: db.commit(),
    "rollback": lambda db: db.rollback(),
    "close": lambda db: db.close(),
    "with": lambda db: db.__enter__(),
    "autocommit": lambda db: setattr(db, "autocommit", True),
    "set_autocommit": lambda db: db.set_autocommit(True),
    "isolation_level": lambda db: setattr(db, "isolation_level", psycopg.IsolationLevel.SERIALIZABLE),
    "read_only": lambda db: setattr(db, "read_only", True),
    "deferrable": lambda db: setattr(db, "deferrable", True),
    "tpc_begin": lambda db: db.tpc_begin("x"),
    "tpc_prepare": lambda db: db.tpc_prepare(),
    "tpc_commit": lambda db: db.tpc_commit(),
    "tpc_rollback": lambda db: db.tpc_rollback(),
    "text": lambda db: db.execute("COMMIT"),
    "bytes": lambda db: db.execute(b" rollback "),
    "composed": lambda db: db.execute(sql.SQL("COMMIT")),
    "second statement": lambda db: db.execute("SELECT 1; COMMIT"),
    "a cursor's connection": lambda db: db.cursor().connection.commit(),
    "cursor": lambda db: db.cursor().execute("END"),
    "executemany": lambda db: db.cursor().executemany("COMMIT", [()]),
    "copy": lambda db: db.cursor().copy("COMMIT").__enter__(),
    "stream": lambda db: next(db.cursor().stream("COMMIT")),
    "session": lambda db: db.cursor(row_factory=dict_row).execute("ABORT"),
}


@table("call", REFUSED)
def test_operations_refused_in_a_block(mine: SqlStateStore, dsn: str, call: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE orders")
    transaction = written(mine, claim_of(mine))
    with pytest.raises(TransactionControlError, match=r"transaction\(\)") as caught:
        REFUSED[call](transaction.handle)
    assert caught.value.transactional_id == ID
    commit(transaction)
    assert count(dsn) == 1


@pytest.mark.parametrize("how", ["the connection itself", "the driver's", "and another begun"])
def test_record_finds_a_transaction_that_was_ended_elsewhere(
    mine: SqlStateStore, connection: psycopg.Connection[Any], how: str
) -> None:
    claim = claim_of(mine)
    transaction = written(mine, claim)
    if how == "the connection itself":
        connection.commit()
    elif how == "the driver's":
        transaction.handle.pgconn.exec_(b"COMMIT")
    else:
        transaction.handle.pgconn.exec_(b"ROLLBACK")
        transaction.handle.pgconn.exec_(b"BEGIN")
    with pytest.raises(TransactionControlError, match="ended the database's transaction itself"):
        transaction.record(STATE, generation=0, transaction_number=1)
    transaction.rollback()
    recorded(mine, claim, 2).commit()


def test_after_the_end_the_handle_is_refused_and_the_connection_usable(
    mine: SqlStateStore, connection: psycopg.Connection[Any]
) -> None:
    transaction = recorded(mine, claim_of(mine))
    db, session = transaction.handle, transaction.session
    cursor = db.cursor()
    transaction.commit()
    for use in (
        lambda: transaction.handle,
        db.cursor,
        lambda: db.execute("SELECT 1"),
        db.transaction,
        db.pipeline,
        db.commit,
        lambda: cursor.execute("SELECT 1"),
        lambda: session.execute(sa.select(orders)),
    ):
        with pytest.raises(WriterClosedError, match="ended"):
            use()
    assert connection.execute("SELECT count(*) AS n FROM orders").fetchone() == {"n": 1}
    connection.commit()


# --- a connection that is not fit ---------------------------------------------------------------------------------------------


def test_a_connection_that_is_in_a_transaction(mine: SqlStateStore, connection: psycopg.Connection[Any]) -> None:
    claim = claim_of(mine)
    connection.execute("SELECT 1")
    with pytest.raises(UsageError, match=r"(?s)already in a transaction.*autocommit"):
        mine.begin(claim)
    with pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT * FROM nowhere")
    with pytest.raises(UsageError, match="already in a transaction"):
        mine.begin(claim)
    connection.rollback()
    recorded(mine, claim).commit()


def test_a_connection_in_pipeline_mode(mine: SqlStateStore, connection: psycopg.Connection[Any]) -> None:
    claim = claim_of(mine)
    with connection.pipeline(), pytest.raises(UsageError, match="pipeline mode"):
        mine.begin(claim)
    recorded(mine, claim).commit()


def test_a_pipeline_left_open_by_the_block(mine: SqlStateStore, dsn: str) -> None:
    """Nothing is committed, and the connection is closed: the answers in flight on it can't be distinguished."""
    transaction = mine.begin(claim_of(mine))
    pipeline = transaction.handle.pipeline()
    pipeline.__enter__()
    transaction.handle.execute("INSERT INTO orders VALUES (1, 'chair')")
    with pytest.raises(StoreError, match="pipeline"):
        transaction.record(STATE, generation=0, transaction_number=1)
    transaction.rollback()
    with suppress(psycopg.Error):
        pipeline.__exit__(None, None, None)
    assert count(dsn) == 0


def test_a_closed_connection(mine: SqlStateStore, connection: psycopg.Connection[Any]) -> None:
    claim = claim_of(mine)
    connection.close()
    with pytest.raises(StoreError, match=r"(?s)closed.*connect again"):
        mine.begin(claim)
    with pytest.raises(ConfigurationError, match="closed"):
        SqlStateStore.from_psycopg(connection)


def test_two_concurrent_transactions(mine: SqlStateStore) -> None:
    claim = claim_of(mine)
    transaction = recorded(mine, claim)
    with pytest.raises(ConcurrentUseError, match="another transaction"):
        mine.begin(claim)
    transaction.commit()
    recorded(mine, claim, 2).rollback()


def test_use_from_another_thread(mine: SqlStateStore, connection: psycopg.Connection[Any], dsn: str) -> None:
    claim = claim_of(mine)
    connection.autocommit = True
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE orders")
        thread = threading.Thread(target=connection.execute, args=("SELECT * FROM orders",))
        thread.start()
        while connection.info.transaction_status.name != "ACTIVE":
            thread.join(0.01)
        with pytest.raises(ConcurrentUseError, match="running a statement"):
            mine.begin(claim)
    thread.join()
    recorded(mine, claim).commit()


def test_use_in_a_forked_process_is_refused(mine: SqlStateStore, connection: psycopg.Connection[Any]) -> None:
    claim = claim_of(mine)
    child = os.fork()
    if child == 0:
        try:
            mine.begin(claim)
        except UsageError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorded(mine, claim).commit()


@pytest.mark.parametrize("source", [None, "postgresql://", lambda: None])
def test_invalid_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"psycopg"):
        SqlStateStore.from_psycopg(source)


# --- connections of the store's own -------------------------------------------------------------------------------------------


def test_claims_run_on_connections_with_the_same_parameters(mine: SqlStateStore, connection: psycopg.Connection[Any]) -> None:
    with mine.engine.connect() as own:
        shown = own.execute(sa.text("SELECT pg_backend_pid() AS pid, current_setting('application_name') AS name")).one()
    assert shown.pid != connection.info.backend_pid
    assert shown.name == "the user's"


@pytest.mark.slow
def test_a_password_is_used_and_never_shown(own_postgres_server: PostgresServer) -> None:
    server = own_postgres_server
    migration.upgrade(server.url)
    with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as admin:
        admin.execute("CREATE ROLE walter PASSWORD 's3cret' LOGIN SUPERUSER")
        admin.execute("ALTER SYSTEM SET password_encryption = 'scram-sha-256'")
        (path,) = admin.execute("SHOW hba_file").fetchone() or ("",)
        admin.execute(
            f"COPY (SELECT 'host all walter 127.0.0.1/32 scram-sha-256' UNION ALL SELECT 'host all all all trust') TO '{path}'"
        )
        admin.execute("SELECT pg_reload_conf()")
    conninfo = f"host=127.0.0.1 port={server.port} dbname=postgres user=walter"
    for _ in range(100):  # until the server has read the file
        try:
            psycopg.connect(conninfo).close()
        except psycopg.OperationalError:
            break
    with psycopg.connect(conninfo, password="s3cret") as connection, SqlStateStore.from_psycopg(connection) as store:
        assert store.claim(ID, "tests", timeout=LIMIT).fence == 1
        assert "walter@127.0.0.1" in store.description
        assert "s3cret" not in store.description + repr(store.engine.url)


def test_check_reports_a_search_path_set_on_the_connection_only(
    mine: SqlStateStore, connection: psycopg.Connection[Any]
) -> None:
    mine.check()
    connection.execute("CREATE SCHEMA app")
    connection.execute("CREATE TABLE app.kafka_transaction_state (LIKE kafka_transaction_state)")
    connection.execute("SET search_path TO app, public")
    connection.commit()
    with pytest.raises(ConfigurationError, match="search_path"):
        mine.check()
