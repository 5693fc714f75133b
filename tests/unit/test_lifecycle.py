"""The writer's state machine: every pair of phase and event is either in the table or an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import UsageError
from dualwrite.recipe.phases import TRANSITIONS, Event, Phase, WriterState
from fixtures.tables import table

P, E = Phase, Event

_ANY_TIME = {E.FENCED: P.FENCED, E.CLOSE: P.CLOSED}
_MOVES = {
    (P.OPENING, E.OPENED): P.READY,
    (P.READY, E.OPENED): P.READY,
    (P.NEEDS_RECOVERY, E.OPENED): P.READY,
    (P.IN_DOUBT, E.OPENED): P.READY,
    (P.FENCED, E.OPENED): P.READY,
    (P.CONFIRMING, E.OPENED): P.READY,
    (P.READY, E.BEGIN): P.ACTIVE,
    (P.ACTIVE, E.PREPARE): P.PREPARING,
    (P.PREPARING, E.PREPARED): P.PREPARED,
    (P.PREPARED, E.RECORDED): P.RECORDED,
    (P.RECORDED, E.COMMIT_SENT): P.COMMITTING_DATABASE,
    (P.COMMITTING_DATABASE, E.DATABASE_COMMITTED): P.COMMITTING_KAFKA,
    (P.COMMITTING_DATABASE, E.DATABASE_ROLLED_BACK): P.ABORTING,
    (P.COMMITTING_DATABASE, E.OUTCOME_UNKNOWN): P.IN_DOUBT,
    (P.COMMITTING_KAFKA, E.KAFKA_COMMITTED): P.READY,
    (P.COMMITTING_KAFKA, E.OUTCOME_UNKNOWN): P.IN_DOUBT,
    (P.COMMITTING_KAFKA, E.COMMIT_REQUESTED): P.CONFIRMING,
    (P.CONFIRMING, E.KAFKA_COMMITTED): P.READY,
    (P.ABORTING, E.ABORTED): P.READY,
    **{
        (phase, E.CLAIMED): P.NEEDS_RECOVERY
        for phase in (P.OPENING, P.READY, P.CONFIRMING, P.IN_DOUBT, P.NEEDS_RECOVERY, P.FENCED)
    },
    **{(phase, E.ABORT): P.ABORTING for phase in (P.ACTIVE, P.PREPARING, P.PREPARED, P.RECORDED)},
    **{
        (phase, E.BROKEN): phase if phase in (P.OPENING, P.IN_DOUBT, P.FENCED) else P.NEEDS_RECOVERY
        for phase in P
        if phase is not P.CLOSED
    },
    **{(phase, event): after for phase in P if phase is not P.CLOSED for event, after in _ANY_TIME.items()},
}


@table("phase", Phase)
def test_every_phase_and_event_has_its_transition_or_is_refused(phase: Phase) -> None:
    for event in Event:
        state = WriterState(phase, 4)
        expected = _MOVES.get((phase, event))
        if expected is None:
            with pytest.raises(UsageError) as caught:
                state.advance(event)
            assert event.value in str(caught.value)
            assert phase.value in str(caught.value)
            assert (state.phase, state.transaction_number) == (phase, 4)
        else:
            state.advance(event)
            assert (state.phase, state.transaction_number) == (expected, 5 if event is Event.BEGIN else 4), event


def test_a_new_writer_is_not_open_and_has_begun_nothing() -> None:
    state = WriterState()
    assert (state.phase, state.transaction_number) == (Phase.OPENING, 0)


def test_past_the_commit_point_nothing_leads_to_an_abort() -> None:
    """After COMMIT was sent, only a proven rollback of the database may abort Kafka."""
    into_abort = {pair for pair, after in TRANSITIONS.items() if after is Phase.ABORTING}
    past = (P.COMMITTING_DATABASE, P.COMMITTING_KAFKA, P.CONFIRMING, P.IN_DOUBT)
    assert {pair for pair in into_abort if pair[0] in past} == {(P.COMMITTING_DATABASE, E.DATABASE_ROLLED_BACK)}


def test_a_lane_begins_nothing_before_kafka_has_confirmed_its_last_commit() -> None:
    assert {event for phase, event in TRANSITIONS if phase is P.CONFIRMING} == {
        E.KAFKA_COMMITTED,
        E.CLAIMED,
        E.OPENED,
        E.BROKEN,
        E.FENCED,
        E.CLOSE,
    }


def test_the_database_commits_only_after_the_state_was_recorded() -> None:
    assert {phase for phase, event in TRANSITIONS if event is E.COMMIT_SENT} == {P.RECORDED}
    assert {phase for phase, event in TRANSITIONS if event is E.RECORDED} == {P.PREPARED}


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_the_transaction_number_never_decreases(events: list[Event]) -> None:
    state = WriterState()
    for event in events:
        before = state.transaction_number
        try:
            state.advance(event)
        except UsageError:
            assert state.transaction_number == before
            continue
        assert state.transaction_number - before == (event is Event.BEGIN)


def test_a_closed_writer_stays_closed() -> None:
    assert not [phase for phase, _ in TRANSITIONS if phase is Phase.CLOSED]
