"""COMMIT on MariaDB: what certainly failed, what is unknown, and how the outcome is found (rule F8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from store_scene import (
    ID,
    STATE,
    assert_nothing_is_checked_out,
    assert_outcome,
    first_claim,
    recorded,
    rows,
    user_metadata,
)

from dualwrite import migration
from dualwrite.errors import FencedError, StoreCommitFailedError, StoreCommitUnknownError
from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.mariadb import MariaDBServer
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.pace import LIMIT, done

COMMIT = b"\x03COMMIT"
UPDATE = b"UPDATE `test`.kafka_transaction_state"


@pytest.fixture
def proxied_claim(proxied_mariadb_store: SqlStateStore) -> Claim:
    """Here through the proxy of MariaDB."""
    return first_claim(proxied_mariadb_store)


@contextmanager
def commits_held_back(store: SqlStateStore) -> Iterator[sa.Connection]:
    """Each COMMIT waits, as for a backup, until the block ends."""
    with store.engine.connect() as connection:
        connection.exec_driver_sql("FLUSH TABLES WITH READ LOCK")
        yield connection
        connection.exec_driver_sql("UNLOCK TABLES")


# --- certainly failed -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_commit_that_waited_too_long_for_a_backup_lock(
    mariadb_url: str, mariadb_store: SqlStateStore, mariadb_claim: Claim
) -> None:
    with SqlStateStore.from_url(mariadb_url, lock_timeout=1) as store:
        transaction = recorded(store, mariadb_claim)
        with commits_held_back(mariadb_store), pytest.raises(StoreCommitFailedError, match="1205"):
            transaction.commit()
        assert_outcome(store, mariadb_claim, committed=False)


def test_a_server_that_became_read_only(
    mariadb_server: MariaDBServer, mariadb_store: SqlStateStore, mariadb_claim: Claim
) -> None:
    """As during a switchover to another primary."""
    with mariadb_store.engine.begin() as connection:
        connection.exec_driver_sql("CREATE OR REPLACE USER weak@'127.0.0.1'")
        connection.exec_driver_sql("GRANT ALL ON test.* TO weak@'127.0.0.1'")
    with SqlStateStore.from_url(mariadb_server.url_at(mariadb_server.port, "test", user="weak")) as store:
        transaction = recorded(store, mariadb_claim)
        with mariadb_store.engine.connect() as connection:
            connection.exec_driver_sql("SET GLOBAL read_only = ON")
            try:
                with pytest.raises(StoreCommitFailedError, match="read-only"):
                    transaction.commit()
            finally:
                connection.exec_driver_sql("SET GLOBAL read_only = OFF")
        assert_outcome(store, mariadb_claim, committed=False)


def test_a_transaction_that_was_lost_after_record_is_not_committed(mariadb_store: SqlStateStore, mariadb_claim: Claim) -> None:
    """Nothing should be written after `record`; DDL at that point commits, without our COMMIT."""
    transaction = mariadb_store.begin(mariadb_claim)
    transaction.record(STATE, generation=0, transaction_number=1)
    transaction.handle.connection.rollback()
    with pytest.raises(StoreCommitFailedError, match="no transaction any more"):
        transaction.commit()
    assert_outcome(mariadb_store, mariadb_claim, committed=False)


# --- unknown --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [Link.cut, Link.cut_with_reset])
def test_a_connection_lost_while_mariadb_commits(
    proxied_mariadb_store: SqlStateStore,
    mariadb_proxy: TcpProxy,
    mariadb_store: SqlStateStore,
    proxied_claim: Claim,
    cut: Callable[[Link], None],
) -> None:
    """The COMMIT continues without us; a read would show "not committed", and the next claim waits for it."""
    transaction = recorded(proxied_mariadb_store, proxied_claim)
    with ThreadPoolExecutor(1) as thread:
        with commits_held_back(mariadb_store):
            mariadb_proxy.on_client_bytes(COMMIT, cut, when="after")
            with pytest.raises(StoreCommitUnknownError):
                transaction.commit()
            assert mariadb_store.read_claimed(proxied_claim).transaction_number == 0
            claiming = thread.submit(mariadb_store.claim, ID, "tests", timeout=LIMIT, expected_fence=proxied_claim.fence)
        again = done(claiming)
    assert mariadb_store.read_claimed(again).prepared_state == STATE
    assert rows(mariadb_store.engine) == 1


@pytest.mark.parametrize("how", ["KILL", "KILL QUERY"])
def test_an_administrator_kills_the_connection_in_commit(mariadb_store: SqlStateStore, mariadb_claim: Claim, how: str) -> None:
    transaction = recorded(mariadb_store, mariadb_claim)
    number = transaction.handle.scalar(sa.text("SELECT connection_id()"))
    state = sa.text("SELECT state FROM information_schema.PROCESSLIST WHERE id = :id AND info = 'COMMIT'")
    with ThreadPoolExecutor(1) as thread:
        with commits_held_back(mariadb_store) as admin:
            committing = thread.submit(transaction.commit)
            while admin.scalar(state, {"id": number}) is None:
                assert not committing.done()
            admin.exec_driver_sql(f"{how} {number}")
            with pytest.raises(StoreCommitUnknownError):
                done(committing)
        assert_outcome(mariadb_store, mariadb_claim, committed=False)


def test_an_administrator_kills_the_connection_before_commit(mariadb_store: SqlStateStore, mariadb_claim: Claim) -> None:
    transaction = recorded(mariadb_store, mariadb_claim)
    number = transaction.handle.scalar(sa.text("SELECT connection_id()"))
    with mariadb_store.engine.connect() as connection:
        connection.exec_driver_sql(f"KILL {number}")
    with pytest.raises(StoreCommitUnknownError):
        transaction.commit()
    assert_outcome(mariadb_store, mariadb_claim, committed=False)


@pytest.mark.slow
def test_a_server_that_shuts_down_before_commit(own_mariadb_server: MariaDBServer) -> None:
    migration.upgrade(own_mariadb_server.url)
    with SqlStateStore.from_url(own_mariadb_server.url) as store:
        user_metadata.create_all(store.engine)
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(store, claim)
        own_mariadb_server.restart()
        with pytest.raises(StoreCommitUnknownError):
            transaction.commit()
        assert_outcome(store, claim, committed=False)


@pytest.mark.slow
def test_a_server_that_hangs_in_commit(own_mariadb_server: MariaDBServer) -> None:
    """With the user's read timeout, COMMIT becomes unknown; the server finds it in its socket when it continues."""
    migration.upgrade(own_mariadb_server.url)
    with SqlStateStore.from_url(f"{own_mariadb_server.url}&read_timeout=1") as store:
        user_metadata.create_all(store.engine)
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(store, claim)
        own_mariadb_server.pause()
        with pytest.raises(StoreCommitUnknownError, match="timed out"):
            transaction.commit()
        own_mariadb_server.resume()
        assert_outcome(store, claim, committed=True)


