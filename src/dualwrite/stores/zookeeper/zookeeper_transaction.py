"""One business transaction on ZooKeeper: a batch collected in the client, and one multi that commits it with the row.

The multi is conditional on the version that the row's node had at `record`. That alone provides the fencing: any claim
changes the version. It also makes a late multi harmless. It may be delayed in kazoo's queue or in the network, and reach a
server after we have reported "unknown", or after we have claimed again; then either it comes before that claim, which reads
its effect, or after it, and is refused. Sessions do not matter: the next session's multi is equally valid.

A process that was paused notices that its connection is closed only when it uses it. It is better if a read fails then than if
the multi does, whose outcome would be unknown: so if some time has passed since `record`, `commit` reads once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn, Self

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, KazooException, NoNodeError, RolledBackError, RuntimeInconsistency
from kazoo.protocol.serialization import Create, SetData
from kazoo.protocol.states import ZnodeStat
from kazoo.security import ACL

from dualwrite.errors import (
    DualWriteError,
    FencedError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreError,
    UsageError,
)
from dualwrite.state import MAX_DELIVERY_LENGTH, MAX_EPOCH, MAX_PRODUCER_ID, MAX_TOPIC_LENGTH, Delivery, Place, PreparedTxnState
from dualwrite.stores.key_values import Batch, BatchTransaction
from dualwrite.stores.rows import Claim, StateRow, check_fence, document, fenced, recorded
from dualwrite.stores.zookeeper.nodes import Nodes, StateNode, condition
from dualwrite.stores.zookeeper.paths import is_ours, multi_size, operation_size, state_path, too_large
from dualwrite.stores.zookeeper.zookeeper_connection import (
    NoAnswerError,
    NotSentError,
    ZooKeeperConnection,
    sentence,
    translated,
)

_LONGEST_STATE: Final = PreparedTxnState(MAX_PRODUCER_ID, MAX_EPOCH, MAX_PRODUCER_ID)
_LARGEST_NUMBER: Final = 2**63 - 1
_LONGEST_PLACE: Final = Place("t" * MAX_TOPIC_LENGTH, 2**31 - 1, _LARGEST_NUMBER, _LARGEST_NUMBER, in_topic=True)
_MOST_PLACES: Final = MAX_DELIVERY_LENGTH // len(_LONGEST_PLACE.topic)
LONGEST_DELIVERY: Final = Delivery(_LARGEST_NUMBER, (_LONGEST_PLACE,) * _MOST_PLACES, datetime.max.replace(tzinfo=UTC))
"""What `begin` reserves space for: the delivery is known only when the batch is complete."""
_READ_AGAIN_AFTER: Final = 0.5  # seconds
_CONSEQUENCES: Final = (RolledBackError, RuntimeInconsistency)
"""Results that a failed multi has for the operations before and after the one that failed."""

_METHODS: Final = {"Create": "create", "SetData": "set_data", "Delete": "delete", "CheckVersion": "check"}


class ZooKeeperBatch(Batch):
    """Create, set, delete and check operations, with the signatures of kazoo's TransactionRequest: all are applied, or none.

    Nothing is sent before the writer commits. So an operation that is not possible (a node is missing, or does not have the
    expected version) fails only then, with StoreCommitFailedError. Paths are relative to the client's chroot. A node created
    with `ephemeral=True` belongs to the session of the store's client. Not safe for use by several threads at once.

    Args:
        connection: The connection to the servers.
        transactional_id: For the errors.
        reserved: Bytes of the multi that the writer needs.
        limit: Maximum size of a multi in bytes.
    """

    def __init__(self, connection: ZooKeeperConnection, transactional_id: str, *, reserved: int, limit: int) -> None:
        super().__init__(transactional_id)
        self._connection = connection
        self._reserved = reserved
        self._limit = limit
        self._request = connection.client.transaction()
        self._size = multi_size(())
        self._before_unit = (0, self._size)

    # --- the user's operations --------------------------------------------------------------------------------------------

    def create(
        self,
        path: str,
        value: bytes = b"",
        acl: Sequence[ACL] | None = None,
        ephemeral: bool = False,
        sequence: bool = False,
    ) -> None:
        """Create a node. Its parent must exist, or be created earlier in the batch.

        Raises:
            StoreError: The batch would be too large for one request; it is unchanged. Also raised by the other operations.
            UsageError: The path is one of dualwrite's own. Also raised by the other operations.
            WriterClosedError: The transaction has ended. Also raised by all other methods.
        """
        self.check_open()
        self._request.create(path, value, acl, ephemeral, sequence)
        self._accept_last()

    def creates(self, path: str) -> bool:
        """Whether a node with this path is created in the batch."""
        self.check_open()
        whole = f"{self._connection.client.chroot}{path}"
        return any(isinstance(operation, Create) and operation.path == whole for operation in self._request.operations)

    def set_data(self, path: str, value: bytes, version: int = -1) -> None:
        """Set a node's data, if it has this version (-1: any)."""
        self.check_open()
        self._request.set_data(path, value, version)
        self._accept_last()

    def delete(self, path: str, version: int = -1) -> None:
        """Delete a node without children, if it has this version (-1: any)."""
        self.check_open()
        self._request.delete(path, version)
        self._accept_last()

    def check(self, path: str, version: int) -> None:
        """Make the transaction fail unless the node has this version."""
        self.check_open()
        self._request.check(path, version)
        self._accept_last()

    def _accept_last(self) -> None:
        """Keep the operation that kazoo has added, if it is allowed in the batch."""
        operation = self._request.operations.pop()
        path = self._connection.client.unchroot(operation.path)
        if is_ours(path):
            raise UsageError(
                f"{path!r} is a node that only dualwrite writes; the transaction is still open and usable.",
                transactional_id=self._transactional_id,
                next_step="keep your data in other nodes",
            )
        size = self._size + operation_size(operation)
        if size + self._reserved > self._limit:
            raise too_large("The transaction", size + self._reserved, self._limit, self._transactional_id)
        self._request.operations.append(operation)
        self._size = size

    # --- plain reads ------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> tuple[bytes, ZnodeStat]:
        """Data and stat of a node, as KazooClient.get: a plain read, sent now, which does not see the batch.

        It is not part of the transaction: what it read may change before the commit. Pass its `stat.version` to `set_data`,
        `delete` or `check` to make the commit fail in that case.

        Raises:
            StoreUnavailableError: There is no connection, or no response within the limit. Also raised by the other reads.
            KazooException: As KazooClient.get raises it.
        """
        found: tuple[bytes, ZnodeStat] = self._read("get_async", path)
        return found

    def exists(self, path: str) -> ZnodeStat | None:
        """The node's stat, or None, as KazooClient.exists: a plain read, like `get`."""
        found: ZnodeStat | None = self._read("exists_async", path)
        return found

    def get_children(self, path: str) -> list[str]:
        """The names of the children, as KazooClient.get_children: a plain read, like `get`."""
        found: list[str] = self._read("get_children_async", path)
        return found

    def _read(self, method: str, path: str) -> Any:
        self.check_open()

        def send(client: KazooClient) -> Any:
            return getattr(client, method)(path)

        try:
            return self._connection.request(send)
        except (NotSentError, NoAnswerError) as error:
            raise translated(error, self._connection.address, f"reading {path!r}", self._transactional_id) from error

    def commit_async(self) -> NoReturn:
        """Refused."""
        self._refuse("commit_async()")

    # --- the writer's side ------------------------------------------------------------------------------------------------

    @property
    def operations(self) -> tuple[Any, ...]:
        """The collected operations, in kazoo's form."""
        return tuple(self._request.operations)

    @property
    def size(self) -> int:
        """Size in bytes of a multi of the operations, without the writer's own."""
        return self._size

    def begin_unit(self) -> None:
        self._before_unit = (len(self._request.operations), self._size)

    def undo_unit(self) -> None:
        count, self._size = self._before_unit
        del self._request.operations[count:]


