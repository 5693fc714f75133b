"""PostgreSQL's isolation levels: what a conflict does at each step, and which conflicts a second attempt resolves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import insert, select, update
from store_scene import ID, STATE, assert_nothing_is_checked_out, assert_outcome, commit, orders, user_metadata, write

from dualwrite import migration
from dualwrite.errors import FencedError, StoreCommitFailedError, StoreCommitUnknownError, StoreError
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from fixtures.pace import LIMIT

READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE = LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
SNAPSHOTS = (REPEATABLE_READ, SERIALIZABLE)

Open = Callable[[str], SqlStateStore]


@pytest.fixture(params=["engine", "psycopg"])
def open_store(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[Open]:
    """Opens a store whose transactions have the given level, from a user's engine or a user's psycopg connection."""
    opened: list[tuple[SqlStateStore, Any]] = []

    def on_engine(level: str) -> SqlStateStore:
        engine = sa.create_engine(postgres_url, isolation_level=level)
        opened.append((SqlStateStore(engine, lock_timeout=LIMIT), engine))
        return opened[-1][0]

    def on_connection(level: str) -> SqlStateStore:
        connection = psycopg.connect(postgres_url.replace("+psycopg", ""))
        connection.isolation_level = psycopg.IsolationLevel[level.replace(" ", "_")]
        opened.append((SqlStateStore.from_psycopg(connection, lock_timeout=LIMIT), connection))
        return opened[-1][0]

    engine = sa.create_engine(postgres_url)
    user_metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(orders), [{"id": 1, "item": "on call"}, {"id": 2, "item": "on call"}])
    engine.dispose()
    yield on_engine if request.param == "engine" else on_connection
    for store, theirs in opened:
        assert_nothing_is_checked_out(store)
        store.close()
        theirs.dispose() if isinstance(theirs, sa.Engine) else theirs.close()


def items(store: SqlStateStore) -> dict[int, str]:
    with store.engine.connect() as connection:
        return {row.id: row.item for row in connection.execute(select(orders))}


@pytest.mark.parametrize("level", LEVELS)
def test_an_update_of_a_row_that_another_transaction_changed(open_store: Open, level: str) -> None:
    store = open_store(level)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    transaction.session.execute(select(orders)).all()
    with store.engine.begin() as other:
        other.execute(update(orders).where(orders.c.id == 1).values(item="theirs"))
    change = update(orders).where(orders.c.id == 1).values(item=orders.c.item + " and ours")
    if level == READ_COMMITTED:
        transaction.session.execute(change)
        commit(transaction)
        assert items(store)[1] == "theirs and ours"
        return
    with pytest.raises(sa.exc.OperationalError) as caught:
        transaction.session.execute(change)
    assert store.is_conflict(caught.value)
    transaction.rollback()
    assert items(store)[1] == "theirs"
    again = store.begin(claim)
    again.session.execute(change)
    commit(again, 2)
    assert items(store)[1] == "theirs and ours"


@pytest.mark.parametrize("level", LEVELS)
def test_a_newer_claim_is_reported_as_fencing(open_store: Open, level: str) -> None:
    """With a snapshot it causes a serialization failure of the UPDATE; but a second attempt would not resolve this conflict."""
    store = open_store(level)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    transaction.session.execute(insert(orders).values(id=3, item="ours"))
    newer = store.claim(ID, "rival", timeout=LIMIT)
    with pytest.raises(FencedError) as caught:
        transaction.record(STATE, generation=0, transaction_number=1)
    assert (caught.value.current_fence, caught.value.current_owner) == (newer.fence, "rival")
    transaction.rollback()
    assert 3 not in items(store)


@pytest.mark.parametrize("level", LEVELS)
def test_a_claim_waits_for_commit_and_reads_what_it_decided(open_store: Open, level: str) -> None:
    """Claims of a SERIALIZABLE engine are retried after a conflict."""
    store, rival = open_store(level), open_store(level)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    transaction.record(STATE, generation=0, transaction_number=1)
    with ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(rival.claim, ID, "rival", timeout=LIMIT)
        _wait_for_event(store, "Lock")
        transaction.commit()
        newer = claiming.result()
    assert rival.read_claimed(newer).prepared_state == STATE
    with pytest.raises(FencedError):
        store.begin(claim)


def _wait_for_event(store: SqlStateStore, event: str) -> None:
    """Wait until a session waits for this `wait_event` or `wait_event_type` of PostgreSQL."""
    waiting = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE :event IN (wait_event_type, wait_event) AND datname = current_database()"
    )
    while True:
        with store.engine.connect() as connection:
            if connection.scalar(waiting, {"event": event}):
                return


@pytest.mark.parametrize("level", SNAPSHOTS)
def test_record_after_a_change_of_its_row_other_than_a_claim(open_store: Open, level: str) -> None:
    """By recovery's resolution or an acknowledgement, for example: the fence is ours, so it is a retriable conflict."""
    store = open_store(level)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    with store.engine.begin() as other:
        other.execute(sa.text("UPDATE kafka_transaction_state SET updated_at = now()"))
    with pytest.raises(StoreCommitFailedError, match="could not serialize") as caught:
        transaction.record(STATE, generation=0, transaction_number=1)
    assert caught.value.retriable
    again = store.begin(claim)
    commit(again, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_a_read_only_transaction_is_refused_before_commit(postgres_url: str, level: str) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection, closing(connection):
        connection.isolation_level = psycopg.IsolationLevel[level.replace(" ", "_")]
        connection.read_only = True
        with SqlStateStore.from_psycopg(connection) as store:
            transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
            with pytest.raises(StoreError, match="permits no writes while recording"):
                transaction.record(STATE, generation=0, transaction_number=1)
            transaction.rollback()


# --- a server that restarts in COMMIT -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fast shutdown", "backend terminated"])
def test_a_commit_that_is_ended_while_it_runs(own_postgres_server: PostgresServer, how: str) -> None:
    """COMMIT takes long (a deferred trigger sleeps in it): the server answers FATAL, which alone proves nothing."""
    server = own_postgres_server
    migration.upgrade(server.url)
    with SqlStateStore.from_url(server.url, lock_timeout=LIMIT) as store:
        user_metadata.create_all(store.engine)
        with store.engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(600); RETURN NULL; END $$"
            )
            connection.exec_driver_sql(
                "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
                "EXECUTE FUNCTION wait()"
            )
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = store.begin(claim)
        pid = transaction.handle.scalar(sa.text("SELECT pg_backend_pid()"))
        write(transaction)
        transaction.record(STATE, generation=0, transaction_number=1)
        with ThreadPoolExecutor(1) as pool:
            committing = pool.submit(transaction.commit)
            _wait_for_event(store, "PgSleep")
            if how == "fast shutdown":
                server.restart()
            else:
                with store.engine.connect() as connection:
                    connection.execute(sa.text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
            with pytest.raises(StoreCommitUnknownError, match="terminating connection"):
                committing.result()
        assert_outcome(store, claim, committed=False)
