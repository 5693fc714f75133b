"""The native producer's states: each call is allowed, or raises an error with the state and the allowed calls (KIP-939)."""

from __future__ import annotations

import pickle

import pytest

from dualwrite.errors import InvalidTransitionError
from dualwrite.kafka.native.native_producer import ALLOWED, NativeProducer, ProducerState, check_allowed
from fixtures.tables import table

CALLS = sorted({call for calls in ALLOWED.values() for call in calls})


def test_every_state_lists_its_calls_and_every_call_is_a_method() -> None:
    assert set(ALLOWED) == set(ProducerState)
    assert all(callable(getattr(NativeProducer, call)) for call in CALLS)


@table("state", ProducerState)
def test_a_call_is_allowed_or_refused_by_name(state: ProducerState) -> None:
    for call in ALLOWED[state]:
        check_allowed(state, call, "orders")
    for call in set(CALLS) - set(ALLOWED[state]):
        with pytest.raises(InvalidTransitionError) as caught:
            check_allowed(state, call, "orders")
        for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
            assert (error.state, error.allowed, error.transactional_id) == (state, ALLOWED[state], "orders")
            text = str(error)
            assert f"{call}()" in text
            assert state.value in text
            assert all(allowed in text for allowed in ALLOWED[state])


def test_a_prepared_transaction_can_only_be_ended() -> None:
    assert set(ALLOWED[ProducerState.PREPARED]) == {
        "commit_transaction",
        "abort_transaction",
        "complete_prepared_transaction",
        "close",
    }


def test_a_producer_can_be_closed_in_every_state_and_then_refuses_everything() -> None:
    assert all("close" in calls for calls in ALLOWED.values())
    assert ALLOWED[ProducerState.CLOSED] == ("close",)
