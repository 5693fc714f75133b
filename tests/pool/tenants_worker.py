"""The process that the soak test of tenants kills: threads of a service with row-level security, on one pool.

python -m pool.tenants_worker URL BOOTSTRAP PREFIX TOPIC FIRST CALLERS

A unit sets its tenant in one of the ways that a service would choose, and writes a row whose tenant the database fills in with
what is set, by a default and by a trigger, next to the one that it means. Every fourth unit has no tenant: it must see no row,
and can't write one. A unit prints `wrong N …` if it sees something of another one; otherwise the lines are those of
`pool.soak_worker`.

HANDLE is what the units get: `core` (SQLAlchemy), `psycopg` (with the pipeline), `aio` (coroutines), or `processor`: the
numbers are messages of the topic SOURCE. With NO_WATCH, settings of units are not looked for. With DECLARED, most units do not
set their tenant but declare it, and some of them fail at their end; with NO_RESET, what a unit has declared stays for the next.
"""

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.orm import Session, sessionmaker

import dualwrite
from crash.worker import say, settings, timeouts
from dualwrite import Transaction, aio
from dualwrite.processor import DualProcessor, ProcessorOptions
from dualwrite.stores.sql import local_settings, postgresql_outgoing
from dualwrite.stores.sql.isolation import StatementWatch
from fixtures.pace import LIMIT
from pool.pool_scene import psycopg_store

TENANTS: Final = ("red", "green", "blue", None)
PER_CALLER: Final = 20_000

SCHEMA: Final = (
    "DROP TABLE IF EXISTS orders, visits",
    "DO $$ BEGIN CREATE ROLE app LOGIN NOSUPERUSER; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
    """CREATE TABLE orders (number int PRIMARY KEY, meant text, tenant text DEFAULT current_setting('app.tenant', true),
    by_trigger text)""",
    """CREATE OR REPLACE FUNCTION note_tenant() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN NEW.by_trigger := current_setting('app.tenant', true); RETURN NEW; END $$""",
    "CREATE TRIGGER note_tenant BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION note_tenant()",
    "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
    "CREATE POLICY own_rows ON orders USING (tenant = nullif(current_setting('app.tenant', true), ''))",
    "CREATE TABLE visits (number int PRIMARY KEY)",
    "CREATE OR REPLACE FUNCTION log_in(name text) RETURNS text LANGUAGE sql AS 'SELECT set_config(''app.tenant'', name, true)'",
    """CREATE OR REPLACE FUNCTION log_in_deeper(name text) RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN PERFORM log_in(name); END $$""",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO app",
)
"""Run by the owner of the tables; the service connects as `app`."""

by_event: ContextVar[str | None] = ContextVar("by_event", default=None)
"""The tenant, for listeners of the Session or of the Engine."""
by_session: ContextVar[str | None] = ContextVar("by_session", default=None)
by_pool: ContextVar[str | None] = ContextVar("by_pool", default=None)
"""For the pool's function."""
Way = Callable[[Any, str], object]


def with_own_cursor(db: Any, tenant: str) -> None:
    psycopg.ClientCursor(db).execute("SELECT set_config('app.tenant', %s, true)", [tenant])


def handle() -> str:
    """The kind of handle; read by the process, whose module was imported before it was forked."""
    return os.environ["HANDLE"]


def execute(db: Any, statement: str, *parameters: Any) -> Any:
    return db.exec_driver_sql(statement, parameters) if handle() != "psycopg" else db.execute(statement, parameters)


