"""One business transaction on ZooKeeper: a batch collected in the client, and one multi that commits it with the row.

The multi is conditional on the version that the row's node had at `record`. That alone provides the fencing: any claim
changes the version. It also makes a late multi harmless. It may be delayed in kazoo's queue or in the network, and reach a
server after we have reported "unknown", or after we have claimed again; then either it comes before that claim, which reads
its effect, or after it, and is refused. Sessions do not matter: the next session's multi is equally valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Self

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from kazoo.protocol.serialization import SetData
from kazoo.protocol.states import ZnodeStat
from kazoo.security import ACL

from dualwrite.errors import StoreCommitFailedError, StoreCommitUnknownError, UsageError
from dualwrite.state import MAX_DELIVERY_LENGTH, MAX_EPOCH, MAX_PRODUCER_ID, MAX_TOPIC_LENGTH, Delivery, Place, PreparedTxnState
from dualwrite.stores.key_values import ROWS, BatchTransaction, ChangeBatch, ConflictError, Write
from dualwrite.stores.rows import Claim, StateRow, document, recorded
from dualwrite.stores.store_transaction import refused
from dualwrite.stores.zookeeper.nodes import CONCURRENT_CHANGES, NodeTree, failed_in
from dualwrite.stores.zookeeper.paths import is_ours, multi_size, operation_size, path_of, too_large
from dualwrite.stores.zookeeper.zookeeper_connection import NoAnswerError, NotSentError, sentence, translated

_LONGEST_STATE: Final = PreparedTxnState(MAX_PRODUCER_ID, MAX_EPOCH, MAX_PRODUCER_ID)
_LARGEST_NUMBER: Final = 2**63 - 1
_LONGEST_PLACE: Final = Place("t" * MAX_TOPIC_LENGTH, 2**31 - 1, _LARGEST_NUMBER, _LARGEST_NUMBER, in_topic=True)
_MAX_PLACES: Final = MAX_DELIVERY_LENGTH // len(_LONGEST_PLACE.topic)
LONGEST_DELIVERY: Final = Delivery(_LARGEST_NUMBER, (_LONGEST_PLACE,) * _MAX_PLACES, datetime.max.replace(tzinfo=UTC))
"""What `begin` reserves space for: the delivery is known only when the batch is complete."""

_METHODS: Final = {"Create": "create", "SetData": "set_data", "Delete": "delete", "CheckVersion": "check"}


class ZooKeeperBatch(ChangeBatch):
    """Create, set, delete and check operations, with the signatures of kazoo's TransactionRequest: all are applied, or none.

    Nothing is sent before the writer commits. So an operation that is not possible (a node is missing, or does not have the
    expected version) fails only then, with StoreCommitFailedError. Paths are relative to the client's chroot. A node created
    with `ephemeral=True` belongs to the session of the store's client. Not safe for use by several threads at once.

    Args:
        nodes: The tree.
        transactional_id: For the errors.
        reserved: Bytes of the multi that the writer needs.
    """

    def __init__(self, nodes: NodeTree, transactional_id: str, *, reserved: int) -> None:
        super().__init__(transactional_id)
        self._nodes = nodes
        self._connection = nodes.connection
        self._reserved = reserved
        self._request = nodes.connection.client.transaction()
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
        self._add("create", path, value, acl, ephemeral, sequence)

    def set_data(self, path: str, value: bytes, version: int = -1) -> None:
        """Set a node's data, if it has this version (-1: any)."""
        self._add("set_data", path, value, version)

    def delete(self, path: str, version: int = -1) -> None:
        """Delete a node without children, if it has this version (-1: any)."""
        self._add("delete", path, version)

    def check(self, path: str, version: int) -> None:
        """Make the transaction fail unless the node has this version."""
        self._add("check", path, version)

    def _add(self, method: str, *arguments: Any) -> None:
        """Have kazoo make an operation, and keep it if it is allowed in the batch."""
        self.check_open()
        getattr(self._request, method)(*arguments)
        operation = self._request.operations.pop()
        path = self._connection.client.unchroot(operation.path)
        if is_ours(path):
            raise UsageError(
                f"{path!r} is a node that only dualwrite writes; the transaction is still open and usable.",
                transactional_id=self._transactional_id,
                next_step="keep your data in other nodes",
            )
        self._size = self._size_with(operation, self._reserved)
        self._request.operations.append(operation)

    def _size_with(self, operation: Any, reserved: int) -> int:
        size, limit = self._size + operation_size(operation), self._nodes.max_request_bytes
        if size + reserved > limit:
            raise too_large("The transaction", size + reserved, limit, self._transactional_id)
        return size

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

    commit_async = refused("commit_async()")

    # --- the writer's side ------------------------------------------------------------------------------------------------

    def add(self, write: Write) -> None:
        """Missing parents are created now: two transactions may need the same ones."""
        is_row = write.key[0] == ROWS
        size = self._size_with(self._nodes.operation(write), 0 if is_row else self._reserved)
        if write.found is None:
            self._nodes.make_parents(write.key)
        super().add(write)
        self._size = size

    @property
    def operations(self) -> tuple[Any, ...]:
        """The operations of the multi, in kazoo's form: ours first, and the row before them, so that an error of it shows."""
        return (*map(self._nodes.operation, reversed(self.writes.values())), *self._request.operations)

    def begin_unit(self) -> None:
        super().begin_unit()
        self._before_unit = (len(self._request.operations), self._size)

    def undo_unit(self) -> None:
        super().undo_unit()
        count, self._size = self._before_unit
        del self._request.operations[count:]


