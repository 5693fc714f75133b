"""Recovery reports: what they count, when they are ok, and what they raise."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest

from dualwrite.errors import BrokerUnavailableError, LostTransactionError, RecoveryError, UnverifiedTransactionError
from dualwrite.recovery.plan import IdPlan, RecoveryPlan
from dualwrite.recovery.report import GenerationOutcome, IdReport, Outcome, RecoveryReport, raise_for_lost
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import LostKind, LostTransaction
from fixtures.tables import table

STATE = PreparedTxnState(7, 5, 1000)
WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def lost(
    kind: LostKind = LostKind.LOST, state: PreparedTxnState = STATE, producer: ProducerKind | None = None
) -> LostTransaction:
    return LostTransaction(kind, state, 2, WHEN, producer=producer)


def outcome(kind: Outcome, generation: int = 0) -> GenerationOutcome:
    return GenerationOutcome("a", generation, kind, None)


def test_iterating_gives_every_generation_of_every_id() -> None:
    outcomes = [outcome(Outcome.COMMITTED), outcome(Outcome.ABORTED, 1), outcome(Outcome.ABORTED, 2)]
    report = RecoveryReport((IdReport("a", tuple(outcomes[:2])), IdReport("b"), IdReport("c", (outcomes[2],))))
    assert list(report) == outcomes
    assert report.count() == {Outcome.COMMITTED: 1, Outcome.ABORTED: 2}
    assert repr(RecoveryPlan((IdPlan("a"), IdPlan("b")))) == "<RecoveryPlan of 2 ids: nothing open>"


def test_an_outcome_is_logged_in_words() -> None:
    texts = [kind.in_words for kind in Outcome]
    assert not [text for text in texts if any(kind.value in text for kind in Outcome)]


def test_an_id_that_was_taken_over_is_not_a_problem() -> None:
    for report in (RecoveryReport(), RecoveryReport((IdReport("a", taken_over_by="writer h:1"),))):
        assert report.ok
        report.raise_for_problems()
    raise_for_lost([])


def test_an_id_that_failed_is_raised_with_its_error_as_the_cause() -> None:
    error = BrokerUnavailableError("No broker.")
    report = RecoveryReport((IdReport("a"), IdReport("b", error=error, unacknowledged=(lost(),))))
    assert not report.ok
    assert [failed.transactional_id for failed in report.failed] == ["b"]
    with pytest.raises(RecoveryError, match="1 of 2 ids") as caught:
        report.raise_for_problems()
    assert caught.value.__cause__ is error
    assert caught.value.report is report
    assert caught.value.transactional_id == "b"
    assert caught.value.retriable


def test_lost_transactions_are_raised_before_unverified_ones() -> None:
    unverified = lost(LostKind.UNVERIFIED, PreparedTxnState(1, 1))
    report = RecoveryReport((IdReport("a", unacknowledged=(unverified,)), IdReport("b", unacknowledged=(lost(),))))
    assert not report.ok
    assert report.unacknowledged == (("a", unverified), ("b", lost()))
    with pytest.raises(LostTransactionError, match=r"(?s)7:5@1000.*\(and 1 more\)") as caught:
        report.raise_for_problems()
    assert (caught.value.transactional_id, caught.value.state, caught.value.generation) == ("b", "7:5@1000", 2)
    assert "dualwrite recover --id b --republish" in str(caught.value)
    assert "transaction.timeout.ms" in str(caught.value)


@table(
    ("producer", "may_time_out"),
    [(ProducerKind.NATIVE_TWO_PHASE, False), (ProducerKind.NATIVE, True), (ProducerKind.LIBRDKAFKA, True), (None, True)],
)
def test_a_timeout_is_named_as_the_cause_only_where_a_transaction_can_time_out(
    producer: ProducerKind | None, may_time_out: bool
) -> None:
    with pytest.raises(LostTransactionError) as caught:
        raise_for_lost([("a", lost(producer=producer))])
    assert caught.value.cause is not None
    assert ("timeout" in caught.value.cause) is may_time_out
    assert "an operator aborted it" in caught.value.cause
    assert "copy of this database" in caught.value.cause


def test_unverified_transactions_have_their_own_error() -> None:
    with pytest.raises(UnverifiedTransactionError) as caught:
        raise_for_lost([("a", lost(LostKind.UNVERIFIED))])
    assert caught.value.state == "7:5@1000"
    assert not isinstance(caught.value, LostTransactionError)
    assert "look for its messages" in str(caught.value)
    assert "more)" not in str(caught.value)


def test_a_report_survives_pickling() -> None:
    report = RecoveryReport((IdReport("a", (outcome(Outcome.LOST),), (lost(),), error=BrokerUnavailableError("No broker.")),))
    again = pickle.loads(pickle.dumps(report))
    assert list(again) == list(report)
    assert str(again.failed[0].error) == "No broker."
