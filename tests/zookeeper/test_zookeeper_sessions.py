"""Sessions that expire between the steps, paused writers, user-supplied clients, forks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kazoo.client import KazooClient
from zookeeper_scene import ID, ORDER, SHORT_SESSION, STATE, assert_outcome, expire, recorded, until

from dualwrite.errors import StoreUnavailableError, UsageError
from dualwrite.stores.base import Claim
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.testing.proxy import TcpProxy
from fixtures.pace import LIMIT
from fixtures.zookeeper_server import ZooKeeperServer

# --- sessions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before record", "before commit"])
def test_a_session_that_expired_in_a_transaction_changes_nothing(
    zookeeper_server: ZooKeeperServer, store: ZooKeeperStore, claim: Claim, when: str
) -> None:
    """Kazoo opens a new session; the condition is the version, not the session."""
    transaction = store.begin(claim)
    transaction.handle.create(ORDER, b"chair")
    if when == "before record":
        expire(zookeeper_server.hosts, store.client)
    transaction.record(STATE, generation=0, transaction_number=1)
    if when == "before commit":
        expire(zookeeper_server.hosts, store.client)
    transaction.commit()
    assert_outcome(store, claim, committed=True)


@pytest.mark.slow
def test_a_claim_waits_for_the_end_of_a_long_outage(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    proxied_store.check()
    proxy.refuse()
    proxy.cut()
    with ThreadPoolExecutor(1) as thread:
        claiming = thread.submit(proxied_store.claim, ID, "ours", timeout=LIMIT)
        time.sleep(SHORT_SESSION * 2)
        assert not claiming.done()
        proxy.refuse(refusing=False)
        assert claiming.result().fence == 2


@pytest.mark.slow
def test_reads_time_out(proxied_store: ZooKeeperStore, proxy: TcpProxy, claim: Claim) -> None:
    transaction = proxied_store.begin(claim)
    batch = transaction.handle
    proxied_store._connection._connect_timeout = 0.3
    proxy.refuse()
    proxy.cut()
    until(lambda: not proxied_store.client.connected)
    for call in (
        lambda: proxied_store.read(ID),
        proxied_store.list,
        proxied_store.check,
        lambda: proxied_store.begin(claim),
        lambda: batch.get("/"),
        lambda: transaction.record(STATE, generation=0, transaction_number=1),
    ):
        with pytest.raises(StoreUnavailableError):
            call()


@pytest.mark.slow
def test_a_store_connects_once_its_server_has_started(own_server: ZooKeeperServer) -> None:
    own_server.stop()
    with ZooKeeperStore.from_url(own_server.url, connect_timeout=0.5) as store:
        with pytest.raises(StoreUnavailableError, match="refused"):
            store.check()
        own_server.start()
        assert store.claim(ID, "tests", timeout=LIMIT).fence == 1


# --- clients --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [True, False])
def test_a_client_of_the_user_stays_open(zookeeper_server: ZooKeeperServer, chroot: str, started: bool) -> None:
    client = KazooClient(f"{zookeeper_server.hosts}{chroot}")
    if started:
        client.start_async().wait(LIMIT)
    with ZooKeeperStore(client) as store:
        claim = store.claim(ID, "tests", timeout=LIMIT)
        recorded(store, claim).commit()
    assert client.connected
    assert client.get(ORDER)[0] == b"chair"
    with pytest.raises(UsageError, match="closed"):
        store.read(ID)
    assert not client.state_listeners
    client.stop()
    client.close()


def test_a_client_that_the_user_has_stopped(zookeeper_server: ZooKeeperServer, chroot: str) -> None:
    client = KazooClient(f"{zookeeper_server.hosts}{chroot}")
    with ZooKeeperStore(client) as store:
        store.check()
        client.stop()
        with pytest.raises(UsageError, match="stopped"):
            store.read(ID)
        client.start()
        assert store.read(ID) is None
    client.stop()
    client.close()


def test_a_closed_store_refuses_calls_and_leaves_no_thread(url: str) -> None:
    before = threading.active_count()
    store = ZooKeeperStore.from_url(url)
    claim = store.claim(ID, "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    store.close()
    store.close()
    transaction.rollback()
    for call in (lambda: store.read(ID), lambda: store.begin(claim), store.check):
        with pytest.raises(UsageError, match="closed"):
            call()
    until(lambda: threading.active_count() == before)


FORKED = """
import os, sys
from dualwrite.errors import UsageError
from dualwrite.stores.zookeeper import ZooKeeperStore

store = ZooKeeperStore.from_url(sys.argv[1])
claim = store.claim("orders", "parent", timeout=60)
pid = os.fork()
if pid == 0:
    try:
        store.read("orders")
    except UsageError as error:
        print(error, flush=True)
    store.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert store.read_claimed(claim).owner == "parent"
store.close()
"""


def test_a_forked_child_is_refused_and_does_not_touch_the_parents_session(url: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, url], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not survive a fork" in done.stdout
