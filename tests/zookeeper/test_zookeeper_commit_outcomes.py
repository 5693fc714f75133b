"""The heart of the contract: does a failed commit certainly leave nothing behind, or is its outcome unknown?"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, ConnectionLoss, RuntimeInconsistency
from zookeeper_scene import ID, MULTI, ORDER, SHORT_SESSION, STATE, assert_outcome, recorded, until

from dualwrite.errors import (
    FencedError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreUnavailableError,
    WriterClosedError,
)
from dualwrite.stores.base import Claim
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperTransaction
from dualwrite.testing.proxy import Link, TcpProxy
from dualwrite.testing.zookeeper import ZooKeeperServer
from fixtures.pace import LIMIT


@pytest.fixture
def claim(proxied_store: ZooKeeperStore) -> Claim:
    return proxied_store.claim(ID, "tests", timeout=LIMIT)


# --- certainly failed -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_connection_at_commit(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    transaction = recorded(proxied_store, claim)
    proxied_store._connection._connect_timeout = 0.5
    proxy.refuse()
    proxy.cut()
    until(lambda: not proxied_store.client.connected)
    with pytest.raises(StoreCommitFailedError, match="nothing was sent") as caught:
        transaction.commit()
    assert caught.value.retriable
    proxy.refuse(refusing=False)
    assert_outcome(proxied_store, claim, committed=False)


def test_a_connection_lost_before_record(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    transaction = proxied_store.begin(claim)
    transaction.handle.create(ORDER)
    proxy.cut()
    transaction.record(STATE, generation=0, transaction_number=1)  # over a new connection that kazoo has made
    transaction.commit()
    assert_outcome(proxied_store, claim, committed=True)


def test_an_unreachable_server_at_record(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    transaction = proxied_store.begin(claim)
    proxied_store._connection._connect_timeout = 0.5
    proxy.refuse()
    proxy.cut()
    until(lambda: not proxied_store.client.connected)
    with pytest.raises(StoreUnavailableError) as caught:
        transaction.record(STATE, generation=0, transaction_number=1)
    assert caught.value.retriable
    transaction.rollback()


def test_a_connection_lost_between_record_and_commit(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    """Kazoo reconnects, and the multi is sent over the new connection; or it notices while the multi is in flight."""
    transaction = recorded(proxied_store, claim)
    proxy.cut()
    try:
        transaction.commit()
    except StoreCommitUnknownError:
        assert_outcome(proxied_store, claim, committed=False)
    else:
        assert_outcome(proxied_store, claim, committed=True)


# --- unknown --------------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Callable[[TcpProxy], None], bool]] = {
    "cut before the multi arrives": (lambda p: p.on_client_bytes(MULTI, Link.cut), False),
    "reset before the multi arrives": (lambda p: p.on_client_bytes(MULTI, Link.cut_with_reset), False),
    "silent before the multi arrives": (lambda p: p.on_client_bytes(MULTI, Link.blackhole), False),
    "cut after the multi was answered": (lambda p: p.on_client_bytes(MULTI, Link.cut, when="answered"), True),
    "reset after the multi was answered": (lambda p: p.on_client_bytes(MULTI, Link.cut_with_reset, when="answered"), True),
    "silent after the multi was answered": (lambda p: p.on_client_bytes(MULTI, Link.blackhole, when="answered"), True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_connection_lost_in_commit(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim, fault: str) -> None:
    break_it, committed = FAULTS[fault]
    transaction = recorded(proxied_store, claim)
    break_it(proxy)
    with pytest.raises(StoreCommitUnknownError) as caught:
        transaction.commit()
    assert not caught.value.retriable
    assert isinstance(caught.value.__cause__, ConnectionLoss)
    transaction.rollback()
    with pytest.raises(WriterClosedError):
        transaction.commit()
    assert_outcome(proxied_store, claim, committed=committed)


@pytest.mark.parametrize("cut", [Link.cut, Link.cut_with_reset])
def test_a_connection_cut_while_the_server_works(
    proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim, cut: Callable[[Link], None]
) -> None:
    """It may or may not have committed; the next claim makes the outcome final, and the row shows it."""
    transaction = recorded(proxied_store, claim)
    proxy.on_client_bytes(MULTI, cut, when="after")
    with pytest.raises(StoreCommitUnknownError):
        transaction.commit()
    again = proxied_store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
    committed = proxied_store.read_claimed(again).transaction_number == 1
    assert (proxied_store.client.exists(ORDER) is not None) is committed


@pytest.mark.slow
def test_no_answer_within_the_limit(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    transaction = recorded(proxied_store, claim)
    proxied_store._connection._request_timeout = 0.3
    proxy.on_client_bytes(MULTI, lambda link: link.blackhole("server_to_client"))
    with pytest.raises(StoreCommitUnknownError, match="did not answer within the limit"):
        transaction.commit()
    proxied_store._connection._request_timeout = 5
    assert_outcome(proxied_store, claim, committed=True)


@pytest.mark.slow
def test_an_interrupt_while_waiting_for_the_answer(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    transaction = recorded(proxied_store, claim)

    def interrupt(link: Link) -> None:
        link.blackhole("server_to_client")
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    proxy.on_client_bytes(MULTI, interrupt)
    with pytest.raises(KeyboardInterrupt):
        transaction.commit()
    transaction.rollback()
    assert_outcome(proxied_store, claim, committed=True)


# --- a multi that comes late ----------------------------------------------------------------------------------------------


def test_a_multi_delayed_by_the_network(
    proxied_store: ZooKeeperStore, proxy: TcpProxy, store: ZooKeeperStore, claim: Claim
) -> None:
    """It reaches the server over the old connection, after another's claim: refused, nothing of it applied."""
    transaction = recorded(proxied_store, claim)
    proxied_store._connection._request_timeout = 0.3
    held: list[Link] = []

    def hold(link: Link) -> None:
        link.blackhole("client_to_server")
        held.append(link)

    proxy.on_client_bytes(MULTI, hold)
    with pytest.raises(StoreCommitUnknownError):
        transaction.commit()
    theirs = store.claim(ID, "theirs", timeout=LIMIT)
    held[0].resume()
    proxied_store._connection._request_timeout = 5
    with pytest.raises(FencedError):
        proxied_store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
    assert store.client.exists(ORDER) is None
    assert store.read_claimed(theirs).prepared_state is None