BOTH: Final[dict[str, Way]] = {
    "set_config": lambda db, tenant: execute(db, "SELECT set_config('app.tenant', %s, true)", tenant),
    "set_config of the session": lambda db, tenant: execute(db, "SELECT set_config('app.tenant', %s, false)", tenant),
    "SET LOCAL": lambda db, tenant: execute(db, f"SET LOCAL app.tenant = '{tenant}'"),
    "a function": lambda db, tenant: execute(db, "SELECT log_in(%s)", tenant),
    "a function that calls it": lambda db, tenant: execute(db, "SELECT log_in_deeper(%s)", tenant),
    "a function in a condition": lambda db, tenant: execute(db, "SELECT 1 WHERE log_in(%s) = ''", tenant),
}
WAYS: Final[dict[str, dict[str, Way]]] = {
    "core": {
        **BOTH,
        "text": lambda db, tenant: db.execute(sa.text("SELECT set_config('app.tenant', :it, true)"), {"it": tenant}),
        "func": lambda db, tenant: db.scalar(sa.select(sa.func.set_config("app.tenant", tenant, True))),
        "the driver": lambda db, tenant: db.connection.cursor().execute(f"SET LOCAL app.tenant = '{tenant}'"),
        "a listener of the connection": lambda db, tenant: sa.event.listen(
            db, "before_cursor_execute", lambda *given: given[1].execute(f"SET LOCAL app.tenant = '{tenant}'")
        ),
        "a listener of the engine": lambda _, tenant: by_event.set(tenant),
    },
    "psycopg": {
        **BOTH,
        "composed": lambda db, tenant: db.execute(sql.SQL("SET LOCAL app.tenant = {}").format(sql.Literal(tenant))),
        "bytes": lambda db, tenant: db.execute(f"SET LOCAL app.tenant = '{tenant}'".encode()),
        "a cursor": lambda db, tenant: db.cursor().executemany("SELECT log_in(%s)", [[tenant]]),
        "a cursor of its own": with_own_cursor,
    },
}
numbers: Final = itertools.count()
insert: Final = "INSERT INTO orders (number, meant) VALUES (%s, %s)"


def tenant_of(number: int) -> str | None:
    return TENANTS[number % len(TENANTS)]


def declares(number: int) -> bool:
    """Whether a unit declares its tenant, or none, if it has none."""
    return "DECLARED" in os.environ and number % 5 > 0


def local_of(number: int) -> dict[str, str] | None:
    """What a call declares itself. Every other one leaves that to the pool's function, in the caller's context."""
    tenant = tenant_of(number) if declares(number) else None
    is_by_pool = number % 3 == 0
    by_pool.set(tenant if is_by_pool else None)
    return None if tenant is None or is_by_pool else {"app.tenant": tenant}


def of_context() -> dict[str, str]:
    tenant = by_pool.get()
    return {} if tenant is None else {"app.tenant": tenant}


def may_fail(number: int) -> None:
    if declares(number) and number % 11 == 0:
        raise KeyError(number)


def next_way(number: int) -> Way:
    if declares(number):
        return lambda *_: None
    ways = list(WAYS["psycopg" if handle() == "psycopg" else "core"].values())
    return ways[next(numbers) % len(ways)]


def look(db: Any, number: int, tenant: str | None) -> None:
    """Say what a unit sees that is not its own."""
    seen = [row[0] for row in execute(db, "SELECT DISTINCT tenant FROM orders").fetchall()]
    if set(seen) - {tenant}:
        say("wrong", number, f"{tenant} has seen {seen}")


def write(db: Any, number: int, way: Way) -> None:
    """What all units do to the database."""
    tenant = tenant_of(number)
    if tenant is None:
        look(db, number, tenant)
        with suppress(psycopg.Error, sa.exc.DBAPIError), db.transaction() if handle() == "psycopg" else db.begin_nested():
            execute(db, insert, number, "nobody")
            say("wrong", number, "could write without a tenant")
    else:
        way(db, tenant)
        look(db, number, tenant)
        execute(db, insert, number, tenant)
    execute(db, "INSERT INTO visits VALUES (%s)", number)


def anew(unit: Any, number: int) -> Any:
    """Every other time a function that the pool does not know, so that it is refused in a group again."""
    if number % 8 < 4:
        unit.__code__ = unit.__code__.replace(co_name=f"unit_{number}")
    return unit


def made(topic: str, number: int) -> Callable[[Transaction], None]:
    way = next_way(number)

    def unit(tx: Transaction) -> None:
        event, session = by_event.set(None), by_session.set(None)
        try:
            if handle() == "core" and number % 7 == 0 and tenant_of(number) is not None:
                by_session.set(None if declares(number) else tenant_of(number))
                write(tx.session.connection(), number, lambda *_: None)
            else:
                write(tx.db, number, way)
        finally:
            by_event.reset(event)
            by_session.reset(session)
        tx.send(topic, str(number))
        may_fail(number)

    return anew(unit, number)  # type: ignore[no-any-return]  # the same function


