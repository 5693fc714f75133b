"""What recovery found and did: one outcome per generation, one report per id; the error for what is lost. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dualwrite.errors import (
    CommittedTransactionsForgottenError,
    DualWriteError,
    LostTransactionError,
    RecoveryError,
    UnverifiedTransactionError,
    shell_word,
)
from dualwrite.state import PreparedTxnState, ProducerKind, state_text
from dualwrite.stores.base import LostKind, LostTransaction


class Outcome(Enum):
    """The outcome of recovery for one generation of an id."""

    COMMITTED = "COMMITTED"
    """The database had committed; recovery committed Kafka's side."""

    ALREADY_COMMITTED = "ALREADY_COMMITTED"
    """Both sides had already committed."""

    ABORTED = "ABORTED"
    """The database had not committed; recovery aborted Kafka's side."""

    LOST = "LOST"
    """The database had committed, and Kafka had provably aborted. Recorded in the row."""

    UNVERIFIED = "UNVERIFIED"
    """The database had committed, and Kafka has no evidence left. Recorded in the row."""

    FORGOTTEN = "FORGOTTEN"
    """Both sides had committed transactions that the database has forgotten since. Recorded in the row."""

    PUBLISHED_AGAIN = "PUBLISHED_AGAIN"
    """The database had committed, and Kafka had aborted; the messages were published again by a new transaction."""

    NOTHING = "NOTHING"
    """Nothing was open or in doubt when Kafka was asked.

    A transaction that a fenced writer begins after that, before the epoch is raised, is aborted; that writer gets an error.
    """

    @property
    def in_words(self) -> str:
        """What happened, for a log."""
        return _IN_WORDS[self]

    @property
    def lost_kind(self) -> LostKind | None:
        """How the row records this outcome, or None if nothing is lost, unverified or forgotten."""
        return LostKind.__members__.get(self.name)


_IN_WORDS: Final = {
    Outcome.COMMITTED: "the database had committed; Kafka's side is committed now",
    Outcome.ALREADY_COMMITTED: "the database and Kafka had both committed",
    Outcome.ABORTED: "the database had not committed; Kafka's side is aborted now",
    Outcome.LOST: "the database had committed, and Kafka had aborted",
    Outcome.UNVERIFIED: "the database had committed, and Kafka has no evidence left",
    Outcome.FORGOTTEN: "Kafka had committed a later transaction than the database knows, which has forgotten it",
    Outcome.PUBLISHED_AGAIN: "the database had committed, and Kafka had aborted; its messages are published again now",
    Outcome.NOTHING: "nothing was open or in doubt",
}


@dataclass(frozen=True, slots=True)
class GenerationOutcome:
    """The outcome of one generation.

    Args:
        transactional_id: The logical id, or the id of a lane.
        generation: The generation.
        outcome: Its outcome.
        state: The stored state concerned, if any.
        lost: What the row has recorded, if the outcome is LOST, UNVERIFIED or FORGOTTEN.
    """

    transactional_id: str
    generation: int
    outcome: Outcome
    state: PreparedTxnState | None
    lost: LostTransaction | None = field(default=None, compare=False)  # may be found twice, at different times


@dataclass(frozen=True, slots=True)
class NotPublished:
    """A lost transaction that could not be published again; it stays in the row.

    Args:
        transactional_id: The logical id, or the id of a lane.
        entry: The transaction.
        reasons: Why, one for each partition or topic: a sentence without the final period.
    """

    transactional_id: str
    entry: LostTransaction
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IdReport:
    """What recovery did for one id.

    Args:
        transactional_id: The logical id, or the id of a lane.
        outcomes: One per unresolved generation; empty if there was nothing to resolve.
        unacknowledged: The lost and unverified transactions in the row, from this recovery and from earlier ones.
        taken_over_by: The owner that claimed the id during the recovery, if any; it resolves the id before anything else.
        error: Why recovery did not finish, if it did not. Prepared transactions stay prepared.
        not_published: Those of the lost transactions that were to be published again and could not be, with the reasons.
    """

    transactional_id: str
    outcomes: tuple[GenerationOutcome, ...] = ()
    unacknowledged: tuple[LostTransaction, ...] = ()
    taken_over_by: str | None = None
    error: DualWriteError | None = None
    not_published: tuple[NotPublished, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery did, id by id. Iterating over it yields the outcome of every generation."""

    ids: tuple[IdReport, ...] = ()

    def __iter__(self) -> Iterator[GenerationOutcome]:
        return (outcome for report in self.ids for outcome in report.outcomes)

    def count(self) -> Counter[Outcome]:
        """How many generations had each outcome."""
        return Counter(found.outcome for found in self)

    @property
    def failed(self) -> tuple[IdReport, ...]:
        """The ids whose recovery did not finish."""
        return tuple(report for report in self.ids if report.error is not None)

    @property
    def unacknowledged(self) -> tuple[tuple[str, LostTransaction], ...]:
        """Every lost or unverified transaction that is not acknowledged, with its id."""
        return tuple((report.transactional_id, lost) for report in self.ids for lost in report.unacknowledged)

    @property
    def not_published(self) -> tuple[NotPublished, ...]:
        """The lost transactions that were to be published again and could not be."""
        return tuple(found for report in self.ids for found in report.not_published)

    @property
    def published_again(self) -> frozenset[tuple[str, int, PreparedTxnState | None]]:
        """The lost transactions that were published again, by id, generation and state."""
        found = (each for each in self if each.outcome is Outcome.PUBLISHED_AGAIN)
        return frozenset((each.transactional_id, each.generation, each.state) for each in found)

    @property
    def ok(self) -> bool:
        """Whether every id was recovered, and nothing is lost or unverified."""
        return not self.failed and not self.unacknowledged

    def raise_for_problems(self) -> None:
        """Raise an error unless `ok`.

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
                cause=f"{first.error}",
                next_step="prepared transactions stay prepared; fix the cause and recover again",
                report=self,
            ) from first.error
        raise_for_lost(self.unacknowledged, self.not_published)


