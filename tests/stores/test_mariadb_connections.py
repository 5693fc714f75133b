"""MariaDB: engines of the user, waiting for locks and for the server, and errors."""

from __future__ import annotations

import signal
import threading
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
    Order,
    assert_nothing_is_checked_out,
    commit,
    execute_past_the_guard,
    orders,
    recorded,
    rows,
    store_on_engine,
    user_metadata,
)

from dualwrite import migration
from dualwrite.errors import (
    ClaimTimeoutError,
    ConfigurationError,
    FencedError,
    StoreUnavailableError,
    TransactionControlError,
)
from dualwrite.stores.base import Claim, Resolution
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import TABLE_NAME, state_table
from fixtures.mariadb_server import MariaDBServer
from fixtures.mysql_server import MYSQLD, mariadb_only, mysql_only
from fixtures.pace import LIMIT, done, happened, until

# --- engines of the user --------------------------------------------------------------------------------------------------

ENGINES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "autocommit": {"isolation_level": "AUTOCOMMIT"},
    "the driver's autocommit": {"connect_args": {"autocommit": True}},
    "read committed": {"isolation_level": "READ COMMITTED"},
    "serializable": {"isolation_level": "SERIALIZABLE"},
    "no sql_mode": {"connect_args": {"sql_mode": ""}},
    "ansi": {"connect_args": {"sql_mode": "ANSI,TRADITIONAL"}},
    "chained": {"connect_args": {"init_command": "SET SESSION completion_type = 'CHAIN'"}},
    "one connection": {"pool_size": 1, "max_overflow": 0},
    "latin1": {"connect_args": {"charset": "latin1"}},
    # rowcount is then what was changed, not what matched: our writes change the row always
    "without CLIENT.FOUND_ROWS": {"connect_args": {"client_flag": 0}},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_an_engine_of_the_user(mariadb_url: str, options: dict[str, Any]) -> None:
    with store_on_engine(mariadb_url, **options) as store:
        claim = store.claim(ID, "ours", timeout=LIMIT)
        transaction = recorded(store, claim)
        transaction.session.add(Order(id=1, item="chair"))
        transaction.session.flush()
        transaction.commit()
        undone = store.begin(claim)
        undone.handle.execute(insert(orders).values(id=2, item="table"))
        undone.rollback()
        assert (rows(store.engine), rows(store.engine, Order)) == (1, 1)
        store.record_resolution(claim, Resolution(clear_state=True))
        assert store.read_claimed(claim).transaction_number == 1
        assert_nothing_is_checked_out(store)


_ISOLATION = "tx_isolation" if MYSQLD is None else "transaction_isolation"  # MariaDB has the second from 11.1 on
SESSION = f"SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout, @@wait_timeout, @@autocommit, @@{_ISOLATION}"


@pytest.mark.parametrize("autocommit", [False, True])
def test_session_variables_are_restored(mariadb_url: str, autocommit: bool) -> None:
    init = "SET SESSION innodb_lock_wait_timeout = 17, SESSION lock_wait_timeout = 18, SESSION wait_timeout = 1900"
    options = {"init_command": init, "autocommit": autocommit}
    with store_on_engine(mariadb_url, pool_size=1, max_overflow=0, connect_args=options) as store:

        def session() -> tuple[Any, ...]:
            with store.engine.connect() as connection:
                number = connection.scalar(sa.text("SELECT connection_id()"))
                return (number, *connection.exec_driver_sql(SESSION).one())

        before = session()
        assert before[1:5] == (17, 18, 1900, int(autocommit))
        claim = store.claim(ID, "ours", timeout=LIMIT)
        assert session() == before
        store.record_resolution(claim, Resolution(clear_state=True))
        assert session() == before
        with pytest.raises(FencedError):
            store.claim(ID, "ours", timeout=LIMIT, expected_fence=7)
        assert session() == before
        with pytest.raises(FencedError):
            store.record_resolution(Claim(ID, 7, "nobody"), Resolution(clear_state=True))
        assert session() == before
        recorded(store, claim).commit()
        assert session() == before
        store.begin(claim).rollback()
        assert session() == before
        failing = store.begin(claim)
        execute_past_the_guard(failing, "CREATE TABLE another (id int)")
        with pytest.raises(TransactionControlError):
            failing.record(STATE, generation=0, transaction_number=1)
        failing.rollback()
        assert session() == before
        with pytest.raises(FencedError):
            store.begin(Claim(ID, 7, "nobody"))
        assert session() == before