def made_coroutine(topic: str, number: int) -> Any:
    way = next_way(number)

    async def unit(tx: aio.AsyncTransaction) -> None:
        if number % 3 or declares(number):
            await tx.db.run_sync(write, number, way)
        else:
            tenant = tenant_of(number)
            if tenant is not None:
                await tx.session.execute(sa.select(sa.func.set_config("app.tenant", tenant, True)))
            await tx.db.run_sync(write, number, lambda *_: None)
        tx.send(topic, str(number))
        may_fail(number)

    return anew(unit, number)


def sets_tenant_in_session(_session: Any, _transaction: Any, connection: sa.Connection) -> None:
    if by_session.get() is not None:
        connection.execute(sa.text("SELECT set_config('app.tenant', :it, true)"), {"it": by_session.get()})


def sets_tenant_in_cursor(_connection: Any, cursor: Any, *_: Any) -> None:
    if by_event.get() is not None:
        cursor.execute("SELECT set_config('app.tenant', %s, true)", [by_event.get()])


@contextmanager
def opened(url: str) -> Iterator[Any]:
    """The database for the pool, with the listeners of the service."""
    if handle() == "psycopg":
        with psycopg_store(url) as store:
            yield store
    else:
        engine = sa.create_engine(url)
        sa.event.listen(engine, "before_cursor_execute", sets_tenant_in_cursor)
        yield engine
        engine.dispose()


def report(number: int, error: BaseException | None) -> None:
    say(*(("told", number) if error is None else ("error", number, type(error).__name__, *str(error).split())))


def call(pool: dualwrite.WriterPool[Any], topic: str, first: int) -> None:
    for number in range(first, first + PER_CALLER):
        report(number, pool.with_options(local=local_of(number)).submit(made(topic, number)).exception())


async def call_aio(pool: aio.AsyncWriterPool[Any], topic: str, first: int) -> None:
    for number in range(first, first + PER_CALLER):
        running = pool.with_options(local=local_of(number)).run(made_coroutine(topic, number))
        (error,) = await asyncio.gather(running, return_exceptions=True)
        report(number, error)


async def in_loop(engine: Any, topic: str, firsts: list[int], **options: Any) -> None:
    async with aio.create_pool(engine, **options) as pool:
        say("open")
        await asyncio.gather(*(call_aio(pool, topic, first) for first in firsts))


def process(pool: dualwrite.WriterPool[Any], bootstrap: str, topic: str) -> None:
    source = os.environ["SOURCE"]

    def unit(message: Any, tx: Transaction) -> None:
        made(topic, int(message.value()))(tx)

    consumer = {"bootstrap.servers": bootstrap, "group.id": topic}
    options = ProcessorOptions(batch=7, attempts=1_000_000)
    DualProcessor(pool, consumer, [source], handle=unit, options=options).run()


def main() -> None:
    if "NO_WATCH" in os.environ:
        StatementWatch.see_call = lambda *_, **__: None  # type: ignore[method-assign]
    if "NO_RESET" in os.environ:
        change = local_settings.change
        postgresql_outgoing.change = lambda in_force, wanted: change(in_force, {**in_force, **wanted})
    url, bootstrap, prefix, topic = sys.argv[1:5]
    first, callers = map(int, sys.argv[5:7])
    firsts = [first + caller * PER_CALLER for caller in range(callers)]
    options = dualwrite.PoolOptions(timeout=LIMIT, lease=5, local=of_context if "DECLARED" in os.environ else None)
    given: dict[str, Any] = {"kafka": settings(bootstrap), "prefix": prefix, "options": options, "timeouts": timeouts()}
    with opened(url) as database:
        if handle() == "aio":
            asyncio.run(in_loop(database, topic, firsts, **given))
            return
        if handle() == "core":
            given["session"] = sessionmaker(class_=type("TenantSession", (Session,), {}))
            sa.event.listen(given["session"], "after_begin", sets_tenant_in_session)
        with dualwrite.create_pool(database, **given) as pool:
            say("open")
            if handle() == "processor":
                process(pool, bootstrap, topic)
                return
            threads = [threading.Thread(target=call, args=(pool, topic, each)) for each in firsts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
