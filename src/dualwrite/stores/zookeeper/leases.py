"""Leases as ephemeral nodes: each lasts as long as its owner's session."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError

from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.state_row import MAX_OWNER_LENGTH
from dualwrite.stores.zookeeper.nodes import StateNodes
from dualwrite.stores.zookeeper.paths import LEASE_ROOT, lease_path, transactional_id_of


class ZooKeeperLeases(LeaseStore):
    """The leases of a ZooKeeper tree, below `/kafka_transaction_lease`; their `seconds` have no meaning.

    Args:
        nodes: The store's nodes, for the connection and its retries.
        change_timeout: Seconds within which a change must succeed.
    """

    def __init__(self, nodes: StateNodes, change_timeout: float) -> None:
        self._nodes = nodes
        self._request = nodes.connection.request
        self._timeout = change_timeout

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore."""
        del seconds
        return frozenset(
            name for name in sorted(ids) if self._change(name, partial(self._acquired, name, owner), "leasing an id")
        )

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """See LeaseStore; what an expired session had leased is lost."""
        del seconds
        return frozenset(
            name for name in sorted(ids) if self._change(name, partial(self._kept, name, owner), "renewing a lease")
        )

    def release(self, ids: Collection[str], owner: str) -> None:
        """See LeaseStore."""
        for name in sorted(ids):
            self._change(name, partial(self._released, name, owner), "releasing an id")

    def entries(self, prefix: str = "") -> list[Lease]:
        """See LeaseStore."""
        found = self._nodes.query(partial(self._entries, prefix), "listing the leases")
        return sorted(found, key=lambda each: each.transactional_id)

    # --- one node ---------------------------------------------------------------------------------------------------------

    def _acquired(self, transactional_id: str, owner: str, deadline: float) -> bool:
        if self._read(transactional_id, deadline) is None:
            self._create(transactional_id, owner, deadline)  # NodeExistsError: another owner was faster; `change` tries again
            return True
        return self._kept(transactional_id, owner, deadline)

    def _kept(self, transactional_id: str, owner: str, deadline: float) -> bool:
        """Whether it is ours. A node of an earlier session of ours, which will expire, is replaced."""
        read = self._read(transactional_id, deadline)
        if read is None or read[0] != _data(owner):
            return False
        stat = read[1]
        if stat.ephemeralOwner != self._nodes.connection.client.client_id[0]:
            self._delete(transactional_id, stat.version, deadline)
            self._create(transactional_id, owner, deadline)
        return True

    def _released(self, transactional_id: str, owner: str, deadline: float) -> None:
        read = self._read(transactional_id, deadline)
        if read is not None and read[0] == _data(owner):
            self._delete(transactional_id, read[1].version, deadline)

    def _read(self, transactional_id: str, deadline: float | None) -> tuple[bytes, Any] | None:
        path = lease_path(transactional_id)
        try:
            _, read = self._request(lambda client: [client.sync_async(path), client.get_async(path)], deadline=deadline)
        except NoNodeError:
            return None
        return read[0], read[1]

    def _create(self, transactional_id: str, owner: str, deadline: float) -> None:
        path, acl = lease_path(transactional_id), self._nodes.connection.acl

        def create() -> None:
            self._request(lambda client: client.create_async(path, _data(owner), acl=acl, ephemeral=True), deadline=deadline)

        try:
            create()
        except NoNodeError:
            with suppress(NodeExistsError):  # another client was faster
                self._request(lambda client: client.create_async(LEASE_ROOT, b"", acl=acl), deadline=deadline)
            create()

    def _delete(self, transactional_id: str, version: int, deadline: float) -> None:
        path = lease_path(transactional_id)
        self._request(lambda client: client.delete_async(path, version), deadline=deadline)

    def _change(self, transactional_id: str, work: Any, doing: str) -> Any:
        return self._nodes.change(work, doing, transactional_id, self._timeout)

    # --- all nodes --------------------------------------------------------------------------------------------------------

    def _entries(self, prefix: str) -> list[Lease]:
        try:
            _, names = self._request(lambda client: [client.sync_async(LEASE_ROOT), client.get_children_async(LEASE_ROOT)])
        except NoNodeError:
            return []
        ids = [name for name in map(transactional_id_of, names) if name is not None and name.startswith(prefix)]
        found = ((name, self._read(name, None)) for name in ids)
        return [Lease(name, read[0].decode(errors="replace"), None) for name, read in found if read is not None]


def _data(owner: str) -> bytes:
    return owner[:MAX_OWNER_LENGTH].encode()
