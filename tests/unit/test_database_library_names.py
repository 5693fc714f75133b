"""The names in SQLAlchemy, PyMySQL, psycopg and alembic that are private or not guaranteed, and that dualwrite relies on.

If a name has moved, one test fails and names it, without a database. The versions are bounded in pyproject.toml.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Iterator
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg.adapt import AdaptersMap
from psycopg.pq import PGconn
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.sql import visitors

from dualwrite.errors import WriterClosedError
from dualwrite.migration import newest, scripts_folder
from dualwrite.stores.sql.async_handles import buffered
from dualwrite.stores.sql.engines import dialect_of
from dualwrite.stores.sql.guard import Guard, GuardedConnection, OwnedTransaction
from dualwrite.stores.sql.home import engine_at_home
from dualwrite.stores.sql.orm import GuardedSession
from dualwrite.stores.sql.psycopg_sources import RecipeConnection, view_of


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    made = sa.create_engine("sqlite://")
    yield engine_at_home(made, dialect_of(made), None, is_ours=True)
    made.dispose()


# --- SQLAlchemy ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sqlalchemy_a_connection_asks_its_listeners_by_has_events(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """GuardedConnection sets `_has_events`; the engine's own events fire all the same."""
    monkeypatch.setattr(sa.Connection, "_has_events", False)  # a test that ran before may have listened to all connections
    heard: list[str] = []

    def hear(*_: Any) -> None:
        heard.append("of the engine")

    with engine.connect() as connection:
        assert connection._has_events is False
        source = inspect.getsource(sa.Connection)
        assert "self._has_events or self.engine._has_events" in source
        sa.event.listen(engine, "before_cursor_execute", hear)
        connection.execute(sa.text("SELECT 1"))
        sa.event.remove(engine, "before_cursor_execute", hear)
    assert heard == ["of the engine"]


def test_sqlalchemy_a_connection_wraps_a_pooled_one_and_a_root_transaction_installs_itself(engine: sa.Engine) -> None:
    guard = Guard("id", "begin_nested")
    connection = GuardedConnection(engine, guard, engine.raw_connection())
    begun = connection.begin()
    assert isinstance(begun, OwnedTransaction)
    assert connection.get_transaction() is begun
    begun.rollback()
    connection.close()


def test_sqlalchemy_a_pool_can_replace_its_older_connections() -> None:
    """By `_invalidate`, which leaves the connection alone that it is called with."""
    pool = sa.QueuePool(lambda: sqlite3.connect(":memory:", check_same_thread=False))
    lent, other = pool.connect(), pool.connect()
    before = other.dbapi_connection
    other.close()
    pool._invalidate(lent, ValueError(), _checkin=False)
    assert lent.is_valid
    again = pool.connect()
    assert again.dbapi_connection is not before
    again.close()
    lent.close()
    pool.dispose()


def test_sqlalchemy_a_result_can_be_given_its_rows(engine: sa.Engine) -> None:
    """`buffered` reads them by `cursor_strategy`, which closes the cursor, and puts a strategy with the rows in its place."""
    rows = sa.union_all(*(sa.select(sa.literal(number).label("number")) for number in range(3)))
    with engine.connect() as connection:
        for read in (lambda found: found.all(), list, lambda found: found.partitions(3).__next__()):
            result = buffered(connection.execute(rows))
            assert result.cursor is None
            assert [row.number for row in read(result)] == [0, 1, 2]
            assert result.all() == []
        assert buffered(connection.execute(rows)).mappings().first() == {"number": 0}
        assert buffered(connection.execute(sa.text("CREATE TABLE t (i INTEGER)"))).returns_rows is False


def test_sqlalchemy_a_session_can_load_all_objects_at_once(engine: sa.Engine) -> None:
    assert 'execution_options.get("prebuffer_rows"' in inspect.getsource(sa.orm.loading)


def test_sqlalchemy_a_savepoint_can_be_left_without_having_been_entered(engine: sa.Engine) -> None:
    """`undo_unit` leaves those of `with` blocks that never ended, and the others, by `__exit__`."""
    with engine.begin() as connection:
        for enters in (True, False):
            nested = connection.begin_nested()
            if enters:
                nested.__enter__()
            nested.__exit__(KeyError, KeyError(), None)
            assert connection.get_nested_transaction() is None
            connection.execute(sa.text("SELECT 1"))


def test_sqlalchemy_a_session_has_flushing_and_begins_by_autobegin_t() -> None:
    assert Session()._flushing is False
    assert list(inspect.signature(Session._autobegin_t).parameters) == ["self", "begin"]


