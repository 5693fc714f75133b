"""BEGIN, the check of the fence and a unit's savepoint, sent to PostgreSQL with the user's next statement."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.pq import PipelineStatus
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError
from store_scene import ID, STATE, Order, assert_nothing_is_checked_out, first_claim, orders, rows

from dualwrite.errors import FencedError, StateTableMissingError, StoreUnavailableError, TransactionControlError
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.sql import SqlStateStore, local_settings
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import TcpProxy
from fixtures.pace import LIMIT

Use = Callable[[Any], Any]


@pytest.fixture(params=["SQLAlchemy", "psycopg"])
def store(request: pytest.FixtureRequest, proxied_store: SqlStateStore) -> Iterator[SqlStateStore]:
    if request.param == "SQLAlchemy":
        yield proxied_store
        return
    address = proxied_store.engine.url.render_as_string(hide_password=False).replace("+psycopg", "")
    with SqlStateStore.from_psycopg(lambda: psycopg.connect(address)) as store:
        yield store


@pytest.fixture
def claim(store: SqlStateStore, proxied_store: SqlStateStore) -> Claim:
    """A claim whose connection has just committed, so that BEGIN may wait."""
    claim = first_claim(store)
    commit(store.begin(claim), 1)
    return claim


def commit(transaction: StoreTransaction, number: int) -> None:
    transaction.record_at_commit(STATE, generation=0, transaction_number=number)
    transaction.commit()


def write(transaction: StoreTransaction, number: int = 1) -> None:
    handle = transaction.handle
    if isinstance(handle, psycopg.Connection):
        handle.execute("INSERT INTO orders VALUES (%s, 'chair')", (number,))
    else:
        handle.execute(insert(orders).values(id=number, item="chair"))


def claim_again(store: SqlStateStore) -> Claim:
    return store.claim(ID, "theirs", timeout=LIMIT)


def test_a_transaction_takes_as_many_round_trips_as_it_has_statements_and_one_more(
    store: SqlStateStore, claim: Claim, postgres_proxy: TcpProxy
) -> None:
    for number in (2, 3):
        before = postgres_proxy.exchanges
        transaction = store.begin_soon(claim)
        assert postgres_proxy.exchanges == before
        assert not transaction.is_fence_checked
        write(transaction, number)
        assert transaction.is_fence_checked
        assert postgres_proxy.exchanges == before + 1
        commit(transaction, number)
        assert postgres_proxy.exchanges == before + 2
    assert rows(store.engine) == 2


@pytest.mark.parametrize("fails", [False, True], ids=["", "the first of which fails"])
def test_units_with_a_savepoint_each_take_a_round_trip_each(
    proxied_store: SqlStateStore, postgres_proxy: TcpProxy, fails: bool
) -> None:
    claim = first_claim(proxied_store)
    transaction = proxied_store.begin(claim)
    transaction.begin_unit()
    write(transaction)  # asks what the statement calls, once
    transaction.undo_unit(ValueError())
    commit(transaction, 1)
    transaction = proxied_store.begin_soon(claim)
    if fails:
        transaction.begin_unit()
        write(transaction, 1)
        with pytest.raises(IntegrityError) as caught:
            write(transaction, 1)
        transaction.undo_unit(caught.value)
    before = postgres_proxy.exchanges
    for number in (1, 2, 3):
        transaction.begin_unit()
        write(transaction, number)
        transaction.end_unit()
    assert postgres_proxy.exchanges == before + 3
    transaction.begin_unit()
    transaction.end_unit()  # it has executed nothing
    commit(transaction, 2)
    assert postgres_proxy.exchanges == before + 4
    assert rows(proxied_store.engine) == 3


def test_settings_take_no_round_trip(
    store: SqlStateStore, claim: Claim, postgres_proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_settings, "_REMEMBERED_SECONDS", LIMIT)
    for number in (2, 3):  # the first one also asks what the statement calls, and what runs at COMMIT
        transaction, before = store.begin_soon(claim), postgres_proxy.exchanges
        for place, tenant in enumerate(("red", "red", "green")):
            assert transaction.may_set_local({"app.tenant": tenant})
            transaction.begin_unit()
            transaction.set_local({"app.tenant": tenant})
            write(transaction, 3 * number + place)
            transaction.end_unit()
        assert postgres_proxy.exchanges == before + 3 or number == 2
        commit(transaction, number)
    assert rows(store.engine) == 6


def test_the_check_alone(store: SqlStateStore, claim: Claim, postgres_proxy: TcpProxy) -> None:
    transaction, before = store.begin_soon(claim), postgres_proxy.exchanges
    transaction.check_fence()
    transaction.check_fence()
    assert transaction.is_fence_checked
    assert postgres_proxy.exchanges == before + 1
    transaction.rollback()


# --- fenced -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [lambda transaction: transaction.check_fence(), write], ids=["check_fence", "a statement"])
def test_a_fenced_transaction_stays_unusable(store: SqlStateStore, claim: Claim, use: Use) -> None:
    """Also for a block that has ignored the error."""
    theirs = claim_again(store)
    transaction = store.begin_soon(claim)
    handle = transaction.handle
    for attempt in (use, write, lambda _: select_one(handle), lambda each: commit(each, 2)):
        with pytest.raises(FencedError) as caught:
            attempt(transaction)
        assert caught.value.facts["current_owner"] == theirs.owner
    assert transaction.begin_error is not None
    transaction.rollback()
    assert rows(store.engine) == 0
    assert_next_transaction_commits(store, theirs)


def select_one(handle: Any) -> None:
    handle.execute("SELECT 1" if isinstance(handle, psycopg.Connection) else sa.select(1))


def assert_next_transaction_commits(store: SqlStateStore, claim: Claim) -> None:
    """On the same connection, if it has survived: nothing of the transaction before is left on it."""
    for number in (2, 3):
        transaction = store.begin_soon(claim)
        write(transaction, number)
        commit(transaction, number)
    assert rows(store.engine) == 2
    assert_nothing_is_checked_out(store)


def test_a_fence_that_is_gone_wins_over_the_error_of_the_statement(proxied_store: SqlStateStore) -> None:
    claim = first_claim(proxied_store)
    commit(proxied_store.begin(claim), 1)
    claim_again(proxied_store)
    transaction = proxied_store.begin_soon(claim)
    with pytest.raises(FencedError):
        transaction.handle.execute(sa.text("SELECT :x FROM missing"), {"x": 1})
    transaction.rollback()


# --- errors -------------------------------------------------------------------------------------------------------------------


def test_the_error_of_the_statement_is_its_own(proxied_store: SqlStateStore) -> None:
    claim = first_claim(proxied_store)
    commit(proxied_store.begin(claim), 1)
    transaction = proxied_store.begin_soon(claim)
    with pytest.raises(ProgrammingError) as caught:
        transaction.handle.execute(sa.text("SELECT :x FROM missing"), {"x": 1})
    assert isinstance(caught.value.orig, psycopg.errors.UndefinedTable)
    assert transaction.begin_error is None
    transaction.rollback()
    assert_next_transaction_commits(proxied_store, claim)


def test_a_statement_that_could_not_be_made_leaves_the_transaction_usable(store: SqlStateStore, claim: Claim) -> None:
    transaction = store.begin_soon(claim)
    values, handle = {"x": object()}, transaction.handle
    if isinstance(handle, psycopg.Connection):
        with pytest.raises(psycopg.ProgrammingError, match="adapt"):
            handle.execute("SELECT %(x)s", values)
    else:
        with pytest.raises(ProgrammingError, match="adapt"):
            handle.execute(sa.text("SELECT :x"), values)
    assert transaction.is_fence_checked
    write(transaction)
    commit(transaction, 2)
    assert rows(store.engine) == 1


def test_a_statement_whose_preparation_fails_is_prepared_again(proxied_store: SqlStateStore) -> None:
    """Psycopg takes it for prepared, unless it forgets that: a ROLLBACK TO that it knows already does not make it do so."""
    claim = first_claim(proxied_store)
    commit(proxied_store.begin(claim), 1)
    engine, statement, values = proxied_store.engine, sa.text("SELECT count(*) FROM later WHERE id > :id"), {"id": 0}
    with engine.connect() as free:  # the next transaction gets its connection
        free.connection.dbapi_connection.prepare_threshold = 1  # type: ignore[union-attr]  # psycopg's
        free.exec_driver_sql("CREATE TABLE later (id integer)")
        free.commit()
    transaction = proxied_store.begin_soon(claim)
    transaction.begin_unit()
    assert transaction.handle.scalar(statement, values) == 0
    transaction.undo_unit(ValueError())
    commit(transaction, 2)
    other = psycopg.connect(engine.url.render_as_string(hide_password=False).replace("+psycopg", ""), autocommit=True)
    other.execute("DROP TABLE later")
    transaction = proxied_store.begin_soon(claim)
    transaction.begin_unit()
    with pytest.raises(ProgrammingError) as caught:
        transaction.handle.scalar(statement, values)
    transaction.undo_unit(caught.value)
    transaction.begin_unit()
    with other:
        other.execute("CREATE TABLE later (id integer)")
    assert transaction.handle.scalar(statement, values) == 0
    transaction.end_unit()
    commit(transaction, 3)


@pytest.mark.parametrize("values", [None, {"x": 1}], ids=["", "with a value that is not used"])
def test_copy_by_execute_has_psycopgs_error(store: SqlStateStore, claim: Claim, values: Any) -> None:
    """In a pipeline libpq would not say why, and psycopg could not either."""
    transaction = store.begin_soon(claim)
    handle: Any = transaction.handle
    execute = handle.execute if isinstance(handle, psycopg.Connection) else handle.exec_driver_sql
    with pytest.raises((ProgrammingError, psycopg.ProgrammingError), match="use copy"):
        execute("COPY orders TO STDOUT", values)
    transaction.rollback()
    assert_next_transaction_commits(store, claim)


def test_our_own_error_is_ours(store: SqlStateStore, claim: Claim, proxied_store: SqlStateStore) -> None:
    transaction = store.begin_soon(claim)
    with proxied_store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE kafka_transaction_state RENAME TO elsewhere")
    with pytest.raises(StateTableMissingError):
        write(transaction)
    transaction.rollback()
    assert_nothing_is_checked_out(store)


def test_a_connection_that_is_cut_with_the_first_statement(
    store: SqlStateStore, claim: Claim, postgres_proxy: TcpProxy
) -> None:
    transaction = store.begin_soon(claim)
    postgres_proxy.on_client_bytes(b"BEGIN", lambda link: link.cut())
    with pytest.raises(StoreUnavailableError):
        write(transaction)
    with pytest.raises(StoreUnavailableError):
        commit(transaction, 2)
    transaction.rollback()
    assert rows(store.engine) == 0
    assert_next_transaction_commits(store, claim)


def test_a_connection_that_has_died_is_replaced(store: SqlStateStore, claim: Claim, postgres_server: PostgresServer) -> None:
    transaction = store.begin_soon(claim)
    write(transaction)
    connection = transaction.handle if isinstance(transaction.handle, psycopg.Connection) else None
    pid = transaction.handle.execute(sa.text("SELECT pg_backend_pid()") if connection is None else "SELECT pg_backend_pid()")
    pid = pid.fetchone()[0]
    commit(transaction, 2)
    with psycopg.connect(postgres_server.url.replace("+psycopg", "")) as killer:
        killer.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    transaction = store.begin_soon(claim)
    write(transaction, 2)
    commit(transaction, 3)
    assert rows(store.engine) == 2


def test_a_unit_that_ends_the_transaction_is_found_by_the_next_one(proxied_store: SqlStateStore) -> None:
    claim = first_claim(proxied_store)
    commit(proxied_store.begin(claim), 1)
    transaction = proxied_store.begin_soon(claim)
    transaction.begin_unit()
    write(transaction, 1)
    raw = transaction_raw(transaction)
    raw.rollback()
    raw.execute("SELECT 1")
    transaction.end_unit()
    transaction.begin_unit()
    with pytest.raises(TransactionControlError) as caught:
        write(transaction, 2)
    with pytest.raises(TransactionControlError):
        transaction.undo_unit(caught.value)
    transaction.rollback()
    assert rows(proxied_store.engine) == 0


def transaction_raw(transaction: StoreTransaction) -> Any:
    """The driver's own connection, past the guard that watches units."""
    return sa.Connection.connection.fget(transaction.handle).dbapi_connection  # type: ignore[attr-defined]  # a property


