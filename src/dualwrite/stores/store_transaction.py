"""The contract of one database transaction: the user's writes and the prepared state are committed together.

`dualwrite.stores.base` has the contract of the store that begins it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from operator import attrgetter
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

from dualwrite.errors import TransactionControlError, UsageError
from dualwrite.state import Delivery, PreparedTxnState

P = ParamSpec("P")
T = TypeVar("T")


class RunAloneError(Exception):
    """A unit was about to change what the units after it see: it must be undone, and run in a transaction of its own.

    Internal: raised by a unit's handle, and handled by whoever runs the units.

    Args:
        what: The statement, or the call.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} would be seen by the units that share the transaction; this unit runs again, alone")
        self.what = what


class TransactionThread(Protocol):
    """The thread of a transaction that a coroutine uses (docs/guides/asyncio.md).

    Attributes:
        ident: The thread's identifier, as `threading.get_ident()` returns it.
    """

    ident: int

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread and wait for it, without blocking the event loop; calls run one after another.

        A call can't be stopped once it was passed to the thread: a cancellation of the coroutine is raised when the function
        has ended.

        Raises:
            BaseException: What the function raises.
            WriterClosedError: The coroutine's unit or block has ended.
        """


class StoreTransaction(ABC):
    """One database transaction, begun under a claim whose fence was current when it began.

    While the user's block runs, `handle` (and `session`) refuse to end the transaction: TransactionControlError. Once it has
    been committed or rolled back, they and every method but `rollback` raise WriterClosedError.
    """

    @property
    @abstractmethod
    def handle(self) -> Any:
        """What the user writes with: SQLAlchemy Connection, RocksDB batch, ZooKeeper transaction."""

    @property
    def session(self) -> Any:
        """A SQLAlchemy ORM Session on the same transaction, created at the first use.

        Raises:
            UsageError: The store does not support ORM sessions.
        """
        raise UsageError(f"{type(self).__name__} has no ORM session; write through `tx.db`.")

    # --- a transaction of `TxnStateStore.begin_soon`: BEGIN may be sent with the first statement ----------------------------

    is_fence_checked: bool = True
    """Whether the fence was found to be the claim's."""

    def check_fence(self) -> None:  # noqa: B027  (most stores check it when they begin)
        """Check the fence, unless that was done; called before the first message is sent (rule F2).

        Raises: as `TxnStateStore.begin`, here or in whatever uses the database first: also what the user does with `handle`.
        """

    found_number: int | None = None
    """The row's transaction number when the fence was checked; None: it is not checked yet, or the store does not say."""

    begin_error: Exception | None = None
    """Why the transaction could not begin, if that has shown only later: nothing was written. It must be rolled back."""

    # --- for coroutines: called in the event loop's thread, while the transaction's thread waits --------------------------

    def async_handle(self, thread: TransactionThread) -> Any:
        """What a coroutine writes with. By default `handle` itself: for stores that only collect changes before the commit.

        Args:
            thread: The transaction's thread, for what blocks.

        Raises:
            UsageError: The store's handle would block the event loop.
        """
        del thread
        return self.handle

    def async_session(self, thread: TransactionThread) -> Any:
        """An ORM session for a coroutine, on the same transaction.

        Raises:
            UsageError: The store does not support ORM sessions.
        """
        del thread
        return self.session

    def before_commit(self) -> None:  # noqa: B027  (only SQL has an ORM)
        """Called when the block ended without an error and Kafka's side is still open: this may still write and send messages.

        With an ORM session: runs its `before_commit` event, and flushes pending changes.

        Raises:
            Exception: What the user's listeners and the flush raise, unchanged; both sides are rolled back.
        """

    # --- isolation of those who use this transaction, or its connection, one after another ----------------------------------

    refused: str | None = None
    """What the current unit was about to do when RunAloneError was raised, even if the unit has ignored that."""

    def watch(self, *, shares: bool) -> None:  # noqa: B027  (handles without settings have nothing to watch)
        """From here on, watch what the user's statements leave behind; see `dualwrite.stores.sql.isolation`.

        Args:
            shares: Whether others will use the transaction too. If so, a statement that leaves something behind is not
                executed, and raises RunAloneError. Otherwise it is executed, and if it changes the session, the connection is
                not used again after the transaction.
        """

    def renew_handle(self) -> None:  # noqa: B027  (as above)
        """Forget what the user has set on the handle: options, factories, listeners. `end_unit` and `undo_unit` do so, too."""

    # --- settings that a unit declares: called only if the store has `has_local_settings` ------------------------------------

    def may_set_local(self, settings: Mapping[str, str]) -> bool:
        """Whether the next unit may have these settings, after those that have used the transaction so far.

        False if something of theirs would see these settings, too, since it runs at COMMIT.
        """
        del settings
        return True

    def set_local(self, settings: Mapping[str, str]) -> None:  # noqa: B027  (as above)
        """From the next statement on, these settings have these values, and all others those from before the transaction.

        Called after `begin_unit`, or `begin_units`, which undo it, too. An error of the database is raised by that statement.

        Args:
            settings: The value of each, by its name in lower case; see `dualwrite.pool.declared`.
        """

    # --- units of work that share this transaction (group commit) -----------------------------------------------------------

    def begin_unit(self) -> None:
        """Begin the next unit: from here on, `undo_unit` undoes what this unit has written, and only that.

        The three methods are called only if the store has `undoes_units`.

        Raises:
            TransactionControlError: The unit before has ended the transaction itself.
            StoreError: Any other failure; the transaction must be rolled back.
        """
        raise UsageError(f"{type(self).__name__} can't undo a single unit of a transaction.")

    def end_unit(self) -> None:  # noqa: B027  (without a session nothing is pending)
        """End the unit: as `before_commit`, for what this unit has left pending. The next unit gets a session of its own.

        Raises:
            Exception: As `before_commit`; the unit must be undone.
            StoreCommitFailedError: The unit has left the transaction unable to commit; the unit must be undone.
            RunAloneError: The unit has ignored an earlier RunAloneError; it must be undone.
        """

    def undo_unit(self, error: BaseException) -> None:  # noqa: B027  (never called without begin_unit)
        """Undo what was written since `begin_unit`; the transaction continues without it.

        Args:
            error: Why the unit is undone; it may show that the database has rolled back more than the unit.

        Raises:
            TransactionControlError: The unit has ended the transaction itself.
            StoreError: The unit can't be undone alone; the transaction must be rolled back.
        """

    def begin_units(self) -> None:
        """Begin units that are undone only together; each is ended by `end_unit`.

        Statements may be sent without waiting for their responses: the error of one may be raised in a later unit, or by
        `end_units`, but a unit gets what it reads at once. This and the two following methods are called only if the store
        has `units_need_savepoints`, and at most once in a transaction, before any `begin_unit`.

        Raises:
            StoreError: The transaction must be rolled back.
        """
        self.begin_unit()

    savepoints: int = 0
    """How many savepoints the units have set so far, as far as the store sees them; they count towards `group_units`."""

    has_unanswered_statements: bool = False
    """Whether some statements of the units have no response yet; `end_units` waits for it."""

    def end_units(self) -> None:  # noqa: B027  (nothing is late unless a store makes it so)
        """Wait until every statement of the units has its response.

        Raises:
            Exception: The error of a statement; the units must be undone.
            StoreCommitFailedError: A unit has left the transaction unable to commit; the units must be undone.
        """

    def undo_units(self, error: BaseException) -> None:
        """Undo what was written since `begin_units`; see `undo_unit`."""
        self.undo_unit(error)

    @abstractmethod
    def record(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """Write S, its generation, delivery and number, on the condition that the fence is still the claim's.

        Called once, as the last write of the transaction. Pending changes of the ORM session are flushed first.

        If the database locks rows, a claim of the id waits from here to the end of the transaction. If it compares versions
        instead, the condition is checked at `commit`: a claim in between makes the commit fail.

        Raises:
            FencedError: There is a newer claim of the id. The transaction must be rolled back.
            TransactionControlError: The user's block has already ended the transaction; what it wrote before that may be
                committed, without its messages.
            StoreError: Any other failure of the store; the transaction must be rolled back, nothing was committed. It is
                retriable (StoreCommitFailedError) if the database aborted the transaction because of a conflict with another.
            Exception: What the flush of the user's own changes raises, unchanged.
        """

    def record_at_commit(
        self,
        state: PreparedTxnState | None,
        *,
        generation: int,
        transaction_number: int,
        delivery: Delivery | None = None,
    ) -> None:
        """As `record`, but the write may happen in `commit`, which then does both in one round trip and raises either's errors.

        Called instead of `record` under two-phase commit, where nothing has to be checked between the two.

        Raises: as for `record`.
        """
        self.record(state, generation=generation, transaction_number=transaction_number, delivery=delivery)

    after_commit_error: Exception | None = None
    """Set by `commit`: what the user's listeners of the commit have raised. It does not change that the database committed."""

    is_surely_rolled_back: bool = False
    """Set by `commit` before it raises an error of `record`: certainly nothing was committed."""

    @abstractmethod
    def commit(self) -> None:
        """Commit: the commit point of the whole recipe.

        Raises:
            StoreCommitFailedError: Certainly not committed, and already rolled back.
            FencedError: The same, because the id was claimed again after `record`.
            StoreCommitUnknownError: The outcome is unknown. Any other exception, including KeyboardInterrupt, must also be
                treated as unknown, unless `is_surely_rolled_back` is set.
            DualWriteError: After `record_at_commit`: as for `record`, with `is_surely_rolled_back` set.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Roll back and release everything. May be called at any time and more than once; does nothing after `commit`.

        A connection that can't roll back any more is closed, which makes the database roll back. Raises no `Exception`, only
        other exceptions such as KeyboardInterrupt.
        """


class UsersTransaction(Protocol):
    """A transaction on a connection of the user's; see `TxnStateStore.users_connection`.

    Attributes:
        is_async: Whether the connection belongs to an event loop.
    """

    @property
    def is_async(self) -> bool: ...

    def begin(self) -> None:
        """Begin it, or leave that to the driver. Raises: UsageError, if it has begun already, or the driver's error."""

    def commit(self) -> None:
        """Commit the database alone. Raises: the driver's error."""

    def roll_back(self) -> None:
        """Roll back, if it has not ended, or close the connection, which makes the database do it."""

    async def awaited(self, work: Callable[[Any], T]) -> T:
        """Run work with this transaction in a thread, if the connection belongs to the running event loop."""
        ...


class JoinedUnit(Protocol):
    """Messages that commit with a transaction of the user's (`TxnStateStore.join`).

    Attributes:
        is_open: Whether it has not ended.
        has_content: Whether there is something to commit.
    """

    @property
    def is_open(self) -> bool: ...

    @property
    def has_content(self) -> bool: ...

    def commit(self, connection: Any) -> None:
        """Commit the user's transaction on this connection, and the messages; after an error both are rolled back, or unknown.

        Args:
            connection: For `TxnStateStore.begin_on`.
        """

    def end(self) -> None:
        """Note that the transaction has ended."""

    def forget_since(self, savepoint: Hashable) -> None:
        """Forget what was added inside this savepoint, which is rolled back."""


def refused(call: str, by: str = "_refuse") -> Callable[..., NoReturn]:
    """A method that refuses a call, by what its object has under the name `by`."""
    refuse_by = attrgetter(by)

    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        found: Callable[[str], NoReturn] = refuse_by(self)
        found(call)

    refuse.__doc__ = "Refused."
    return refuse


def control_refused(call: str, transactional_id: str, *, savepoints: str | None = None) -> TransactionControlError:
    """The error for a call that would end or replace the transaction in the block.

    Args:
        call: The call.
        transactional_id: The writer's id.
        savepoints: How to make savepoints, if the database has them.
    """
    allowed = "" if savepoints is None else f"savepoints ({savepoints}) are allowed; "
    return TransactionControlError(
        f"{call} is not possible inside the block: the writer ends the transaction, on both sides together.",
        transactional_id=transactional_id,
        cause="a commit or rollback here would end the database's side without Kafka's",
        next_step="leave the block to commit, raise an exception to roll back; "
        f"{allowed}the transaction is still open and usable",
        call=call,
    )
