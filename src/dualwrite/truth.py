"""What a transaction that met trouble past its commit point is reported as: committed, rolled back, lost, or in doubt."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import NoReturn

from dualwrite.decision import Decision, decide
from dualwrite.errors import DualWriteError, FencedError, InDoubtTransactionError, StoreCommitFailedError
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.report import GenerationOutcome, raise_for_lost
from dualwrite.state import PreparedTxnState, state_text
from dualwrite.stores.base import LostTransaction

log = logging.getLogger(__name__)


def tell(error: BaseException, truth: DualWriteError) -> NoReturn:
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


def rolled_back(transactional_id: str) -> StoreCommitFailedError:
    """COMMIT had no answer, and the row shows that it had no effect."""
    return StoreCommitFailedError(
        "The connection was lost in COMMIT, and the database had not committed. Both sides are rolled back.",
        transactional_id=transactional_id,
    )


def in_doubt(
    transactional_id: str, state: PreparedTxnState | None, why: DualWriteError, *, database_committed: bool | None
) -> InDoubtTransactionError:
    """The outcome could not be learnt here, and nothing was guessed."""
    known = "The database committed; Kafka's side is" if database_committed else "Whether the transaction committed is"
    settler = "whoever claimed the id" if isinstance(why, FencedError) else "the next transaction, or recovery,"
    error = InDoubtTransactionError(
        f"{known} not known here. Nothing was guessed: it stays prepared.",
        transactional_id=transactional_id,
        cause=str(why),
        next_step=f"{settler} settles it; don't repeat it before you have seen in your data whether it committed",
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
