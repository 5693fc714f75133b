"""BEGIN with the fence's SELECT, and the record with COMMIT, each in one message to PostgreSQL."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event, insert
from store_scene import ID, STATE, assert_nothing_is_checked_out, orders, recorded, rows, user_metadata, write

from dualwrite.errors import FencedError, StoreUnavailableError, TransactionControlError
from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT


class Messages:
    """What a client sent, as PostgreSQL's types of messages: Q is a simple query, P, B, E, S an extended one."""

    def __init__(self, proxy: TcpProxy) -> None:
        self.texts: list[bytes] = []
        for pattern in (b"BEGIN", b"SELECT fence", b"WITH recorded", b"COMMIT\0", b"SAVEPOINT"):
            proxy.on_client_bytes(pattern, lambda _, pattern=pattern: self.texts.append(pattern), when="answered", times=1000)

    def take(self) -> list[bytes]:
        texts, self.texts[:] = list(self.texts), []
        return texts


def test_a_transaction_takes_two_round_trips_instead_of_four(proxied_store: SqlStateStore, postgres_proxy: TcpProxy) -> None:
    """A message has been answered before the next one is sent, so the first pattern that it contains stands for it."""
    user_metadata.create_all(proxied_store.engine)
    claim = proxied_store.claim(ID, "tests", timeout=LIMIT)
    messages = Messages(postgres_proxy)
    transaction = proxied_store.begin(claim)
    begun = messages.take()
    transaction.record_at_commit(STATE, generation=0, transaction_number=1)
    assert messages.take() == []
    transaction.commit()
    committed = messages.take()
    assert set(begun) == {b"BEGIN", b"SELECT fence"}
    assert set(committed) == {b"WITH recorded", b"COMMIT\0"}
    assert proxied_store.read_claimed(claim).prepared_state == STATE


def test_the_savepoint_of_a_group_comes_with_its_first_statement(
    proxied_store: SqlStateStore, postgres_proxy: TcpProxy
) -> None:
    user_metadata.create_all(proxied_store.engine)
    claim = proxied_store.claim(ID, "tests", timeout=LIMIT)
    messages = Messages(postgres_proxy)
    transaction = proxied_store.begin(claim)
    assert set(messages.take()) == {b"BEGIN", b"SELECT fence"}
    transaction.begin_units()
    assert messages.take() == []
    write(transaction)
    assert messages.take().count(b"SAVEPOINT") == 1
    transaction.undo_units(ValueError())
    transaction.begin_unit()
    assert messages.take().count(b"SAVEPOINT") == 1
    transaction.handle.execute(sa.select(1))
    assert messages.take().count(b"SAVEPOINT") == 1
    transaction.record_at_commit(STATE, generation=0, transaction_number=1)
    transaction.commit()
    assert rows(proxied_store.engine) == 0
    assert proxied_store.read_claimed(claim).prepared_state == STATE


# --- what keeps the two apart -------------------------------------------------------------------------------------------------


def test_a_listener_for_begin_comes_first(postgres_store: SqlStateStore, postgres_claim: Claim) -> None:
    """A statement of its own is in the transaction, which it begins."""

    def listener(connection: sa.Connection) -> None:
        connection.exec_driver_sql("SET LOCAL application_name TO 'listener'")

    event.listen(postgres_store.engine, "begin", listener)
    transaction = postgres_store.begin(postgres_claim)
    assert transaction.handle.scalar(sa.text("SHOW application_name")) == "listener"
    transaction.record_at_commit(STATE, generation=0, transaction_number=1)
    transaction.commit()
    assert postgres_store.read_claimed(postgres_claim).prepared_state == STATE


def test_a_listener_for_commit_can_still_write(postgres_store: SqlStateStore, postgres_claim: Claim) -> None:
    def listener(connection: sa.Connection) -> None:
        connection.execute(insert(orders).values(id=2, item="by the listener"))
        raise_once()

    def raise_once() -> None:
        if not failed:
            failed.append(True)
            raise ValueError("the listener has failed")

    failed: list[bool] = []
    event.listen(postgres_store.engine, "commit", listener)
    transaction = recorded(postgres_store, postgres_claim, "record_at_commit")
    with pytest.raises(ValueError, match="listener"):
        transaction.commit()
    assert rows(postgres_store.engine) == 0
    again = postgres_store.claim(ID, "tests", timeout=LIMIT)  # whose own COMMIT writes the row of the listener
    event.remove(postgres_store.engine, "commit", listener)
    assert postgres_store.read_claimed(again).prepared_state is None


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE", "READ COMMITTED"])
def test_a_transaction_has_the_characteristics_of_its_engine(postgres_url: str, level: str) -> None:
    engine = sa.create_engine(
        postgres_url, isolation_level=level, execution_options={"postgresql_readonly": False, "postgresql_deferrable": True}
    )
    store = SqlStateStore(engine)
    user_metadata.create_all(engine)
    transaction = store.begin(store.claim(ID, "tests", timeout=LIMIT))
    shown = [
        transaction.handle.scalar(sa.text(f"SHOW transaction_{name}")) for name in ("isolation", "read_only", "deferrable")
    ]
    assert shown == [level.lower(), "off", "on"]
    transaction.rollback()
    engine.dispose()


