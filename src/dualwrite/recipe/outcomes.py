"""What a transaction that met trouble past its commit point is reported as: committed, rolled back, lost, or in doubt."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Final, NoReturn

from dualwrite.errors import DualWriteError, FencedError, InDoubtTransactionError, ProducerFencedError, StoreCommitFailedError
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.recovery.decision import Decision, decide
from dualwrite.recovery.report import GenerationOutcome, raise_for_lost
from dualwrite.state import PreparedTxnState, state_text
from dualwrite.stores.base import LostTransaction

log = logging.getLogger(__name__)


def raise_outcome(error: BaseException, truth: DualWriteError) -> NoReturn:
    """Raise what became of the transaction; KeyboardInterrupt and defects go through, with the truth as a note."""
    if isinstance(error, DualWriteError):
        raise truth from (truth.__cause__ or error)
    error.add_note(f"dualwrite: {truth}")
    raise error


def pass_over(error: BaseException, truth: str) -> None:
    """Return if `error` told only that the outcome was unknown; else raise it, with the truth as a note."""
    if isinstance(error, DualWriteError):
        log.warning("%s, though: %s", truth, error)
        return
    error.add_note(f"dualwrite: {truth}.")
    raise error


def rolled_back(transactional_id: str, why: BaseException) -> StoreCommitFailedError:
    """COMMIT did not answer that it had committed, and the row shows that it had no effect."""
    return StoreCommitFailedError(
        "COMMIT failed or was not answered, and the database had not committed. Both sides are rolled back.",
        transactional_id=transactional_id,
        cause=(why.cause if isinstance(why, DualWriteError) else None) or f"{type(why).__name__}: {why}".rstrip(": "),
        next_step="once the cause is gone, run the whole transaction again",
    )


_DOUBTS: Final = {
    # by: the database is known to have committed; somebody else has claimed the id
    (True, True): (
        (
            "The database committed the transaction, and somebody else has claimed the id since: they commit Kafka's side "
            "before anything else, or have done so already. It can't be seen here any more."
        ),
        (
            "don't repeat the transaction: its messages are there, or will be; should Kafka have given them up, "
            "`dualwrite status` shows it as lost"
        ),
    ),
    (True, False): (
        "The database committed the transaction; Kafka's side is not known here. Nothing was guessed: it stays prepared.",
        "don't repeat the transaction: the next one, or recovery, commits Kafka's side",
    ),
    (False, True): (
        (
            "Whether the transaction committed is not known here: somebody else has claimed the id since, and brings Kafka's "
            "side to the database's outcome, or has done so already."
        ),
        "look in your data whether it committed before you repeat it",
    ),
    (False, False): (
        "Whether the transaction committed is not known here. Nothing was guessed: it stays prepared.",
        "the next transaction, or recovery, settles it; don't repeat it before you have seen in your data whether it committed",
    ),
}


def say_who_else(error: ProducerFencedError) -> None:
    """Add to an error of Kafka's what it means where nobody has claimed the id in this database."""
    error.cause = (
        "nobody has claimed the id in this database, so that another process uses it at Kafka: a writer on a copy of the "
        "database, most likely; or the transaction timed out, or the id expired at its coordinator while it was idle"
    )
    error.next_step = (
        "both sides are rolled back, and the writer has taken the id back. `dualwrite doctor` on each database tells which is "
        "a copy, and `dualwrite db new-store-id` makes that one a store of its own"
    )


def in_doubt(
    transactional_id: str, state: PreparedTxnState | None, why: DualWriteError, *, database_committed: bool | None
) -> InDoubtTransactionError:
    """The outcome could not be learnt here, and nothing was guessed."""
    what, next_step = _DOUBTS[bool(database_committed), isinstance(why, FencedError)]
    error = InDoubtTransactionError(
        what,
        transactional_id=transactional_id,
        cause=str(why),
        next_step=next_step,
        state=state_text(state),
        database_committed=database_committed,
    )
    error.__cause__ = why
    return error


def lost_error(found: GenerationOutcome | None) -> DualWriteError | None:
    """The LostTransactionError or UnverifiedTransactionError for an outcome, or None where it is neither."""
    kind = None if found is None else found.outcome.lost_kind
    if found is None or kind is None or found.state is None:
        return None
    try:
        raise_for_lost([(found.transactional_id, LostTransaction(kind, found.state, found.generation, datetime.now(UTC)))])
    except DualWriteError as lost:
        return lost
    return None


def is_seen_committed(
    coordinator: TransactionCoordinator,
    kafka_transactional_id: str,
    state: PreparedTxnState | None,
    *,
    database_committed: bool | None,
) -> bool:
    """Whether a transaction that a successor settles is seen to be committed on both sides. Only looks.

    A commit at Kafka proves that of the database, since nobody commits Kafka before it. An abort proves nothing here.
    """
    if state is None:
        return database_committed is True
    try:
        return decide(state, coordinator.describe(kafka_transactional_id)) is Decision.ALREADY_COMMITTED
    except DualWriteError as error:
        log.warning("%s: can't see how the transaction ended: %s", kafka_transactional_id, error)
        return False