@pytest.mark.slow
def test_session_variables_are_restored_after_a_claim_timeout(mariadb_url: str, mariadb_store: SqlStateStore) -> None:
    with store_on_engine(mariadb_url, pool_size=1, max_overflow=0) as store:
        claim = mariadb_store.claim(ID, "theirs", timeout=LIMIT)
        transaction = recorded(mariadb_store, claim)
        with store.engine.connect() as connection:
            before = connection.exec_driver_sql(SESSION).one()
        with pytest.raises(ClaimTimeoutError):
            store.claim(ID, "ours", timeout=1)
        with store.engine.connect() as connection:
            assert connection.exec_driver_sql(SESSION).one() == before
        transaction.rollback()


@pytest.mark.slow
def test_dead_connections_in_the_pool(own_mariadb_server: MariaDBServer) -> None:
    server = own_mariadb_server
    migration.upgrade(server.url)
    with SqlStateStore.from_url(server.url) as store:
        connections = [store.engine.connect() for _ in range(3)]
        for connection in connections:
            connection.close()
        server.restart()
        claim = store.claim(ID, "ours", timeout=LIMIT)
        server.restart()
        transaction = store.begin(claim)
        commit(transaction)
        server.restart()
        assert store.read_claimed(claim).prepared_state == STATE


def test_the_older_dialect_name_is_accepted(mariadb_url: str) -> None:
    with store_from_url(mariadb_url.replace("mariadb+pymysql", "mysql")) as store:
        assert store.description.startswith("mysql+pymysql://dualwrite@127.0.0.1")
        assert store.claim(ID, "ours", timeout=LIMIT).fence == 1


def test_a_url_without_a_database_is_refused(mariadb_server: MariaDBServer) -> None:
    with pytest.raises(ConfigurationError, match="no database"):
        store_from_url(mariadb_server.url_at(mariadb_server.port, ""))


# --- waiting --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_paused_claimer_does_not_block_others_forever(
    mariadb_store: SqlStateStore, mariadb_claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualwrite.stores.sql import mysql  # noqa: PLC0415  (shortens a constant)

    monkeypatch.setattr(mysql, "_PAUSED", 1)
    paused, go_on = threading.Event(), threading.Event()

    def pause(_connection: sa.Connection) -> None:
        if not paused.is_set():
            paused.set()
            happened(go_on)

    with ThreadPoolExecutor(1) as thread, SqlStateStore.from_url(mariadb_store.engine.url) as sleeper:
        sa.event.listen(sleeper.engine, "commit", pause)
        claiming = thread.submit(sleeper.claim, ID, "sleeper", timeout=LIMIT)
        happened(paused)
        assert mariadb_store.claim(ID, "awake", timeout=LIMIT).fence == mariadb_claim.fence + 1
        go_on.set()
        assert done(claiming).fence == mariadb_claim.fence + 2  # its first COMMIT failed, and it claimed again


@pytest.mark.slow
def test_a_server_that_hangs_during_connect(own_mariadb_server: MariaDBServer) -> None:
    """It accepts the connection and sends nothing: PyMySQL's own limit is only for the TCP connection."""
    own_mariadb_server.pause()
    with SqlStateStore.from_url(own_mariadb_server.url, connect_timeout=1) as store:
        with pytest.raises(StoreUnavailableError):
            store.read(ID)
        own_mariadb_server.resume()
        migration.upgrade(own_mariadb_server.url)
        assert store.read(ID) is None


