"""The writer's state machine: phases, events, and the table of transitions. No I/O.

A phase records an intent or an outcome, never an expectation: `COMMITTING_DATABASE` is entered before COMMIT is sent, and left
only when the outcome is known, or known to be unknown.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Final, Protocol

from dualwrite.errors import UsageError


class Phase(Enum):
    """A phase of a writer. The value completes the sentence "the writer …"."""

    OPENING = "is not open yet"
    READY = "is open, between transactions"
    ACTIVE = "is inside a transaction"
    PREPARING = "is preparing the Kafka transaction"
    PREPARED = "has prepared the Kafka transaction"
    RECORDED = "has recorded the state in the database transaction"
    COMMITTING_DATABASE = "has sent the database's COMMIT"
    COMMITTING_KAFKA = "has committed the database and is committing Kafka"
    CONFIRMING = "has committed the database and requested Kafka's commit, whose response it has not read yet"
    ABORTING = "is aborting both sides"
    IN_DOUBT = "does not know yet how its last transaction ended"
    NEEDS_RECOVERY = "must recover its id before the next transaction"
    FENCED = "was fenced: another writer or recoverer has claimed its id"
    CLOSED = "is closed"

    __hash__ = object.__hash__  # Enum's is a Python function, called for each of a transaction's many look-ups


class Event(Enum):
    """What happens to a writer."""

    CLAIMED = "claimed without Kafka"
    OPENED = "opened"
    BEGIN = "begin"
    PREPARE = "prepare"
    PREPARED = "prepared"
    RECORDED = "recorded"
    COMMIT_SENT = "commit sent"
    DATABASE_COMMITTED = "database committed"
    DATABASE_ROLLED_BACK = "database rolled back"
    OUTCOME_UNKNOWN = "outcome unknown"
    COMMIT_REQUESTED = "commit requested"
    KAFKA_COMMITTED = "kafka committed"
    ABORT = "abort"
    ABORTED = "aborted"
    BROKEN = "broken"
    FENCED = "fenced"
    CLOSE = "close"

    __hash__ = object.__hash__  # as for Phase


_STEPS: Final = {
    (Phase.OPENING, Event.OPENED): Phase.READY,
    (Phase.READY, Event.OPENED): Phase.READY,
    (Phase.NEEDS_RECOVERY, Event.OPENED): Phase.READY,
    (Phase.IN_DOUBT, Event.OPENED): Phase.READY,
    (Phase.FENCED, Event.OPENED): Phase.READY,
    (Phase.CONFIRMING, Event.OPENED): Phase.READY,
    (Phase.READY, Event.BEGIN): Phase.ACTIVE,
    (Phase.ACTIVE, Event.PREPARE): Phase.PREPARING,
    (Phase.PREPARING, Event.PREPARED): Phase.PREPARED,
    (Phase.PREPARED, Event.RECORDED): Phase.RECORDED,
    (Phase.RECORDED, Event.COMMIT_SENT): Phase.COMMITTING_DATABASE,
    (Phase.COMMITTING_DATABASE, Event.DATABASE_COMMITTED): Phase.COMMITTING_KAFKA,
    (Phase.COMMITTING_DATABASE, Event.DATABASE_ROLLED_BACK): Phase.ABORTING,
    (Phase.COMMITTING_DATABASE, Event.OUTCOME_UNKNOWN): Phase.IN_DOUBT,
    (Phase.COMMITTING_KAFKA, Event.KAFKA_COMMITTED): Phase.READY,
    (Phase.COMMITTING_KAFKA, Event.OUTCOME_UNKNOWN): Phase.IN_DOUBT,
    (Phase.COMMITTING_KAFKA, Event.COMMIT_REQUESTED): Phase.CONFIRMING,
    (Phase.CONFIRMING, Event.KAFKA_COMMITTED): Phase.READY,
    (Phase.ABORTING, Event.ABORTED): Phase.READY,
}
_CLAIMABLE: Final = (Phase.OPENING, Phase.READY, Phase.CONFIRMING, Phase.IN_DOUBT, Phase.NEEDS_RECOVERY, Phase.FENCED)
_ABORTABLE: Final = (Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED, Phase.RECORDED)


_KEPT_WHEN_BROKEN: Final = (Phase.OPENING, Phase.IN_DOUBT, Phase.FENCED)


def _table() -> dict[tuple[Phase, Event], Phase]:
    table = dict(_STEPS)
    for phase in Phase:
        if phase is Phase.CLOSED:
            continue
        table[phase, Event.CLOSE] = Phase.CLOSED
        table[phase, Event.FENCED] = Phase.FENCED
        table[phase, Event.BROKEN] = phase if phase in _KEPT_WHEN_BROKEN else Phase.NEEDS_RECOVERY
    for phase in _CLAIMABLE:
        table[phase, Event.CLAIMED] = Phase.NEEDS_RECOVERY
    for phase in _ABORTABLE:
        table[phase, Event.ABORT] = Phase.ABORTING
    return table


TRANSITIONS: Final = MappingProxyType(_table())
"""(phase, event) → the next phase. Any other combination is an error."""


class StepReport(Protocol):
    """Is told of a transaction's steps."""

    def entered(self, event: Event) -> object:
        """`event` has happened, and its phase is entered."""


class WriterState:
    """A writer's phase, and the number of transactions that it has begun since it was made.

    The number is never reset: together with the fencing token it identifies a transaction in the row, even after the writer has
    claimed its id again, which keeps the row's number (`TxnStateStore.claim`).

    Attributes:
        report: Is told of the steps of the last transaction; None if nobody wants to know.
    """

    __slots__ = ("phase", "report", "transaction_number")

    def __init__(self, phase: Phase = Phase.OPENING, transaction_number: int = 0) -> None:
        self.phase = phase
        self.transaction_number = transaction_number
        self.report: StepReport | None = None

    def advance(self, event: Event) -> None:
        """Enter the phase that follows `event`.

        Raises:
            UsageError: The event is not possible in this phase; nothing changed.
        """
        following = TRANSITIONS.get((self.phase, event))
        if following is None:
            raise UsageError(f"'{event.value}' is not possible: the writer {self.phase.value}.", phase=self.phase)
        if event is Event.BEGIN:
            self.transaction_number += 1
        self.phase = following
        if self.report is not None:
            self.report.entered(event)
