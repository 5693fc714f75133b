"""Units of a group on psycopg connections: their statements go through libpq's pipeline, and behave as if they did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.pq import PipelineStatus
from psycopg.rows import dict_row
from sqlalchemy import insert
from store_scene import ID, STATE, Order, orders, rows, user_metadata

from dualwrite.errors import StoreCommitFailedError, TransactionControlError
from dualwrite.stores.base import StoreTransaction
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.stores.store_transaction import RunAloneError
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT

INSERT = "INSERT INTO orders VALUES (%s, 'chair')"


@pytest.fixture
def connect(postgres_url: str) -> Callable[[], psycopg.Connection[Any]]:
    return lambda: psycopg.connect(postgres_url.replace("+psycopg", ""))


@pytest.fixture
def known_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a text with new names, the database is asked whether they are functions of users, and that ends the pipeline."""
    monkeypatch.setattr(SqlStoreTransaction, "_has_own_functions", lambda *_: False)


pytestmark = pytest.mark.usefixtures("known_statements")


@pytest.fixture
def store(connect: Callable[[], psycopg.Connection[Any]]) -> Iterator[SqlStateStore]:
    with SqlStateStore.from_psycopg(connect) as made:
        user_metadata.create_all(made.engine)
        yield made


@pytest.fixture
def units(store: SqlStateStore) -> Iterator[StoreTransaction]:
    """A transaction, in units that are undone only together."""
    transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
    transaction.begin_units()
    yield transaction
    transaction.rollback()


def is_in_pipeline(transaction: StoreTransaction) -> bool:
    return bool(transaction.handle.pgconn.pipeline_status == PipelineStatus.ON)


def commit(transaction: StoreTransaction) -> None:
    transaction.end_unit()
    transaction.end_units()
    transaction.record_at_commit(STATE, generation=0, transaction_number=1)
    transaction.commit()


def test_statements_do_not_wait_for_each_other(proxied_postgres_url: str, postgres_proxy: TcpProxy) -> None:
    """The server is silent until the end of the units."""
    address = proxied_postgres_url.replace("+psycopg", "")
    with SqlStateStore.from_psycopg(lambda: psycopg.connect(address)) as store:
        user_metadata.create_all(store.engine)
        links: list[Link] = []
        postgres_proxy.on_client_bytes(b"BEGIN", links.append, when="answered")
        transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
        transaction.begin_units()
        links[-1].blackhole("server_to_client")
        for number in range(20):
            transaction.handle.execute(INSERT, (number,))
            transaction.end_unit()
        links[-1].resume()
        commit(transaction)
        assert rows(store.engine) == 20


# --- what the answer alone has ------------------------------------------------------------------------------------------------

READS: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "fetchone": ("SELECT id FROM orders ORDER BY id", lambda cursor: cursor.fetchone(), (1,)),
    "fetchmany": ("SELECT id FROM orders ORDER BY id", lambda cursor: cursor.fetchmany(5), [(1,), (2,)]),
    "fetchall": ("SELECT id FROM orders ORDER BY id", lambda cursor: cursor.fetchall(), [(1,), (2,)]),
    "iteration": ("SELECT id FROM orders ORDER BY id", list, [(1,), (2,)]),
    "rowcount of UPDATE": ("UPDATE orders SET item = 'sofa' WHERE id > 1", lambda cursor: cursor.rowcount, 1),
    "rowcount of nothing": ("UPDATE orders SET item = 'sofa' WHERE id > 9", lambda cursor: cursor.rowcount, 0),
    "rowcount of INSERT": ("INSERT INTO orders VALUES (1, 'x') ON CONFLICT DO NOTHING", lambda cursor: cursor.rowcount, 0),
    "RETURNING": ("INSERT INTO orders VALUES (7, 'x') RETURNING id", lambda cursor: cursor.fetchone(), (7,)),
    "description": (
        "SELECT id, item FROM orders",
        lambda cursor: [column.name for column in cursor.description],
        ["id", "item"],
    ),
    "no description": ("DELETE FROM orders", lambda cursor: cursor.description, None),
    "statusmessage": ("DELETE FROM orders", lambda cursor: cursor.statusmessage, "DELETE 2"),
    "nextset": ("SELECT 1", lambda cursor: cursor.nextset(), None),
    "scroll": ("SELECT id FROM orders ORDER BY id", lambda cursor: [cursor.scroll(1), cursor.fetchone()], [None, (2,)]),
    "rownumber": ("SELECT id FROM orders", lambda cursor: [cursor.fetchone() is not None, cursor.rownumber], [True, 1]),
}


