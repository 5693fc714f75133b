"""What a unit sets in the transaction, the session or its handle, no other sees: each begins as in a fresh connection."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row
from psycopg.types.string import TextLoader

from crash.scene import Scene
from dualwrite import PoolOptions, Transaction, WriterPool
from dualwrite.testing.topics import read_committed
from fixtures.mysql_server import MYSQLD
from fixtures.pace import LIMIT, until
from pool.pool_scene import both, grouped, held, open_pool, psycopg_store

numbers = itertools.count(1)
Unit = Callable[[Transaction], Any]


class Meant(Exception):  # noqa: N818  (it is meant to be raised)
    """A unit's own error."""


def run(tx: Transaction, sql: str, *parameters: Any) -> Any:
    """A statement on whatever handle the transaction has."""
    if isinstance(tx.db, sa.Connection):
        return tx.db.exec_driver_sql(sql, tuple(parameters))
    return tx.db.execute(sql, parameters or None)


def runs(*statements: str, then: Unit = lambda _: None) -> Unit:
    def unit(tx: Transaction) -> None:
        for statement in statements:
            run(tx, statement)
        then(tx)

    return unit


def fails(tx: Transaction) -> None:
    del tx
    raise Meant


def ignores_the_refusal(tx: Transaction) -> None:
    with suppress(Exception):
        run(tx, "SET LOCAL statement_timeout = '777s'")


def goes_back_to_a_savepoint(tx: Transaction) -> None:
    try:
        run(tx, "ROLLBACK TO SAVEPOINT mine")
    except Exception as error:
        raise Meant from error
    raise AssertionError("this would undo what another unit has done")


# --- PostgreSQL ---------------------------------------------------------------------------------------------------------------

POSTGRESQL_STATE = (
    "SELECT current_setting('app.tenant', true)",
    "SELECT current_setting('search_path'), current_setting('role'), current_setting('timezone'), current_setting('datestyle')",
    "SELECT current_setting('statement_timeout'), current_setting('lock_timeout'), current_setting('application_name')",
    "SELECT current_setting('transaction_read_only'), current_setting('transaction_deferrable'), current_user, session_user",
    "SELECT count(*) FROM pg_class WHERE relpersistence = 't' AND pg_table_is_visible(oid)",
    "SELECT count(*) FROM pg_cursors WHERE name ~ '^my'",
    "SELECT count(*) FROM pg_prepared_statements WHERE name ~ '^my'",
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    "SELECT count(*) FROM pg_listening_channels()",
)
POSTGRESQL_SCHEMA = (
    "DROP SCHEMA IF EXISTS tenant CASCADE",
    "CREATE SCHEMA tenant",
    "DROP TABLE IF EXISTS deferred",
    "CREATE TABLE deferred (id int UNIQUE DEFERRABLE)",
    """CREATE OR REPLACE FUNCTION log_in(name text) RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN PERFORM set_config('app.tenant', name, true); END $$""",
    "CREATE OR REPLACE FUNCTION log_in_deeper(name text) RETURNS void LANGUAGE sql AS 'SELECT log_in(name)'",
    """CREATE OR REPLACE FUNCTION log_in_text(name text) RETURNS text LANGUAGE plpgsql AS
    $$ BEGIN PERFORM log_in(name); RETURN name; END $$""",
    """CREATE OR REPLACE FUNCTION log_in_for_good(name text) RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN EXECUTE 'SET app.tenant = ' || quote_literal(name); SET search_path TO tenant, public; END $$""",
    """CREATE FUNCTION tenant.log_in() RETURNS text LANGUAGE sql STABLE AS
    'SELECT pg_catalog.set_config(''app.tenant'', ''stable'', true)'""",
    """CREATE OR REPLACE FUNCTION "log in"(name text, value text, local bool) RETURNS text LANGUAGE internal AS
    'set_config_by_name'""",
    "CREATE OR REPLACE PROCEDURE refresh() LANGUAGE plpgsql AS $$ BEGIN SET LOCAL statement_timeout = '9s'; END $$",
)
POSTGRESQL_UNITS: Mapping[str, Unit] = {
    "nothing": runs("SELECT 1"),
    "an error": fails,
    "set_config, local": runs("SELECT set_config('app.tenant', 'one', true)"),
    "set_config, local, then an error": runs("SELECT set_config('app.tenant', 'one', true)", then=fails),
    "set_config, session": runs("SELECT set_config('app.tenant', 'one', false)"),
    "set_config, a parameter": lambda tx: run(tx, "SELECT set_config('app.tenant', 'one', %s)", False),
    "SET LOCAL search_path": runs("SET LOCAL search_path TO tenant, public"),
    "SET LOCAL statement_timeout": runs("SET LOCAL statement_timeout = '777s'"),
    "SET LOCAL, ignored": ignores_the_refusal,
    "SET statement_timeout": runs("SET statement_timeout = '777s'"),
    "SET TIME ZONE": runs("SET LOCAL TIME ZONE 'Asia/Tokyo'", "SET TIME ZONE 'Asia/Tokyo'"),
    "SET after another statement": runs("SELECT 1; SET LOCAL lock_timeout = '777s'"),
    "SET CONSTRAINTS": runs("SET CONSTRAINTS ALL DEFERRED"),
    "DO": runs("DO $$ BEGIN PERFORM set_config('app.tenant', 'do', true); END $$"),
    "a temporary table": runs("CREATE TEMPORARY TABLE my_table (v int)"),
    "a temporary table until the commit": runs("CREATE TEMPORARY TABLE my_table (v int) ON COMMIT DROP"),
    "SELECT INTO": runs("SELECT 1 AS v INTO TEMPORARY my_table"),
    "a cursor": runs("DECLARE my_cursor CURSOR FOR SELECT 1"),
    "a prepared statement": runs("PREPARE my_statement AS SELECT 1"),
    "a lock of the session": runs("SELECT pg_advisory_lock(35)"),
    "LISTEN": runs("LISTEN my_channel"),
    "a function": runs("SELECT log_in('function')"),
    "a function that calls it": runs("SELECT log_in_deeper('function')"),
    "a function that sets something for the session": runs("SELECT log_in_for_good('function')"),
    "a function of another schema": runs("SELECT tenant.log_in()"),
    "a function in DML": runs("INSERT INTO deferred SELECT 1 WHERE log_in_text('a') IS NULL"),
    "a procedure": runs("CALL refresh()"),
    "another name of set_config": runs("""SELECT "log in"('app.tenant', 'internal', true)"""),
    "a view of the settings": runs("UPDATE pg_settings SET setting = '777s' WHERE name = 'statement_timeout'"),
    "a temporary table with rows of others": runs("CREATE TEMPORARY TABLE my_table AS SELECT log_in_text('a') FROM deferred"),
    "a savepoint": runs("SAVEPOINT mine"),
    "a savepoint of another unit": goes_back_to_a_savepoint,
}


