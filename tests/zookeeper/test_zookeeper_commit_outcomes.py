"""Commits without an answer, as only ZooKeeper has them: silence, multis that come late, dead servers, expired sessions.

The conformance suite cuts the connection, and `tests/crash` does so under a whole writer.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from kazoo.exceptions import BadVersionError, RuntimeInconsistency
from zookeeper_scene import ID, MULTI, ORDER, SHORT_SESSION, assert_outcome, recorded, until

from dualwrite.errors import (
    FencedError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
)
from dualwrite.stores.base import Claim
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperTransaction
from dualwrite.testing.proxy import Link, TcpProxy
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


# --- unknown --------------------------------------------------------------------------------------------------------------

SILENCES: dict[str, tuple[Callable[[TcpProxy], None], bool]] = {
    "before the multi arrives": (lambda p: p.on_client_bytes(MULTI, Link.blackhole), False),
    "after it was answered": (lambda p: p.on_client_bytes(MULTI, Link.blackhole, when="answered"), True),
    "of the server": (lambda p: p.on_client_bytes(MULTI, lambda link: link.blackhole("server_to_client")), True),
}


@pytest.mark.parametrize("silence", SILENCES)
def test_silence_in_commit(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim, silence: str) -> None:
    """Until the session or the limit for a response ends."""
    break_it, committed = SILENCES[silence]
    transaction = recorded(proxied_store, claim)
    if silence == "of the server":
        proxied_store._connection._request_timeout = 0.3
    break_it(proxy)
    with pytest.raises(StoreCommitUnknownError) as caught:
        transaction.commit()
    assert not caught.value.retriable
    proxied_store._connection._request_timeout = LIMIT
    assert_outcome(proxied_store, claim, committed=committed)


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
    operations = transaction.handle.operations
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
