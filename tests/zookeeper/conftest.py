"""Fixtures of the ZooKeeper tests: a separate subtree of the session's server for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient
from zookeeper_scene import ID, SHORT_SESSION

from dualwrite.stores.base import Claim
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.testing.proxy import TcpProxy
from fixtures.pace import LIMIT
from fixtures.zookeeper_client import zookeeper_client
from fixtures.zookeeper_server import ZooKeeperServer

_chroots = itertools.count(1)


@pytest.fixture
def own_server() -> Iterator[ZooKeeperServer]:
    """A separate ZooKeeper for one test, to kill, pause and restart."""
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def chroot() -> str:
    """A subtree that no other test uses; it is not created yet."""
    return f"/test/{next(_chroots)}"


@pytest.fixture
def url(zookeeper_server: ZooKeeperServer, chroot: str) -> str:
    return zookeeper_server.url_at(zookeeper_server.port, chroot)


@pytest.fixture
def store(url: str) -> Iterator[ZooKeeperStore]:
    with ZooKeeperStore.from_url(url) as made:
        yield made


@pytest.fixture
def rival(url: str) -> Iterator[ZooKeeperStore]:
    """A second store on the same subtree, with its own session."""
    with ZooKeeperStore.from_url(url) as made:
        yield made


@pytest.fixture
def plain(zookeeper_server: ZooKeeperServer, store: ZooKeeperStore, chroot: str) -> Iterator[KazooClient]:
    """Another client on the same subtree."""
    store.check()  # creates the chroot
    with zookeeper_client(f"{zookeeper_server.hosts}{chroot}") as client:
        yield client


@pytest.fixture
def claim(store: ZooKeeperStore) -> Claim:
    """The first claim of the id."""
    return store.claim(ID, "tests", timeout=LIMIT)


@pytest.fixture
def proxy(zookeeper_server: ZooKeeperServer) -> Iterator[TcpProxy]:
    """A proxy in front of the server, which breaks connections."""
    with TcpProxy("127.0.0.1", zookeeper_server.port) as made:
        yield made


@pytest.fixture
def proxied_store(zookeeper_server: ZooKeeperServer, proxy: TcpProxy, chroot: str) -> Iterator[ZooKeeperStore]:
    """A store on the same subtree whose connection goes through `proxy`, with a short session."""
    through = zookeeper_server.url_at(proxy.port, chroot)
    made = ZooKeeperStore.from_url(through, session_timeout=SHORT_SESSION, connect_timeout=LIMIT, request_timeout=LIMIT)
    yield made
    proxy.clear()
    proxy.refuse(refusing=False)
    proxy.cut()  # a silenced connection would make the client wait when it closes its session
    made.close()