def sets(**options: Any) -> Unit:
    return lambda tx: tx.db.execution_options(**options)


def through_the_driver(tx: Transaction) -> None:
    with tx.db.connection.cursor() as cursor:
        cursor.execute("SET LOCAL statement_timeout = '777s'")


def listens(tx: Transaction) -> None:
    sa.event.listen(tx.db, "before_cursor_execute", lambda *_: heard.append(1))


def listens_and_changes_statements(tx: Transaction) -> None:
    def change(*given: Any) -> tuple[str, Any]:
        return f"SET LOCAL app.tenant = 'listener'; {given[2]}", given[3]

    sa.event.listen(tx.db, "before_cursor_execute", change, retval=True)
    run(tx, "SELECT 1")


by_engine: ContextVar[str] = ContextVar("by_engine", default="")
"""How the Engine's listener sets the tenant, if it does."""


def by_the_engine(how: str) -> Unit:
    def unit(tx: Transaction) -> None:
        token = by_engine.set(how)
        try:
            run(tx, "SELECT 1")
        finally:
            by_engine.reset(token)

    return unit


def set_tenant(_connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
    if by_engine.get() == "cursor":
        cursor.execute("SELECT set_config('app.tenant', 'cursor', true)")
    if by_engine.get() == "statement" and statement == "SELECT 1":
        statement = "SET LOCAL app.tenant = 'statement'; SELECT 1"
    return statement, parameters


def execute_itself(cursor: Any, statement: str, _parameters: Any, _context: Any) -> bool:
    if by_engine.get() == "execution":
        cursor.execute("SELECT set_config('app.tenant', 'execution', true)")
        cursor.execute(statement)
    return by_engine.get() == "execution"


def by_the_session(tx: Transaction) -> None:
    tx.session.connection(execution_options={"mark": "session"})
    tx.session.execute(sa.select(sa.func.set_config("app.tenant", "orm", True)))


heard: list[int] = []
SQLALCHEMY_UNITS: Mapping[str, Unit] = {
    "execution_options": sets(schema_translate_map={None: "tenant"}),
    "other execution_options": sets(stream_results=True, mark="connection"),
    "info": lambda tx: tx.db.info.update(tenant="one"),
    "a listener": listens,
    "the driver's connection": through_the_driver,
    "func.set_config": lambda tx: tx.db.execute(sa.select(sa.func.set_config("app.tenant", "core", True))),
    "the session": by_the_session,
    "a listener that changes statements": listens_and_changes_statements,
    "a listener of the Engine that changes statements": by_the_engine("statement"),
    "a listener of the Engine with the cursor": by_the_engine("cursor"),
    "a listener of the Engine that executes statements itself": by_the_engine("execution"),
}


def adapts(tx: Transaction) -> None:
    class Shouted(TextLoader):
        def load(self, data: Any) -> Any:
            return super().load(data).upper()  # type: ignore[union-attr]

    tx.db.adapters.register_loader("text", Shouted)


def assigns(name: str, value: Any) -> Unit:
    return lambda tx: setattr(tx.db, name, value)


def opens_a_cursor(tx: Transaction) -> None:
    tx.db.cursor("my_cursor").execute("SELECT 1")


class OwnCursor(psycopg.Cursor[Any]):
    """A cursor class of the user's."""


PSYCOPG_UNITS: Mapping[str, Unit] = {
    "row_factory": assigns("row_factory", dict_row),
    "cursor_factory": assigns("cursor_factory", OwnCursor),
    "prepare_threshold": assigns("prepare_threshold", None),
    "prepared_max": assigns("prepared_max", 7),
    "adapters": adapts,
    "a notice handler": lambda tx: (tx.db.add_notice_handler(heard.append), run(tx, "SELECT 1")),
    "a server-side cursor": opens_a_cursor,
    "a cursor of its own": lambda tx: psycopg.ClientCursor(tx.db).execute("SET LOCAL app.tenant = 'cursor'"),
}


def state(tx: Transaction, queries: tuple[str, ...]) -> tuple[Any, ...]:
    """What a unit sees of the session and of its handle."""
    rows = [tuple(value or "" for value in run(tx, query).fetchone()) for query in queries]
    if isinstance(tx.db, sa.Connection):
        info = {name: value for name, value in tx.db.info.items() if not str(name).startswith("dualwrite.")}
        own: tuple[Any, ...] = (dict(tx.db.get_execution_options()), info, len(heard))
    else:
        assert tx.db.execute("SELECT 'quiet' WHERE true").fetchone() == ("quiet",)
        own = (tx.db.row_factory, tx.db.prepare_threshold, tx.db.prepared_max, tx.db.cursor_factory, len(heard))
    return (*rows, *own)


class Seen:
    """Runs units that first look around, and collects those that have seen something of another one.

    Args:
        pool: The pool.
        scene: Its scene.
        queries: What a unit looks at.
    """

    def __init__(self, pool: WriterPool[Any], scene: Scene, queries: tuple[str, ...]) -> None:
        self._pool = pool
        self._scene = scene
        self._queries = queries
        self._fresh = pool.run(state, queries)
        self.wrong: list[tuple[str, Any]] = []
        self.committed: set[int] = set()

    def unit(self, name: str, does: Unit, number: int) -> Unit:
        def looks_and_does(tx: Transaction) -> None:
            found = state(tx, self._queries)
            if found != self._fresh:
                self.wrong.append((name, [pair for pair in zip(found, self._fresh, strict=True) if pair[0] != pair[1]]))
            self._write(tx, number)
            does(tx)

        looks_and_does.__code__ = looks_and_does.__code__.replace(co_name=name)  # each kind is a function of its own
        return looks_and_does

    def _write(self, tx: Transaction, number: int) -> None:
        if isinstance(tx.db, sa.Connection):
            both(tx, self._scene, number)
        else:
            tx.db.execute("INSERT INTO public.events VALUES (%s, %s)", (self._scene.transactional_id, number))
            tx.send(self._scene.topic, str(number), key=self._scene.transactional_id)

    def check(self, units: Mapping[str, Unit], names: list[str], *, together: bool) -> None:
        heard.clear()
        given = [(name, next(numbers)) for name in names]
        made = [self.unit(name, units[name], number) for name, number in given]
        if together:
            with held(self._pool):
                futures = [self._pool.submit(unit) for unit in made]
        else:
            futures = [self._pool.submit(unit) for unit in made]
        for (name, number), future in zip(given, futures, strict=True):
            error = future.exception(LIMIT)
            assert error is None or isinstance(error, Meant), (name, error)
            self.committed |= {number} if error is None else set()
        assert not self.wrong
        heard.clear()


@pytest.fixture
def pool(scene: Scene, request: pytest.FixtureRequest) -> Iterator[WriterPool[Any]]:
    """A pool on a database with functions and triggers that set something, through SQLAlchemy or psycopg."""
    with scene.engine.begin() as connection:
        for statement in POSTGRESQL_SCHEMA:
            connection.exec_driver_sql(statement)
    with ExitStack() as stack:
        store: Any = sa.create_engine(scene.url)
        sa.event.listen(store, "before_cursor_execute", set_tenant, retval=True)
        sa.event.listen(store, "do_execute", execute_itself)
        stack.callback(store.dispose)
        if request.param == "psycopg":
            store = stack.enter_context(psycopg_store(scene.url))
        yield stack.enter_context(open_pool(scene, store, size=1, options=PoolOptions(group_units=8, timeout=LIMIT)))


HANDLES = {"sqlalchemy": POSTGRESQL_UNITS | SQLALCHEMY_UNITS, "psycopg": POSTGRESQL_UNITS | PSYCOPG_UNITS}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a unit leaves its server-side cursor open
@pytest.mark.parametrize("pool", HANDLES, indirect=True)
def test_each_unit_begins_as_in_a_fresh_connection(
    pool: WriterPool[Any], scene: Scene, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dualwrite")
    units = HANDLES[request.node.callspec.params["pool"]]
    seen = Seen(pool, scene, POSTGRESQL_STATE)
    for name in units:  # each in a group with innocent ones, while its function is not known
        seen.check(units, ["nothing", name, "nothing", "nothing"], together=True)
    assert "others would see INSERT INTO deferred" in caplog.text

    @settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(st.lists(st.sampled_from(list(units)), min_size=1, max_size=16), st.booleans())
    def in_any_order(names: list[str], together: bool) -> None:
        seen.check(units, names, together=together)

    in_any_order()
    assert set(scene.agree()) == seen.committed


# --- MariaDB and SQLite, whose settings even survive a rollback ---------------------------------------------------------------

MYSQL_LIMIT = "max_statement_time" if MYSQLD is None else "max_execution_time"
OTHERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Mapping[str, Unit]]] = {
    "mariadb": (
        (
            "DROP FUNCTION IF EXISTS log_in",
            "CREATE FUNCTION log_in(x INT) RETURNS INT NO SQL BEGIN SET @tenant = x; RETURN x; END",
        ),
        (
            "SELECT @tenant, DATABASE(), IS_USED_LOCK('mine'), CURRENT_ROLE()",
            f"SELECT @@sql_mode, @@time_zone, @@character_set_client, @@foreign_key_checks, @@{MYSQL_LIMIT}",
        ),
        {
            "nothing": runs("SELECT 1"),
            "an error": fails,
            "a variable, then an error": runs("SET @tenant = 1", then=fails),
            "a variable of a SELECT": runs("SELECT @tenant := 1"),
            "SET SESSION": runs("SET SESSION sql_mode = ''", "SET time_zone = '+09:00'"),
            "SET NAMES": runs("SET NAMES latin1"),
            "a limit of one statement": runs(
                f"SET STATEMENT {MYSQL_LIMIT} = 77 FOR SELECT 1"
                if MYSQLD is None
                else f"SELECT /*+ SET_VAR({MYSQL_LIMIT} = 77) */ 1"
            ),
            "USE": runs("USE information_schema"),
            "a lock": runs("SELECT GET_LOCK('mine', 1)"),
            "a temporary table": runs("CREATE TEMPORARY TABLE my_table (v INT)"),
            "a function": runs("SELECT log_in(1)"),
            "the driver's connection": lambda tx: tx.db.connection.cursor().execute("SET @tenant = 1"),
            "execution_options": sets(mark="connection"),
            "info": lambda tx: tx.db.info.update(tenant="one"),
        },
    ),
    "sqlite": (
        (),
        ("SELECT 'a' LIKE 'A', (SELECT count(*) FROM sqlite_temp_master)",),
        {
            "nothing": runs("SELECT 1"),
            "an error": fails,
            "PRAGMA": runs("PRAGMA case_sensitive_like = ON"),
            "a temporary table": runs("CREATE TEMP TABLE my_table (v INT)"),
            "a temporary table, then an error": runs("CREATE TEMP TABLE my_table (v INT)", then=fails),
            "execution_options": sets(mark="connection"),
            "the driver's connection": lambda tx: tx.db.connection.cursor().execute("PRAGMA case_sensitive_like = ON"),
        },
    ),
}