# --- values -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["it's", 'a "quoted" id', "back\\slash", "100%", "{braces}", "größe", "'; DROP TABLE orders; --"]
)
def test_values_are_quoted(postgres_store: SqlStateStore, name: str) -> None:
    user_metadata.create_all(postgres_store.engine)
    claim = postgres_store.claim(name, f"owner {name}", timeout=LIMIT)
    recorded(postgres_store, claim, "record_at_commit").commit()
    assert postgres_store.read_claimed(claim).prepared_state == STATE
    newer = postgres_store.claim(name, f"other {name}", timeout=LIMIT)
    with pytest.raises(FencedError) as caught:
        postgres_store.begin(claim)
    assert caught.value.facts["current_owner"] == newer.owner


# --- errors -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["", "and begins another"])
def test_a_block_that_commits_by_itself_is_found(postgres_store: SqlStateStore, postgres_claim: Claim, then: str) -> None:
    """The mark is gone with its transaction: the record finds no row, and nothing more is committed."""
    transaction = postgres_store.begin(postgres_claim)
    transaction.record_at_commit(STATE, generation=0, transaction_number=1)
    raw = transaction.handle.connection.driver_connection
    raw.commit()
    raw.execute("SELECT 1")
    if then:
        write(transaction)
    with pytest.raises(TransactionControlError, match="WITHOUT its messages"):
        transaction.commit()
    assert transaction.is_surely_rolled_back
    assert rows(postgres_store.engine) == 0
    assert postgres_store.read_claimed(postgres_claim).transaction_number == 0
    assert_nothing_is_checked_out(postgres_store)


def test_a_fence_lost_just_before_commit(postgres_store: SqlStateStore, postgres_claim: Claim) -> None:
    transaction = recorded(postgres_store, postgres_claim, "record_at_commit")
    newer = postgres_store.claim(ID, "theirs", timeout=LIMIT)
    with pytest.raises(FencedError) as caught:
        transaction.commit()
    assert caught.value.facts["fence"] == postgres_claim.fence
    assert transaction.is_surely_rolled_back
    assert rows(postgres_store.engine) == 0
    assert postgres_store.read_claimed(newer).prepared_state is None
    assert_nothing_is_checked_out(postgres_store)


def test_the_reason_cannot_be_looked_up(proxied_store: SqlStateStore, postgres_proxy: TcpProxy, postgres_store: Any) -> None:
    """The record has failed, and then the database is away: nothing was committed, but why is not known."""
    user_metadata.create_all(proxied_store.engine)
    claim = proxied_store.claim(ID, "tests", timeout=LIMIT)
    transaction = recorded(proxied_store, claim, "record_at_commit")
    postgres_store.claim(ID, "theirs", timeout=LIMIT)

    def away(link: Link) -> None:
        postgres_proxy.refuse()  # first: the store connects again at once
        link.cut()

    postgres_proxy.on_client_bytes(b"ROLLBACK", away)
    with pytest.raises(StoreUnavailableError):
        transaction.commit()
    assert transaction.is_surely_rolled_back
    assert rows(postgres_store.engine) == 0


def test_connections_that_died_in_the_pool(postgres_store: SqlStateStore, postgres_claim: Claim) -> None:
    """All of them are replaced: the first attempt meets one, SQLAlchemy's meets another and drops the rest."""

    def kill_them() -> None:
        connections = [postgres_store.engine.connect() for _ in range(4)]
        pids = [connection.scalar(sa.text("SELECT pg_backend_pid()")) for connection in connections]
        for connection in connections:
            connection.close()
        with psycopg.connect(postgres_store.engine.url.render_as_string(False).replace("+psycopg", "")) as killer:
            for pid in pids:
                killer.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    kill_them()
    recorded(postgres_store, postgres_claim, "record_at_commit").commit()
    kill_them()
    assert postgres_store.read_claimed(postgres_claim).prepared_state == STATE
    assert rows(postgres_store.engine) == 1