def raise_for_lost(unacknowledged: Iterable[tuple[str, LostTransaction]], not_published: Iterable[NotPublished] = ()) -> None:
    """Raise `lost_error` of these, unless it is None."""
    error = lost_error(unacknowledged, not_published)
    if error is not None:
        raise error


def lost_error(
    unacknowledged: Iterable[tuple[str, LostTransaction]], not_published: Iterable[NotPublished] = ()
) -> DualWriteError | None:
    """The error for the first of the lost or unverified transactions, if there are any; the lost ones come first.

    Args:
        unacknowledged: The transactions, each with the id of its row.
        not_published: Those that could not be published again.

    Returns:
        LostTransactionError: Kafka provably aborted what the database committed. Or UnverifiedTransactionError: Kafka has no
        evidence of what the database committed. Or CommittedTransactionsForgottenError: the database has forgotten it.
    """
    kinds = list(LostKind)
    found = sorted(unacknowledged, key=lambda entry: kinds.index(entry[1].kind))
    if not found:
        return None
    transactional_id, lost = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    facts = {"state": state_text(lost.state), "generation": lost.generation, "delivery": lost.delivery}
    whose = "They" if lost.kind is LostKind.FORGOTTEN else "It"
    text = "" if lost.delivery is None else f" {whose} had {lost.delivery}."
    command = f"dualwrite recover --id {shell_word(transactional_id)}"
    acknowledge = f"`{command} --acknowledge`, then publish its messages from your data"
    if lost.kind is LostKind.LOST:
        known = (each.reasons for each in not_published if (each.transactional_id, each.entry) == (transactional_id, lost))
        reasons = next(known, ())
        republish = f"`{command} --republish` publishes its messages again from the log (as on_lost='republish' does)"
        return LostTransactionError(
            f"Transaction {lost.state} was committed by the database but aborted by Kafka: its messages are lost{more}.{text}"
            + (f" They can't be published again from the log: {'; '.join(reasons)}." if reasons else ""),
            transactional_id=transactional_id,
            cause=_why_lost(lost.producer),
            next_step=f"{acknowledge}; or change that, and then {republish}" if reasons else republish,
            **facts,
        )
    if lost.kind is LostKind.FORGOTTEN:
        return CommittedTransactionsForgottenError(
            f"The database has forgotten {lost.transactions} or more transactions that it had committed, the newest of them "
            f"{lost.state}: their messages are visible, their rows are gone{more}.{text}",
            transactional_id=transactional_id,
            cause="it has gone back to an earlier state: a failover to a standby that lacked the last commits, a restored "
            "backup, or a crash with synchronous_commit=off",
            next_step="compare these messages with your data, which lacks what was committed with them (see the page about "
            f"failovers); then `{command} --acknowledge`. The writer goes on",
            transactions=lost.transactions,
            **facts,
        )
    return UnverifiedTransactionError(
        f"Transaction {lost.state} was committed by the database; Kafka no longer knows its outcome{more}.{text}",
        transactional_id=transactional_id,
        cause="the id's state expired at the coordinator (transactional.id.expiration.ms) and its messages can no longer be "
        "read (retention, or no permission to read the topic)",
        next_step=f"look for its messages in the topic; {acknowledge} if they are missing",
        **facts,
    )


def _why_lost(producer: ProducerKind | None) -> str:
    """The likely cause: under two-phase commit no transaction times out (KIP-939), so someone has aborted it."""
    aborted = (
        "an operator aborted it (`dualwrite transactions force-terminate`, kafka-transactions.sh), or a writer or recovery on "
        "a copy of this database did (`dualwrite doctor` finds copies)"
    )
    if producer is ProducerKind.NATIVE_TWO_PHASE:
        return aborted
    timed_out = "it stayed prepared for longer than its transaction.timeout.ms, which is possible without two-phase commit"
    return f"{timed_out}; or {aborted}"
