"""Settings that units declare, such as a tenant: each sees its own and no other one's, although they share a commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from crash.scene import Scene
from dualwrite import PoolOptions, Transaction, WriterPool, aio
from dualwrite.errors import ConfigurationError, UsageError
from dualwrite.stores.sql import local_settings
from fixtures.pace import LIMIT
from fixtures.tables import table
from pool.aio_scene import Pool, in_loop, opened
from pool.pool_scene import both, held, open_pool, psycopg_store

Local = Mapping[str, str] | None
RED, GREEN, NONE = {"app.tenant": "red"}, {"app.tenant": "green"}, None

SCHEMA = (
    "DROP TABLE IF EXISTS seen, audit, only_once",
    "DROP SEQUENCE IF EXISTS attempts",
    "CREATE TABLE seen (number int, by_default text DEFAULT current_setting('app.tenant', true), by_trigger text)",
    "CREATE TABLE audit (number int, tenant text)",
    "CREATE TABLE only_once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)",
    "CREATE SEQUENCE attempts",
    """CREATE OR REPLACE FUNCTION note_tenant() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.number < 0 AND nextval('attempts') % 3 > 0 THEN RAISE serialization_failure; END IF;
    NEW.by_trigger := current_setting('app.tenant', true);
    RETURN NEW; END $$""",
    "CREATE TRIGGER note_tenant BEFORE INSERT ON seen FOR EACH ROW EXECUTE FUNCTION note_tenant()",
    """CREATE OR REPLACE FUNCTION note_at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO audit VALUES (NEW.number, current_setting('app.tenant', true)); RETURN NULL; END $$""",
)
AT_COMMIT = (
    "CREATE CONSTRAINT TRIGGER note_at_commit AFTER INSERT ON seen DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
    "EXECUTE FUNCTION note_at_commit()"
)
"""Runs when the units have ended."""


class Meant(Exception):  # noqa: N818  (it is meant to be raised)
    """A unit's own error."""


@pytest.fixture
def tables(scene: Scene) -> Iterator[sa.Engine]:
    """The database, with tables that note the tenant that they see."""
    execute(scene.engine, *SCHEMA)
    yield scene.engine
    execute(scene.engine, *SCHEMA[:2])