@pytest.mark.parametrize("what", READS)
def test_reads_of_a_unit_are_answered_at_once(units: StoreTransaction, what: str) -> None:
    query, read, expected = READS[what]
    units.handle.execute(INSERT, (1,))
    units.handle.execute(INSERT, (2,))
    assert read(units.handle.execute(query)) == expected
    assert is_in_pipeline(units)


def test_the_row_factory_of_the_user(units: StoreTransaction) -> None:
    with units.handle.cursor(row_factory=dict_row) as cursor:
        assert cursor.execute("SELECT 1 AS one").fetchall() == [{"one": 1}]


def test_many_rows_at_once(units: StoreTransaction, store: SqlStateStore) -> None:
    with units.handle.cursor() as cursor:
        cursor.executemany(INSERT, [(number,) for number in range(100)])
        assert cursor.rowcount == 100
        cursor.executemany("SELECT %s::int", [(1,), (2,)], returning=True)
        assert cursor.fetchone() == (1,)
        assert cursor.nextset()
        assert cursor.fetchone() == (2,)
    commit(units)
    assert rows(store.engine) == 100


# --- what a pipeline can't do: the rest of the units wait for each answer -----------------------------------------------------


def copies(transaction: StoreTransaction) -> None:
    with transaction.handle.cursor() as cursor, cursor.copy("COPY orders FROM STDIN") as copy:
        copy.write_row((2, "sofa"))


def streams(transaction: StoreTransaction) -> None:
    with transaction.handle.cursor() as cursor:
        assert [row[0] for row in cursor.stream("INSERT INTO orders VALUES (2, 'sofa') RETURNING id")] == [2]


def uses_a_savepoint(transaction: StoreTransaction) -> None:
    with suppress(psycopg.errors.UniqueViolation), transaction.handle.transaction():
        transaction.handle.execute(INSERT, (1,))
    transaction.handle.execute(INSERT, (2,))


def uses_the_session(transaction: StoreTransaction) -> None:
    transaction.session.add(Order(id=2, item="sofa"))
    transaction.session.execute(insert(orders).values(id=2, item="sofa"))
    assert transaction.session.get(Order, 2).item == "sofa"


def has_a_pipeline_of_its_own(transaction: StoreTransaction) -> None:
    with transaction.handle.pipeline():
        transaction.handle.execute(INSERT, (2,))


@pytest.mark.parametrize("unit", [copies, streams, uses_a_savepoint, uses_the_session, has_a_pipeline_of_its_own])
def test_a_unit_that_cannot_run_in_a_pipeline(
    units: StoreTransaction, store: SqlStateStore, unit: Callable[[StoreTransaction], None]
) -> None:
    units.handle.execute(INSERT, (1,))
    units.end_unit()
    unit(units)
    units.end_unit()
    assert not is_in_pipeline(units)
    units.handle.execute(INSERT, (3,))
    commit(units)
    assert rows(store.engine) == 3


