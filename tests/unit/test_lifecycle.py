"""The writer's state machine: every pair of phase and event is either in the table or an error, and so is each way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import UsageError
from dualwrite.recipe.phases import PAIRS, TRANSITIONS, Change, Phase, Way, WriterState
from fixtures.tables import table

P, E = Phase, Change

_ANY_TIME = {E.FENCED: P.FENCED, E.CLOSE: P.CLOSED}
_MOVES = {
    (P.OPENING, E.OPENED): P.READY,
    (P.READY, E.OPENED): P.READY,
    (P.NEEDS_RECOVERY, E.OPENED): P.READY,
    (P.IN_DOUBT, E.OPENED): P.READY,
    (P.FENCED, E.OPENED): P.READY,
    (P.READY, E.SWITCHED): P.READY,
    (P.READY, E.BEGIN): P.ACTIVE,
    (P.ACTIVE, E.SWITCHED): P.ACTIVE,
    (P.ACTIVE, E.PREPARE): P.PREPARING,
    (P.PREPARING, E.PREPARED): P.PREPARED,
    (P.PREPARED, E.RECORDED): P.RECORDED,
    (P.RECORDED, E.COMMIT_SENT): P.COMMITTING_DATABASE,
    (P.COMMITTING_DATABASE, E.DATABASE_COMMITTED): P.COMMITTING_KAFKA,
    (P.COMMITTING_DATABASE, E.DATABASE_ROLLED_BACK): P.ABORTING,
    (P.COMMITTING_DATABASE, E.OUTCOME_UNKNOWN): P.IN_DOUBT,
    (P.COMMITTING_KAFKA, E.KAFKA_COMMITTED): P.READY,
    (P.COMMITTING_KAFKA, E.OUTCOME_UNKNOWN): P.IN_DOUBT,
    (P.ABORTING, E.ABORTED): P.READY,
    **{(phase, E.CLAIMED): P.NEEDS_RECOVERY for phase in (P.OPENING, P.READY, P.IN_DOUBT, P.NEEDS_RECOVERY, P.FENCED)},
    **{
        (phase, E.INTERRUPTED): P.IN_DOUBT if phase in (P.COMMITTING_DATABASE, P.COMMITTING_KAFKA) else P.NEEDS_RECOVERY
        for phase in (P.ACTIVE, P.PREPARING, P.PREPARED, P.RECORDED, P.COMMITTING_DATABASE, P.COMMITTING_KAFKA, P.ABORTING)
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
    for event in Change:
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
            assert (state.phase, state.transaction_number) == (expected, 5 if event is Change.BEGIN else 4), event


def test_a_new_writer_is_not_open_and_has_begun_nothing() -> None:
    state = WriterState()
    assert (state.phase, state.transaction_number) == (Phase.OPENING, 0)


def test_past_the_commit_point_nothing_leads_to_an_abort() -> None:
    """After COMMIT was sent, only a proven rollback of the database may abort Kafka."""
    into_abort = {pair for pair, after in TRANSITIONS.items() if after is Phase.ABORTING}
    past = (P.COMMITTING_DATABASE, P.COMMITTING_KAFKA, P.IN_DOUBT)
    assert {pair for pair in into_abort if pair[0] in past} == {(P.COMMITTING_DATABASE, E.DATABASE_ROLLED_BACK)}


def test_the_database_commits_only_after_the_state_was_recorded() -> None:
    assert {phase for phase, event in TRANSITIONS if event is E.COMMIT_SENT} == {P.RECORDED}
    assert {phase for phase, event in TRANSITIONS if event is E.RECORDED} == {P.PREPARED}


@given(st.lists(st.sampled_from(list(Change)), max_size=40))
def test_the_transaction_number_never_decreases(events: list[Change]) -> None:
    state = WriterState()
    for event in events:
        before = state.transaction_number
        try:
            state.advance(event)
        except UsageError:
            assert state.transaction_number == before
            continue
        assert state.transaction_number - before == (event is Change.BEGIN)


def test_a_closed_writer_stays_closed() -> None:
    assert not [phase for phase, _ in TRANSITIONS if phase is Phase.CLOSED]


def _reached() -> set[tuple[Way, Phase]]:
    """The states that a writer can reach."""
    found: set[tuple[Way, Phase]] = set()
    left = [(Way.KAFKA, Phase.OPENING)]
    while left:
        way, phase = left.pop()
        if (way, phase) in found:
            continue
        found.add((way, phase))
        for event in Change:
            state = WriterState(phase)
            state.way = way
            try:
                state.advance(event)
            except UsageError:
                continue
            left.append((state.way, state.phase))
    return found


def test_the_pairs_of_phase_and_way_that_can_occur() -> None:
    assert _reached() == {(way, phase) for way, phases in PAIRS.items() for phase in phases}


def _after(way: Way, phase: Phase, *events: Change) -> tuple[Way, Phase]:
    state = WriterState(phase)
    state.way = way
    for event in events:
        state.advance(event)
    return state.way, state.phase


_COMMIT = (E.BEGIN, E.PREPARE, E.PREPARED, E.RECORDED, E.COMMIT_SENT, E.DATABASE_COMMITTED)


@table(
    ("way", "phase", "events", "after"),
    [
        (Way.JOURNAL, P.READY, (*_COMMIT, E.KAFKA_COMMITTED), (Way.KAFKA, P.READY)),
        (Way.DETOUR, P.NEEDS_RECOVERY, (*_COMMIT, E.KAFKA_COMMITTED), (Way.DETOUR, P.NEEDS_RECOVERY)),
        (Way.DETOUR, P.NEEDS_RECOVERY, (E.BEGIN, E.ABORT, E.ABORTED), (Way.DETOUR, P.NEEDS_RECOVERY)),
        (Way.DETOUR, P.NEEDS_RECOVERY, (E.OPENED,), (Way.KAFKA, P.READY)),
        (Way.JOURNAL, P.READY, (*_COMMIT[:-1], E.OUTCOME_UNKNOWN, E.CLAIMED), (Way.DETOUR, P.NEEDS_RECOVERY)),
        (Way.KAFKA, P.READY, (E.BEGIN, E.SWITCHED, E.PREPARE), (Way.JOURNAL, P.PREPARING)),
        (Way.JOURNAL, P.READY, (E.BEGIN, E.SWITCHED, E.PREPARE), (Way.KAFKA, P.PREPARING)),
    ],
)
def test_where_transactions_lead(way: Way, phase: Phase, events: tuple[Change, ...], after: tuple[Way, Phase]) -> None:
    assert _after(way, phase, *events) == after


def test_a_writer_that_has_left_something_at_kafka_sends_nothing_there_before_it_has_recovered() -> None:
    for phase in PAIRS[Way.DETOUR]:
        for event in set(Change) - {E.OPENED}:
            try:
                assert _after(Way.DETOUR, phase, event)[1] is not P.READY, (phase, event)
            except UsageError:
                continue
