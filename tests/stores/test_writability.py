"""A database that takes no writes for a while: which errors say so, and that the connections from then are not used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from psycopg_pool import ConnectionPool
from store_scene import ID, STATE

from dualwrite.errors import StoreNotWritableError
from dualwrite.observability.outages import database_at
from dualwrite.stores.base import StoreTransaction
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.mysql import MysqlDialect
from fixtures.pace import LIMIT
from fixtures.read_only import read_only
from fixtures.tables import table
from fixtures.tiers import thinned

TABLE = "CREATE TABLE notes (text varchar(20))"
WRITE = "INSERT INTO notes VALUES ('a')"


def execute(transaction: StoreTransaction, statement: str) -> None:
    handle = transaction.handle
    (handle.exec_driver_sql if isinstance(handle, sa.Connection) else handle.execute)(statement)


def write(store: SqlStateStore, statement: str = WRITE) -> Exception | None:
    """One transaction of a new claim; the error of its statement, of which it is told as a writer tells it."""
    transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
    try:
        execute(transaction, statement)
        transaction.record(STATE, generation=0, transaction_number=1)
        transaction.commit()
    except Exception as error:  # noqa: BLE001  (returned)
        return error
    finally:
        transaction.rollback()
    return None


# --- which errors -----------------------------------------------------------------------------------------------------------

RAISED = "DO $$ BEGIN RAISE EXCEPTION 'raised by a test' USING ERRCODE = '{}'; END $$"


@table("code", ["53000", "53100", "53200", "58030", "25006"])
def test_what_postgresql_says_of_itself_is_an_outage(postgres_url: str, code: str) -> None:
    with SqlStateStore.from_url(postgres_url) as store:
        error = write(store, RAISED.format(code))
        assert error is not None
        assert (store.is_outage(error), store.is_conflict(error), store.passes(error)) == (True, False, True)


@table("code", ["53400", "54000", "42501", "0A000", "P0001"])
def test_what_it_says_of_a_statement_is_none(postgres_url: str, code: str) -> None:
    """The limit for temporary files, a limit of the program, a right, an unknown feature, an error of a routine."""
    with SqlStateStore.from_url(postgres_url) as store:
        error = write(store, RAISED.format(code))
        assert error is not None
        assert not store.passes(error)


MARIADB: dict[str, tuple[int, str, tuple[bool, bool]]] = {
    "read_only": (1290, "The MariaDB server is running with the --read-only option so it cannot execute", (True, False)),
    "super_read_only": (1290, "The MySQL server is running with the --super-read-only option so it", (True, False)),
    "secure_file_priv": (1290, "The MariaDB server is running with the --secure-file-priv option so it", (False, False)),
    "a read-only transaction": (1792, "Cannot execute statement in a READ ONLY transaction", (True, False)),
    "read-only mode": (1836, "Running in read-only mode", (True, False)),
    "InnoDB is read-only": (1036, "Table 'orders' is read only", (True, False)),
    "a full disk": (1021, "Disk full (/tmp/x); waiting for someone to free some space...", (True, False)),
    "a full tablespace": (1114, "The table 'orders' is full", (True, False)),
    "no space, by the engine": (1030, 'Got error 28 "No space left on device" from storage engine InnoDB', (True, False)),
    "no space, by a file": (3, "Error writing file './x' (Errcode: 28 \"No space left on device\")", (True, False)),
    "another error of the engine": (1030, 'Got error 168 "Unknown error" from storage engine', (False, False)),
    "a value like a full disk": (1062, "Duplicate entry 'error 28' for key 'PRIMARY'", (False, False)),
    "a migration": (1412, "Table definition has changed, please retry transaction", (False, True)),
    "a right": (1142, "INSERT command denied to user 'shop'", (False, False)),
}


@table("case", MARIADB)
def test_errors_of_mariadb_and_mysql(case: str) -> None:
    code, text, expected = MARIADB[case]
    found = MysqlDialect().classify(pymysql.err.OperationalError(code, text))
    assert (found.name in ("READ_ONLY", "EXHAUSTED"), found.name == "CONFLICT") == expected


@table("code", [1206, 1213])
def test_errors_that_may_have_rolled_back_everything(code: int) -> None:
    """Not only the unit of a group whose statement has failed."""
    assert MysqlDialect().may_have_rolled_back(pymysql.err.OperationalError(code, "by a test"))


SQLITE = {
    "no more pages": (("PRAGMA max_page_count = 1", "CREATE TABLE more AS SELECT zeroblob(100000) AS x"), "full"),
    "query_only": (("PRAGMA query_only = ON", WRITE), "readonly"),
}


@table("case", SQLITE)
def test_errors_of_sqlite(sqlite_url: str, case: str) -> None:
    statements, text = SQLITE[case]
    with SqlStateStore.from_url(sqlite_url) as store:
        transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
        for statement in (TABLE.replace("TABLE", "TABLE IF NOT EXISTS"), *statements[:-1]):
            execute(transaction, statement)
        with pytest.raises(sa.exc.DBAPIError, match=text) as caught:
            execute(transaction, statements[-1])
        transaction.rollback()
        assert store.is_outage(caught.value)
        assert write(store, "CREATE TABLE IF NOT EXISTS made (x integer)") is None, "on another connection, without the setting"


def test_a_migration_changes_what_a_prepared_statement_returns(postgres_url: str) -> None:
    """PostgreSQL says "cached plan must not change result type" once for each session."""
    with SqlStateStore.from_url(postgres_url) as store, psycopg.connect(dsn_of(postgres_url), autocommit=True) as users:
        users.execute(TABLE)
        for _ in range(8):
            assert write(store, "SELECT * FROM notes") is None
        users.execute("ALTER TABLE notes ALTER text TYPE varchar(30)")
        error = write(store, "SELECT * FROM notes")
        assert error is not None
        assert "cached plan" in str(error)
        assert store.is_conflict(error)
        assert write(store, "SELECT * FROM notes") is None


# --- the connections --------------------------------------------------------------------------------------------------------


def dsn_of(url: str) -> str:
    return url.replace("+psycopg", "")


@contextmanager
def made(url: str, source: str) -> Iterator[SqlStateStore]:
    with ExitStack() as opened:
        if source == "engine":
            engine = sa.create_engine(url)
            opened.callback(engine.dispose)
            yield opened.enter_context(SqlStateStore(engine))
        elif source == "url":
            yield opened.enter_context(SqlStateStore.from_url(url))
        else:
            given: Any = lambda: psycopg.connect(dsn_of(url))  # noqa: E731  (as users write it)
            if source == "psycopg_pool":
                # two, both in use when they are found out: one that is just being made would escape the pool's `drain`
                given = opened.enter_context(ConnectionPool(dsn_of(url), min_size=2, max_size=2, open=True))
            yield opened.enter_context(SqlStateStore.from_psycopg(given))


CASES = [
    *(("postgres_url", source) for source in ("url", "engine", "psycopg", "psycopg_pool")),
    ("mariadb_url", "url"),
]


@pytest.mark.parametrize(("server", "source"), thinned(CASES, quick=CASES[:1]))
def test_connections_that_were_made_while_it_was_read_only_are_replaced(
    request: pytest.FixtureRequest, server: str, source: str
) -> None:
    url = request.getfixturevalue(server)
    with made(url, source) as store:
        database = database_at(store.description)
        database.forget_all()  # what an earlier case has reported, and no writer has seen to end
        claims = [store.claim(name, "tests", timeout=LIMIT) for name in ("one", "two")]
        with store.engine.begin() as connection:
            connection.exec_driver_sql(TABLE)
        with read_only(url) as over:
            side_by_side = [store.begin(claim) for claim in claims]  # two connections, which stay read-only
            over()
            with pytest.raises(Exception, match=r"(?i)read.only") as caught:
                execute(side_by_side[0], WRITE)
            for each in side_by_side:
                each.rollback()
            assert store.is_outage(caught.value)
            assert database.is_out
            with pytest.raises(StoreNotWritableError, match="takes no writes"):
                store.check_now()
        assert [write(store) for _ in range(3)] == [None] * 3
        assert store.leases.acquire(["leased"], "tests", seconds=LIMIT) == frozenset({"leased"})


def test_our_own_transactions_replace_them_by_themselves(postgres_url: str) -> None:
    with SqlStateStore.from_url(postgres_url) as store:
        store.claim(ID, "tests", timeout=LIMIT)
        with read_only(postgres_url) as over:
            with pytest.raises(StoreNotWritableError, match="permits no writes") as caught:
                store.claim(ID, "tests", timeout=LIMIT)
            assert caught.value.retriable
            assert store.list() == [ID]  # by a connection that stays read-only
            over()
        store.claim(ID, "tests", timeout=LIMIT)


@pytest.mark.parametrize("record", ["record", "record_at_commit"])
def test_the_record_is_refused(postgres_url: str, record: str) -> None:
    with SqlStateStore.from_url(postgres_url) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        with read_only(postgres_url):
            transaction = store.begin(claim)

            def end() -> None:
                getattr(transaction, record)(STATE, generation=0, transaction_number=1)
                transaction.commit()

            with pytest.raises(StoreNotWritableError, match="while recording the prepared state"):
                end()
            transaction.rollback()
        transaction = store.begin(claim)
        transaction.record(STATE, generation=0, transaction_number=1)
        transaction.commit()


def test_a_block_may_expect_the_error(postgres_url: str) -> None:
    """Its transaction goes on, and commits."""
    with SqlStateStore.from_url(postgres_url) as store:
        transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
        with pytest.raises(sa.exc.DBAPIError), transaction.handle.begin_nested():
            execute(transaction, RAISED.format("53100"))
        execute(transaction, TABLE)
        transaction.record(STATE, generation=0, transaction_number=1)
        transaction.commit()
        assert write(store) is None