@pytest.mark.slow
def test_the_connect_timeout_does_not_apply_to_statements(mariadb_url: str) -> None:
    with SqlStateStore.from_url(mariadb_url, connect_timeout=1) as store, store.engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT SLEEP(1.5)")) == 0
        assert connection.exec_driver_sql("SELECT @@lock_wait_timeout").scalar() == 30


@pytest.mark.slow
def test_a_read_timeout_of_the_user_is_kept(mariadb_url: str) -> None:
    with (
        SqlStateStore.from_url(f"{mariadb_url}&read_timeout=1") as store,
        store.engine.connect() as connection,
        pytest.raises(sa.exc.OperationalError, match="timed out"),
    ):
        connection.scalar(sa.text("SELECT SLEEP(3)"))


def test_an_interrupt_ends_a_waiting_claim_at_once(
    mariadb_url: str, mariadb_store: SqlStateStore, mariadb_claim: Claim
) -> None:
    transaction = recorded(mariadb_store, mariadb_claim)
    with SqlStateStore.from_url(mariadb_url) as store:
        store.check()
        timer = threading.Timer(0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            store.claim(ID, "ours", timeout=LIMIT)
        timer.join()
        with mariadb_store.engine.connect() as connection:
            waiting = (
                "SELECT count(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE '%%kafka_transaction_state%%FOR UPDATE'"
            )
            assert connection.exec_driver_sql(waiting).scalar() == 1
        assert_nothing_is_checked_out(store)
        transaction.commit()
        # what was waiting at the server is rolled back there, whenever it gets the lock
        assert store.claim(ID, "ours", timeout=LIMIT).fence == mariadb_claim.fence + 1


def test_many_first_claims_at_once(mariadb_store: SqlStateStore) -> None:
    """Each reading of a missing row for an update may lock the gap, so that the INSERTs deadlock."""
    barrier = threading.Barrier(8)

    def one(number: int) -> int:
        barrier.wait()
        return mariadb_store.claim(f"{ID}-{number}", "ours", timeout=LIMIT).fence

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(8))) == [1] * 8