def test_sqlalchemy_a_session_passes_autobegin_t_at_every_use_and_sends_events_by_dispatch(engine: sa.Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Thing(Base):
        __tablename__ = "things"
        number: Mapped[int] = mapped_column(primary_key=True)

    guard = Guard("id", "begin_nested")
    connection = GuardedConnection(engine, guard)
    session = GuardedSession(connection)
    for event in ("before_commit", "after_commit", "after_rollback"):
        getattr(session.dispatch, event)(session)
    guard.ended = True
    for use in (
        lambda: session.add(Thing(number=1)),
        lambda: session.execute(sa.text("SELECT 1")),
        session.connection,
        session.begin_nested,
    ):
        with pytest.raises(WriterClosedError):
            use()
    connection.close()


def test_sqlalchemy_an_engine_has_its_driver_a_preparer_and_options(engine: sa.Engine) -> None:
    assert engine.dialect.dbapi is not None
    assert engine.dialect.loaded_dbapi.Error
    assert engine.dialect.identifier_preparer.quote_identifier("a") == '"a"'
    assert engine.execution_options(ours=1).get_execution_options()["ours"] == 1
    assert engine.url._replace(password=None) == engine.url


def test_sqlalchemy_statements_can_be_walked_and_rewritten() -> None:
    table, other = (sa.Table(name, sa.MetaData(), sa.Column("c", sa.Integer)) for name in ("a", "b"))
    statement = sa.update(table).where(table.c.c == 1).values(c=table.c.c + 1)
    assert table in {found for found in visitors.iterate(statement) if isinstance(found, sa.Table)}

    def replace(element: Any, **_: Any) -> Any:
        if element is table:
            return other
        return other.c.c if isinstance(element, sa.Column) and element.table is table else None

    text = str(visitors.replacement_traverse(statement, {}, replace))
    assert text == "UPDATE b SET c=(b.c + :c_1) WHERE b.c = :c_2"


# --- PyMySQL ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_read_timeout", "_sock", "server_status", "unix_socket"])
def test_pymysql_a_connection_has_these_attributes(name: str) -> None:
    made: Any = pymysql.Connection(defer_connect=True)
    if name == "unix_socket":
        assert made.unix_socket is None
    assert hasattr(made, name) or name in inspect.getsource(pymysql.Connection)


@pytest.mark.parametrize("name", ["get_autocommit", "open", "thread_id"])
def test_pymysql_a_connection_has_these_methods(name: str) -> None:
    assert hasattr(pymysql.Connection, name)


# --- psycopg ------------------------------------------------------------------------------------------------------------------


def test_psycopg_a_view_shares_the_dict_of_its_connection() -> None:
    connection: Any = psycopg.Connection(PGconn.connect_start(b"host=/nowhere"))
    try:
        for name in ("cursor_factory", "server_cursor_factory", "pgconn", "lock"):
            assert name in connection.__dict__, name
        view = view_of(RecipeConnection, connection)
        view.adapters_map = AdaptersMap(psycopg.adapters)
        view.returned = True
        assert view.pgconn is connection.pgconn
        assert view.adapters is view.adapters_map
        view.prepare_threshold = None
        assert connection.prepare_threshold is None
    finally:
        connection.close()


def test_psycopg_executes_a_statement_in_a_pipeline_that_only_collects() -> None:
    """What `postgresql_outgoing` needs: the generator of `execute`, its arguments, and what a cursor does with a pipeline."""
    connection: Any = psycopg.Connection(PGconn.connect_start(b"host=/nowhere"))
    try:
        cursor = psycopg.Cursor(connection)
        gen = cursor._execute_gen("SELECT 1", (1,))
        assert gen.__name__ == "_execute_gen"
        assert inspect.getgeneratorlocals(gen)["self"] is cursor
        assert {"query", "params"} <= set(inspect.getgeneratorlocals(gen))
        assert connection._pipeline is None
        pipeline: Any = psycopg.Pipeline(connection)
        assert not pipeline.command_queue
        assert not pipeline.result_queue
        assert callable(pipeline._process_results)
        assert callable(pipeline._communicate_gen)
        assert callable(connection._prepared.clear)
        assert callable(psycopg.generators.send)
        assert callable(psycopg.generators.fetch_many)
        assert "wait" not in connection.__dict__
    finally:
        connection.close()


# --- alembic ------------------------------------------------------------------------------------------------------------------


def test_alembic_a_script_directory_lists_the_steps_of_upgrades_and_downgrades() -> None:
    script: Any = ScriptDirectory(str(scripts_folder()))
    up = script._upgrade_revs(newest(), ())
    assert up[-1].revision.revision == newest()
    assert len(script._downgrade_revs("base", (newest(),))) == len(up)


def test_alembic_a_context_accepts_steps_and_a_version_table(engine: sa.Engine) -> None:
    asked: list[Any] = []
    options = {"version_table": "ours", "fn": lambda heads, _context: asked.append(heads) or ()}
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        context.run_migrations()
        assert asked == [()]
        assert callable(context.impl.static_output)
