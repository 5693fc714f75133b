"""The recovery decision: a pure function of what the database stored and what the coordinator describes.

The decision table is in docs/how-it-works/recovery.md. `stored` is S, the state in the row for this generation (None: there is
none), `described` is D, the coordinator's answer (None: it does not know the id).
"""

from __future__ import annotations

from enum import Enum

from dualwrite.state import Fate, PreparedTxnState, TransactionDescription, TransactionStatus, names


class Decision(Enum):
    """What to do with one generation of an id."""

    COMMIT = "commit"
    """D is ongoing and S names it: the database committed, so Kafka must."""

    ABORT = "abort"
    """D is ongoing and S does not name it: its database transaction never committed."""

    ALREADY_COMMITTED = "already committed"
    """S names D, and D has committed."""

    LOST = "lost"
    """S names D, and Kafka has aborted it: a transaction that the database committed."""

    PROVE = "prove"
    """The producer id has changed since S, which names its transaction by epoch: EndTxn v5 of S gives the proof (KIP-890)."""

    UNVERIFIED = "unverified"
    """S is unresolved, and the coordinator has no evidence of it left: the log may have some (`decide_by_log`)."""

    FORGOTTEN = "forgotten"
    """S is not in doubt, and Kafka has committed a later transaction: the database had, too, and has gone back since."""

    WAIT = "wait"
    """The coordinator is between two states: describe again."""

    NOTHING = "nothing"
    """Nothing is open, and S is not in doubt."""


_ENDED = {
    TransactionStatus.COMPLETE_COMMIT: Decision.ALREADY_COMMITTED,
    TransactionStatus.COMPLETE_ABORT: Decision.LOST,
}

_BY_LOG = {
    Fate.COMMITTED: Decision.ALREADY_COMMITTED,
    Fate.ABORTED: Decision.LOST,
    Fate.OPEN: Decision.UNVERIFIED,
    Fate.GONE: Decision.UNVERIFIED,
}


def decide(stored: PreparedTxnState | None, described: TransactionDescription | None) -> Decision:
    """Decide what to do with one generation; see `Decision`."""
    if described is None:
        return Decision.NOTHING if stored is None else Decision.UNVERIFIED
    if described.status.is_ending or described.status is TransactionStatus.DEAD:
        return Decision.WAIT
    if names(stored, described):
        return _ENDED.get(described.status, Decision.COMMIT)
    if stored is not None and not _has_passed(stored, described):
        has_new_producer_id = stored.has_own_epoch and stored.producer_id != described.producer_id
        return Decision.PROVE if has_new_producer_id else Decision.UNVERIFIED
    if stored is not None and described.status is TransactionStatus.COMPLETE_COMMIT:
        is_later = stored.has_own_epoch or described.start_time_ms > (stored.start_time_ms or 0)
        return Decision.FORGOTTEN if is_later else Decision.NOTHING
    return Decision.ABORT if described.status is TransactionStatus.ONGOING else Decision.NOTHING


def _has_passed(stored: PreparedTxnState, described: TransactionDescription) -> bool:
    """Whether D is a later transaction than S: no writer begins one before S is known to be committed or is resolved."""
    if stored.producer_id != described.producer_id or described.status is TransactionStatus.EMPTY:
        return False
    if stored.has_own_epoch:
        return described.epoch > stored.epoch
    return described.epoch >= stored.epoch and described.start_time_ms != stored.start_time_ms


def last_committed(stored: PreparedTxnState, described: TransactionDescription) -> PreparedTxnState:
    """The name of the transaction that D has committed after S; EndTxn v5 has raised its epoch since."""
    if stored.has_own_epoch:
        return PreparedTxnState(described.producer_id, described.epoch - 1)
    return PreparedTxnState(described.producer_id, described.epoch, described.start_time_ms)


def decide_by_log(fate: Fate) -> Decision:
    """Decide by the log, if the coordinator has no evidence of the state (`TransactionCoordinator.fate`)."""
    return _BY_LOG[fate]
