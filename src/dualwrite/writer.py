"""DualWriter: one id with its lanes, for one thread at a time (DESIGN.md §4, KIP-939 "dual write recipe")."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Concatenate, Final, Generic, ParamSpec, Self, TypeVar, overload

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from dualwrite.errors import ConcurrentUseError, DualWriteError, NestedTransactionError, UsageError, WriterClosedError
from dualwrite.failpoints import note_ignored_variable
from dualwrite.kafka.base import ProducerFactory, TransactionCoordinator
from dualwrite.recipe.lanes import Lanes
from dualwrite.recipe.phases import Phase
from dualwrite.recovery.recoverer import name_lane
from dualwrite.recovery.report import RecoveryReport
from dualwrite.settings import OnLost, Timeouts, validate_lanes
from dualwrite.state import validate_transactional_id
from dualwrite.stores.base import TxnStateStore
from dualwrite.transaction import H, Transaction, forked

P = ParamSpec("P")
T = TypeVar("T")

_WAIT: Final = wait_exponential(multiplier=0.05, max=2.0) + wait_random(0, 0.05)


class DualWriter(Generic[H]):
    """Writes to one database and to Kafka as one, under one transactional id. One thread at a time.

    `DualWriter[Connection]`, which `connect` makes for a SQLAlchemy Engine, has transactions of `Transaction[Connection]`.

    `dualwrite.connect` builds one. Opening it claims the id, settles what an earlier holder left, and takes the id over;
    from then on an earlier holder can neither commit to the database nor to Kafka.

    A writer has one or more *lanes*: transactional ids of their own, `orders`, `orders~1`, `orders~2`, each with its claim, its
    row and its producer. Transactions take turns on them, so that none waits until Kafka has written the markers of the one
    before. They are still one after another: in each partition their messages lie in the order of the transactions. Opening
    claims and settles every lane of the id, also those that an earlier writer had beyond ours.

    Args:
        store: The database that keeps the row; closed with the writer if `owns_store`.
        transactional_id: The logical id: the same over restarts, and used by one writer at a time.
        producers: Makes the producer for a Kafka transactional id, and says of which kind it is.
        coordinator: Kafka's side, for recovery; closed with the writer if `owns_coordinator`.
        lanes: How many lanes transactions take turns on, 1 to 100. It may change from one opening to the next.
        timeouts: Time limits.
        on_lost: What opening does while lost or unverified transactions stand in the row unacknowledged: "raise"
            LostTransactionError or UnverifiedTransactionError, or "report" them in `recovery_report` and go on.
        owns_store: Whether `close` closes the store.
        owns_coordinator: Whether `close` closes the coordinator.

    Raises:
        InvalidTransactionalIdError: The id is empty, too long (with the numbers of its lanes), or holds '#' or '~'.
        ConfigurationError: The number of lanes is none.
    """

    def __init__(
        self,
        store: TxnStateStore,
        *,
        transactional_id: str,
        producers: ProducerFactory,
        coordinator: TransactionCoordinator,
        lanes: int = 1,
        timeouts: Timeouts | None = None,
        on_lost: OnLost = "raise",
        owns_store: bool = False,
        owns_coordinator: bool = False,
    ) -> None:
        self._id = validate_transactional_id(transactional_id, lanes=validate_lanes(lanes))
        self._store = store
        self._coordinator = coordinator
        self._on_lost = on_lost
        self._owns_store = owns_store
        self._owns_coordinator = owns_coordinator
        self._lanes = Lanes(
            store, coordinator, producers, transactional_id=self._id, count=lanes, timeouts=timeouts or Timeouts()
        )
        self._mutex = threading.Lock()
        self._user: int | None = None
        self._pid = os.getpid()

    # --- what can be asked ----------------------------------------------------------------------------------------------

    @property
    def transactional_id(self) -> str:
        """The logical transactional id."""
        return self._id

    @property
    def phase(self) -> Phase:
        """Where the writer stands: as its lanes do, and where they differ, as the one that the next transaction waits for."""
        return self._lanes.phase

    @property
    def recovery_report(self) -> RecoveryReport:
        """What the last opening found and settled, lane by lane."""
        return self._lanes.report

    @property
    def store(self) -> TxnStateStore:
        """The database's side."""
        return self._store

    # --- opening and closing --------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Claim the id with all its lanes, settle what an earlier holder left, and take the id over.

        Raises:
            StoreUnavailableError: The database can't be reached; the message names address and setting.
            StateTableMissingError: The table is missing; the message names the command that makes it.
            ClaimTimeoutError: Another transaction holds the id's row; the message names it where the database tells.
            BrokerUnavailableError: Kafka can't be reached; the message names address and setting.
            LostTransactionError: See `on_lost`. Everything is settled; acknowledge and open again.
            FencedError: Somebody else claimed the id while we were opening.
        """
        with self._exclusively("open()"):
            note_ignored_variable()
            if self.phase is not Phase.OPENING:
                raise UsageError(f"open() was called, but the writer {self.phase.value}.", transactional_id=self._id)
            self._lanes.acquire(only_if_ours=False, on_lost=self._on_lost)
        return self

    def reopen(self) -> Self:
        """Take the id again, from whoever has it: after FencedError, or to recover at once after trouble.

        Raises: as `open`.
        """
        with self._exclusively("reopen()"):
            if self.phase is Phase.CLOSED:
                raise WriterClosedError("The writer is closed.", transactional_id=self._id)
            self._lanes.acquire(only_if_ours=False, on_lost=self._on_lost)
        return self

    def close(self) -> None:
        """Settle what is unsettled, clear the stored state, and release everything. May be called more than once.

        Every lane is closed, also where one fails.

        Raises:
            InDoubtTransactionError: The last transaction is still unsettled and could not be settled now; recovery will.
            UsageError: Called inside a transaction.
        """
        if self._lanes.are_closed:
            return
        with self._exclusively("close()"):
            try:
                self._lanes.close()
            finally:
                if self._owns_coordinator:
                    self._coordinator.close()
                if self._owns_store:
                    self._store.close()

    def __enter__(self) -> Self:
        if self.phase is Phase.OPENING:
            self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self._check_process("leaving the writer")
            self._forget_abandoned_transaction()
            self.close()
        except DualWriteError as closing:
            error.add_note(f"dualwrite, closing the writer: {closing}")

    # --- transactions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[Transaction[H]]:
        """One business transaction: leaving the block well commits both sides, an exception rolls both back.

        The user's own exception goes through unchanged. Besides it:

        Raises:
            FencedError: Somebody else has claimed the id. Both sides are rolled back.
            StoreCommitFailedError: The database did not commit (retriable). Both sides are rolled back.
            DeliveryError: A message was not stored; UnknownTopicError and MessageTooLargeError where that is why. Both sides
                are rolled back.
            TransactionTimeoutError: The transaction grew too old to commit safely. Both sides are rolled back.
            InDoubtTransactionError: The outcome could not be learnt. Nothing is guessed: recovery settles it.
            LostTransactionError: The database committed and Kafka had timed out (no two-phase commit); recorded.
            NestedTransactionError: Inside another transaction of this writer.
            ConcurrentUseError: Another thread is using the writer.
            WriterClosedError: The writer is closed, or was never opened.
        """
        with self._exclusively("transaction()"):
            phase = self.phase
            if phase in (Phase.OPENING, Phase.CLOSED):
                raise WriterClosedError(f"The writer {phase.value}.", transactional_id=self._id)
            lane = self._lanes.next()
            try:
                transaction = lane.begin()
                yield transaction
                self._check_process("the end of transaction()")
                lane.before_commit()
                transaction.end()
                lane.commit(transaction)
            except BaseException as error:  # KeyboardInterrupt too must leave neither side open
                if os.getpid() != self._pid:
                    raise  # a forked child: the connections are its parent's, in the middle of its transaction
                lane.after_trouble(error)
            finally:
                self._forget_transaction()

    @overload
    def transactional(self, function: Callable[Concatenate[Transaction[H], P], T], /) -> Callable[P, T]: ...

    @overload
    def transactional(self, /, *, attempts: int) -> Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]: ...

    def transactional(
        self, function: Callable[Concatenate[Transaction[H], P], T] | None = None, /, *, attempts: int = 1
    ) -> Callable[P, T] | Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]:
        """Make every call of a function one transaction; the function gets the Transaction as its first argument.

        As `@writer.transactional`, or `@writer.transactional(attempts=3)`: then the whole function runs again, with
        back-off, after an error that is retriable (serialization failures and the like, after which nothing is left).
        """
        decorate = _repeating(self.transaction, attempts=attempts, may_be_repeated=self._may_be_repeated)
        return decorate if function is None else decorate(function)

    def _may_be_repeated(self, error: BaseException) -> bool:
        """Whether nothing is left of the transaction and the same one may succeed; the user's own statement may tell it too."""
        return error.retriable if isinstance(error, DualWriteError) else self._store.is_conflict(error)

    # --- one thread, one process --------------------------------------------------------------------------------------------

    def _forget_transaction(self) -> None:
        if os.getpid() == self._pid:
            self._lanes.forget_transactions()

    def _forget_abandoned_transaction(self) -> None:
        """End what a block left that was interrupted between its last line and our first: only the traceback holds it then."""
        with self._mutex:
            if self._user == threading.get_ident():
                self._forget_transaction()
                self._user = None

    def _check_process(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise forked(what, self._pid, self._id)

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        me = threading.get_ident()
        self._check_process(what)
        with self._mutex:
            if self._user == me and self._lanes.in_transaction:
                raise NestedTransactionError(
                    f"{what} inside a transaction of the same writer.",
                    transactional_id=self._id,
                    next_step="for a part that may fail by itself, use a savepoint: tx.db.begin_nested()"
                    if what == "transaction()"
                    else f"leave the block first: {what} is for between transactions",
                )
            if self._user not in (None, me):
                raise ConcurrentUseError(
                    f"{what}, while another thread is using the writer.",
                    transactional_id=self._id,
                    next_step="one writer, with a transactional id of its own, for each thread",
                )
            self._user = me
        try:
            self._lanes.forget_transactions()  # what an interrupt kept an earlier call from finishing
            yield
        except DualWriteError as error:
            name_lane(error, self._id)
            raise
        finally:
            self._user = None


def _repeating(
    transaction: Callable[[], AbstractContextManager[Transaction[H]]],
    *,
    attempts: int,
    may_be_repeated: Callable[[BaseException], bool],
) -> Callable[[Callable[Concatenate[Transaction[H], P], T]], Callable[P, T]]:
    """A decorator that runs a function inside `transaction()`, and hands it the Transaction as its first argument.

    Args:
        transaction: Begins a transaction, as a context manager.
        attempts: How often the whole function runs at most, with back-off.
        may_be_repeated: Whether an error left nothing behind, and the same again may succeed.

    Raises:
        UsageError: `attempts` is below 1.
    """
    if attempts < 1:
        raise UsageError(f"attempts is {attempts}; 1 is the least.")

    def decorate(function: Callable[Concatenate[Transaction[H], P], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            with transaction() as begun:
                return function(begun, *args, **kwargs)

        @functools.wraps(function)
        def repeated(*args: P.args, **kwargs: P.kwargs) -> T:
            retrying = Retrying(
                retry=retry_if_exception(may_be_repeated), stop=stop_after_attempt(attempts), wait=_WAIT, reraise=True
            )
            return retrying(once, *args, **kwargs)

        return once if attempts == 1 else repeated

    return decorate