# --- claims without an answer ----------------------------------------------------------------------------------------------


def test_a_claim_on_mariadb_survives_a_broken_connection(proxied_mariadb_store: SqlStateStore, mariadb_proxy: TcpProxy) -> None:
    assert proxied_mariadb_store.claim(ID, "ours", timeout=LIMIT).fence == 1
    mariadb_proxy.on_client_bytes(UPDATE, Link.cut, times=2)
    assert proxied_mariadb_store.claim(ID, "ours", timeout=LIMIT).fence == 2
    mariadb_proxy.on_client_bytes(COMMIT, Link.cut, when="answered")
    assert proxied_mariadb_store.claim(ID, "ours", timeout=LIMIT).fence == 3  # it recognizes its own claim
    mariadb_proxy.on_client_bytes(COMMIT, Link.cut_with_reset, when="answered")
    assert proxied_mariadb_store.claim(ID, "ours", timeout=LIMIT, expected_fence=3).fence == 4
    assert_nothing_is_checked_out(proxied_mariadb_store)


def test_a_claim_with_expected_fence_does_not_mistake_a_later_claim_for_its_own(
    proxied_mariadb_store: SqlStateStore, mariadb_proxy: TcpProxy, mariadb_store: SqlStateStore
) -> None:
    first = proxied_mariadb_store.claim(ID, "ours", timeout=LIMIT)

    def claim_meanwhile(link: Link) -> None:
        mariadb_store.claim(ID, "theirs", timeout=LIMIT)
        link.cut()

    mariadb_proxy.on_client_bytes(UPDATE, claim_meanwhile)
    with pytest.raises(FencedError) as caught:
        proxied_mariadb_store.claim(ID, "ours", timeout=LIMIT, expected_fence=first.fence)
    assert (caught.value.current_fence, caught.value.current_owner) == (2, "theirs")