@pytest.mark.parametrize("database", OTHERS)
def test_each_unit_begins_as_in_a_fresh_connection_of_other_databases(scene: Scene, database: str) -> None:
    schema, queries, units = OTHERS[database]
    with scene.engine.begin() as connection:
        for statement in schema:
            connection.exec_driver_sql(statement)
    with open_pool(scene, size=1, options=PoolOptions(group_units=8, timeout=LIMIT)) as pool:
        seen = Seen(pool, scene, queries)
        for together in (True, False, False):
            for name in units:
                seen.check(units, ["nothing", name, "nothing", "nothing"], together=together)
    assert set(scene.agree()) == seen.committed


# --- which units share a transaction ------------------------------------------------------------------------------------------


def transaction_of(tx: Transaction) -> int:
    return int(tx.db.scalar(sa.text("SELECT pg_current_xact_id()::text")))


def sets_a_tenant(tx: Transaction, scene: Scene, number: int) -> int:
    tx.db.execute(sa.text("SELECT set_config('app.tenant', 'one', true)"))
    both(tx, scene, number)
    return transaction_of(tx)


def plain(tx: Transaction, scene: Scene, number: int) -> int:
    both(tx, scene, number)
    return transaction_of(tx)


def test_only_units_that_set_something_run_alone(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dualwrite"), open_pool(scene, size=1) as pool:
        for first in (1, 7):
            units = [partial(sets_a_tenant if each % 3 == 0 else plain, scene=scene, number=first + each) for each in range(6)]
            alone, *rest = sorted(ids for ids in (future.result() for future in grouped(pool, *units)))
            assert len({alone, *rest}) == 3, "four units together, and two alone"
        with held(pool):
            futures = [pool.with_options(alone=True).submit(plain, scene, number) for number in (13, 14)]
        assert len({future.result(LIMIT) for future in futures}) == 2
        with ThreadPoolExecutor(2) as threads, held(pool):
            futures = [threads.submit(pool.transactional(alone=True)(plain), scene, number) for number in (17, 18)]
            until(lambda: pool.waiting == 2, "both wait for the unit that runs")
        assert len({future.result(LIMIT) for future in futures}) == 2
    assert scene.agree() == [*range(1, 15), 17, 18]
    assert sum("runs in transactions of its own from now on" in record.message for record in caplog.records) == 1
    with open_pool(scene, size=1, options=PoolOptions(alone=True, timeout=LIMIT)) as pool:
        assert (
            len({future.result() for future in grouped(pool, *[partial(plain, scene=scene, number=n) for n in (15, 16)])}) == 2
        )


def test_units_with_a_key_keep_their_order_beside_one_that_runs_alone(scene: Scene) -> None:
    with open_pool(scene, size=2) as pool:
        for first in (1, 11):  # before its function is known, and after that
            with held(pool):
                keyed = pool.with_options(key="customer")
                futures = [
                    keyed.submit(sets_a_tenant if number % 4 == 2 else plain, scene, number)
                    for number in range(first, first + 8)
                ]
            for future in futures:
                future.result(LIMIT)
    in_the_topic = [int(message.value or b"") for message in read_committed(scene.settings, scene.topic)]
    assert in_the_topic == [*range(1, 9), *range(11, 19)]


def test_a_block_of_its_own_leaves_nothing_in_its_connection(scene: Scene) -> None:
    def setting(tx: Transaction) -> Any:
        return tx.db.execute(sa.text("SELECT current_setting('search_path'), pg_backend_pid()")).one()

    engine = sa.create_engine(scene.url, pool_size=1, max_overflow=0)
    with open_pool(scene, engine, size=1) as pool:
        before = pool.run(setting)
        with pool.transaction() as tx:
            tx.db.execute(sa.text("SET LOCAL search_path TO tenant, public"))
        assert pool.run(setting) == before, "the connection is used again: nothing of its session has changed"
        with pool.transaction() as tx:
            tx.db.execute(sa.text("SET search_path TO tenant, public"))
        after = pool.run(setting)
        assert after[0] == before[0]
        assert after[1] != before[1]
    engine.dispose()