@contextmanager
def interrupted_at(step: int) -> Iterator[list[int]]:
    """Ctrl-C before or after one of the waits for the server, which are two steps each; gives the steps that were reached."""
    wait, reached = psycopg.Connection.wait, list[int]()

    def enter() -> None:
        reached.append(len(reached))
        if reached[-1] == step:
            raise KeyboardInterrupt

    def interrupted(*args: Any, **named: Any) -> Any:
        enter()
        result = wait(*args, **named)
        enter()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Connection, "wait", interrupted)
        yield reached


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a connection that is left to the garbage collector
def test_an_interrupt_at_each_step_of_a_transaction(store: SqlStateStore, claim: Claim) -> None:
    """Nothing of it is left on the connection, which the next transaction takes, if it has survived."""

    def transact(number: int) -> None:
        transaction = store.begin_soon(claim)
        begun.append(transaction)
        write(transaction, number)
        transaction.before_commit()
        commit(transaction, number)

    begun: list[StoreTransaction] = []
    transact(2)
    with interrupted_at(-1) as reached:
        transact(3)
    assert len(reached) >= 4
    expected, unknown = [2, 3], []
    for step in range(len(reached)):
        number = 1000 + 2 * step
        with interrupted_at(step), pytest.raises(KeyboardInterrupt):
            transact(number)
        for each in begun:
            each.rollback()
        begun.clear()
        unknown.append(number)  # its COMMIT may have been sent
        transact(number + 1)
        expected.append(number + 1)
    with store.engine.connect() as connection:
        found = set(connection.scalars(sa.select(orders.c.id)))
    assert set(expected) <= found <= {*expected, *unknown}