class ZooKeeperTransaction(BatchTransaction[NodeTree, ZooKeeperBatch]):
    """Nothing is open on the server before `commit`."""

    next_step: ClassVar[str] = "if the cause is a concurrent change, read again and run the whole transaction again"

    @classmethod
    def begun(cls, nodes: NodeTree, claim: Claim, row: StateRow) -> Self:
        """With room for the row as it may be recorded."""
        longest = recorded(
            row,
            _LONGEST_STATE,
            generation=_LARGEST_NUMBER,
            transaction_number=_LARGEST_NUMBER,
            delivery=LONGEST_DELIVERY,
        )
        path = f"{nodes.connection.client.chroot}{path_of((ROWS, claim.transactional_id))}"
        reserved = operation_size(SetData(path, document(longest).encode(), 0))
        return cls(nodes, claim, ZooKeeperBatch(nodes, claim.transactional_id, reserved=reserved), row)

    @property
    def title(self) -> str:
        return f"ZooKeeper at {self._keys.connection.address}"

    def _write(self, batch: ZooKeeperBatch) -> None:
        operations = batch.operations
        try:
            results = self._keys.send(operations)
        except NotSentError as error:
            raise self._failed(f"nothing was sent: {error}") from error
        except KazooException as error:
            raise self._unknown(sentence(error)) from error
        failed = failed_in(results)
        if failed is None and isinstance(results[0], ZnodeStat):
            return
        if failed is None or not all(isinstance(each, Exception) for each in results):
            raise self._unknown(f"kazoo returned {results!r} for {len(operations)} operations")
        place, failure = failed
        if place >= len(batch.writes):
            raise self._users_failed(operations[place], failure) from failure
        if isinstance(failure, CONCURRENT_CHANGES):
            raise ConflictError([*reversed(batch.writes)][place]) from failure
        raise self._failed(f"writing the row of the id failed: {sentence(failure)}") from failure

    def _users_failed(self, operation: Any, error: Exception) -> StoreCommitFailedError:
        name = _METHODS.get(type(operation).__name__, type(operation).__name__)
        path = self._keys.connection.client.unchroot(operation.path)
        return self._failed(f"{name} of {path!r}: {sentence(error)}", operation=name, path=path)

    def _unknown(self, cause: str) -> StoreCommitUnknownError:
        return StoreCommitUnknownError(
            f"{self.title} did not answer the multi: it may or may not have committed, and may still commit.",
            transactional_id=self._claim.transactional_id,
            cause=cause,
            next_step="claim the id again with the same expected fence and read the row: after that claim it can't commit any "
            "more",
        )