@pytest.mark.parametrize("claimant", ["another", "ourselves"])
def test_a_multi_delayed_by_kazoo(
    proxied_store: ZooKeeperStore, proxy: TcpProxy, store: ZooKeeperStore, claim: Claim, claimant: str
) -> None:
    """A request made while kazoo is connecting is queued, and sent when it is connected again.

    The store avoids that, except in the moment between its check of the connection and its request, which the test makes
    long: it passes the multi to kazoo while kazoo is connecting.
    """
    transaction = recorded(proxied_store, claim)
    assert isinstance(transaction, ZooKeeperTransaction)
    operations = [transaction._ours, *transaction.handle.operations]
    proxy.refuse()
    proxy.cut()
    until(lambda: not proxied_store.client.connected)
    request = proxied_store.client.transaction()
    request.operations.extend(operations)
    late = request.commit_async()
    time.sleep(0.1)
    assert not late.ready()
    if claimant == "another":
        theirs = store.claim(ID, "theirs", timeout=LIMIT)
        proxy.refuse(refusing=False)
        results = late.get(timeout=LIMIT)
        assert [type(each) for each in results] == [BadVersionError, RuntimeInconsistency]
        assert store.client.exists(ORDER) is None
        assert store.read_claimed(theirs).prepared_state is None
    else:
        proxy.refuse(refusing=False)
        assert_outcome(proxied_store, claim, committed=True)  # one queue: the multi came before the claim
        assert late.ready()