def test_an_interrupt_while_the_first_statement_runs(proxied_store: SqlStateStore) -> None:
    claim = first_claim(proxied_store)
    commit(proxied_store.begin(claim), 1)
    transaction = proxied_store.begin_soon(claim)
    waits = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    waits.start()
    with pytest.raises(KeyboardInterrupt):
        transaction.handle.execute(sa.text("SELECT pg_sleep(:s)"), {"s": 100})
    waits.join()
    with pytest.raises((StoreUnavailableError, SQLAlchemyError)):
        write(transaction)
    transaction.rollback()
    assert rows(proxied_store.engine) == 0
    assert_next_transaction_commits(proxied_store, claim)


# --- other ways to the connection: what is queued goes first ------------------------------------------------------------------


def several(handle: Any) -> None:
    handle.exec_driver_sql("INSERT INTO orders VALUES (1, 'a'); INSERT INTO orders VALUES (2, 'b')")


def copied(handle: Any) -> None:
    with handle.connection.cursor() as cursor, cursor.copy("COPY orders FROM STDIN") as copy:
        copy.write_row((1, "a"))
        copy.write_row((2, "b"))


def driver(handle: Any) -> None:
    handle.connection.driver_connection.execute("INSERT INTO orders VALUES (1, 'a'), (2, 'b')")


