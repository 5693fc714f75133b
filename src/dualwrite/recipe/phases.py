"""The writer's state machine: its phase, the way of its messages, what changes them, and the tables of transitions. No I/O.

A phase records an intent or an outcome, never an expectation: `COMMITTING_DATABASE` is entered before COMMIT is sent, and left
only when the outcome is known, or known to be unknown.

A state is a pair. The phase is about the database's transaction; the way says where its messages go, and what has to happen
before the next ones may go to Kafka. `PAIRS` has the pairs that can occur.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Protocol

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
    ABORTING = "is aborting both sides"
    IN_DOUBT = "does not know yet how its last transaction ended"
    NEEDS_RECOVERY = "must recover its id before the next transaction"
    FENCED = "was fenced: another writer or recoverer has claimed its id"
    CLOSED = "is closed"

    __hash__ = object.__hash__  # Enum's is a Python function, called for each of a transaction's many look-ups


class Way(Enum):
    """Where the messages of a writer's transaction go. The value completes the sentence "they go …"."""

    KAFKA = "to Kafka"
    JOURNAL = "into the journal"
    DETOUR = "into the journal, since what was left at Kafka must be recovered first; in the database nothing is in doubt"

    __hash__ = object.__hash__  # as for Phase


class Change(Enum):
    """What happens to a writer."""

    CLAIMED = "claimed without Kafka"
    OPENED = "opened"
    SWITCHED = "switched between Kafka and the journal"
    BEGIN = "begin"
    PREPARE = "prepare"
    PREPARED = "prepared"
    RECORDED = "recorded"
    COMMIT_SENT = "commit sent"
    DATABASE_COMMITTED = "database committed"
    DATABASE_ROLLED_BACK = "database rolled back"
    OUTCOME_UNKNOWN = "outcome unknown"
    KAFKA_COMMITTED = "kafka committed"
    ABORT = "abort"
    ABORTED = "aborted"
    BROKEN = "broken"
    INTERRUPTED = "interrupted"
    FENCED = "fenced"
    CLOSE = "close"

    __hash__ = object.__hash__  # as for Phase


_STEPS: Final = {
    (Phase.OPENING, Change.OPENED): Phase.READY,
    (Phase.READY, Change.OPENED): Phase.READY,
    (Phase.NEEDS_RECOVERY, Change.OPENED): Phase.READY,
    (Phase.IN_DOUBT, Change.OPENED): Phase.READY,
    (Phase.FENCED, Change.OPENED): Phase.READY,
    (Phase.READY, Change.SWITCHED): Phase.READY,
    (Phase.READY, Change.BEGIN): Phase.ACTIVE,
    (Phase.ACTIVE, Change.SWITCHED): Phase.ACTIVE,
    (Phase.ACTIVE, Change.PREPARE): Phase.PREPARING,
    (Phase.PREPARING, Change.PREPARED): Phase.PREPARED,
    (Phase.PREPARED, Change.RECORDED): Phase.RECORDED,
    (Phase.RECORDED, Change.COMMIT_SENT): Phase.COMMITTING_DATABASE,
    (Phase.COMMITTING_DATABASE, Change.DATABASE_COMMITTED): Phase.COMMITTING_KAFKA,
    (Phase.COMMITTING_DATABASE, Change.DATABASE_ROLLED_BACK): Phase.ABORTING,
    (Phase.COMMITTING_DATABASE, Change.OUTCOME_UNKNOWN): Phase.IN_DOUBT,
    (Phase.COMMITTING_KAFKA, Change.KAFKA_COMMITTED): Phase.READY,
    (Phase.COMMITTING_KAFKA, Change.OUTCOME_UNKNOWN): Phase.IN_DOUBT,
    (Phase.ABORTING, Change.ABORTED): Phase.READY,
}
BEFORE_COMMIT_POINT: Final = frozenset({Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED, Phase.RECORDED})
PAST_COMMIT_POINT: Final = frozenset({Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA})
IN_TRANSACTION: Final = BEFORE_COMMIT_POINT | PAST_COMMIT_POINT | {Phase.ABORTING}
MUST_RECOVER: Final = frozenset({Phase.NEEDS_RECOVERY, Phase.IN_DOUBT})
_KEPT_WHEN_BROKEN: Final = (Phase.OPENING, Phase.IN_DOUBT, Phase.FENCED)


