"""A transaction that its user begins and ends: what was sent is kept, and committed with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import ref

from dualwrite import process
from dualwrite.deadline import Limit
from dualwrite.errors import StoreCommitFailedError, UsageError, WriterClosedError
from dualwrite.kafka.base import GivenMessage, GroupMetadata, Message, progress_of
from dualwrite.kafka.messages import checked
from dualwrite.state import ConsumedOffset, PreparedTxnState
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Move, Positions
from dualwrite.stores.store_transaction import UsersTransaction
from dualwrite.transaction import LaterMessage, OpenTransaction, Transaction, no_later
from dualwrite.writer import DualWriter

Savepoints = frozenset[Hashable]


class JoinedOpenTransaction(OpenTransaction):
    """What a pool has of a transaction that the user has begun, or begins next.

    No writer is needed, and nothing is sent, before the user commits: a transaction that ends in any other way leaves nothing
    behind.

    Args:
        prefix: Of the pool.
        commit: Commits the user's transaction on a connection, with what this has kept.
        savepoints: The savepoints that the user's transaction is in now.
        handle: What the user writes with.
        can_wait: Whether a message may wait for its time.
    """

    def __init__(
        self,
        prefix: str,
        commit: Callable[[UsersTransaction, JoinedOpenTransaction], None],
        savepoints: Callable[[], Savepoints],
        handle: Any,
        *,
        can_wait: bool,
    ) -> None:
        self.transactional_id = prefix
        self.number = 0
        self.state: PreparedTxnState | None = None
        self.messages: list[tuple[Message, Savepoints]] = []
        self.offsets: list[tuple[list[ConsumedOffset], GroupMetadata, Savepoints]] = []
        self.moves: list[tuple[Positions, str, list[Move], Savepoints]] = []
        self.waiting: list[tuple[LaterMessage, Savepoints]] = []
        self._can_wait = can_wait
        self._commit = commit
        self._savepoints = savepoints
        self._handle = handle
        self._pid = process.pid
        self._open = True

    # --- for the user's code ----------------------------------------------------------------------------------------------

    @property
    def db(self) -> Any:
        self._check()
        return self._handle()

    @property
    def session(self) -> Any:
        self._check()
        return self._handle()

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """The messages are checked now and sent when the user commits: if a topic is missing, the commit fails."""
        self._check()
        inside = self._savepoints()
        self.messages += [(checked(message), inside) for message in messages]

    def send_later(self, later: LaterMessage) -> None:
        """It is written when the user commits."""
        self._check()
        if not self._can_wait:
            raise no_later(self.transactional_id)
        self.waiting.append((later, self._savepoints()))

    def cancel(self, cancel_id: str) -> NoReturn:
        """Not here: that would need the user's connection now."""
        raise UsageError(
            f"The message {cancel_id!r} can't be cancelled by a transaction that was joined.",
            transactional_id=self.transactional_id,
            next_step="call pool.cancel(id), which does it in a transaction of its own",
        )

    def send_offsets(self, consumer: Any, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        self._check()
        positions, group = progress_of(consumer, offsets)
        self.offsets.append((list(positions), group, self._savepoints()))

    def move_positions(self, positions: Positions, group_id: str, moves: Iterable[Move]) -> None:
        """The positions are moved when the user commits, before the transaction is recorded."""
        self._check()
        self.moves.append((positions, group_id, list(moves), self._savepoints()))

    def _check(self) -> None:
        if not self._open:
            raise WriterClosedError(
                "The transaction that was joined has ended.",
                transactional_id=self.transactional_id,
                next_step="send inside the block; or join the next transaction: tx = pool.join(session)",
            )
        if process.pid != self._pid:
            process.check_not_forked("the transaction", self._pid, self.transactional_id)

    def pass_on(self, begun: OpenTransaction) -> None:
        """Send what was kept, in the transaction that a writer has begun."""
        if self.messages:
            begun.send_messages([message for message, _ in self.messages])
        for later, _ in self.waiting:
            begun.send_later(later)
        for positions, group, _ in self.offsets:
            begun.send_positions(positions, group)
        for kept, group_id, moves, _ in self.moves:
            begun.move_positions(kept, group_id, moves)

    # --- for the store ----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def has_content(self) -> bool:
        return bool(self.messages or self.waiting or self.offsets or self.moves)

    def commit(self, connection: UsersTransaction) -> None:
        self._commit(connection, self)

    def forget_since(self, savepoint: Hashable) -> None:
        self.messages = [each for each in self.messages if savepoint not in each[1]]
        self.waiting = [each for each in self.waiting if savepoint not in each[1]]
        self.offsets = [each for each in self.offsets if savepoint not in each[2]]
        self.moves = [each for each in self.moves if savepoint not in each[3]]


class UsersUnit:
    """Messages that commit with a transaction that a framework has begun on a driver's connection; see `WriterPool.unit_on`.

    Attributes:
        tx: What the user's code sends with.
    """

    def __init__(self, joined: JoinedOpenTransaction, users: UsersTransaction) -> None:
        self.tx: Transaction[Any] = Transaction(joined)
        self._joined = joined
        self._users = users

    @property
    def has_content(self) -> bool:
        """Whether there is something to commit besides the database's transaction."""
        return self._joined.has_content

    @property
    def messages(self) -> list[Message]:
        """What was sent, without what belongs to savepoints that were forgotten."""
        return [message for message, _ in self._joined.messages]

    def forget_since(self, savepoint: Hashable) -> None:
        """Forget what was sent inside this savepoint, which was rolled back."""
        self._joined.forget_since(savepoint)

    def commit(self) -> None:
        """Commit both sides whole: the framework's own COMMIT then finds no transaction. The unit ends.

        After an error both sides are rolled back; or the outcome is unknown, and the connection is closed.

        Raises:
            DualWriteError: As for `WriterPool.transaction`.
        """
        try:
            self._joined.commit(self._users)
        except BaseException:
            self._users.roll_back()
            raise
        finally:
            self.end()

    def end(self) -> None:
        """End the unit; what was not committed is forgotten. Idempotent."""
        self._joined.end()


def claimed_first(transactional_id: str) -> StoreCommitFailedError:
    """The error for a transaction that was rolled back, so that its writer could claim its id."""
    return StoreCommitFailedError(
        "The writer had to claim its id first; both sides are rolled back.",
        transactional_id=transactional_id,
        cause="another process had recovered it, or its last transaction was in doubt; and SQLite has one write lock for the "
        "whole file, which this transaction had",
        next_step="run the whole transaction again: the id is claimed now",
    )


class Joining:
    """The transactions of a pool that its users begin.

    Args:
        prefix: Of the pool.
        store: Of the pool.
        writer: Checks out a writer to commit a user's transaction, within a limit or the pool's own.
        can_wait: Whether a message may wait for its time.
    """

    def __init__(
        self,
        prefix: str,
        store: TxnStateStore,
        writer: Callable[[UsersTransaction, Limit | None], AbstractContextManager[DualWriter[Any]]],
        *,
        can_wait: bool,
    ) -> None:
        self._can_wait = can_wait
        self._prefix = prefix
        self._store = store
        self._writer = writer

    def joined(self, session: Any) -> Transaction[Any]:
        """See `WriterPool.join`."""
        commit, can_wait = partial(self._commit, None), self._can_wait
        make = partial(JoinedOpenTransaction, self._prefix, commit, handle=ref(session), can_wait=can_wait)
        return Transaction(self._store.join(session, self, make))

    @contextmanager
    def on_connection(self, connection: Any, timeout: Limit | None) -> Iterator[Transaction[Any]]:
        """See `WriterPool.transaction`."""
        users, joined = self._begun(connection, timeout, is_async=False)
        users.begin()
        try:
            yield Transaction(joined)
            joined.commit(users)
        except BaseException:
            users.roll_back()
            raise
        finally:
            joined.end()

    @asynccontextmanager
    async def on_async_connection(self, connection: Any, limit: Limit | None) -> AsyncIterator[Transaction[Any]]:
        """See `AsyncWriterPool.transaction`."""
        users, joined = self._begun(connection, limit, is_async=True)
        await users.awaited(lambda on: on.begin())
        try:
            yield Transaction(joined)
            await users.awaited(joined.commit)
        except BaseException:
            await users.awaited(lambda on: on.roll_back())
            raise
        finally:
            joined.end()

    def unit_on(self, connection: Any, savepoints: Callable[[], Savepoints], handle: Callable[[], Any] | None) -> UsersUnit:
        """See `WriterPool.unit_on`."""
        users, joined = self._begun(connection, None, is_async=False, savepoints=savepoints, handle=handle)
        return UsersUnit(joined, users)

    def _begun(
        self,
        connection: Any,
        timeout: Limit | None,
        *,
        is_async: bool,
        savepoints: Callable[[], Savepoints] = frozenset,
        handle: Callable[[], Any] | None = None,
    ) -> tuple[UsersTransaction, JoinedOpenTransaction]:
        users = self._store.users_connection(connection)
        if users.is_async and not is_async:
            raise UsageError(
                "An asynchronous connection can't be used by a blocking pool.",
                next_step="use the pool of dualwrite.aio: async with pool.transaction(connection=…) as tx",
            )
        if is_async and not users.is_async:
            raise UsageError(
                "A blocking connection would keep the event loop waiting.",
                next_step="use an asynchronous driver's (such as asyncpg, psycopg or aiomysql), or a blocking pool in a thread",
            )
        commit = partial(self._commit, timeout)
        tx_handle = handle or (lambda: connection)
        return users, JoinedOpenTransaction(self._prefix, commit, savepoints, tx_handle, can_wait=self._can_wait)

    def _commit(self, timeout: Limit | None, users: UsersTransaction, joined: JoinedOpenTransaction) -> None:
        if not joined.has_content:
            users.commit()
            return
        with self._writer(users, timeout) as writer, writer.joined_transaction(users) as begun:
            joined.transactional_id = begun.transactional_id
            joined.pass_on(begun)
        joined.state, joined.outcome = begun.state, begun.outcome