# --- errors ---------------------------------------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[MariaDBServer], str]] = {
    "database": lambda server: server.url_at(server.port, "nowhere"),
    "user": lambda server: server.url_at(server.port, user="nobody"),
    "password": lambda server: server.url.replace("dualwrite@", "dualwrite:s3cret@"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_connection_is_not_retried(mariadb_server: MariaDBServer, what: str) -> None:
    with (
        SqlStateStore.from_url(REFUSED[what](mariadb_server)) as store,
        pytest.raises(StoreUnavailableError, match="refused") as caught,
    ):
        store.claim(ID, "tests", timeout=LIMIT)
    assert "s3cret" not in str(caught.value)


@pytest.mark.slow
def test_a_claim_waits_while_there_are_too_many_connections() -> None:
    with MariaDBServer(settings={"max-connections": "10", "extra-max-connections": "1"}) as server:
        migration.upgrade(server.url)
        with SqlStateStore.from_url(server.url, pool_size=20) as hog, SqlStateStore.from_url(server.url) as store:
            held: list[sa.Connection] = []
            with pytest.raises(sa.exc.OperationalError, match="1040"):
                held.extend(hog.engine.connect() for _ in range(20))
            with pytest.raises(StoreUnavailableError) as caught:
                store.claim(ID, "tests", timeout=0.3)
            assert caught.value.retriable
            with ThreadPoolExecutor(1) as thread:
                claiming = thread.submit(store.claim, ID, "tests", timeout=LIMIT)
                time.sleep(0.2)
                for connection in held:
                    connection.invalidate()
                    connection.close()
                assert done(claiming).fence == 1


@pytest.mark.slow
def test_a_short_transaction_waits_only_for_its_own_rows(mariadb_store: SqlStateStore) -> None:
    """With InnoDB's default isolation, INSERT … SELECT would also wait for the rows next to those it reads."""
    user_metadata.create_all(mariadb_store.engine)
    copied = sa.insert(orders).from_select(["id", "item"], sa.select(orders.c.id + 100, orders.c.item).where(orders.c.id < 50))
    with mariadb_store.short_transactions.begin_long() as loading:
        loading.execute(insert(orders).values(id=1, item="chair"))
        with mariadb_store.short_transactions.begin(1) as connection:
            connection.execute(copied)
        with mariadb_store.engine.connect() as connection:  # as the user connects, with the default isolation
            connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
            with pytest.raises(sa.exc.OperationalError, match="1205"):
                connection.execute(copied)
            connection.invalidate()
    assert rows(mariadb_store.engine) == 1


@pytest.mark.slow
def test_statement_based_binary_logging() -> None:
    """It refuses writes of READ COMMITTED transactions (error 1665). With REPEATABLE READ the lanes' list must not be older."""
    waiting = "SELECT count(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"
    with MariaDBServer(settings={"log-bin": "log", "server-id": "1", "binlog-format": "STATEMENT"}) as server:
        migration.upgrade(server.url)
        with SqlStateStore.from_url(server.url) as store, ThreadPoolExecutor(1) as thread:
            assert store.claim(ID, "ours", timeout=LIMIT).fence == 1
            assert store.claim(ID, "ours", timeout=LIMIT).fence == 2
            with store.engine.begin() as connection:
                connection.exec_driver_sql(f"SELECT 1 FROM {TABLE_NAME} WHERE transactional_id = '{ID}' FOR UPDATE")
                claiming = thread.submit(store.claim_lanes, [ID], "theirs", timeout=LIMIT, cluster_id="c")
                until(  # the server looks again only if the last reading is 0.1 s old
                    lambda: store.short_transactions.query(lambda other: other.exec_driver_sql(waiting).scalar(), "waiting"),
                    pause=0.2,
                )
                copied = [sa.literal(f"{ID}~1"), *(column for column in state_table.c if column.name != "transactional_id")]
                connection.execute(
                    insert(state_table).from_select([column.name for column in state_table.c], sa.select(*copied))
                )
            assert [row.transactional_id for row in done(claiming).rows] == [ID, f"{ID}~1"]


def test_a_long_transaction_paused_with_locks(mariadb_store: SqlStateStore, mariadb_claim: Claim) -> None:
    """Afterwards its session's limits are what they were before."""
    short = mariadb_store.short_transactions
    with short.begin_long() as connection:
        before = connection.exec_driver_sql("SELECT @@SESSION.wait_timeout").scalar()
        short.dialect.limit_pause(connection)
        assert connection.exec_driver_sql("SELECT @@SESSION.wait_timeout").scalar() == 10
        number = connection.exec_driver_sql("SELECT connection_id()").scalar()
    with mariadb_store.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT connection_id()").scalar() == number
        assert connection.exec_driver_sql("SELECT @@SESSION.wait_timeout").scalar() == before
    assert mariadb_store.claim(ID, "theirs", timeout=LIMIT).fence == mariadb_claim.fence + 1


@mariadb_only
def test_durability_settings_of_mariadb(mariadb_store: SqlStateStore) -> None:
    found = mariadb_store.durability()
    assert found["innodb_flush_log_at_trx_commit"] == "1"
    assert (found["innodb_doublewrite"], found["log_bin"], found["sync_binlog"]) == ("ON", "OFF", "0")
    assert (found["read_only"], found["tx_read_only"], found["engine"]) == ("OFF", "OFF", "InnoDB")
    assert (found["wsrep_on"], found["Slaves_connected"], "product" in found) == ("OFF", "0", False)


@mysql_only
def test_durability_settings_of_mysql(mariadb_store: SqlStateStore) -> None:
    found = mariadb_store.durability()
    assert (found["innodb_flush_log_at_trx_commit"], found["Innodb_redo_log_enabled"]) == ("1", "ON")
    assert (found["innodb_doublewrite"], found["log_bin"], found["sync_binlog"]) == ("ON", "ON", "1")
    assert (found["read_only"], found["transaction_read_only"], found["engine"]) == ("OFF", "OFF", "InnoDB")
    assert "product" not in found
