"""What pools and consumers keep in the tree: leases as ephemeral nodes, each for its owner's session; and positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Final, TypeVar
from urllib.parse import unquote

from kazoo.client import TransactionRequest
from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError, RolledBackError
from kazoo.protocol.states import ZnodeStat

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
from dualwrite.stores.rows import MAX_OWNER_LENGTH
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.stores.zookeeper.nodes import Nodes
from dualwrite.stores.zookeeper.paths import LEASE_ROOT, id_of, lease_path, node_name

T = TypeVar("T")

POSITION_ROOT: Final = "/kafka_consumed_offset"


class ZooKeeperLeases(LeaseStore):
    """The leases of a ZooKeeper tree, below `/kafka_transaction_lease`; their `seconds` have no meaning."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def acquire(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        del seconds

        def acquired(path: str, deadline: float) -> bool:
            if self._nodes.get(path, deadline) is None:  # NodeExistsError: another owner was faster; `change` tries again
                self._nodes.create(path, _data(owner), deadline, ephemeral=True)
                return True
            return self._kept(path, owner, deadline)

        return frozenset(name for name in sorted(ids) if self._change(name, acquired, "leasing an id"))

    def renew(self, ids: Collection[str], owner: str, *, seconds: float) -> frozenset[str]:
        """What an expired session had leased is lost."""
        del seconds

        def kept(path: str, deadline: float) -> bool:
            return self._kept(path, owner, deadline)

        return frozenset(name for name in sorted(ids) if self._change(name, kept, "renewing a lease"))

    def release(self, ids: Collection[str], owner: str) -> None:
        def released(path: str, deadline: float) -> bool:
            found = self._nodes.get(path, deadline)
            if found is not None and found[0] == _data(owner):
                self._nodes.delete(path, found[1].version, deadline)
            return True

        for name in sorted(ids):
            self._change(name, released, "releasing an id")

    def entries(self, prefix: str = "") -> list[Lease]:
        found = self._nodes.query(lambda: list(self._entries(prefix)), "listing the leases")
        return sorted(found, key=lambda each: each.transactional_id)

    def _kept(self, path: str, owner: str, deadline: float) -> bool:
        """Whether it is ours. A node of an earlier session of ours, which will expire, is replaced."""
        found = self._nodes.get(path, deadline)
        if found is None or found[0] != _data(owner):
            return False
        if found[1].ephemeralOwner != self._nodes.connection.client.client_id[0]:
            self._nodes.delete(path, found[1].version, deadline)
            self._nodes.create(path, _data(owner), deadline, ephemeral=True)
        return True

    def _entries(self, prefix: str) -> Iterable[Lease]:
        for name in map(id_of, self._nodes.children(LEASE_ROOT)):
            if name is not None and name.startswith(prefix) and (found := self._nodes.get(lease_path(name))) is not None:
                yield Lease(name, found[0].decode(errors="replace"), None)

    def _change(self, transactional_id: str, work: Callable[[str, float], bool], doing: str) -> bool:
        path = lease_path(transactional_id)
        return self._nodes.change(lambda deadline: work(path, deadline), doing, transactional_id)


def _data(owner: str) -> bytes:
    return owner[:MAX_OWNER_LENGTH].encode()


class ZooKeeperPositions(Positions):
    """A node is set on the condition of the version that was read, so the multi fails if it was set meanwhile."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._acl = nodes.connection.acl

    def prepare(self) -> None:
        """Creates the root."""
        self._nodes.query(lambda: self._create(POSITION_ROOT), "creating the root of the positions")

    def read(self, group_id: str) -> Mapping[Partition, Position]:
        return self._nodes.query(lambda: self._read(group_id), "reading the positions of a group")

    def move(self, transaction: StoreTransaction, group_id: str, moves: Iterable[Move]) -> None:
        """Missing parents are created in the same multi."""
        batch = transaction.handle
        for one in in_order(moves):
            path, found = _path(group_id, one.key), None
            with suppress(NoNodeError):
                found = batch.get(path)
            version = _expected_version(group_id, one, found)
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

        self._nodes.query(work, "resetting positions")

    def forget(self, group_id: str) -> int:
        """Deletes node by node, the partitions of a topic before the topic."""
        counted = 0  # the maximum over all attempts: one whose response was lost may have deleted some

        def work() -> int:
            nonlocal counted
            found = self._read(group_id)
            counted = max(counted, len(found))
            folder = _folder(group_id)
            topics = [f"{folder}/{topic}" for topic in self._nodes.children(folder)]
            for path in (*(_path(group_id, key) for key in found), *topics, folder):
                with suppress(NoNodeError):
                    self._nodes.delete(path)
            return counted

        return self._nodes.query(work, "forgetting the positions of a group")

    def groups(self, prefix: str = "") -> list[str]:
        names = self._nodes.query(lambda: self._nodes.children(POSITION_ROOT), "listing the groups with positions")
        return sorted(name for name in map(unquote, names) if name.startswith(prefix))

    def _read(self, group_id: str) -> dict[Partition, Position]:
        positions = {}
        for topic in self._nodes.children(_folder(group_id)):
            for partition in self._nodes.children(f"{_folder(group_id)}/{topic}"):
                key = (unquote(topic), int(partition))
                if (found := self._nodes.get(_path(group_id, key))) is not None:  # otherwise it was forgotten meanwhile
                    positions[key] = parse_position(key, found[0])
        return positions

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
            version = _expected_version(group_id, one, self._nodes.get(path))
            if version is None:
                self._create(path.rpartition("/")[0])
                request.create(path, position_text(one.after), acl=self._acl)
            else:
                request.set_data(path, position_text(one.after), version)
        return request

    def _commit(self, request: TransactionRequest, group_id: str, moves: list[Move]) -> None:
        results = self._nodes.connection.request(lambda _: request.commit_async()) if moves else []
        for one, result in zip(moves, results, strict=True):
            if isinstance(result, BadVersionError | NodeExistsError | NoNodeError):  # changed between the read and the multi
                raise moved(group_id, one, self._read(group_id).get(one.key)) from result
        for result in results:
            if isinstance(result, KazooException) and not isinstance(result, RolledBackError):
                raise result

    def _create(self, path: str) -> None:
        with suppress(NodeExistsError):
            self._nodes.create(path)


def _expected_version(group_id: str, one: Move, found: tuple[bytes, ZnodeStat] | None) -> int | None:
    """The version of the node, whose position is the expected one; None if there is no node, as expected."""
    check_expected(group_id, one, None if found is None else parse_position(one.key, found[0]))
    return None if found is None else int(found[1].version)


def _folder(group_id: str) -> str:
    return f"{POSITION_ROOT}/{node_name(group_id)}"


def _path(group_id: str, partition: Partition) -> str:
    return f"{_folder(group_id)}/{node_name(partition[0])}/{partition[1]}"


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(2, len(parts))]