def test_kazoo_never_resends_a_multi(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    transaction = recorded(proxied_store, claim)
    seen: list[Link] = []

    def cut(link: Link) -> None:
        seen.append(link)
        link.cut()

    proxy.on_client_bytes(MULTI, cut, times=10)
    with pytest.raises(StoreCommitUnknownError):
        transaction.commit()
    until(lambda: proxied_store.client.connected)
    assert proxied_store.read_claimed(claim).transaction_number == 0
    assert len(seen) == 1


# --- servers that die, sessions that end ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_killed_before_it_receives_the_multi(own_server: ZooKeeperServer) -> None:
    with ZooKeeperStore.from_url(own_server.url, session_timeout=SHORT_SESSION) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(store, claim)
        own_server.pause()
        with ThreadPoolExecutor(1) as thread:
            committing = thread.submit(transaction.commit)
            time.sleep(0.2)
            own_server.kill()
            with pytest.raises(StoreCommitUnknownError):
                committing.result()
        own_server.start()
        assert_outcome(store, claim, committed=False)


@pytest.mark.slow
def test_a_server_killed_after_its_answer(own_server: ZooKeeperServer) -> None:
    def kill(link: Link) -> None:
        own_server.kill()
        link.cut()

    with TcpProxy("127.0.0.1", own_server.port) as proxy:
        store = ZooKeeperStore.from_url(own_server.url_at(proxy.port), session_timeout=SHORT_SESSION)
        with store:
            claim = store.claim(ID, "tests", timeout=LIMIT)
            transaction = recorded(store, claim)
            proxy.on_client_bytes(MULTI, kill, when="answered")
            with pytest.raises(StoreCommitUnknownError):
                transaction.commit()
            own_server.start()
            assert_outcome(store, claim, committed=True)


@pytest.mark.slow
def test_a_server_that_stops_in_commit_for_longer_than_the_session(own_server: ZooKeeperServer) -> None:
    """The multi waits in the stopped server's socket, and is applied, or not, when the server continues."""
    with ZooKeeperStore.from_url(own_server.url, session_timeout=SHORT_SESSION) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(store, claim)
        own_server.pause()
        with pytest.raises(StoreCommitUnknownError):
            transaction.commit()
        time.sleep(SHORT_SESSION)
        own_server.resume()
        again = store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
        committed = store.read_claimed(again).transaction_number == 1
        assert (store.client.exists(ORDER) is not None) is committed


@pytest.mark.slow
@pytest.mark.parametrize("committed", [False, True])
def test_a_session_that_expires_in_commit(
    proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim, committed: bool
) -> None:
    transaction = recorded(proxied_store, claim)
    session = proxied_store.client.client_id[0]

    def keep_away(link: Link) -> None:
        proxy.refuse()
        link.cut()

    proxy.on_client_bytes(MULTI, keep_away, when="answered" if committed else "before")
    with pytest.raises(StoreCommitUnknownError):
        transaction.commit()
    time.sleep(SHORT_SESSION + 1)
    proxy.refuse(refusing=False)
    assert_outcome(proxied_store, claim, committed=committed)
    assert proxied_store.client.client_id[0] != session


def test_the_outcome_is_read_with_a_client_of_the_user(
    zookeeper_server: ZooKeeperServer, proxy: TcpProxy, chroot: str, store: ZooKeeperStore
) -> None:
    store.check()
    client = KazooClient(f"127.0.0.1:{proxy.port}{chroot}", timeout=SHORT_SESSION)
    with ZooKeeperStore(client) as users:
        claim = users.claim(ID, "tests", timeout=LIMIT)
        transaction = recorded(users, claim)
        proxy.on_client_bytes(MULTI, Link.cut, when="answered")
        with pytest.raises(StoreCommitUnknownError):
            transaction.commit()
        assert_outcome(users, claim, committed=True)
    assert client.connected
    client.stop()
    client.close()
