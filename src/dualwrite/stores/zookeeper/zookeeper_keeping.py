"""Leases as ephemeral nodes: each lasts as long as its owner's session."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from kazoo.client import TransactionRequest
from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError, RolledBackError

from dualwrite.stores.leases import Lease, LeaseStore
from dualwrite.stores.positions import (
    Move,
    Partition,
    Position,
    Positions,
    check_expected,
    in_order,
    moved,
    parse_position,
    position_text,
)
from dualwrite.stores.row import MAX_OWNER_LENGTH
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.stores.zookeeper.nodes import StateNodes
from dualwrite.stores.zookeeper.paths import LEASE_ROOT, lease_path, node_name, transactional_id_of


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
        del seconds
        return frozenset(
            name for name in sorted(ids) if self._change(name, partial(self._acquired, name, owner), "leasing an id")
        )

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """What an expired session had leased is lost."""
        del seconds
        return frozenset(
            name for name in sorted(ids) if self._change(name, partial(self._kept, name, owner), "renewing a lease")
        )

    def release(self, ids: Collection[str], owner: str) -> None:
        for name in sorted(ids):
            self._change(name, partial(self._released, name, owner), "releasing an id")

    def entries(self, prefix: str = "") -> list[Lease]:
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


T = TypeVar("T")

ROOT: Final = "/kafka_consumed_offset"


class ZooKeeperPositions(Positions):
    """See Positions. A node is set on the condition of the version that was read, so the multi fails if it was set meanwhile.

    Args:
        nodes: The store's nodes, for the connection.
    """

    def __init__(self, nodes: StateNodes) -> None:
        self._nodes = nodes
        self._request = nodes.connection.request
        self._acl = nodes.connection.acl

    def prepare(self) -> None:
        """Creates the root."""
        self._run(lambda: self._create(ROOT), "creating the root of the positions")

    def read(self, group_id: str) -> Mapping[Partition, Position]:
        return self._run(lambda: self._read(group_id), "reading the positions of a group")

    def move(self, transaction: StoreTransaction, group_id: str, moves: Iterable[Move]) -> None:
        """Missing parents are created in the same multi."""
        batch = transaction.handle
        for one in in_order(moves):
            path = _path(group_id, one.key)
            version = _expected_version(batch.get, group_id, one, path)
            if version is not None:
                batch.set_data(path, position_text(one.after), version)
                continue
            for parent in _parents(path):
                if not batch.creates(parent) and batch.exists(parent) is None:
                    batch.create(parent, acl=self._acl)
            batch.create(path, position_text(one.after), acl=self._acl)

    def reset(self, group_id: str, moves: Iterable[Move]) -> None:
        ordered = in_order(moves)
        is_sent = False

        def work() -> None:
            nonlocal is_sent
            if is_sent and self._is_done(group_id, ordered):  # by the multi whose response was lost
                return
            request = self._multi_of(group_id, ordered)
            is_sent = True
            self._commit(request, group_id, ordered)

        self._run(work, "resetting positions")

    def forget(self, group_id: str) -> int:
        """Deletes node by node, the partitions of a topic before the topic."""
        counted = 0  # the maximum over all attempts: one whose response was lost may have deleted some

        def work() -> int:
            nonlocal counted
            found = self._read(group_id)
            counted = max(counted, len(found))
            for key in found:
                self._delete(_path(group_id, key))
            for topic in self._children(_folder(group_id)):
                self._delete(f"{_folder(group_id)}/{topic}")
            self._delete(_folder(group_id))
            return counted

        return self._run(work, "forgetting the positions of a group")

    def groups(self, prefix: str = "") -> list[str]:
        names = self._run(lambda: self._children(ROOT), "listing the groups with positions")
        return sorted(name for name in map(unquote, names) if name.startswith(prefix))

    # --- nodes ------------------------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], T], doing: str) -> T:
        return self._nodes.query(work, doing)

    def _read(self, group_id: str) -> dict[Partition, Position]:
        found = {}
        for topic in self._children(_folder(group_id)):
            for partition in self._children(f"{_folder(group_id)}/{topic}"):
                key = (unquote(topic), int(partition))
                with suppress(NoNodeError):  # forgotten meanwhile
                    found[key] = parse_position(key, self._get(_path(group_id, key))[0])
        return found

    def _is_done(self, group_id: str, moves: list[Move]) -> bool:
        stored = self._read(group_id)
        there = [stored.get(one.key) for one in moves]
        return all(
            found is not None and (found.offset, found.topic_id) == (one.after.offset, one.after.topic_id)
            for found, one in zip(there, moves, strict=True)
        )

    def _multi_of(self, group_id: str, moves: list[Move]) -> TransactionRequest:
        request = self._nodes.connection.client.transaction()
        for one in moves:
            path = _path(group_id, one.key)
            version = _expected_version(self._get, group_id, one, path)
            if version is None:
                for parent in _parents(path):
                    self._create(parent)
                request.create(path, position_text(one.after), acl=self._acl)
            else:
                request.set_data(path, position_text(one.after), version)
        return request

    def _commit(self, request: TransactionRequest, group_id: str, moves: list[Move]) -> None:
        results = self._request(lambda _: request.commit_async()) if moves else []
        for one, result in zip(moves, results, strict=True):
            if isinstance(result, BadVersionError | NodeExistsError | NoNodeError):  # changed between the read and the multi
                raise moved(group_id, one, self._read(group_id).get(one.key)) from result
        for result in results:
            if isinstance(result, KazooException) and not isinstance(result, RolledBackError):
                raise result

    def _children(self, path: str) -> list[str]:
        try:
            _, found = self._request(lambda client: [client.sync_async(path), client.get_children_async(path)])
        except NoNodeError:
            return []
        return list(found)

    def _get(self, path: str) -> Any:
        _, found = self._request(lambda client: [client.sync_async(path), client.get_async(path)])
        return found

    def _create(self, path: str) -> None:
        with suppress(NodeExistsError):
            self._request(lambda client: client.create_async(path, b"", acl=self._acl))

    def _delete(self, path: str) -> None:
        with suppress(NoNodeError):
            self._request(lambda client: client.delete_async(path))


def _expected_version(get: Callable[[str], Any], group_id: str, one: Move, path: str) -> int | None:
    """The version of the node, whose position is the expected one; None if there is no node, as expected."""
    try:
        data, stat = get(path)
    except NoNodeError:
        check_expected(group_id, one, None)
        return None
    check_expected(group_id, one, parse_position(one.key, data))
    return int(stat.version)


def _folder(group_id: str) -> str:
    return f"{ROOT}/{node_name(group_id)}"


def _path(group_id: str, partition: Partition) -> str:
    return f"{_folder(group_id)}/{node_name(partition[0])}/{partition[1]}"


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(2, len(parts))]
