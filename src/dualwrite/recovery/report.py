"""What recovery found and did: one outcome per generation, one report per id. Frozen, without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from dualwrite.errors import DualWriteError, LostTransactionError, RecoveryError, UnverifiedTransactionError, shell_word
from dualwrite.state import PreparedTxnState, state_text
from dualwrite.stores.base import LostKind, LostTransaction


class Outcome(Enum):
    """How recovery left one generation of an id."""

    COMMITTED = "COMMITTED"
    """The database had committed; recovery committed Kafka."""

    ALREADY_COMMITTED = "ALREADY_COMMITTED"
    """Both sides had committed before."""

    ABORTED = "ABORTED"
    """The database had not committed; recovery aborted Kafka."""

    LOST = "LOST"
    """The database had committed, and Kafka had provably aborted. Recorded in the row."""

    UNVERIFIED = "UNVERIFIED"
    """The database had committed, and Kafka has no evidence left. Recorded in the row."""

    NOTHING = "NOTHING"
    """Nothing was open and nothing in doubt."""

    @property
    def lost_kind(self) -> LostKind | None:
        """What is recorded in the row for it, or None where nothing is lost."""
        return LostKind(self.value) if self in (Outcome.LOST, Outcome.UNVERIFIED) else None


@dataclass(frozen=True, slots=True)
class GenerationOutcome:
    """The outcome of one generation.

    Args:
        transactional_id: The logical id.
        generation: The generation.
        outcome: What became of it.
        state: The stored state that it was about, where there was one.
    """

    transactional_id: str
    generation: int
    outcome: Outcome
    state: PreparedTxnState | None


@dataclass(frozen=True, slots=True)
class IdReport:
    """What recovery did for one id.

    Args:
        transactional_id: The logical id.
        outcomes: One per unsettled generation; empty where there was nothing to look at.
        unacknowledged: What stands in the row as lost or unverified, from this recovery and from earlier ones.
        taken_over_by: Who claimed the id while we recovered it; that claimant settles it before anything else.
        error: Why recovery did not finish, if it did not. What is prepared stays prepared.
    """

    transactional_id: str
    outcomes: tuple[GenerationOutcome, ...] = ()
    unacknowledged: tuple[LostTransaction, ...] = ()
    taken_over_by: str | None = None
    error: DualWriteError | None = None


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery did, id by id. Iterating gives every generation's outcome."""

    ids: tuple[IdReport, ...] = ()

    def __iter__(self) -> Iterator[GenerationOutcome]:
        return (outcome for report in self.ids for outcome in report.outcomes)

    def count(self) -> Counter[Outcome]:
        """How often each outcome came."""
        return Counter(found.outcome for found in self)

    @property
    def failed(self) -> tuple[IdReport, ...]:
        """The ids whose recovery did not finish."""
        return tuple(report for report in self.ids if report.error is not None)

    @property
    def unacknowledged(self) -> tuple[tuple[str, LostTransaction], ...]:
        """Every lost or unverified transaction that nobody has acknowledged, with its id."""
        return tuple((report.transactional_id, lost) for report in self.ids for lost in report.unacknowledged)

    @property
    def ok(self) -> bool:
        """Whether every id is settled, and nothing is lost or unverified."""
        return not self.failed and not self.unacknowledged

    def raise_for_problems(self) -> None:
        """Raise what is not ok; return otherwise.

        Raises:
            RecoveryError: An id could not be recovered; the first such error is its cause.
            LostTransactionError: A transaction is lost.
            UnverifiedTransactionError: A transaction can't be verified.
        """
        if self.failed:
            first = self.failed[0]
            raise RecoveryError(
                f"{len(self.failed)} of {len(self.ids)} ids could not be recovered.",
                transactional_id=first.transactional_id,
                cause=str(first.error),
                next_step="what is prepared stays prepared; mend the cause and recover again",
                report=self,
            ) from first.error
        raise_for_lost(self.unacknowledged)


def raise_for_lost(unacknowledged: Iterable[tuple[str, LostTransaction]]) -> None:
    """Raise the first of the lost or unverified transactions, if there is one; the lost ones come first.

    Raises:
        LostTransactionError: Kafka provably aborted what the database committed.
        UnverifiedTransactionError: Kafka has no evidence of what the database committed.
    """
    found = sorted(unacknowledged, key=lambda entry: entry[1].kind is not LostKind.LOST)
    if not found:
        return
    transactional_id, lost = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    facts = {"state": state_text(lost.state), "generation": lost.generation, "delivery": lost.delivery}
    held = "" if lost.delivery is None else f" It had {lost.delivery}."
    command = f"dualwrite recover --id {shell_word(transactional_id)} --acknowledge"
    acknowledge = f"publish its messages again from your data, then `{command}`"
    if lost.kind is LostKind.LOST:
        raise LostTransactionError(
            f"Transaction {lost.state} was committed by the database and aborted by Kafka: its messages are lost{more}.{held}",
            transactional_id=transactional_id,
            cause="it stayed prepared for longer than its transaction.timeout.ms, on a broker without two-phase commit",
            next_step=acknowledge,
            **facts,
        )
    raise UnverifiedTransactionError(
        f"Transaction {lost.state} was committed by the database; Kafka no longer knows what became of it{more}.{held}",
        transactional_id=transactional_id,
        cause="the id's state expired at the coordinator (transactional.id.expiration.ms) and its messages can't be read any "
        "more (retention, or no right to read the topic); or recovery ran on another cluster, which only the row of an older "
        "release can't tell",
        next_step="recover on the right cluster, which still commits it there; or look for its messages in the topic, and if "
        f"they are missing, {acknowledge}",
        **facts,
    )
