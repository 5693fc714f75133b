"""Whatever a block, a role or a database sets for the session, our statements reach the same rows, or an error names the cause.

Beside our tables there are others of the same names, which the settings make the database prefer. They have the same row, with
the same fencing token and the same store id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from typing import cast

import psycopg
import pytest
import sqlalchemy as sa
from psycopg_pool import ConnectionPool
from store_scene import ID, STATE, assert_nothing_is_checked_out, rows, user_metadata

from dualwrite import Transaction, migration
from dualwrite.cli import main
from dualwrite.errors import ConfigurationError, FencedError, StoreError, TransactionControlError
from dualwrite.spark.chunks import ChunkMarker, ChunkMarkers
from dualwrite.state import ProducerKind
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from fixtures.mysql_server import MYSQLD
from fixtures.pace import LIMIT
from fixtures.tiers import thinned

POSITION, MARKER = Position("topic", 0, 5), ChunkMarker(0, 10, "digest")
NAME = "größe"  # not ASCII, so that encodings matter
_TABLES = ("kafka_transaction_state", "kafka_consumed_offset", "kafka_job_chunk")
_TEMPORARY = ("CREATE TEMPORARY TABLE {0} AS SELECT * FROM {1}.{0}",)
_FUNCTIONS = """
CREATE FUNCTION tenant.current_setting(text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT 'another' $$;
CREATE FUNCTION tenant.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT 'another' $$;
CREATE FUNCTION tenant.pg_backend_pid() RETURNS integer LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION tenant.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT timestamptz '2000-01-01' $$
"""
POSTGRESQL: dict[str, tuple[str, ...]] = {
    "search_path": ("SET LOCAL search_path TO tenant",),
    "search_path of the session": ("SET search_path TO tenant",),
    "functions of the same names": (*_FUNCTIONS.split(";"), "SET search_path TO tenant, pg_catalog"),
    "temporary tables": tuple(_TEMPORARY[0].format(table, "public") for table in _TABLES),
    "DateStyle": ("SET datestyle TO 'German'", "SET intervalstyle TO 'sql_standard'", "SET TIME ZONE '<+03>-03'"),
    "client_encoding": ("SET client_encoding TO 'SQL_ASCII'",),
    "another client_encoding": ("SET client_encoding TO 'LATIN1'",),
    "strings": ("SET standard_conforming_strings TO off", "SET backslash_quote TO off"),
}
MARIADB: dict[str, tuple[str, ...]] = {
    "USE": ("USE tenant",),
    "sql_mode": ("SET sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT'", "USE tenant"),
    "no sql_mode": ("SET sql_mode = ''", "SET time_zone = '+05:00'", "SET sql_safe_updates = 1", "USE tenant"),
    "another database's sql_mode": (f"SET sql_mode = '{'ORACLE' if MYSQLD is None else 'ANSI'}'", "USE tenant"),
}
SQLITE: dict[str, tuple[str, ...]] = {"temporary tables": tuple(_TEMPORARY[0].format(table, "main") for table in _TABLES)}


@dataclass
class Scene:
    """A store, where tables of the same names are, and how a block runs a statement."""

    store: SqlStateStore
    elsewhere: SqlStateStore | None
    claim: Claim
    generation: int

    def block(self, statements: tuple[str, ...]) -> StoreTransaction:
        """A transaction in whose block these statements have run."""
        transaction = self.store.begin(self.claim)
        handle = transaction.handle
        for statement in statements:
            (handle.exec_driver_sql if isinstance(handle, sa.Connection) else handle.execute)(statement)
        return transaction


def opened(store: SqlStateStore, elsewhere: SqlStateStore | None = None) -> Scene:
    """With a claimed row that has a store id; elsewhere is a row that nothing but its place tells from it."""
    claim = store.claim(NAME, "tests", timeout=LIMIT)
    generation = store.acquire_generation(claim, ProducerKind.NATIVE)
    if elsewhere is not None:
        elsewhere.acquire_generation(elsewhere.claim(NAME, "tests", timeout=LIMIT), ProducerKind.NATIVE)
        row, copied = store.read(NAME), sa.table("kafka_transaction_state", sa.column("store_id"))
        assert row is not None
        with elsewhere.engine.begin() as connection:
            copied.schema = "tenant"
            connection.execute(sa.update(copied).values(store_id=row.store_id))
    return Scene(store, elsewhere, claim, generation)


def assert_every_statement_reaches_our_tables(scene: Scene, settings: tuple[str, ...], record: str) -> None:
    store, others = scene.store, None if scene.elsewhere is None else scene.elsewhere.read(NAME)
    transaction = scene.block(settings)
    markers, whole = ChunkMarkers(store), cast("Transaction", transaction)  # which has `session`, as it has
    store.positions.move(transaction, "group", [Move(None, POSITION)])
    store.positions.move(transaction, "group", [Move(POSITION, moved := Position("topic", 0, 6))])
    markers.write(whole, "job", 0, MARKER)
    assert markers.read(whole, "job", 0) == {0: MARKER}
    getattr(transaction, record)(STATE, generation=scene.generation, transaction_number=1)
    transaction.commit()
    with SqlStateStore.from_url(store.engine.url.render_as_string(False)) as after:
        row = after.read_claimed(scene.claim)
        assert (row.prepared_state, row.transaction_number) == (STATE, 1)
        assert after.positions.read("group")[moved.key].offset == 6
        assert ChunkMarkers(after).forget("job") == 1
    if scene.elsewhere is not None:
        assert scene.elsewhere.read(NAME) == others
        assert scene.elsewhere.positions.groups() == []
    # the connection may still have the session's settings
    assert store.read_claimed(scene.claim) == row
    assert store.list() == [NAME]
    assert store.durability()
    assert store.marks()
    assert store.leases.lease("shop", "tests", 1, seconds=600) == ["shop.1"]
    assert [lease.transactional_id for lease in store.leases.entries()] == ["shop.1"]
    again = store.claim(NAME, "tests", timeout=LIMIT, expected_fence=scene.claim.fence)
    store.begin(again).rollback()
    assert store.acquire_generation(again, ProducerKind.NATIVE) == scene.generation + 1


@pytest.fixture
def tenant_url(postgres_url: str) -> Iterator[str]:
    """A PostgreSQL database with our tables in the default schema and in another."""
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS tenant CASCADE; CREATE SCHEMA tenant")
        migration.upgrade(postgres_url, schema="tenant")
        yield postgres_url
        connection.execute("DROP SCHEMA tenant CASCADE")


WAYS = ["URL", "engine", "psycopg"]
RECORDS = ["record", "record_at_commit"]


@pytest.fixture
def postgresql_scene(request: pytest.FixtureRequest, tenant_url: str) -> Iterator[Scene]:
    with ExitStack() as stack:
        if request.param == "psycopg":
            connection = stack.enter_context(closing(psycopg.connect(tenant_url.replace("+psycopg", ""))))
            store = SqlStateStore.from_psycopg(connection)
        elif request.param == "engine":
            engine = sa.create_engine(tenant_url, execution_options={"schema_translate_map": {"public": "tenant"}})
            stack.callback(engine.dispose)
            store = SqlStateStore(engine)
        else:
            store = SqlStateStore.from_url(tenant_url)
        stack.enter_context(store)
        yield opened(store, stack.enter_context(SqlStateStore.from_url(tenant_url, schema="tenant")))


@pytest.mark.parametrize(
    ("postgresql_scene", "setting", "record"),
    thinned(
        product(WAYS, POSTGRESQL, RECORDS),
        kept=[
            *product(["URL"], POSTGRESQL, ["record_at_commit"]),
            *product(["psycopg"], POSTGRESQL, ["record"]),
            ("engine", "search_path", "record_at_commit"),
        ],
        quick=[("URL", "search_path", "record_at_commit"), ("URL", "DateStyle", "record_at_commit")],
    ),
    indirect=["postgresql_scene"],
)
def test_settings_of_postgresql(postgresql_scene: Scene, setting: str, record: str) -> None:
    assert_every_statement_reaches_our_tables(postgresql_scene, POSTGRESQL[setting], record)


@pytest.mark.parametrize("setting", thinned(MARIADB, quick=["USE"]))
def test_settings_of_mariadb(mariadb_url: str, setting: str) -> None:
    engine = sa.create_engine(mariadb_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP DATABASE IF EXISTS tenant")
        connection.exec_driver_sql("CREATE DATABASE tenant")
    migration.upgrade(mariadb_url, schema="tenant")
    with SqlStateStore(engine) as store, SqlStateStore.from_url(mariadb_url, schema="tenant") as elsewhere:
        assert_every_statement_reaches_our_tables(opened(store, elsewhere), MARIADB[setting], "record")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP DATABASE tenant")
    engine.dispose()


@pytest.mark.parametrize("setting", SQLITE)
def test_settings_of_sqlite(sqlite_url: str, setting: str) -> None:
    with SqlStateStore.from_url(sqlite_url, pool_size=1, max_overflow=0) as store:
        assert_every_statement_reaches_our_tables(opened(store), SQLITE[setting], "record")


# --- what can't work names its cause, and commits nothing ---------------------------------------------------------------------

_HIDDEN = (
    "CREATE FUNCTION tenant.hidden() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
    "CREATE TRIGGER hidden BEFORE UPDATE ON kafka_transaction_state FOR EACH ROW EXECUTE FUNCTION tenant.hidden()",
)
_REPLACED = (
    "ALTER TABLE kafka_transaction_state RENAME TO before",
    "CREATE TABLE kafka_transaction_state AS SELECT * FROM before",
    "UPDATE kafka_transaction_state SET store_id = 'another'",
)
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "a read-only transaction": (("SET TRANSACTION READ ONLY",), "(?s)nothing of it was written.*SET TRANSACTION READ ONLY"),
    "a role": (("SET LOCAL ROLE pg_monitor",), r"(?s)does not permit recording.*nothing of it was written.*\(SET ROLE\)"),
    "a limit for statements": (("SET LOCAL statement_timeout TO '50ms'",), "ended by statement_timeout"),
    "a limit for locks": (("SET LOCAL lock_timeout TO '50ms'",), "not released within the limit"),
    "a trigger": (_HIDDEN, "does not see the row that it began with. Nothing was committed"),
    "the row of another store": (_REPLACED, "does not see the row that it began with. Nothing was committed"),
    "RESET ALL": (("RESET ALL",), "RESET ALL"),
}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("setting", thinned(REFUSED, quick=["a role", "the row of another store"]))
def test_settings_that_make_the_record_impossible(tenant_url: str, setting: str, record: str) -> None:
    statements, message = REFUSED[setting]
    with (
        SqlStateStore.from_url(tenant_url, lock_timeout=LIMIT) as store,
        SqlStateStore.from_url(tenant_url, schema="tenant") as elsewhere,
        ExitStack() as stack,
    ):
        user_metadata.create_all(store.engine)
        scene = opened(store, elsewhere)
        transaction = scene.block(("INSERT INTO orders VALUES (1, 'chair')", *statements))
        if setting.startswith("a limit"):
            holder = stack.enter_context(psycopg.connect(tenant_url.replace("+psycopg", "")))
            holder.execute("SELECT 1 FROM kafka_transaction_state FOR UPDATE")

        def end() -> None:
            getattr(transaction, record)(STATE, generation=scene.generation, transaction_number=1)
            transaction.commit()

        with pytest.raises((StoreError, TransactionControlError)) as caught:
            end()
        transaction.rollback()
        stack.close()
        assert re.search(message, str(caught.value), re.DOTALL)
        assert rows(store.engine) == 0
        assert store.read_claimed(scene.claim).transaction_number == 0
        assert_nothing_is_checked_out(store)


_SHADOW = (
    "CREATE TEMPORARY TABLE shadow AS SELECT * FROM kafka_transaction_state WHERE fence < 0",
    "CREATE TEMPORARY TABLE kafka_transaction_state LIKE shadow",
)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (("SET SESSION TRANSACTION READ ONLY",), "SET SESSION TRANSACTION READ ONLY"),
        (("SET NAMES latin1",), "it is latin1, and PyMySQL sends utf8mb4"),
        (_SHADOW, "a temporary table of the same name"),
    ],
)
def test_settings_of_mariadb_that_make_the_record_impossible(
    mariadb_store: SqlStateStore, statements: tuple[str, ...], message: str
) -> None:
    scene = opened(mariadb_store)
    if "READ ONLY" in statements[0]:  # it is for the transactions that follow
        scene.block(statements).rollback()
        statements = ()
    transaction = scene.block(statements)
    with pytest.raises((StoreError, FencedError), match=message):
        transaction.record(STATE, generation=scene.generation, transaction_number=1)
    transaction.rollback()


def test_a_read_only_session_of_sqlite(sqlite_url: str) -> None:
    with SqlStateStore.from_url(sqlite_url) as store:
        transaction = opened(store).block(("PRAGMA query_only = ON",))
        with pytest.raises(StoreError, match="PRAGMA query_only"):
            transaction.record(STATE, generation=1, transaction_number=1)
        transaction.rollback()


# --- opening ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def odd_url(postgres_server: PostgresServer) -> str:
    """A database without an encoding, whose sessions write times in German."""
    name = "odd"
    with psycopg.connect(postgres_server.url.replace("+psycopg", ""), autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        admin.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
        admin.execute(f"ALTER DATABASE {name} SET datestyle TO 'German'")
    url = postgres_server.url_at(postgres_server.port, name)
    migration.upgrade(url)
    return url


@pytest.mark.parametrize("kind", thinned(["URL", "engine", "connection", "pool"], quick=["URL"]))
def test_a_database_without_an_encoding_that_writes_times_in_german(
    odd_url: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = odd_url.replace("+psycopg", "")
    with ExitStack() as stack:
        engine = sa.create_engine(odd_url)
        stack.callback(engine.dispose)
        stores: dict[str, Callable[[], SqlStateStore]] = {
            "URL": lambda: SqlStateStore.from_url(odd_url),
            "engine": lambda: SqlStateStore(engine),
            "connection": lambda: SqlStateStore.from_psycopg(stack.enter_context(closing(psycopg.connect(address)))),
            "pool": lambda: SqlStateStore.from_psycopg(stack.enter_context(ConnectionPool(address, open=True))),
        }
        store = stack.enter_context(stores[kind]())
        store.check()
        assert_every_statement_reaches_our_tables(opened(store), (), "record_at_commit")
        if kind in ("connection", "pool"):  # the user's own queries get what they got before
            transaction = store.begin(store.claim(NAME, "tests", timeout=LIMIT))
            assert transaction.handle.execute("SELECT 'green'").fetchone() == (b"green",)
            transaction.rollback()
    assert main(["status", "--url", odd_url]) == 0
    assert NAME in capsys.readouterr().out


def test_a_database_that_is_read_only_by_default(postgres_server: PostgresServer, new_database: Callable[[str], str]) -> None:
    url = new_database("postgresql")
    migration.upgrade(url)
    with psycopg.connect(postgres_server.url.replace("+psycopg", ""), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {url.rpartition('/')[2]} SET default_transaction_read_only TO on")
    with SqlStateStore.from_url(url) as store, pytest.raises(StoreError, match="default_transaction_read_only"):
        store.claim(ID, "tests", timeout=LIMIT)


def test_a_search_path_that_an_earlier_block_has_left_on_a_connection(tenant_url: str) -> None:
    """An engine makes another connection to look at the tables; a pool of psycopg's can't, and says what to do."""
    engine = sa.create_engine(tenant_url, pool_size=1, max_overflow=0)
    with engine.begin() as connection:
        connection.exec_driver_sql("SET search_path TO tenant")
    with SqlStateStore(engine) as store, SqlStateStore.from_url(tenant_url) as public:
        store.claim(ID, "tests", timeout=LIMIT)
        assert public.list() == [ID]
    engine.dispose()
    with ConnectionPool(tenant_url.replace("+psycopg", ""), min_size=1, max_size=1, open=True) as pool:
        with pool.connection() as users:
            users.execute("SET search_path TO tenant")
        with SqlStateStore.from_psycopg(pool) as store, pytest.raises(ConfigurationError, match="schema='public'"):
            store.list()
        with SqlStateStore.from_psycopg(pool, schema="public") as store:
            assert store.list() == [ID]


def test_an_upgrade_finds_the_tables_behind_a_schema_that_was_created_later(new_database: Callable[[str], str]) -> None:
    url = new_database("postgresql")
    migration.upgrade(url)
    engine = sa.create_engine(url, connect_args={"options": "-c search_path=later,public"})
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA later")
    migration.upgrade(engine)
    assert sa.inspect(engine).get_table_names("later") == []
    with SqlStateStore(engine) as store:
        store.check()
    engine.dispose()