def execute(engine: sa.Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%"))


@pytest.fixture(params=["core", "psycopg"])
def pool(scene: Scene, tables: sa.Engine, request: pytest.FixtureRequest) -> Iterator[WriterPool[Any]]:
    del tables
    url = sa.make_url(scene.url).update_query_dict({"options": "-csession_preload_libraries=plpgsql"})
    with ExitStack() as stack:
        if request.param == "psycopg":
            store: Any = stack.enter_context(psycopg_store(url.render_as_string(hide_password=False)))
        else:
            store = sa.create_engine(url)
            stack.callback(store.dispose)
        yield stack.enter_context(open_pool(scene, store, size=1))


def run(tx: Transaction, statement: str, *parameters: Any) -> Any:
    if isinstance(tx.db, sa.Connection):
        return tx.db.exec_driver_sql(statement, parameters or None)
    return tx.db.execute(statement, parameters or None)


def tenant_of(tx: Transaction) -> str:
    return run(tx, "SELECT current_setting('app.tenant', true)").fetchone()[0] or ""


def write(tx: Transaction, scene: Scene, number: int) -> str:
    """Write where the database notes the tenant, send a message, and return the database's transaction."""
    run(tx, "INSERT INTO seen (number) VALUES (%s)", number)
    both(tx, scene, number)
    return str(run(tx, "SELECT pg_current_xact_id()::text").fetchone()[0])


def write_unread(tx: Transaction, scene: Scene, number: int) -> None:
    """The same, without waiting for a response."""
    run(tx, "INSERT INTO seen (number) VALUES (%s)", number)
    both(tx, scene, number)


def then_raise(tx: Transaction, scene: Scene, number: int) -> None:
    write(tx, scene, number)
    raise Meant


def only_send(tx: Transaction, scene: Scene, number: int) -> None:
    """Execute nothing."""
    tx.send(scene.topic, str(number), key=scene.transactional_id)


Unit = Callable[[Transaction], Any]


def in_one_group(pool: WriterPool[Any], *calls: tuple[Local, Unit]) -> list[Future[Any]]:
    with held(pool):
        futures = [pool.with_options(local=local).submit(unit) for local, unit in calls]
    for future in futures:
        future.exception(LIMIT)
    return futures


def seen(engine: sa.Engine, *, of: str = "number, by_default, by_trigger FROM seen") -> dict[int, str]:
    """The tenant of each row, which the default and the trigger agree on; '' if there was none."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(f"SELECT {of}").all()
    for row in rows:
        assert len({each or "" for each in row[1:]}) == 1, row
    return {row[0]: row[1] or "" for row in rows}


def test_units_with_different_settings_share_a_commit(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    settings = [NONE, RED, RED, GREEN, NONE, NONE, RED, {"app.tenant": "it's \\ %s ü", "app.user": "7"}, {"app.user": "8"}]
    futures = in_one_group(pool, *((local, partial(write, scene=scene, number=n)) for n, local in enumerate(settings)))
    assert len({future.result() for future in futures}) == 1
    assert seen(tables) == {n: (local or {}).get("app.tenant", "") for n, local in enumerate(settings)}
    assert pool.run(tenant_of) == ""
    assert scene.agree() == list(range(9))


def test_nothing_waits_for_the_settings_in_a_pipeline(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    settings = [(RED, GREEN, NONE)[number % 3] for number in range(30)]
    for future in in_one_group(
        pool, *((local, partial(write_unread, scene=scene, number=n)) for n, local in enumerate(settings))
    ):
        future.result()
    assert seen(tables) == {n: (local or {}).get("app.tenant", "") for n, local in enumerate(settings)}


@pytest.mark.parametrize("fails", [{2}, {0}, {1, 3, 4}, {0, 1, 2, 3, 4, 5}])
def test_a_unit_that_fails_leaves_no_setting(pool: WriterPool[Any], scene: Scene, tables: sa.Engine, fails: set[int]) -> None:
    """First under one savepoint, then each under its own: ROLLBACK TO undoes the settings, too."""
    settings = [RED, RED, GREEN, RED, NONE, GREEN]
    units = [partial(then_raise if n in fails else write, scene=scene, number=n) for n in range(6)]
    for _ in range(2):  # the second time each has its own savepoint from the beginning
        execute(tables, "TRUNCATE seen", "DELETE FROM events")
        for n, future in enumerate(in_one_group(pool, *zip(settings, units, strict=True))):
            assert isinstance(future.exception(), Meant) == (n in fails)
        assert seen(tables) == {n: (settings[n] or {}).get("app.tenant", "") for n in range(6) if n not in fails}


def test_units_that_run_one_by_one(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    """Since COMMIT fails."""

    def once(tx: Transaction, number: int) -> str:
        run(tx, "INSERT INTO only_once VALUES (1)")
        return write(tx, scene, number)

    futures = in_one_group(pool, *((local, partial(once, number=n)) for n, local in enumerate([RED, GREEN])))
    others = in_one_group(pool, *((local, partial(write, scene=scene, number=n)) for n, local in enumerate([RED, NONE], 10)))
    assert [future.exception() is None for future in (*futures, *others)] == [True, False, True, True]
    assert seen(tables) == {0: "red", 10: "red", 11: ""}


def test_a_unit_that_executes_nothing_sets_nothing(
    pool: WriterPool[Any], scene: Scene, tables: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [(RED, only_send), (NONE, write), (GREEN, only_send), (RED, write), (GREEN, only_send)]
    monkeypatch.setattr(local_settings, "_REMEMBERED_SECONDS", 10 * LIMIT)
    first = in_one_group(pool, (RED, tenant_of), (GREEN, tenant_of))
    assert [future.result() for future in first] == ["red", "green"]
    in_one_group(pool, *((local, partial(unit, scene=scene, number=n)) for n, (local, unit) in enumerate(units)))
    assert seen(tables) == {1: "", 3: "red"}
    assert scene.messages() == [0, 1, 2, 3, 4]


def test_a_refused_value_of_a_unit_that_executes_nothing(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    """No statement sees it: neither those of other units nor our own between them."""
    bad = {"plpgsql.variable_conflict": "bogus"}
    units = [(bad, only_send), (RED, write), (bad, only_send), (GREEN, write)]
    futures = in_one_group(pool, *((local, partial(unit, scene=scene, number=n)) for n, (local, unit) in enumerate(units)))
    assert [future.exception() for future in futures] == [None] * 4
    assert seen(tables) == {1: "red", 3: "green"}


def test_savepoints_of_the_unit_keep_its_settings(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    def in_a_savepoint(tx: Transaction, number: int) -> str:
        with suppress(Meant), tx.db.begin_nested() if isinstance(tx.db, sa.Connection) else tx.db.transaction():
            write(tx, scene, number + 100)
            raise Meant
        return write(tx, scene, number)

    settings = [RED, GREEN, NONE, RED]
    futures = in_one_group(pool, *((local, partial(in_a_savepoint, number=n)) for n, local in enumerate(settings)))
    assert len({future.result() for future in futures}) == 1
    assert seen(tables) == {0: "red", 1: "green", 2: "", 3: "red"}


def test_a_unit_that_runs_again_after_a_conflict(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    settings = {1: GREEN, -2: RED, 3: NONE, -4: GREEN, 5: RED}
    for future in in_one_group(pool, *((local, partial(write, scene=scene, number=n)) for n, local in settings.items())):
        future.result()
    assert seen(tables) == {n: (local or {}).get("app.tenant", "") for n, local in settings.items()}


def test_what_a_unit_sets_undeclared_still_runs_alone(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    def sets(tx: Transaction, number: int, name: str) -> str:
        assert tenant_of(tx) == "red"
        run(tx, f"SELECT set_config('{name}', 'mine', true)")
        return write(tx, scene, number)

    units = [
        (GREEN, partial(write, scene=scene, number=0)),
        (RED, partial(sets, number=1, name="app.other")),
        (RED, partial(sets, number=2, name="app.tenant")),
        (GREEN, partial(write, scene=scene, number=3)),
    ]
    results = [future.result() for future in in_one_group(pool, *units)]
    assert results[0] == results[3]
    assert len(set(results)) == 3
    assert seen(tables) == {0: "green", 1: "red", 2: "mine", 3: "green"}


@pytest.mark.parametrize("place", [0, 1])
def test_a_value_that_the_database_refuses_is_the_units_own_error(
    pool: WriterPool[Any], scene: Scene, tables: sa.Engine, place: int
) -> None:
    """Such as that of a setting which an extension checks."""
    units: list[tuple[Local, Unit]] = [(RED, partial(write, scene=scene, number=n)) for n in range(3)]
    units.insert(place, ({"plpgsql.variable_conflict": "bogus"}, partial(write, scene=scene, number=10)))
    for _ in range(2):  # with one savepoint for all, then with their own
        execute(tables, "TRUNCATE seen", "DELETE FROM events")
        errors = [future.exception() for future in in_one_group(pool, *units)]
        assert isinstance(errors[place], psycopg.errors.InvalidParameterValue | sa.exc.DBAPIError)
        assert [error for n, error in enumerate(errors) if n != place] == [None] * 3
        assert seen(tables) == dict.fromkeys(range(3), "red")


def test_a_value_that_is_refused_before_a_copy(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    """Which is sent by itself, after what waits."""

    def copy(tx: Transaction, number: int) -> None:
        cursor = tx.db.connection.cursor() if isinstance(tx.db, sa.Connection) else tx.db.cursor()
        with cursor.copy("COPY seen (number) FROM STDIN") as rows:
            rows.write_row([number])
        only_send(tx, scene, number)

    settings: list[Local] = [RED, {"plpgsql.variable_conflict": "bogus"}, GREEN, NONE]
    futures = in_one_group(pool, *((local, partial(copy, number=n)) for n, local in enumerate(settings)))
    assert isinstance(futures[1].exception(), psycopg.errors.InvalidParameterValue)
    assert [futures[n].exception() for n in (0, 2, 3)] == [None] * 3
    assert seen(tables) == {0: "red", 2: "green", 3: ""}


def test_the_value_of_the_session_comes_back(scene: Scene, tables: sa.Engine) -> None:
    engine = sa.create_engine(scene.url)

    @sa.event.listens_for(engine, "connect")
    def set_default(raw: Any, _record: Any) -> None:
        raw.execute("SET app.tenant = 'of the session'")
        raw.commit()

    settings = [RED, NONE, GREEN, NONE]
    with open_pool(scene, engine, size=1) as pool:
        in_one_group(pool, *((local, partial(write, scene=scene, number=n)) for n, local in enumerate(settings)))
        assert pool.run(tenant_of) == "of the session"
    engine.dispose()
    assert seen(tables) == {0: "red", 1: "of the session", 2: "green", 3: "of the session"}


def test_policies_see_the_setting_of_each_unit(scene: Scene, tables: sa.Engine) -> None:
    """With a role that they apply to."""
    execute(
        tables,
        "DO $$ BEGIN CREATE ROLE app LOGIN NOSUPERUSER; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
        "ALTER TABLE seen ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own_rows ON seen USING (by_default = nullif(current_setting('app.tenant', true), ''))",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO app",
        "GRANT USAGE ON SEQUENCE attempts TO app",
    )

    def numbers(tx: Transaction, number: int) -> list[int]:
        with suppress(sa.exc.DBAPIError), tx.db.begin_nested():
            run(tx, "INSERT INTO seen (number) VALUES (%s)", number)
        both(tx, scene, number)
        return sorted(tx.db.scalars(sa.text("SELECT number FROM seen")))

    engine = sa.create_engine(sa.make_url(scene.url).set(username="app"))
    with open_pool(scene, engine, size=1) as pool:
        futures = in_one_group(pool, *((local, partial(numbers, number=n)) for n, local in enumerate([RED, GREEN, NONE, RED])))
        assert [future.result() for future in futures] == [[0], [1], [], [0, 3]]
    engine.dispose()
    assert seen(tables) == {0: "red", 1: "green", 3: "red"}


def test_triggers_that_run_at_commit(
    pool: WriterPool[Any], scene: Scene, tables: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would see the settings of the last unit: so only units with the same ones share a commit."""
    monkeypatch.setattr(local_settings, "_REMEMBERED_SECONDS", 0.0)
    execute(tables, AT_COMMIT)
    settings = [RED, RED, GREEN, NONE, RED]
    futures = in_one_group(pool, *((local, partial(write, scene=scene, number=n)) for n, local in enumerate(settings)))
    results = [future.result() for future in futures]
    assert results[0] == results[1] == results[4]
    assert len(set(results)) == 3
    expected = {0: "red", 1: "red", 2: "green", 3: "", 4: "red"}
    assert seen(tables) == expected
    assert seen(tables, of="number, tenant FROM audit") == expected


# --- the pool's function, and the other ways to run a unit --------------------------------------------------------------------

current: ContextVar[str | None] = ContextVar("current", default=None)


def of_context() -> dict[str, str]:
    tenant = current.get()
    return {} if tenant is None else {"app.tenant": tenant, "app.source": "function"}


@pytest.mark.parametrize("acknowledge", ["visible", "journaled"])
def test_the_function_of_the_pool(scene: Scene, tables: sa.Engine, acknowledge: Any) -> None:
    """It is called in the caller's context; what a call declares itself is over it."""

    def both_of(tx: Transaction) -> tuple[str, str]:
        assert tx.session.scalar(sa.text("SELECT current_setting('app.tenant', true)")) in (tenant_of(tx), None)
        return tenant_of(tx), run(tx, "SELECT current_setting('app.source', true)").scalar_one() or ""

    def in_thread(pool: WriterPool[Any], tenant: str | None, results: list[Any]) -> None:
        current.set(tenant)
        decorated = pool.transactional(both_of)
        own = pool.with_options(local={"APP.Tenant": "own"})
        expected = ("", "") if tenant is None else (tenant, "function")
        for _ in range(5):
            with pool.transaction() as tx:
                found = both_of(tx)
            with pool.transaction(local={"app.tenant": "other"}) as tx:
                other = tenant_of(tx)
            results.append({pool.run(both_of), decorated(), pool.submit(both_of).result(LIMIT), found} == {expected})
            results.append(own.run(both_of) == ("own", expected[1]) and other == "other")

    options = PoolOptions(timeout=LIMIT, local=of_context, acknowledge=acknowledge)
    results: list[bool] = []
    with open_pool(scene, tables, options=options) as pool:
        threads = [threading.Thread(target=in_thread, args=(pool, each, results)) for each in ("red", "green", None, "blue")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    assert results == [True] * 40


def test_coroutines(scene: Scene, tables: sa.Engine) -> None:
    async def insert(tx: aio.AsyncTransaction, number: int) -> str:
        await tx.db.execute(sa.text("INSERT INTO seen (number) VALUES (:number)"), {"number": number})
        tx.send(scene.topic, str(number), key=scene.transactional_id)
        return str((await tx.db.execute(sa.text("SELECT pg_current_xact_id()::text"))).scalar_one())

    async def cancelled(tx: aio.AsyncTransaction, number: int) -> None:
        await insert(tx, number)
        raise asyncio.CancelledError

    async def fails(tx: aio.AsyncTransaction, number: int) -> None:
        await insert(tx, number)
        raise Meant

    async def call(pool: Pool, number: int) -> Any:
        current.set((None, "red", "green")[number % 3])
        unit = {7: cancelled, 8: fails}.get(number, insert)
        return await (pool.with_options(local={"app.tenant": "own"}) if number == 4 else pool).run(unit, number)

    async def main() -> set[str]:
        async with opened(scene, size=1, options=PoolOptions(timeout=LIMIT, local=of_context)) as pool:
            assert await call(pool, 1)
            results = await asyncio.gather(*(call(pool, number) for number in range(2, 20)), return_exceptions=True)
            assert [type(each) for each in results if not isinstance(each, str)] == [asyncio.CancelledError, Meant]
            current.set("blue")
            async with pool.transaction() as tx:
                await insert(tx, 20)
            async with pool.transaction(local=RED) as tx:
                await insert(tx, 21)
            with pytest.raises(UsageError, match="connection of yours"):
                pool.transaction(connection=object(), local=RED)  # type: ignore[call-overload]  # the test is about it
            return {each for each in results if isinstance(each, str)}

    assert len(in_loop(main())) < 16, "no two shared a commit"
    expected = {number: ("", "red", "green")[number % 3] for number in range(1, 20) if number not in (7, 8)}
    assert seen(tables) == {**expected, 4: "own", 20: "blue", 21: "red"}


def test_a_call_that_is_cancelled_sets_nothing(pool: WriterPool[Any], scene: Scene, tables: sa.Engine) -> None:
    with held(pool):
        futures = [pool.with_options(local=local).submit(write, scene, n) for n, local in enumerate([RED, GREEN, NONE, RED])]
        assert futures[1].cancel()
    for n in (0, 2, 3):
        futures[n].result(LIMIT)
    assert seen(tables) == {0: "red", 2: "", 3: "red"}


# --- what is refused ----------------------------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "search_path": {"search_path": "tenant"},
    "role": {"role": "admin"},
    "a part without a letter": {"app.1": "x"},
    "a quote": {"app.x', 'y', true); --": "x"},
    "no str": {b"app.tenant": "x"},
    "ours": {"Dualwrite.transaction": "x"},
    "a number": {"app.tenant": 7},
    "NULL": {"app.tenant": None},
    "a NUL character": {"app.tenant": "a\0b"},
    "twice": {"app.tenant": "a", "APP.tenant": "b"},
    "no mapping": [("app.tenant", "x")],
}


@table("case", WRONG)
def test_wrong_settings(case: str, wrong_pools: tuple[WriterPool[Any], WriterPool[Any]]) -> None:
    pool, by_function = wrong_pools
    with pytest.raises(UsageError):
        pool.with_options(local=WRONG[case])
    with pytest.raises(UsageError), pool.transaction(local=WRONG[case]):
        pass
    given["local"] = WRONG[case]
    with pytest.raises(UsageError):
        by_function.run(lambda _: None)
    with pytest.raises(UsageError):
        by_function.submit(lambda _: None)


given: dict[str, Any] = {}


@pytest.fixture
def wrong_pools(scene: Scene) -> Iterator[tuple[WriterPool[Any], WriterPool[Any]]]:
    """A pool, and one whose function returns what is `given`."""
    options = PoolOptions(timeout=LIMIT, local=lambda: given["local"])
    with open_pool(scene, size=1) as pool, open_pool(scene, size=1, options=options) as by_function:
        yield pool, by_function


@pytest.mark.parametrize("database", ["sqlite", "rocksdb", pytest.param("mariadb", marks=pytest.mark.slow)])
def test_other_databases_have_no_such_settings(scene: Scene, database: str) -> None:
    with pytest.raises(ConfigurationError, match="only PostgreSQL"):
        open_pool(scene, size=1, options=PoolOptions(local=of_context))
    with open_pool(scene, size=1) as pool:
        with pytest.raises(UsageError, match="only PostgreSQL"):
            pool.with_options(local=RED)
        assert pool.with_options(local={}).run(lambda _: database) == database


def test_the_option_is_a_function() -> None:
    with pytest.raises(ConfigurationError, match="must be a function"):
        PoolOptions(local=RED)  # type: ignore[arg-type]  # the test is about it


# --- what is sent -------------------------------------------------------------------------------------------------------------


def test_only_what_differs_is_set() -> None:
    first = local_settings.change({}, {"app.a": "1", "app.b": "2"})
    assert first is not None
    assert first.values == ["1", "2"]
    assert first.then == {"app.a": "1", "app.b": "2"}
    assert local_settings.change(first.then, {"app.b": "2", "app.a": "1"}) is None
    second = local_settings.change(first.then, {"app.b": "3"})
    assert second is not None
    assert second.statement == (
        "SELECT pg_catalog.set_config('app.a', pg_catalog.current_setting('dualwrite.before.app.a'), true), "
        "pg_catalog.set_config('app.b', %s, true)"
    )
    assert second.then == {"app.a": None, "app.b": "3"}
    assert local_settings.change(second.then, {"app.b": "3"}) is None
    assert local_settings.change({}, {}) is None
