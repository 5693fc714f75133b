"""The port on a ZooKeeper tree: nodes read after a sync, and written in multis on the condition of their versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.protocol.serialization import CheckVersion, Create, Delete, SetData

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, StoredStateError
from dualwrite.stores.key_values import ROWS, ConflictError, Found, Key, KeyValues, Write
from dualwrite.stores.zookeeper.paths import id_of, multi_size, path_of, too_large
from dualwrite.stores.zookeeper.zookeeper_connection import (
    KazooErrorClass,
    NoAnswerError,
    NotSentError,
    ZooKeeperConnection,
    classify,
    translated,
)

_ANY_VERSION: Final = -1
_READ_AT_ONCE: Final = 200
_ATTEMPTS: Final = 3

CONCURRENT_CHANGES: Final = (BadVersionError, NodeExistsError, NoNodeError)
"""Errors of a conditional write when another write was faster."""
_CONSEQUENCES: Final = (RolledBackError, RuntimeInconsistency)
"""Results that a failed multi has for the operations before and after the one that failed."""


class NodeTree(KeyValues):
    """The nodes below the client's chroot. A key's condition is the version of its node; what is removed has a new one."""

    errors = (KazooException,)

    def __init__(self, connection: ZooKeeperConnection, *, max_request_bytes: int) -> None:
        self.connection = connection
        self.max_request_bytes = max_request_bytes

    # --- reading ----------------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[Key], deadline: Deadline | None = None) -> list[Found | None]:
        """Many in one request.

        The `sync` sent first makes a follower catch up. No quorum confirms it: a leader that was deposed and does not know it
        yet may still respond. `confirmed` excludes that.
        """
        paths, found = [path_of(key) for key in keys], list[Found | None]()
        for start in range(0, len(paths), _READ_AT_ONCE):
            send = partial(_synced, "get_async", paths[start : start + _READ_AT_ONCE])
            answers = self.connection.request(send, deadline=deadline, none_for=NoNodeError)
            found += [None if answer is None else Found(*answer) for answer in answers[1:]]
        return found

    def confirmed(self, key: Key) -> Found | None:
        """As `get`, then a `check` of the version, which only a quorum confirms; repeated if it changed in between."""
        while (found := self.get(key)) is not None:
            (result,) = self.send([CheckVersion(self._whole(key), found.stat.version)])
            if not isinstance(result, Exception):
                return found
            if not isinstance(result, CONCURRENT_CHANGES):
                raise result
        return None

    def children(self, key: Key, prefix: str = "") -> list[str]:
        send = partial(_synced, "get_children_async", [path_of(key)])
        _, names = self.connection.request(send, none_for=NoNodeError)
        found = map(id_of, names or ())
        return [name for name in found if name is not None and name.startswith(prefix)]

    # --- writing ----------------------------------------------------------------------------------------------------------

    def multi(self, writes: Sequence[Write], deadline: Deadline | None = None) -> None:
        operations = [self.operation(write) for write in writes]
        size = multi_size(operations)
        if size > self.max_request_bytes:
            row = next((write.key[1] for write in writes if write.key[0] == ROWS), None)
            raise too_large("The change" if row is None else "The row of the id", size, self.max_request_bytes, row)
        for attempt in range(_ATTEMPTS):
            failed = failed_in(self.send(operations, deadline))
            if failed is None:
                break
            write, error = writes[failed[0]], failed[1]
            if write.found is None and isinstance(error, NoNodeError):
                if attempt == _ATTEMPTS - 1:
                    raise error
                self.make_parents(write.key, deadline)
            elif isinstance(error, CONCURRENT_CHANGES):
                raise ConflictError(write.key) from error
            else:
                raise error
        self._remove_empty([write.key for write in writes if write.data is None], deadline)

    def operation(self, write: Write) -> Any:
        """A write in kazoo's form.

        Raises:
            StoredStateError: Its node has the version that means any.
        """
        path = self._whole(write.key)
        if write.found is None:
            return Create(path, write.data, self.connection.acl, int(write.ephemeral))
        version = condition(write.key, write.found.stat.version)
        return Delete(path, version) if write.data is None else SetData(path, write.data, version)

    def send(self, operations: Iterable[Any], deadline: Deadline | None = None) -> Sequence[Any]:
        """Send operations as one multi; returns a result or an exception for each."""
        made = list(operations)
        results: Sequence[Any] = self.connection.request(partial(_sent, operations=made), deadline=deadline)
        if len(results) != len(made):
            raise NoAnswerError(f"kazoo returned {results!r} for {len(made)} operations")
        return results

    def make_parents(self, key: Key, deadline: Deadline | None = None) -> None:
        """Create the nodes above a key that are missing."""
        for depth in range(1, len(key)):
            (result,) = self.send([Create(self._whole(key[:depth]), b"", self.connection.acl, 0)], deadline)
            if isinstance(result, Exception) and not isinstance(result, NodeExistsError):
                raise result

    def _remove_empty(self, removed: Iterable[Key], deadline: Deadline | None) -> None:
        """Remove the nodes above keys that have no children any more, but for the folder itself."""
        parents = {key[:depth] for key in removed for depth in range(2, len(key))}
        for parent in sorted(parents, key=len, reverse=True):
            with suppress(NoNodeError, NotEmptyError):
                self.connection.request(partial(KazooClient.delete_async, path=path_of(parent)), deadline=deadline)

    def _whole(self, key: Key) -> str:
        return f"{self.connection.client.chroot}{path_of(key)}"

    # --- errors -----------------------------------------------------------------------------------------------------------

    def passes(self, error: Exception) -> bool:
        return classify(error) is KazooErrorClass.CONNECTION

    def passes_for_reads(self, error: Exception) -> bool:
        return not isinstance(error, NotSentError) and self.passes(error)  # its time limit has already passed

    def translated(self, error: Exception, doing: str, transactional_id: str | None = None) -> DualWriteError:
        return translated(error, self.connection.address, doing, transactional_id)


def condition(key: Key, version: int) -> int:
    """A node's version, as the condition of a write.

    Raises:
        StoredStateError: It is -1, which means any version; the number wraps around after some four billion changes.
    """
    if version == _ANY_VERSION:
        raise StoredStateError(
            "The node of the id has been changed so often that its version is -1, and no write can be conditional on that.",
            transactional_id=key[-1],
            next_step="with no writer running, set the node's data to itself once in zkCli.sh",
            text=path_of(key),
        )
    return version


def failed_in(results: Sequence[Any]) -> tuple[int, Exception] | None:
    """Which operation of a multi has failed, by its place, and why; None if none has."""
    errors = [(place, each) for place, each in enumerate(results) if isinstance(each, Exception)]
    return next((found for found in errors if not isinstance(found[1], _CONSEQUENCES)), next(iter(errors), None))


def _synced(method: str, paths: Sequence[str], client: KazooClient) -> list[Any]:
    return [client.sync_async(paths[0]), *(getattr(client, method)(path) for path in paths)]


def _sent(client: KazooClient, *, operations: Sequence[Any]) -> Any:
    request = client.transaction()
    request.operations.extend(operations)
    return request.commit_async()