class ZooKeeperTransaction(BatchTransaction[ZooKeeperBatch]):
    """Nothing is open on the server before `commit`."""

    def __init__(self, nodes: Nodes, claim: Claim, batch: ZooKeeperBatch) -> None:
        super().__init__(claim, batch)
        self._nodes = nodes
        self._ours: SetData | None = None
        self._read_at = 0.0

    @classmethod
    def begun(cls, nodes: Nodes, claim: Claim) -> Self:
        """Check the fence, confirmed by a quorum; see TxnStateStore.begin.

        A leader that was deposed and does not know it yet may answer a plain read, and not show a newer claim. The messages
        that follow open a transaction at Kafka, so this check must not miss it (rule F2). Later reads may: the multi fails.
        """
        row = _checked(nodes, claim, "beginning a transaction", nodes.read_from_quorum).row
        longest = recorded(
            row,
            _LONGEST_STATE,
            generation=_LARGEST_NUMBER,
            transaction_number=_LARGEST_NUMBER,
            delivery=LONGEST_DELIVERY,
        )
        reserved = operation_size(_setting(nodes, longest, 0))
        limit = nodes.max_request_bytes
        return cls(nodes, claim, ZooKeeperBatch(nodes.connection, claim.transactional_id, reserved=reserved, limit=limit))

    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """Only a read is sent, and the batch accepts no more operations."""
        batch = self.handle
        batch.end()
        self._read_at = time.monotonic()
        node = _checked(self._nodes, self._claim, "recording the prepared state", self._nodes.read)
        row = recorded(node.row, state, generation=generation, transaction_number=transaction_number, delivery=delivery)
        ours = _setting(self._nodes, row, condition(node))
        size, limit = batch.size + operation_size(ours), self._nodes.max_request_bytes
        if size > limit:
            raise too_large("The transaction", size, limit, self._claim.transactional_id)
        self._ours = ours

    def commit(self) -> None:
        batch, ours = self.handle, self._ours
        if ours is None:
            raise self._not_recorded()
        self.rollback()  # whatever happens now, this object has ended
        operations = [ours, *batch.operations]  # ours first: if several would fail, the error is ours
        try:
            if time.monotonic() - self._read_at > _READ_AGAIN_AFTER:
                _checked(self._nodes, self._claim, "committing", self._nodes.read)
        except StoreError as error:
            raise self._failed(f"nothing was sent: {error}") from error
        try:
            results = self._nodes.connection.request(lambda client: _sent(client, operations))
        except NotSentError as error:
            raise self._failed(f"nothing was sent: {error}") from error
        except KazooException as error:
            raise self._unknown(sentence(error)) from error
        self._check_results(operations, results)

    def _check_results(self, operations: Sequence[Any], results: Sequence[Any]) -> None:
        errors = [each for each in results if isinstance(each, Exception)]
        if not errors and len(results) == len(operations) and isinstance(results[0], ZnodeStat):
            return
        if not errors or len(results) != len(operations) or len(errors) != len(results):
            raise self._unknown(f"kazoo returned {results!r} for {len(operations)} operations")
        causes = [place for place, error in enumerate(results) if not isinstance(error, _CONSEQUENCES)]
        place = causes[0] if causes else 0
        error = results[place]
        if place == 0:
            raise self._why_ours_failed(error) from error
        raise self._users_failed(operations[place], error) from error

    def _why_ours_failed(self, error: Exception) -> DualWriteError:
        if isinstance(error, NoNodeError):
            return fenced(self._claim, None, None)
        if not isinstance(error, BadVersionError):
            return self._failed(f"writing the row of the id failed: {sentence(error)}")
        try:
            _checked(self._nodes, self._claim, "reading the row", self._nodes.read)
        except FencedError as replaced:
            return replaced
        except StoreError as unread:
            return self._failed(f"the row of the id was changed by another process, and can't be read now: {unread}")
        return self._failed("the row of the id was changed meanwhile, under the same claim (by an acknowledgement)")

    def _users_failed(self, operation: Any, error: Exception) -> StoreCommitFailedError:
        name = _METHODS.get(type(operation).__name__, type(operation).__name__)
        path = self._nodes.connection.client.unchroot(operation.path)
        return self._failed(f"{name} of {path!r}: {sentence(error)}", operation=name, path=path)

    def _failed(self, cause: str, **facts: str) -> StoreCommitFailedError:
        return StoreCommitFailedError(
            f"ZooKeeper at {self._nodes.connection.address} did not commit; nothing of the transaction was written.",
            transactional_id=self._claim.transactional_id,
            cause=cause,
            next_step="if the cause is a concurrent change, read again and run the whole transaction again",
            **facts,
        )

    def _unknown(self, cause: str) -> StoreCommitUnknownError:
        return StoreCommitUnknownError(
            f"ZooKeeper at {self._nodes.connection.address} did not answer the multi: it may or may not have committed, and "
            "may still commit.",
            transactional_id=self._claim.transactional_id,
            cause=cause,
            next_step="claim the id again with the same expected fence and read the row: after that claim it can't commit any "
            "more",
        )


def _checked(nodes: Nodes, claim: Claim, doing: str, read: Callable[[str], StateNode | None]) -> StateNode:
    node = nodes.query(partial(read, claim.transactional_id), doing, claim.transactional_id)
    check_fence(None if node is None else node.row, claim)
    assert node is not None  # `check_fence` raises for None
    return node


def _setting(nodes: Nodes, row: StateRow, version: int) -> SetData:
    return SetData(f"{nodes.connection.client.chroot}{state_path(row.transactional_id)}", document(row).encode(), version)


def _sent(client: KazooClient, operations: Sequence[Any]) -> Any:
    request = client.transaction()
    request.operations.extend(operations)
    return request.commit_async()
