"""The nodes of a tree: read after a sync, written on the condition of the version that was read, and tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.serialization import Create, SetData
from kazoo.protocol.states import ZnodeStat

from dualwrite.errors import ClaimTimeoutError, StoredStateError, StoreError
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.rows import StateRow, document, parse_document
from dualwrite.stores.zookeeper.paths import IDENTITY_PATH, STATE_ROOT, id_of, request_size, state_path, too_large
from dualwrite.stores.zookeeper.zookeeper_connection import (
    ErrorClass,
    NoAnswerError,
    NotSentError,
    ZooKeeperConnection,
    classify,
    sentence,
    translated,
)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE, _JITTER = 0.005, 0.5, 0.02  # seconds
_ANY_VERSION: Final = -1
_READ_AT_ONCE: Final = 200

CONCURRENT_CHANGES: Final = (BadVersionError, NodeExistsError, NoNodeError)
"""Errors of a conditional write when another write was faster."""


@dataclass(frozen=True, slots=True)
class StateNode:
    """A row as it was read.

    Every write is conditional on the node's version.
    """

    row: StateRow
    version: int


class Nodes:
    """Reads and writes nodes; all methods but `query` and `change`, which run the others, raise kazoo's errors unchanged.

    A `deadline` is a value of `time.monotonic()`.
    """

    def __init__(self, connection: ZooKeeperConnection, *, max_request_bytes: int, change_timeout: float) -> None:
        self.connection = connection
        self.max_request_bytes = max_request_bytes
        self._change_timeout = change_timeout

    # --- any node ---------------------------------------------------------------------------------------------------------

    def get(self, path: str, deadline: float | None = None) -> tuple[bytes, ZnodeStat] | None:
        """Data and stat of a node, as of this call or later; None if it does not exist.

        The `sync` sent first makes a follower catch up. No quorum confirms it: a leader that was deposed and does not know it
        yet may still respond. `read_from_quorum` excludes that.
        """
        try:
            _, found = self.connection.request(
                lambda client: [client.sync_async(path), client.get_async(path)], deadline=deadline
            )
        except NoNodeError:
            return None
        return found[0], found[1]

    def children(self, path: str) -> list[str]:
        """The names of a node's children, read as by `get`; empty if it does not exist."""
        try:
            _, names = self.connection.request(lambda client: [client.sync_async(path), client.get_children_async(path)])
        except NoNodeError:
            return []
        return list(names)

    def create(self, path: str, data: bytes = b"", deadline: float | None = None, *, ephemeral: bool = False) -> None:
        """Create a node, and its parents if they are missing."""

        def send() -> None:
            acl = self.connection.acl
            self.connection.request(
                lambda client: client.create_async(path, data, acl=acl, ephemeral=ephemeral), deadline=deadline
            )

        try:
            send()
        except NoNodeError:
            if not (parent := path.rpartition("/")[0]):
                raise
            with suppress(NodeExistsError):  # another client was faster
                self.create(parent, deadline=deadline)
            send()

    def set(self, path: str, data: bytes, version: int, deadline: float | None = None) -> None:
        """Replace the data of a node that has this version."""
        self.connection.request(lambda client: client.set_async(path, data, version), deadline=deadline)

    def delete(self, path: str, version: int = _ANY_VERSION, deadline: float | None = None) -> None:
        """Delete a node that has this version."""
        self.connection.request(lambda client: client.delete_async(path, version), deadline=deadline)

    # --- rows -------------------------------------------------------------------------------------------------------------

    def read(self, transactional_id: str, deadline: float | None = None) -> StateNode | None:
        """The row of an id, as of this call or later; see `get`.

        Raises:
            StoredStateError: The node's data is not a row.
        """
        found = self.get(state_path(transactional_id), deadline)
        return None if found is None else StateNode(parse_document(transactional_id, found[0]), found[1].version)

    def read_from_quorum(self, transactional_id: str) -> StateNode | None:
        """As `read`, then a `check` of the version, which only a quorum confirms; repeated if it changed in between."""
        path = state_path(transactional_id)
        while (node := self.read(transactional_id)) is not None:
            (result,) = self.connection.request(partial(_check_of, path=path, version=node.version))
            if not isinstance(result, Exception):
                return node
            if not isinstance(result, CONCURRENT_CHANGES):
                raise result
        return None

    def write(self, row: StateRow, read: StateNode | None, deadline: float) -> None:
        """Replace the row that was read by a new one.

        Raises:
            BadVersionError: Or another of CONCURRENT_CHANGES: the node has changed since it was read.
            StoreError: The row is too large.
        """
        path, data = state_path(row.transactional_id), document(row).encode()
        request = Create(path, data, self.connection.acl, 0) if read is None else SetData(path, data, read.version)
        size = request_size(request) + len(self.connection.client.chroot)
        if size > self.max_request_bytes:
            raise too_large("The row of the id", size, self.max_request_bytes, row.transactional_id)
        if read is None:
            self.create(path, data, deadline)
        else:
            self.set(path, data, condition(read), deadline)

    def rows(self, prefix: str) -> Iterator[StateRow]:
        """The rows of the ids that begin with `prefix`, in no particular order."""
        found = [each for each in map(id_of, self.children(STATE_ROOT)) if each is not None and each.startswith(prefix)]
        for start in range(0, len(found), _READ_AT_ONCE):
            yield from self._read_all(found[start : start + _READ_AT_ONCE])

    def _read_all(self, ids: Sequence[str]) -> Iterator[StateRow]:
        try:
            answers = self.connection.request(lambda client: [client.get_async(state_path(each)) for each in ids])
        except NoNodeError:  # one was deleted manually after the names were listed
            nodes = (self.read(each) for each in ids)
            yield from (node.row for node in nodes if node is not None)
        else:
            yield from (parse_document(each, data) for each, (data, _) in zip(ids, answers, strict=True))

    # --- which database this is ---------------------------------------------------------------------------------------------

    def identity(self) -> StoreIdentity | None:
        """The identity in the node of the database's id; None if the node does not exist."""
        found = self.get(IDENTITY_PATH)
        return None if found is None else StoreIdentity.parse(found[0])

    def set_identity(self, identity: StoreIdentity, expected: StoreIdentity | None) -> bool:
        """Replace the identity if it still is the expected one; False if it is not."""
        data, read = str(identity).encode(), self.get(IDENTITY_PATH)
        if (None if read is None else StoreIdentity.parse(read[0])) != expected:
            return False
        try:
            if read is None:
                self.create(IDENTITY_PATH, data)
            else:
                self.set(IDENTITY_PATH, data, read[1].version)
        except (BadVersionError, NodeExistsError):
            return False
        except NoNodeError:  # it is gone since it was read; or else the chroot is
            if read is None:
                raise
            return False
        return True

    # --- trying again -----------------------------------------------------------------------------------------------------

    def query(self, work: Callable[[], T], doing: str, transactional_id: str | None = None) -> T:
        """Run read-only `work`, and repeat it once if the connection breaks.

        Raises:
            StoreError: Kazoo's errors, translated.
        """
        try:
            try:
                return work()
            except KazooException as error:
                if not _is_retriable_read(error):
                    raise
            return work()
        except KazooException as error:
            raise self._translated(error, doing, transactional_id) from error

    def change(self, work: Callable[[float], T], doing: str, transactional_id: str, timeout: float | None = None) -> T:
        """Run `work`, which reads and writes, and repeat it after a broken connection or a concurrent change.

        `work` gets the deadline, and must return the same when it runs again after its own success: the response may have been
        lost.

        Raises:
            ClaimTimeoutError: Others changed the node first, until the timeout.
            StoreError: Kazoo's errors, translated.
        """
        limit = self._change_timeout if timeout is None else timeout
        deadline, pause, conflicts = time.monotonic() + limit, _FIRST_PAUSE, 0
        while True:
            try:
                return work(deadline)
            except KazooException as error:
                is_conflict = isinstance(error, CONCURRENT_CHANGES)
                conflicts += is_conflict
                wait = pause + random.uniform(0, _JITTER)  # noqa: S311  (no secret)
                is_retriable = is_conflict or classify(error) is ErrorClass.CONNECTION
                if not is_retriable or time.monotonic() + wait >= deadline:
                    if conflicts and (is_conflict or isinstance(error, NoAnswerError)):  # NoAnswerError: the deadline passed
                        raise _overtaken(error, conflicts, doing, transactional_id, limit) from error
                    raise self._translated(error, doing, transactional_id) from error
            self.connection.client.handler.sleep_func(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _translated(self, error: BaseException, doing: str, transactional_id: str | None) -> StoreError:
        return translated(error, self.connection.address, doing, transactional_id)


def condition(node: StateNode) -> int:
    """The node's version, as the condition of a write.

    Raises:
        StoredStateError: It is -1, which means any version; the number wraps around after some four billion changes.
    """
    if node.version == _ANY_VERSION:
        raise StoredStateError(
            "The node of the id has been changed so often that its version is -1, and no write can be conditional on that.",
            transactional_id=node.row.transactional_id,
            next_step="with no writer running, set the node's data to itself once in zkCli.sh",
            text=document(node.row),
        )
    return node.version


def _overtaken(error: Exception, conflicts: int, doing: str, transactional_id: str, timeout: float) -> ClaimTimeoutError:
    return ClaimTimeoutError(
        f"The time limit of {timeout:g} s for {doing} has passed; others changed its row in {conflicts} attempts.",
        transactional_id=transactional_id,
        cause=f"more than one process claims or recovers the id at once (the last attempt: {sentence(error)})",
        next_step="run one writer for each transactional id, then try again",
        timeout=timeout,
        blocker=None,
    )


def _is_retriable_read(error: BaseException) -> bool:
    if isinstance(error, NotSentError):
        return False  # the time limit for connecting has already passed
    return isinstance(error, BadVersionError) or classify(error) is ErrorClass.CONNECTION


def _check_of(client: KazooClient, *, path: str, version: int) -> Any:
    request = client.transaction()
    request.check(path, version)
    return request.commit_async()