def pipeline(handle: Any) -> None:
    raw = handle.connection.driver_connection
    with raw.pipeline():
        for number in (1, 2):
            raw.execute("INSERT INTO orders VALUES (%s, 'a')", (number,))


def executed_with_many(handle: Any) -> None:
    handle.exec_driver_sql("INSERT INTO orders VALUES (%s, 'a')", [(1,), (2,)])


def streamed(handle: Any) -> None:
    series = sa.text("SELECT generate_series(1, :n)").execution_options(stream_results=True)
    with handle.execute(series, {"n": 2}) as found:
        assert [number for (number,) in found] == [1, 2]
    executed_with_many(handle)


def savepoint(handle: Any) -> None:
    with handle.begin_nested():
        executed_with_many(handle)


def client_cursor(handle: Any) -> None:
    psycopg.ClientCursor(handle.connection.driver_connection).execute(
        "INSERT INTO orders VALUES (%s, 'a'); INSERT INTO orders VALUES (%s, 'b')", (1, 2)
    )


def returned(handle: Any) -> None:
    found = handle.execute(insert(orders).returning(orders.c.id), [{"id": 1, "item": "a"}, {"id": 2, "item": "b"}])
    assert sorted(found.scalars()) == [1, 2]
    assert handle.execute(sa.update(orders).values(item="c")).rowcount == 2