def _transitions() -> dict[tuple[Phase, Change], Phase]:
    table = dict(_STEPS)
    for phase in Phase:
        if phase is Phase.CLOSED:
            continue
        table[phase, Change.CLOSE] = Phase.CLOSED
        table[phase, Change.FENCED] = Phase.FENCED
        table[phase, Change.BROKEN] = phase if phase in _KEPT_WHEN_BROKEN else Phase.NEEDS_RECOVERY
        if phase in IN_TRANSACTION:
            table[phase, Change.INTERRUPTED] = Phase.IN_DOUBT if phase in PAST_COMMIT_POINT else Phase.NEEDS_RECOVERY
        else:
            table[phase, Change.CLAIMED] = Phase.NEEDS_RECOVERY
    for phase in BEFORE_COMMIT_POINT:
        table[phase, Change.ABORT] = Phase.ABORTING
    return table


TRANSITIONS: Final = MappingProxyType(_transitions())
"""(phase, change) → the next phase. Any other combination is an error."""

ON_DETOUR: Final = MappingProxyType(
    {
        (Phase.NEEDS_RECOVERY, Change.BEGIN): Phase.ACTIVE,
        (Phase.COMMITTING_KAFKA, Change.KAFKA_COMMITTED): Phase.NEEDS_RECOVERY,
        (Phase.ABORTING, Change.ABORTED): Phase.NEEDS_RECOVERY,
    }
)
"""What differs from `TRANSITIONS` on a detour: such a transaction leaves Kafka's side as it has found it."""

WAYS: Final = MappingProxyType(
    {
        **{(way, Change.CLAIMED): Way.DETOUR for way in Way},
        **{
            (way, change): Way.KAFKA
            for way in Way
            for change in (Change.OPENED, Change.BROKEN, Change.INTERRUPTED, Change.FENCED, Change.CLOSE)
        },
        (Way.KAFKA, Change.SWITCHED): Way.JOURNAL,
        (Way.JOURNAL, Change.SWITCHED): Way.KAFKA,
        (Way.JOURNAL, Change.KAFKA_COMMITTED): Way.KAFKA,
        (Way.JOURNAL, Change.ABORTED): Way.KAFKA,
    }
)
"""(way, change) → the next way. Any other change leaves it as it is."""

PAIRS: Final = MappingProxyType(
    {
        Way.KAFKA: frozenset(Phase),
        Way.JOURNAL: IN_TRANSACTION | {Phase.READY, Phase.IN_DOUBT},
        Way.DETOUR: IN_TRANSACTION | MUST_RECOVER,
    }
)
"""The phases that can occur with each way: a writer that has left something at Kafka is never ready to send more there."""


_STATES: Final = {
    (way, phase, change): (following, WAYS.get((way, change), way))
    for way, phases in PAIRS.items()
    for (phase, change), following in {**TRANSITIONS, **(ON_DETOUR if way is Way.DETOUR else {})}.items()
    if phase in phases and following in PAIRS[WAYS.get((way, change), way)]
}


class Watcher(Protocol):
    """Is told of the steps of one transaction, and of its outcome."""

    def entered(self, change: Change, of: Any) -> object:
        """`change` has happened, and its phase is entered by the writer's state, which this must not keep."""

    def ended(self, error: BaseException | None, *, is_in_doubt: bool = False) -> object:
        """The outcome of a transaction that has met an error; None: it has committed all the same.

        `is_in_doubt`: that is not known yet. What comes later changes nothing.
        """


class WriterState:
    """A writer's phase and way, and the number of transactions that it has begun since it was made.

    The number is never reset: together with the fencing token it identifies a transaction in the row, even after the writer has
    claimed its id again, which keeps the row's number (`TxnStateStore.claim`).

    Attributes:
        watch: Called with this state when a transaction begins; returns who is told of its steps, or None.
    """

    def __init__(self, phase: Phase = Phase.OPENING, transaction_number: int = 0) -> None:
        self.phase = phase
        self.way = Way.KAFKA
        self.transaction_number = transaction_number
        self.watch: Callable[[Any], Watcher | None] | None = None
        self._watcher: Watcher | None = None

    def advance(self, change: Change) -> None:
        """Enter the phase that follows `change`.

        Raises:
            UsageError: The change is not possible in this phase; nothing changed.
        """
        following = _STATES.get((self.way, self.phase, change))
        if following is None:
            raise UsageError(f"'{change.value}' is not possible: the writer {self.phase.value}.", phase=self.phase)
        if change is Change.BEGIN:
            self.transaction_number += 1
            self._watcher = None if self.watch is None else self.watch(self)
        self.phase, self.way = following
        if self._watcher is not None:
            self._watcher.entered(change, self)

    def ended(self, error: BaseException | None, *, is_in_doubt: bool = False) -> None:
        """Tell the watcher of the last transaction what its outcome is; see `Watcher.ended`."""
        if self._watcher is not None:
            self._watcher.ended(error, is_in_doubt=is_in_doubt)
