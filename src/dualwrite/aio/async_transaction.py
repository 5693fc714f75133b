"""The transaction object of a coroutine: what blocks is awaited, and runs in a thread of the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from dualwrite.kafka.base import Headers, Message
from dualwrite.kafka.messages import Columns, checked
from dualwrite.observability import tracing
from dualwrite.state import PreparedTxnState
from dualwrite.transaction import LaterMessage, Outcome, Transaction, later_message, opened

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault  # in typing from Python 3.13 on

    from dualwrite.aio.coroutine_threads import BorrowedThread
    from dualwrite.stores.sql.async_handles import AsyncSession

    A = TypeVarWithDefault("A", default=Any)
else:
    A = TypeVar("A")

P = ParamSpec("P")
T = TypeVar("T")


class AsyncTransaction(Generic[A]):
    """A transaction for a coroutine: writes through `db` and messages sent by `send` become visible together, or not at all.

    `AsyncTransaction[AsyncConnection]` is one on a SQL database; without a parameter `db` may be anything. Only one task may
    use it at a time, and none after its unit or its block has ended.

    Args:
        transaction: The transaction in the thread.
        thread: That thread, which serves the coroutine.
    """

    def __init__(self, transaction: Transaction[Any], thread: BorrowedThread) -> None:
        self._transaction = transaction
        self._thread = thread
        self._unsent: deque[Message] = deque()  # never replaced: both threads use it at the same time
        self._unsent_later: deque[LaterMessage] = deque()  # as above
        self._send_error: BaseException | None = None
        self._db: Any = None
        self._session: AsyncSession | None = None

    @property
    def db(self) -> A:
        """The handle for writing to the database.

        SQL: an AsyncConnection. RocksDB, ZooKeeper and stores of your own: the same object as in `Transaction.db`, whose
        methods are not awaited. It only collects changes; reading from it blocks the event loop, unless it is done in
        `run_sync`.

        Raises:
            WriterClosedError: The unit or the block has ended.
            UsageError: The store uses psycopg connections: use `run_sync`, or `session`.
        """
        self._thread.check()
        if self._db is None:
            self._db = opened(self._transaction).store_transaction.async_handle(self._thread)
        handle: A = self._db
        return handle

    @property
    def session(self) -> AsyncSession:
        """An AsyncSession (ORM) on the same database transaction as `db`.

        Raises:
            WriterClosedError: The unit or the block has ended.
            UsageError: The database is not a SQL database.
        """
        self._thread.check()
        if self._session is None:
            self._session = opened(self._transaction).store_transaction.async_session(self._thread)
        return self._session

    @property
    def transactional_id(self) -> str:
        return self._transaction.transactional_id

    @property
    def outcome(self) -> Outcome | None:
        """After the unit or the block: see `Transaction.outcome`."""
        return self._transaction.outcome

    @property
    def state(self) -> PreparedTxnState | None:
        return self._transaction.state

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        not_before: datetime | None = None,
        delay: float | None = None,
        cancel_id: str | None = None,
    ) -> None:
        """Send one message as part of the transaction; never blocks, and is not awaited.

        The message is checked now, but sent only when the coroutine has ended: a missing topic is reported then.

        Args: as for `Transaction.send`.

        Raises:
            InvalidMessageError: An argument has the wrong type or is out of range.
            WriterClosedError: The unit or the block has ended.
        """
        self._thread.check()
        messages = tracing.traced([checked((topic, value, key, headers, partition, timestamp))])
        if not_before is None and delay is None and cancel_id is None:
            self._unsent.extend(messages)
        else:
            self._unsent_later.append(later_message(messages[0], not_before, delay, cancel_id))

    async def cancel(self, cancel_id: str) -> bool:
        """Cancel a message that waits for its time; see `Transaction.cancel`."""
        return await self.run_sync(lambda transaction: transaction.cancel(cancel_id))

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Send many messages as part of the transaction; see `send` and `Transaction.send_many`.

        If one of them is invalid, none is sent.
        """
        self._thread.check()
        messages = Columns(topic, values, keys=keys, partition=partition, timestamp=timestamp)
        self._unsent.extend(tracing.traced([checked(message) for message in messages]))

    async def send_offsets(self, consumer: Any, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        """Commit a consumer's positions in the transaction; see `Transaction.send_offsets`. Not in a unit of `run`."""
        await self.run_sync(lambda transaction: transaction.send_offsets(consumer, offsets))

    async def run_sync(
        self, function: Callable[Concatenate[Transaction[Any], P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a plain function in the thread of the transaction, and wait for it: for code that blocks.

        Args:
            function: Called with the Transaction, whose `db` and `session` are the synchronous ones, and the arguments.
            *args: Positional arguments after the Transaction.
            **kwargs: Keyword arguments.

        Raises:
            BaseException: What the function raises.
            DualWriteError: A message that `send` had accepted before was not sent: the transaction can't be committed any more.
            WriterClosedError: The unit or the block has ended.
        """

        def in_thread() -> T:
            send_unsent(self)
            return function(self._transaction, *args, **kwargs)

        return await self._thread.call(in_thread)


def plain(tx: AsyncTransaction[Any]) -> Transaction[Any]:
    """The transaction in the thread, behind the object that the coroutine has."""
    return tx._transaction  # noqa: SLF001  (not a property: users would see it)


def send_unsent(tx: AsyncTransaction[Any]) -> None:
    """Send what the coroutine has sent, and its thread has not. Called in the thread.

    If that fails, every later call fails too: some of the messages are missing, so the transaction must not be committed.
    """
    if tx._send_error is not None:  # noqa: SLF001  (a function for the same reason as `plain`)
        raise tx._send_error  # noqa: SLF001  (as above)
    unsent, later = tx._unsent, tx._unsent_later  # noqa: SLF001  (as above)
    messages = [unsent.popleft() for _ in range(len(unsent))]
    try:
        if messages:
            opened(plain(tx)).send_messages(messages)
        while later:
            opened(plain(tx)).send_later(later.popleft())
    except BaseException as error:
        tx._send_error = error  # noqa: SLF001  (as above)
        raise
