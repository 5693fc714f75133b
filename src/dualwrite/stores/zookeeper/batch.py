"""What the user writes with: the operations of one multi, collected; only the writer sends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from kazoo.client import KazooClient
from kazoo.protocol.serialization import Create
from kazoo.protocol.states import ZnodeStat
from kazoo.security import ACL

from dualwrite.errors import UsageError
from dualwrite.stores.refusals import batch_ended, control_refused
from dualwrite.stores.zookeeper.connection import NoAnswerError, NotSentError, ZooKeeperConnection
from dualwrite.stores.zookeeper.errors import translated
from dualwrite.stores.zookeeper.paths import is_ours
from dualwrite.stores.zookeeper.sizes import multi_size, operation_size, too_large


class ZooKeeperBatch:
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
        self._connection = connection
        self._transactional_id = transactional_id
        self._reserved = reserved
        self._limit = limit
        self._request = connection.client.transaction()
        self._size = multi_size(())
        self._before_unit = (0, self._size)
        self._ended = False

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
        self._check_open()
        self._request.create(path, value, acl, ephemeral, sequence)
        self._accept_last()

    def creates(self, path: str) -> bool:
        """Whether a node with this path is created in the batch."""
        self._check_open()
        whole = f"{self._connection.client.chroot}{path}"
        return any(isinstance(operation, Create) and operation.path == whole for operation in self._request.operations)

    def set_data(self, path: str, value: bytes, version: int = -1) -> None:
        """Set a node's data, if it has this version (-1: any)."""
        self._check_open()
        self._request.set_data(path, value, version)
        self._accept_last()

    def delete(self, path: str, version: int = -1) -> None:
        """Delete a node without children, if it has this version (-1: any)."""
        self._check_open()
        self._request.delete(path, version)
        self._accept_last()

    def check(self, path: str, version: int) -> None:
        """Make the transaction fail unless the node has this version."""
        self._check_open()
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
        self._check_open()

        def send(client: KazooClient) -> Any:
            return getattr(client, method)(path)

        try:
            return self._connection.request(send)
        except (NotSentError, NoAnswerError) as error:
            raise translated(error, self._connection.address, f"reading {path!r}", self._transactional_id) from error

    # --- what would end the transaction -----------------------------------------------------------------------------------

    def commit(self) -> NoReturn:
        """Refused."""
        self._refuse("commit()")

    def commit_async(self) -> NoReturn:
        """Refused."""
        self._refuse("commit_async()")

    def __enter__(self) -> NoReturn:
        self._refuse("`with` on the batch (it would commit it)")

    def __exit__(self, *_: object) -> NoReturn:
        self._refuse("`with` on the batch (it would commit it)")

    def _refuse(self, call: str) -> NoReturn:
        self._check_open()
        raise control_refused(call, self._transactional_id)

    def _check_open(self) -> None:
        if self._ended:
            raise batch_ended(self._transactional_id)

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
        """See StoreTransaction."""
        self._before_unit = (len(self._request.operations), self._size)

    def undo_unit(self) -> None:
        """See StoreTransaction."""
        count, self._size = self._before_unit
        del self._request.operations[count:]

    def end(self) -> None:
        """Accept no more operations. Called by the writer."""
        self._ended = True
