"""The nodes of the rows: read after a sync, and written on the condition of the version that was read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.serialization import Create, SetData
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_before_delay, wait_exponential, wait_random

from dualwrite.errors import ClaimTimeoutError, StoredStateError, StoreError
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.row import Claim, StateRow, claimed, document, parse_document
from dualwrite.stores.zookeeper.paths import IDENTITY_PATH, STATE_ROOT, request_size, state_path, too_large, transactional_id_of
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

_ATTEMPTS: Final = 2
_WAIT: Final = wait_exponential(multiplier=0.005, max=0.5) + wait_random(0, 0.02)
_ANY_VERSION: Final = -1
_READ_AT_ONCE: Final = 200

CONCURRENT_CHANGES: Final = (BadVersionError, NodeExistsError, NoNodeError)
"""Errors of a conditional write when another write was faster."""


@dataclass(frozen=True, slots=True)
class StateNode:
    """A row as it was read.

    Args:
        row: The row.
        version: The node's version; every write is conditional on it.
    """

    row: StateRow
    version: int


class StateNodes:
    """Reads and writes the nodes of the rows; methods with `deadline` (time.monotonic()) raise kazoo's errors unchanged.

    Args:
        connection: The connection to the servers.
        max_request_bytes: The servers' limit for one request.
    """

    def __init__(self, connection: ZooKeeperConnection, *, max_request_bytes: int) -> None:
        self.connection = connection
        self.max_request_bytes = max_request_bytes

    # --- one node ---------------------------------------------------------------------------------------------------------

    def read(self, transactional_id: str, deadline: float | None = None) -> StateNode | None:
        """The node, as of this call or later; None if it does not exist.

        The `sync` sent first makes a follower catch up. No quorum confirms it: a leader that was deposed and does not know it
        yet may still respond. `read_from_quorum` excludes that.

        Raises:
            StoredStateError: The node's data is not a row.
        """
        path = state_path(transactional_id)
        try:
            _, (data, stat) = self.connection.request(
                lambda client: [client.sync_async(path), client.get_async(path)], deadline=deadline
            )
        except NoNodeError:
            return None
        return StateNode(parse_document(transactional_id, data), stat.version)

    def read_from_quorum(self, transactional_id: str, deadline: float | None = None) -> StateNode | None:
        """As `read`, then a `check` of the version, which only a quorum confirms; repeated if it changed in between."""
        path = state_path(transactional_id)
        while (node := self.read(transactional_id, deadline)) is not None:
            request_of = partial(_check_of, path=path, version=node.version)
            (result,) = self.connection.request(request_of, deadline=deadline)
            if not isinstance(result, Exception):
                return node
            if not isinstance(result, CONCURRENT_CHANGES):
                raise result
        return None

    def write(self, row: StateRow, read: StateNode | None, deadline: float | None = None) -> None:
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
            self._create(path, data, deadline)
        else:
            version = condition(read)
            self.connection.request(lambda client: client.set_async(path, data, version), deadline=deadline)

    def _create(self, path: str, data: bytes, deadline: float | None) -> None:
        def create(made: str, content: bytes) -> None:
            self.connection.request(
                lambda client: client.create_async(made, content, acl=self.connection.acl), deadline=deadline
            )

        try:
            create(path, data)
        except NoNodeError:
            with suppress(NodeExistsError):  # another client was faster
                create(STATE_ROOT, b"")
            create(path, data)

    # --- which database this is ---------------------------------------------------------------------------------------------

    def identity(self) -> StoreIdentity | None:
        """The identity in the node of the database's id; None if the node does not exist."""
        found = self._read_identity()
        return None if found is None else found[0]

    def _read_identity(self) -> tuple[StoreIdentity, int] | None:
        try:
            _, (data, stat) = self.connection.request(
                lambda client: [client.sync_async(IDENTITY_PATH), client.get_async(IDENTITY_PATH)]
            )
        except NoNodeError:
            return None
        return StoreIdentity.parse(data), stat.version

    def set_identity(self, identity: StoreIdentity, expected: StoreIdentity | None) -> bool:
        """Replace the identity if it still is the expected one; False if it is not."""
        data = str(identity).encode()
        read = self._read_identity()
        if (None if read is None else read[0]) != expected:
            return False
        try:
            if read is None:
                self.connection.request(lambda client: client.create_async(IDENTITY_PATH, data, acl=self.connection.acl))
            else:
                self.connection.request(lambda client: client.set_async(IDENTITY_PATH, data, read[1]))
        except CONCURRENT_CHANGES:
            return False
        return True

    # --- all nodes --------------------------------------------------------------------------------------------------------

    def rows(self, prefix: str, deadline: float | None = None) -> Iterator[StateRow]:
        """The rows of the ids that begin with `prefix`, in no particular order."""
        try:
            _, names = self.connection.request(
                lambda client: [client.sync_async(STATE_ROOT), client.get_children_async(STATE_ROOT)], deadline=deadline
            )
        except NoNodeError:
            return
        found = [each for each in map(transactional_id_of, names) if each is not None and each.startswith(prefix)]
        for start in range(0, len(found), _READ_AT_ONCE):
            yield from self._read_all(found[start : start + _READ_AT_ONCE], deadline)

    def _read_all(self, ids: Sequence[str], deadline: float | None) -> Iterator[StateRow]:
        def read(client: KazooClient) -> Any:
            return [client.get_async(state_path(each)) for each in ids]

        try:
            answers = self.connection.request(read, deadline=deadline)
        except NoNodeError:  # one was deleted manually after the names were listed
            nodes = (self.read(each, deadline) for each in ids)
            yield from (node.row for node in nodes if node is not None)
        else:
            yield from (parse_document(each, data) for each, (data, _) in zip(ids, answers, strict=True))

    # --- retries ----------------------------------------------------------------------------------------------------------

    def query(self, work: Callable[[], T], doing: str, transactional_id: str | None = None) -> T:
        """Run read-only `work`, and repeat it once if the connection breaks.

        Raises:
            StoreError: Kazoo's errors, translated.
        """
        retrying = Retrying(
            retry=retry_if_exception(_is_retriable_read),
            stop=stop_after_attempt(_ATTEMPTS),
            sleep=self.connection.client.handler.sleep_func,
            reraise=True,
        )
        try:
            return retrying(work)
        except KazooException as error:
            raise self.translated(error, doing, transactional_id) from error

    def change(self, work: Callable[[float], T], doing: str, transactional_id: str, timeout: float) -> T:
        """Run `work`, which reads and writes, and repeat it after a broken connection or a concurrent change.

        `work` gets the deadline, and must return the same when it runs again after its own success: the response may have been
        lost.

        Raises:
            ClaimTimeoutError: Others changed the row first, until the timeout.
            StoreError: Kazoo's errors, translated.
        """
        deadline = time.monotonic() + timeout
        conflicts = 0

        def attempt() -> T:
            nonlocal conflicts
            try:
                return work(deadline)
            except CONCURRENT_CHANGES:
                conflicts += 1
                raise

        retrying = Retrying(
            retry=retry_if_exception(_is_retriable_change),
            stop=stop_before_delay(timeout),
            wait=_WAIT,
            sleep=self.connection.client.handler.sleep_func,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except KazooException as error:
            if conflicts and isinstance(error, (*CONCURRENT_CHANGES, NoAnswerError)):  # NoAnswerError: the deadline passed
                raise ClaimTimeoutError(
                    f"The time limit of {timeout:g} s for {doing} has passed; others changed its row in {conflicts} attempts.",
                    transactional_id=transactional_id,
                    cause=f"more than one process claims or recovers the id at once (the last attempt: {sentence(error)})",
                    next_step="run one writer for each transactional id, then try again",
                    timeout=timeout,
                    blocker=None,
                ) from error
            raise self.translated(error, doing, transactional_id) from error

    def translated(self, error: BaseException, doing: str, transactional_id: str | None = None) -> StoreError:
        """Our error for kazoo's."""
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


def _is_retriable_read(error: BaseException) -> bool:
    if isinstance(error, NotSentError):
        return False  # the time limit for connecting has already passed
    return isinstance(error, BadVersionError) or classify(error) is ErrorClass.CONNECTION


def _is_retriable_change(error: BaseException) -> bool:
    return isinstance(error, CONCURRENT_CHANGES) or classify(error) is ErrorClass.CONNECTION


def _check_of(client: KazooClient, *, path: str, version: int) -> Any:
    request = client.transaction()
    request.check(path, version)
    return request.commit_async()


@dataclass(frozen=True)
class ClaimAttempt:
    """One call of `claim`, with as many attempts as it needs.

    It does not wait for another writer's transaction that is recorded and not committed yet. Once this claim has changed the
    node's version, that transaction can't commit any more, wherever its multi is: in its writer, kazoo's queue or the network.

    Args:
        nodes: The rows.
        transactional_id: The logical id.
        owner: Who claims, as text for people.
        timeout: Seconds to try at most.
        token: Written with the claim, to recognize it if its response was lost.
        expected_fence: Claim only if the fence still is this number.
    """

    nodes: StateNodes
    transactional_id: str
    owner: str
    timeout: float
    token: str
    expected_fence: int | None = None

    def make(self) -> Claim:
        """Claim; see TxnStateStore.claim for the errors."""
        return self.nodes.change(self._once, "claiming the id", self.transactional_id, self.timeout)

    def _once(self, deadline: float) -> Claim:
        read = self.nodes.read(self.transactional_id, deadline)
        before = None if read is None else read.row
        row = claimed(before, self.transactional_id, self.owner, token=self.token, expected_fence=self.expected_fence)
        if row is not before:
            self.nodes.write(row, read, deadline)
        return Claim(self.transactional_id, row.fence, row.owner)
