"""How a transaction is reported: by its events, and by the error that says how it ended after its commit point."""

from __future__ import annotations

import itertools
from time import perf_counter
from typing import Final, NoReturn

from dualwrite.errors import (
    AfterCommitError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    LostTransactionError,
    ProducerFencedError,
    StoreCommitFailedError,
    UnverifiedTransactionError,
)
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.observability.events import (
    DatabaseCommitted,
    MessagesDelivered,
    StateRecorded,
    Steps,
    TransactionBegun,
    TransactionCommitted,
    TransactionInDoubt,
    TransactionLost,
    TransactionRolledBack,
)
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.observers import notify
from dualwrite.observability.outages import level_of
from dualwrite.recipe.phases import Change, Way, WriterState
from dualwrite.recovery.decision import Decision, decide
from dualwrite.state import PreparedTxnState, state_text
from dualwrite.transaction import OpenTransaction, Outcome

log = SubjectLogger(__name__)

_numbers: Final = itertools.count(1)

_DOUBTS: Final = {
    # key: the database is known to have committed; another writer or recoverer has claimed the id
    (True, True): (
        (
            "The database committed the transaction, but another writer or recoverer has claimed the id since. It commits "
            "Kafka's side before anything else, or has already done so; this writer can't see it any more."
        ),
        (
            "don't repeat the transaction: its messages are visible, or will be; if Kafka has aborted them, "
            "`dualwrite status` shows the transaction as lost"
        ),
    ),
    (True, False): (
        "The database committed the transaction; the outcome on Kafka's side is unknown. The transaction stays prepared.",
        "don't repeat the transaction: as soon as Kafka can be reached, this writer, or recovery, commits Kafka's side",
    ),
    (False, True): (
        (
            "It is unknown whether the transaction committed: another writer or recoverer has claimed the id since. It ends "
            "Kafka's side with the database's outcome, or has already done so."
        ),
        "check in your data whether it committed before you repeat it",
    ),
    (False, False): (
        "It is unknown whether the transaction committed. The transaction stays prepared.",
        (
            "this writer, or recovery, resolves it as soon as the database and Kafka can be reached; check in your data "
            "whether it committed before you repeat it"
        ),
    ),
}


def raise_outcome(error: BaseException, outcome: DualWriteError) -> NoReturn:
    """Raise the transaction's outcome; KeyboardInterrupt and bugs are raised themselves, with the outcome as a note."""
    if isinstance(error, DualWriteError):
        raise outcome from (outcome.__cause__ or error)
    error.add_note(f"dualwrite: {outcome}")
    raise error


def note_committed(error: BaseException, outcome: str) -> None:
    """Log the outcome and return if `error` is one of dualwrite's; raise any other error, with the outcome as a note."""
    if isinstance(error, DualWriteError):
        log.warning("%s, despite this error: %s", outcome, error, transactional_id=error.transactional_id)
        return
    error.add_note(f"dualwrite: {outcome}.")
    raise error


def raise_after_commit_error(error: Exception, transactional_id: str) -> NoReturn:
    """Raise what a listener of the commit has raised, as an error that says that the transaction committed."""
    raise AfterCommitError(
        "The database has committed the transaction, which decides it, but a listener of the session has failed.",
        transactional_id=transactional_id,
        cause=f"{type(error).__name__}: {error}".rstrip(": "),
        next_step="repeat what the listener should have done, not the transaction",
    ) from error


def rolled_back(transactional_id: str, why: BaseException) -> StoreCommitFailedError:
    """The error for a COMMIT that failed or was not answered, when the row shows that it had no effect."""
    return StoreCommitFailedError(
        "COMMIT failed or was not answered, and the database did not commit. Both sides are rolled back.",
        transactional_id=transactional_id,
        cause=(why.cause if isinstance(why, DualWriteError) else None) or f"{type(why).__name__}: {why}".rstrip(": "),
        next_step="after fixing the cause, run the whole transaction again",
    )


def explain_fencing(error: ProducerFencedError) -> None:
    """Add the likely cause to Kafka's fencing error if no one has claimed the id in this database."""
    error.cause = (
        "the id was not claimed in this database, so another process uses it at Kafka, most likely a writer on a copy of the "
        "database; or the transaction timed out, or the id expired at its coordinator inside the block"
    )
    error.next_step = (
        "both sides are rolled back, and the writer owns the id again. Run `dualwrite doctor` on each database to find out "
        "which is a copy, and `dualwrite db new-store-id` on the copy to give it a store id of its own"
    )


def in_doubt(
    transactional_id: str, state: PreparedTxnState | None, why: DualWriteError, *, database_committed: bool | None
) -> InDoubtTransactionError:
    """The error for an outcome that could not be determined."""
    what, next_step = _DOUBTS[bool(database_committed), isinstance(why, FencedError)]
    return _doubt(what, transactional_id, state, why, next_step, database_committed=database_committed)


