"""The handle of a block refuses to end the transaction; if it is ended by other means, that is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import insert
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import ClauseElement, Executable
from store_scene import ID, STATE, Order, assert_nothing_is_checked_out, commit, orders, rows, write

from dualwrite import migration
from dualwrite.errors import TransactionControlError
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT
from fixtures.tables import table


def _with(thing: Any) -> None:
    with thing:
        pass


class _Commit(Executable, ClauseElement):
    """Only its compiled text shows what it does."""

    inherit_cache = True


@compiles(_Commit)
def _compiled(_element: _Commit, _compiler: Any, **_arguments: Any) -> str:
    return "COMMIT"


REFUSED: dict[str, Callable[[StoreTransaction], Any]] = {
    "commit()": lambda t: t.handle.commit(),
    "rollback()": lambda t: t.handle.rollback(),
    "close()": lambda t: t.handle.close(),
    "invalidate()": lambda t: t.handle.invalidate(),
    "detach()": lambda t: t.handle.detach(),
    "begin()": lambda t: t.handle.begin(),
    "with begin()": lambda t: _with(t.handle.begin()),
    "with connection": lambda t: _with(t.handle),
    "begin_twophase()": lambda t: t.handle.begin_twophase(),
    "commit_prepared()": lambda t: t.handle.commit_prepared("x"),
    "rollback_prepared()": lambda t: t.handle.rollback_prepared("x"),
    "get_transaction().commit()": lambda t: t.handle.get_transaction().commit(),
    "get_transaction().rollback()": lambda t: t.handle.get_transaction().rollback(),
    "get_transaction().close()": lambda t: t.handle.get_transaction().close(),
    "with get_transaction()": lambda t: _with(t.handle.get_transaction()),
    "session.commit()": lambda t: t.session.commit(),
    "session.rollback()": lambda t: t.session.rollback(),
    "session.close()": lambda t: t.session.close(),
    "session.reset()": lambda t: t.session.reset(),
    "session.invalidate()": lambda t: t.session.invalidate(),
    "session.begin()": lambda t: t.session.begin(),
    "session.prepare()": lambda t: t.session.prepare(),
    "session.get_transaction()": lambda t: t.session.get_transaction(),
    "with session": lambda t: _with(t.session),
    "session.connection().commit()": lambda t: t.session.connection().commit(),
    "session.connection().close()": lambda t: t.session.connection().close(),
    "session COMMIT": lambda t: t.session.execute(sa.text("COMMIT")),
    "driver sql COMMIT": lambda t: t.handle.exec_driver_sql("COMMIT"),
    "DDL COMMIT": lambda t: t.handle.execute(sa.DDL("COMMIT")),
    "scalar COMMIT": lambda t: t.handle.scalar(sa.text("COMMIT")),
    "scalars COMMIT": lambda t: t.handle.scalars(sa.text("COMMIT")),
    "columns of COMMIT": lambda t: t.handle.execute(sa.text("COMMIT").columns()),
    "compiled COMMIT": lambda t: t.handle.execute(_Commit()),
    "lambda COMMIT": lambda t: t.handle.execute(sa.lambda_stmt(lambda: sa.text("COMMIT"))),
    "entities of COMMIT": lambda t: t.session.scalars(sa.select(Order).from_statement(sa.text("COMMIT"))),
    **{
        text: (lambda t, text=text: t.handle.execute(sa.text(text)))
        for text in ("COMMIT", "rollback", " end ", "BEGIN", "/* so */ Commit;", "INSERT INTO orders VALUES (9, ''); COMMIT")
    },
}


@contextmanager
def begun(store: SqlStateStore, claim: Claim) -> Iterator[StoreTransaction]:
    """A transaction on empty tables, which is rolled back if it was not ended."""
    with store.engine.begin() as connection:
        connection.execute(sa.delete(orders))
        connection.execute(sa.delete(Order))
    transaction = store.begin(claim)
    try:
        yield transaction
    finally:
        transaction.rollback()


@table("call", REFUSED)
def test_a_refused_call_leaves_the_transaction_as_it_was(store: SqlStateStore, claim: Claim, call: str) -> None:
    with begun(store, claim) as transaction:
        write(transaction)
        transaction.session.add(Order(id=1, item="chair"))
        transaction.session.flush()
        with pytest.raises(TransactionControlError, match="both sides"):
            REFUSED[call](transaction)
        transaction.handle.execute(insert(orders).values(id=2, item="table"))
        with transaction.handle.begin_nested():
            transaction.session.add(Order(id=2, item="table"))
            transaction.session.flush()
        assert rows(store.engine) == 0
        commit(transaction)
    assert (rows(store.engine), rows(store.engine, Order)) == (2, 2)
    assert store.read_claimed(claim).prepared_state == STATE
    assert_nothing_is_checked_out(store)


def test_the_users_listeners_are_called(store: SqlStateStore, claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sa.Connection, "_has_events", False, raising=False)  # listening sets it, and nothing would take it back
    seen: list[str] = []

    def listener(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name)

    listeners = {name: listener(name) for name in ("all connections", "engine", "this connection")}
    sa.event.listen(sa.Connection, "before_cursor_execute", listeners["all connections"])
    try:
        transaction = store.begin(claim)
        seen.clear()
        write(transaction)
        assert seen == ["all connections"]
        sa.event.listen(store.engine, "before_cursor_execute", listeners["engine"])
        sa.event.listen(transaction.handle, "before_cursor_execute", listeners["this connection"])
        seen.clear()
        transaction.handle.execute(insert(orders).values(id=2, item="table"))
        assert sorted(seen) == sorted(listeners)
        transaction.rollback()
    finally:
        sa.event.remove(sa.Connection, "before_cursor_execute", listeners["all connections"])


def test_savepoints_of_the_connection(store: SqlStateStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    db = transaction.handle
    db.execute(insert(orders).values(id=1, item="kept"))
    with db.begin_nested() as savepoint:
        db.execute(insert(orders).values(id=2, item="undone"))
        savepoint.rollback()
    with db.begin_nested():
        db.execute(insert(orders).values(id=3, item="kept"))
    db.execute(sa.text("SAVEPOINT mine"))
    db.execute(insert(orders).values(id=4, item="undone"))
    db.execute(sa.text("ROLLBACK TO SAVEPOINT mine"))
    db.execute(sa.text("RELEASE SAVEPOINT mine"))
    open_to_the_end = db.begin_nested()
    db.execute(insert(orders).values(id=5, item="kept"))
    assert open_to_the_end.is_active
    commit(transaction)
    with store.engine.connect() as connection:
        assert sorted(connection.scalars(sa.select(orders.c.id))) == [1, 3, 5]


def test_ddl_and_reflection_work_in_the_block(store: SqlStateStore, claim: Claim) -> None:
    transaction = store.begin(claim)
    table = sa.Table("more", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    if store.engine.name in ("mariadb", "mysql"):  # it would commit implicitly
        with pytest.raises(TransactionControlError):
            table.create(transaction.handle)
    else:
        table.create(transaction.handle)
        assert sa.inspect(transaction.handle).has_table("more")
    transaction.rollback()
    assert not sa.inspect(store.engine).has_table("more")


SMUGGLED: dict[str, Callable[[sa.Connection], Any]] = {
    "driver's commit": lambda db: db.connection.commit(),
    "driver's rollback": lambda db: db.connection.rollback(),
    "driver's cursor": lambda db: db.connection.cursor().execute("COMMIT"),
    "driver's cursor, and a new one": lambda db: [db.connection.cursor().execute(sql) for sql in ("COMMIT", "BEGIN")],
}


@table(("way", "goes_on"), product(SMUGGLED, [False, True]))
def test_a_commit_that_bypasses_the_guard_is_found(store: SqlStateStore, claim: Claim, way: str, goes_on: bool) -> None:
    with begun(store, claim) as transaction:
        write(transaction)
        SMUGGLED[way](transaction.handle)
        if goes_on:
            transaction.handle.execute(insert(orders).values(id=2, item="table"))
        with pytest.raises(TransactionControlError, match="WITHOUT its messages"):
            transaction.record(STATE, generation=0, transaction_number=1)
    assert store.read_claimed(claim).prepared_state is None
    assert rows(store.engine) == (0 if "rollback" in way else 1)
    assert_nothing_is_checked_out(store)


def test_a_statement_with_an_implicit_rollback_is_found(sqlite_url: str) -> None:
    with SqlStateStore.from_url(sqlite_url) as store:
        orders.create(store.engine)
        claim = store.claim(ID, "ours", timeout=LIMIT)
        transaction = store.begin(claim)
        write(transaction)
        with pytest.raises(sa.exc.IntegrityError):
            transaction.handle.execute(sa.text("INSERT OR ROLLBACK INTO orders VALUES (1, 'again')"))
        with pytest.raises(TransactionControlError, match="ON CONFLICT ROLLBACK"):
            transaction.record(STATE, generation=0, transaction_number=1)
        transaction.rollback()


def test_a_script_run_by_the_sqlite_driver_is_found(sqlite_url: str) -> None:
    with SqlStateStore.from_url(sqlite_url) as store:
        orders.create(store.engine)
        transaction = store.begin(store.claim(ID, "ours", timeout=LIMIT))
        raw: Any = transaction.handle.connection
        raw.executescript("INSERT INTO orders VALUES (1, 'chair');")  # commits first
        with pytest.raises(TransactionControlError):
            transaction.record(STATE, generation=0, transaction_number=1)
        transaction.rollback()


@pytest.mark.parametrize("at", ["engine", "all connections"])
def test_listeners_of_the_user_are_still_called(
    store: SqlStateStore, claim: Claim, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(sa.Connection, "_has_events", False, raising=False)  # as above
    target: Any = store.engine if at == "engine" else sa.Connection
    heard: list[str] = []
    listeners = {name: lambda _connection, name=name: heard.append(name) for name in ("begin", "commit", "rollback")}
    for name, listener in listeners.items():
        sa.event.listen(target, name, listener)
    try:
        transaction = store.begin(claim)
        commit(transaction)
        store.begin(claim).rollback()
    finally:
        for name, listener in listeners.items():
            sa.event.remove(target, name, listener)
    assert heard == ["begin", "commit", "begin", "rollback"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_listeners_of_the_connection_are_called_after_statements_of_ours(store: SqlStateStore, claim: Claim, end: str) -> None:
    heard: list[str] = []
    transaction = store.begin(claim)
    transaction.begin_unit()
    sa.event.listen(transaction.handle, "before_cursor_execute", lambda *_: heard.append("statement"))
    sa.event.listen(transaction.handle, end, lambda *_: heard.append(end))
    write(transaction)
    transaction.end_unit()
    transaction.begin_unit()
    transaction.handle.execute(insert(orders).values(id=2, item="table"))
    assert heard == ["statement"], "a listener for statements ends with its unit"
    transaction.end_unit()
    transaction.record_at_commit(STATE, generation=0, transaction_number=1)
    getattr(transaction, end)()
    assert heard == ["statement", end]


USERS_OPTIONS: dict[str, dict[str, Any]] = {
    "another schema": {"schema_translate_map": {None: "elsewhere"}},
    "a cursor of the server": {"stream_results": True, "yield_per": 10},
}


@pytest.mark.parametrize("options", USERS_OPTIONS)
def test_options_of_the_user_are_not_for_our_own_statements(store: SqlStateStore, claim: Claim, options: str) -> None:
    """SQLAlchemy's Connection.execution_options changes the connection itself."""
    transaction = store.begin(claim)
    transaction.begin_unit()
    write(transaction)
    transaction.end_unit()
    transaction.begin_unit()
    transaction.handle.execution_options(**USERS_OPTIONS[options])
    if options == "another schema":
        with pytest.raises(sa.exc.DBAPIError):
            transaction.handle.execute(insert(orders).values(id=2, item="table"))
        transaction.undo_unit(ValueError())
        transaction.begin_unit()
        transaction.handle.execution_options(**USERS_OPTIONS[options])
    position = Position("topic", 0, 5)
    store.positions.move(transaction, "group", [Move(None, position)])
    assert transaction.handle.get_execution_options().items() >= USERS_OPTIONS[options].items()
    transaction.end_unit()
    transaction.begin_unit()
    assert transaction.handle.get_execution_options() == store.engine.get_execution_options()
    transaction.end_unit()
    commit(transaction)
    assert store.read_claimed(claim).prepared_state == STATE
    assert rows(store.engine) == 1
    assert store.positions.read("group")[position.key].offset == 5


def test_an_engine_that_translates_schemas(postgres_url: str) -> None:
    """Everything of ours is in the schema that the engine's map gives."""
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA IF EXISTS tenant CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA tenant")
    migration.upgrade(postgres_url, schema="tenant")
    store = SqlStateStore(engine.execution_options(schema_translate_map={None: "tenant"}))
    claim = store.claim(ID, "ours", timeout=LIMIT)
    transaction = store.begin(claim)
    transaction.record_at_commit(STATE, generation=0, transaction_number=1)
    transaction.commit()
    assert store.read_claimed(claim).prepared_state == STATE
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT transaction_number FROM tenant.kafka_transaction_state").scalar_one() == 1
    engine.dispose()
