"""The recovery decision: each case of the table in docs/how-it-works/recovery.md, and properties of all cases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dualwrite.recovery.decision import Decision, decide
from dualwrite.state import MAX_EPOCH, PreparedTxnState, TransactionDescription, TransactionStatus, names
from fixtures.tables import table

S = TransactionStatus
D = Decision

NATIVE = PreparedTxnState(7, 5)
TIMED = PreparedTxnState(7, 5, 1000)


def described(status: TransactionStatus, producer_id: int = 7, epoch: int = 5, start: int = 1000) -> TransactionDescription:
    return TransactionDescription(status, producer_id, epoch, 60_000, start)


@table(
    ("description", "expected"),
    [
        # S names D: epoch e while ongoing, e + 1 once ended
        (described(S.ONGOING, epoch=5), D.COMMIT),
        (described(S.COMPLETE_COMMIT, epoch=6), D.ALREADY_COMMITTED),
        (described(S.COMPLETE_ABORT, epoch=6), D.LOST),
        # between two states: look again
        (described(S.PREPARE_COMMIT, epoch=5), D.WAIT),
        (described(S.PREPARE_COMMIT, epoch=6), D.WAIT),
        (described(S.PREPARE_ABORT, epoch=6), D.WAIT),
        (described(S.PREPARE_EPOCH_FENCE, epoch=6), D.WAIT),
        (described(S.DEAD), D.WAIT),
        # D is a later transaction: S was resolved or committed before that one began
        (described(S.ONGOING, epoch=6), D.ABORT),
        (described(S.ONGOING, epoch=99), D.ABORT),
        (described(S.COMPLETE_COMMIT, epoch=7), D.FORGOTTEN),
        (described(S.COMPLETE_ABORT, epoch=7), D.NOTHING),
        # the producer id changed (epoch exhaustion): only EndTxn v5 of S shows the outcome
        (described(S.ONGOING, producer_id=8, epoch=0), D.PROVE),
        (described(S.COMPLETE_COMMIT, producer_id=8, epoch=0), D.PROVE),
        (described(S.COMPLETE_ABORT, producer_id=8, epoch=0), D.PROVE),
        (described(S.EMPTY, producer_id=8, epoch=0, start=-1), D.PROVE),
        # no evidence: the coordinator is behind S, or shows an id without a transaction
        (described(S.ONGOING, epoch=4), D.UNVERIFIED),
        (described(S.COMPLETE_COMMIT, epoch=5), D.UNVERIFIED),
        (described(S.COMPLETE_ABORT, epoch=4), D.UNVERIFIED),
        (described(S.EMPTY, epoch=5, start=-1), D.UNVERIFIED),
        (described(S.EMPTY, epoch=6, start=-1), D.UNVERIFIED),
        (described(S.EMPTY, epoch=7, start=-1), D.UNVERIFIED),
        (None, D.UNVERIFIED),
    ],
)
def test_a_state_named_by_its_epoch(description: TransactionDescription | None, expected: Decision) -> None:
    assert decide(NATIVE, description) is expected


@table(
    ("description", "expected"),
    [
        # S names D: same start time, epoch e, or e + 1 once ended (EndTxn v5, timeout; e + 2 for a timeout on Kafka 4.0.0)
        (described(S.ONGOING, epoch=5), D.COMMIT),
        (described(S.COMPLETE_COMMIT, epoch=5), D.ALREADY_COMMITTED),
        (described(S.COMPLETE_COMMIT, epoch=6), D.ALREADY_COMMITTED),
        (described(S.COMPLETE_ABORT, epoch=5), D.LOST),
        (described(S.COMPLETE_ABORT, epoch=6), D.LOST),
        (described(S.COMPLETE_ABORT, epoch=7), D.LOST),
        (described(S.PREPARE_COMMIT, epoch=5), D.WAIT),
        (described(S.PREPARE_ABORT, epoch=6), D.WAIT),
        (described(S.PREPARE_EPOCH_FENCE, epoch=6), D.WAIT),
        (described(S.DEAD), D.WAIT),
        # another start time under the same epoch: the session's next transaction
        (described(S.ONGOING, epoch=5, start=2000), D.ABORT),
        (described(S.COMPLETE_COMMIT, epoch=5, start=2000), D.FORGOTTEN),
        (described(S.COMPLETE_ABORT, epoch=6, start=2000), D.NOTHING),
        # the broker's clock was set back: another start time is another transaction, whichever is greater
        (described(S.ONGOING, epoch=5, start=500), D.ABORT),
        (described(S.COMPLETE_COMMIT, epoch=5, start=500), D.NOTHING),
        # no evidence
        (described(S.ONGOING, epoch=4, start=500), D.UNVERIFIED),
        (described(S.ONGOING, epoch=6, start=1000), D.UNVERIFIED),
        (described(S.COMPLETE_COMMIT, epoch=7, start=1000), D.UNVERIFIED),
        (described(S.COMPLETE_ABORT, epoch=8, start=1000), D.UNVERIFIED),
        (described(S.COMPLETE_COMMIT, producer_id=8, epoch=0), D.UNVERIFIED),
        (described(S.ONGOING, producer_id=8, epoch=0, start=2000), D.UNVERIFIED),
        (described(S.EMPTY, epoch=5, start=-1), D.UNVERIFIED),
        (described(S.EMPTY, epoch=6, start=1000), D.UNVERIFIED),
        (None, D.UNVERIFIED),
    ],
)
def test_a_state_that_needs_its_start_time(description: TransactionDescription | None, expected: Decision) -> None:
    assert decide(TIMED, description) is expected


@table(
    ("description", "expected"),
    [
        (described(S.ONGOING), D.ABORT),
        (described(S.PREPARE_COMMIT), D.WAIT),
        (described(S.PREPARE_ABORT), D.WAIT),
        (described(S.PREPARE_EPOCH_FENCE), D.WAIT),
        (described(S.DEAD), D.WAIT),
        (described(S.COMPLETE_COMMIT), D.NOTHING),
        (described(S.COMPLETE_ABORT), D.NOTHING),
        (described(S.EMPTY, start=-1), D.NOTHING),
        (None, D.NOTHING),
    ],
)
def test_no_stored_state(description: TransactionDescription | None, expected: Decision) -> None:
    assert decide(None, description) is expected


# few values, so that equal names are frequent; both ends of the range of epochs
small_epochs = st.sampled_from([0, 1, 2, MAX_EPOCH - 1, MAX_EPOCH])
stored_states = st.none() | st.builds(PreparedTxnState, st.integers(0, 1), small_epochs, st.none() | st.sampled_from([10, 20]))
descriptions = st.none() | st.builds(
    TransactionDescription,
    st.sampled_from(list(TransactionStatus)),
    st.integers(0, 1),
    small_epochs,
    st.just(60_000),
    st.sampled_from([-1, 10, 20]),
)


@given(stored_states, descriptions)
def test_every_pair_has_a_safe_decision(stored: PreparedTxnState | None, description: TransactionDescription | None) -> None:
    decision = decide(stored, description)
    assert isinstance(decision, Decision)
    named = names(stored, description)
    status = None if description is None else description.status
    if decision is D.COMMIT:
        assert named
        assert status is S.ONGOING
    if decision is D.ABORT:
        assert not named
        assert status is S.ONGOING
    if decision is D.LOST:
        assert named
        assert status is S.COMPLETE_ABORT
    if decision is D.ALREADY_COMMITTED:
        assert named
        assert status is S.COMPLETE_COMMIT
    if decision in (D.UNVERIFIED, D.PROVE):
        assert stored is not None
        assert not named
    if decision is D.PROVE:
        assert stored is not None
        assert description is not None
        assert stored.has_own_epoch
        assert stored.producer_id != description.producer_id
    if decision is D.NOTHING:
        assert not named
        assert status is not S.ONGOING


@given(stored_states, descriptions)
def test_an_ongoing_transaction_is_never_skipped(
    stored: PreparedTxnState | None, description: TransactionDescription | None
) -> None:
    if description is not None and description.status is S.ONGOING:
        assert decide(stored, description) in (D.COMMIT, D.ABORT, D.PROVE, D.UNVERIFIED)


@given(descriptions)
def test_without_a_stored_state_nothing_is_ever_committed_or_reported(description: TransactionDescription | None) -> None:
    assert decide(None, description) in (D.ABORT, D.WAIT, D.NOTHING)


@given(stored_states, descriptions)
def test_no_state_names_an_id_without_a_transaction(
    stored: PreparedTxnState | None, description: TransactionDescription | None
) -> None:
    if description is None or description.status is S.EMPTY:
        assert not names(stored, description)