def unknown(prefix: str, why: BaseException) -> InDoubtTransactionError:
    """The error for a transaction of the journal whose COMMIT was not answered, if the database can't tell what came of it."""
    what = "It is unknown whether the transaction committed, its messages with it: COMMIT was not answered."
    next_step = "check in your data whether it committed before you repeat it; if it did, its messages will be published"
    return _doubt(what, prefix, None, why, next_step, database_committed=None)


def not_published_yet(transactional_id: str, state: PreparedTxnState | None, why: DualWriteError) -> InDoubtTransactionError:
    """The error for a transaction that Kafka has aborted after the database's commit, if its copy is not committed yet."""
    what = "The database committed the transaction, but Kafka has aborted it, and its messages are not published again yet."
    next_step = "don't repeat the transaction: this writer, before its next transaction, or recovery publishes them"
    return _doubt(what, transactional_id, state, why, next_step, database_committed=True)


def forgotten(transactional_id: str, state: PreparedTxnState | None, why: DualWriteError) -> InDoubtTransactionError:
    """The error for a transaction that the database had committed, and has forgotten before Kafka confirmed its commit."""
    what = "The database had committed the transaction, and has forgotten it. Its messages are visible if Kafka committed it."
    next_step = "look for its messages before you repeat it: `dualwrite status` shows where they are"
    return _doubt(what, transactional_id, state, why, next_step, database_committed=None)


def _doubt(
    what: str,
    transactional_id: str,
    state: PreparedTxnState | None,
    why: BaseException,
    next_step: str,
    *,
    database_committed: bool | None,
) -> InDoubtTransactionError:
    error = InDoubtTransactionError(
        what,
        transactional_id=transactional_id,
        cause=f"{why}",
        next_step=next_step,
        state=state_text(state),
        database_committed=database_committed,
    )
    error.__cause__ = why
    return error


def has_committed_on_both_sides(
    coordinator: TransactionCoordinator,
    kafka_transactional_id: str,
    state: PreparedTxnState | None,
    *,
    database_committed: bool | None,
) -> bool:
    """Whether a transaction that a successor resolves has provably committed on both sides. Read-only.

    A commit at Kafka proves the commit of the database, since Kafka is never committed before it. An abort proves nothing here.
    """
    if state is None:
        return database_committed is True
    try:
        return decide(state, coordinator.describe(kafka_transactional_id)) is Decision.ALREADY_COMMITTED
    except DualWriteError as error:
        log.log(
            level_of(error),
            "can't find out how the transaction ended: %s",
            error,
            kafka_transactional_id=kafka_transactional_id,
        )
        return False


# --- events ---------------------------------------------------------------------------------------------------------------


class TransactionReport:
    """Makes the events of one transaction of a lane, which it watches (`phases.Watcher`).

    A transaction that has ended, or is in doubt, is reported once: what comes later changes nothing.
    """

    __slots__ = ("_began", "_durations", "_has_ended", "_last", "_messages", "_name", "_outcome", "_transaction")

    def __init__(self, logical_id: str, lane_id: str, transaction: OpenTransaction) -> None:
        self._name = (logical_id, lane_id, next(_numbers))
        self._transaction = transaction
        self._messages = 0
        self._outcome: Outcome = "published"
        self._has_ended = False
        self._durations: list[float] = []
        self._began = self._last = perf_counter()
        transaction.number = self._name[-1]
        notify(TransactionBegun(*self._name))

    def entered(self, change: Change, of: WriterState) -> None:
        """A step has ended."""
        if change is Change.PREPARE:  # the user's code has ended
            self._step()
        elif change is Change.PREPARED:
            delivery = self._transaction.delivery
            self._messages = 0 if delivery is None else delivery.messages
            notify(MessagesDelivered(*self._name, self._messages, self._step()))
        elif change is Change.RECORDED:
            self._outcome = "published" if of.way is Way.KAFKA else "journaled"
            notify(StateRecorded(*self._name, self._step()))
        elif change is Change.DATABASE_COMMITTED:
            notify(DatabaseCommitted(*self._name, self._step()))
        elif change is Change.KAFKA_COMMITTED:
            self._committed(was_in_doubt=False)

    def ended(self, error: BaseException | None, *, is_in_doubt: bool = False) -> None:
        """See `Watcher`."""
        if self._has_ended:
            return
        if error is None:
            self._committed(was_in_doubt=True)
            return
        self._has_ended = True
        kind: type[TransactionRolledBack | TransactionInDoubt | TransactionLost]
        if is_in_doubt or isinstance(error, InDoubtTransactionError):
            kind = TransactionInDoubt
        elif isinstance(error, LostTransactionError | UnverifiedTransactionError):
            kind = TransactionLost
        else:
            kind = TransactionRolledBack
        notify(kind(*self._name, error, perf_counter() - self._began))

    def _committed(self, *, was_in_doubt: bool) -> None:
        self._has_ended = True
        self._step()
        steps, seconds = Steps(*self._durations[: len(Steps._fields)]), perf_counter() - self._began
        notify(TransactionCommitted(*self._name, self._outcome, self._messages, seconds, steps, was_in_doubt))

    def _step(self) -> float:
        now = perf_counter()
        seconds, self._last = now - self._last, now
        self._durations.append(seconds)
        return seconds