@pytest.mark.parametrize(
    "use", [several, copied, driver, pipeline, executed_with_many, streamed, savepoint, client_cursor, returned]
)
def test_every_use_of_the_connection_begins_the_transaction(proxied_store: SqlStateStore, use: Use) -> None:
    claim = first_claim(proxied_store)
    commit(proxied_store.begin(claim), 1)
    transaction = proxied_store.begin_soon(claim)
    raw = transaction_raw(transaction)
    use(transaction.handle)
    assert transaction.is_fence_checked
    assert raw.pgconn.pipeline_status == PipelineStatus.OFF
    assert "wait" not in vars(raw)
    commit(transaction, 2)
    assert rows(proxied_store.engine) == 2


def psycopg_copied(connection: Any) -> None:
    with connection.cursor().copy("COPY orders FROM STDIN") as copy:
        copy.write_row((1, "a"))
        copy.write_row((2, "b"))


def psycopg_pipeline(connection: Any) -> None:
    with connection.pipeline():
        for number in (1, 2):
            connection.execute("INSERT INTO orders VALUES (%s, 'a')", (number,))


def psycopg_many(connection: Any) -> None:
    connection.cursor().executemany("INSERT INTO orders VALUES (%s, 'a')", [(1,), (2,)])


def psycopg_savepoint(connection: Any) -> None:
    with connection.transaction():
        psycopg_many(connection)
    with pytest.raises(psycopg.errors.UniqueViolation), connection.transaction():
        connection.execute("INSERT INTO orders VALUES (1, 'a')")


def psycopg_streamed(connection: Any) -> None:
    assert list(connection.cursor().stream("SELECT generate_series(1, %s)", (2,))) == [(1,), (2,)]
    psycopg_many(connection)


def psycopg_server_cursor(connection: Any) -> None:
    with connection.cursor("found") as cursor:
        assert cursor.execute("SELECT generate_series(1, 2)").fetchall() == [(1,), (2,)]
    psycopg_many(connection)


def psycopg_notified(connection: Any) -> None:
    connection.execute("LISTEN orders; NOTIFY orders")
    assert list(connection.notifies(timeout=0)) == []  # delivered once the transaction has committed
    psycopg_many(connection)


def psycopg_composed(connection: Any) -> None:
    connection.execute(psycopg.sql.SQL("INSERT INTO {} VALUES (1, 'a'), (2, 'b')").format(psycopg.sql.Identifier("orders")))


def psycopg_settings(connection: Any) -> None:
    connection.execute("SET LOCAL search_path TO pg_catalog")
    connection.execute("INSERT INTO public.orders VALUES (1, 'a'), (2, 'b')")


@pytest.mark.parametrize(
    "use",
    [
        psycopg_copied,
        psycopg_pipeline,
        psycopg_many,
        psycopg_savepoint,
        psycopg_streamed,
        psycopg_server_cursor,
        psycopg_notified,
        psycopg_composed,
        psycopg_settings,
    ],
)
@pytest.mark.parametrize("store", ["psycopg"], indirect=True)
def test_every_use_of_a_psycopg_connection_begins_the_transaction(store: SqlStateStore, claim: Claim, use: Use) -> None:
    transaction = store.begin_soon(claim)
    handle: Any = transaction.handle
    use(handle)
    assert transaction.is_fence_checked
    assert "wait" not in vars(handle)
    commit(transaction, 2)
    assert rows(store.engine) == 2


def test_the_first_statement_of_a_session(proxied_store: SqlStateStore, postgres_proxy: TcpProxy) -> None:
    claim = first_claim(proxied_store)
    commit(proxied_store.begin(claim), 1)
    before = postgres_proxy.exchanges
    transaction = proxied_store.begin_soon(claim)
    transaction.session.add(Order(id=1, item="chair"))
    transaction.before_commit()
    commit(transaction, 2)
    assert postgres_proxy.exchanges == before + 2
    assert rows(proxied_store.engine, Order) == 1