# --- errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["by a read", "at the end", "swallowed"])
def test_an_error_is_found_by_the_end_of_the_unit(units: StoreTransaction, store: SqlStateStore, found: str) -> None:
    """If the unit swallows it, the end of the pipeline or the look before COMMIT shows that something has failed."""
    errors = (psycopg.errors.UniqueViolation, psycopg.errors.PipelineAborted, StoreCommitFailedError)
    with pytest.raises(errors[1:] if found == "swallowed" else errors[:1]) as caught:  # noqa: PT012  (by any of them)
        units.handle.execute(INSERT, (1,))
        units.end_unit()
        try:
            units.handle.execute(INSERT, (1,))
            units.handle.execute(INSERT, (2,))
            if found != "at the end":
                units.handle.execute("SELECT 1").fetchone()
        except psycopg.Error:
            if found != "swallowed":
                raise
        units.end_unit()
        units.end_units()
    units.undo_units(caught.value)
    assert not is_in_pipeline(units)
    units.begin_unit()
    units.handle.execute(INSERT, (4,))
    commit(units)
    assert rows(store.engine) == 1


def test_a_unit_rolled_back_with_statements_in_flight(units: StoreTransaction, store: SqlStateStore) -> None:
    for number in range(50):
        units.handle.execute(INSERT, (number,))
    units.undo_units(ValueError())
    units.begin_unit()
    units.handle.execute(INSERT, (4,))
    commit(units)
    assert rows(store.engine) == 1


def test_a_statement_that_was_not_prepared_since_another_had_failed(store: SqlStateStore) -> None:
    """psycopg prepares a statement at its sixth execution, and does not notice if the pipeline was aborted before."""
    claim = store.claim(ID, "tests", timeout=LIMIT)
    for number in range(1, 21):
        transaction = store.begin(claim)
        transaction.begin_units()
        query = f"SELECT {number} + %s"
        with pytest.raises(psycopg.errors.UndefinedColumn) as caught:  # noqa: PT012  (by any of them)
            for place in range(10):
                if place == 4:
                    transaction.handle.execute("SELECT nothing")
                transaction.handle.execute(query, (place,))
            transaction.end_units()
        transaction.undo_units(caught.value)
        transaction.begin_unit()
        assert transaction.handle.execute(query, (1,)).fetchone() == (number + 1,)
        transaction.handle.execute(INSERT, (number,))
        transaction.end_unit()
        transaction.record(STATE, generation=0, transaction_number=number)
        transaction.commit()
    assert rows(store.engine) == 20


def test_a_rollback_with_statements_in_flight(units: StoreTransaction, store: SqlStateStore) -> None:
    for number in range(50):
        units.handle.execute(INSERT, (number,))
    units.rollback()
    assert rows(store.engine) == 0
    again = store.begin(store.claim(ID, "tests", timeout=LIMIT))
    again.handle.execute(INSERT, (1,))
    again.record(STATE, generation=0, transaction_number=1)
    again.commit()
    assert rows(store.engine) == 1


def test_a_unit_cannot_end_the_transaction(units: StoreTransaction) -> None:
    for call in (units.handle.commit, units.handle.rollback, lambda: units.handle.execute("COMMIT")):
        with pytest.raises(TransactionControlError):
            call()
    assert is_in_pipeline(units)


def test_no_pipeline_where_a_function_makes_the_cursors(connect: Callable[[], psycopg.Connection[Any]]) -> None:
    """Its cursors would show a row count of -1: every answer is waited for."""

    def made() -> psycopg.Connection[Any]:
        connection = connect()
        connection.cursor_factory = partial(psycopg.Cursor)  # type: ignore[assignment]  # a function is accepted too
        return connection

    with SqlStateStore.from_psycopg(made) as store:
        user_metadata.create_all(store.engine)
        transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
        transaction.begin_units()
        assert not is_in_pipeline(transaction)
        with pytest.raises(RunAloneError) as refused:  # nobody sees what such cursors execute
            transaction.handle.execute("DELETE FROM orders")
        transaction.undo_units(refused.value)
        transaction.watch(shares=False)
        assert transaction.handle.execute("DELETE FROM orders").rowcount == 0
        commit(transaction)
