"""A scene on ZooKeeper: nothing waits, versions are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from kazoo.client import KazooClient
from sql_conformance import cut_once

from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.key_values import ROWS
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.paths import path_of
from dualwrite.stores.zookeeper.zookeeper_transaction import ZooKeeperBatch
from dualwrite.testing.proxy import TcpProxy
from dualwrite.testing.stores import ClaimsWait, LeasesEnd, StoreCapabilities, StoreScene
from fixtures.pace import LIMIT
from fixtures.zookeeper_server import ZooKeeperServer

_COMMITS = (
    b'"fence"',  # a row is written
    b"\0\0\0\4ours",  # the whole content of the node of a lease
    b"\0\0\0\2\0\xff\xff\xff\xff",  # a node is deleted, as that of a lease: the header of the operation in a multi
)


class ZooKeeperScene(StoreScene):
    """A scene in a part of a server's tree.

    Args:
        server: The server.
        chroot: The part of its tree.
        proxy: The proxy for the stores' connections.
    """

    capabilities: ClassVar[StoreCapabilities] = StoreCapabilities(
        claims_wait=ClaimsWait.NEVER, crashes=True, cuts_commits=True, leases_end=LeasesEnd.WITH_STORE
    )

    def __init__(self, server: ZooKeeperServer, chroot: str, proxy: TcpProxy) -> None:
        super().__init__()
        self._url = server.url_at(server.port, chroot)
        self._proxied_url = server.url_at(proxy.port, chroot)
        self._proxy = proxy
        with ZooKeeperStore.from_url(self._url) as store:
            store.check()  # creates the chroot
        self._client = KazooClient(f"{server.hosts}{chroot}")
        self._client.start()
        self._client.ensure_path("/numbers")

    def open(self) -> ZooKeeperStore:
        return ZooKeeperStore.from_url(self._proxied_url, session_timeout=4, connect_timeout=LIMIT, request_timeout=LIMIT)

    def put(self, handle: ZooKeeperBatch, number: int) -> None:
        handle.create(f"/numbers/{number}")

    def numbers(self) -> list[int]:
        self._client.sync("/")
        return [int(name) for name in self._client.get_children("/numbers")]

    def corrupt(self, transactional_id: str) -> None:
        self._client.set(path_of((ROWS, transactional_id)), b'{"fence": "many"}')

    def ways_to_end(self, handle: ZooKeeperBatch) -> Mapping[str, Callable[[], Any]]:
        return {call.__name__: call for call in (handle.commit, handle.commit_async, handle.__enter__, handle.__exit__)}

    def opener(self) -> Callable[[], TxnStateStore]:
        return partial(store_from_url, self._url)

    def cut_next_commit(self, *, arrives: bool) -> Callable[[], bool]:
        return cut_once(self._proxy, _COMMITS, arrives=arrives)

    def cut_connections(self) -> None:
        self._proxy.cut()

    def remove(self, handle: ZooKeeperBatch, number: int) -> None:
        handle.delete(f"/numbers/{number}")

    def crash(self, store: TxnStateStore) -> None:
        """Break the store's connection: a transaction has nothing on the server before its multi."""
        self._proxy.cut()
        store.close()

    def close(self) -> None:
        self._client.stop()
        self._client.close()
