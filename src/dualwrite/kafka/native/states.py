"""The native producer's states, and which calls each of them allows (KIP-939, "Valid Transitions"). No I/O."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Final

from dualwrite.errors import InvalidTransitionError


class ProducerState(Enum):
    """The state of a producer. The value completes the sentence "the producer …"."""

    UNINITIALIZED = "has no producer id yet"
    READY = "is between transactions"
    IN_TRANSACTION = "is inside a transaction"
    PREPARED = "has prepared its transaction"
    UNCERTAIN = "does not know whether its transaction was committed"
    ABORTING = "does not know whether its transaction was aborted"
    FENCED = "was fenced: its transactional id was taken over, or another process ended its transaction"
    CLOSED = "is closed"

    __hash__ = object.__hash__  # Enum's is a Python function, called for each of a transaction's checks


_ACQUIRING: Final = ("init_transactions", "adopt", "create", "close")

ALLOWED: Final = MappingProxyType(
    {
        ProducerState.UNINITIALIZED: _ACQUIRING,
        ProducerState.READY: ("begin_transaction", *_ACQUIRING),
        ProducerState.IN_TRANSACTION: (
            "send",
            "send_many",
            "send_columns",
            "send_offsets_to_transaction",
            "prepare_transaction",
            "commit_transaction",
            "abort_transaction",
            "close",
        ),
        ProducerState.PREPARED: ("commit_transaction", "abort_transaction", "complete_prepared_transaction", "close"),
        ProducerState.UNCERTAIN: ("commit_transaction", "abort_transaction", *_ACQUIRING),
        ProducerState.ABORTING: ("abort_transaction", *_ACQUIRING),  # a commit might include only part of it
        ProducerState.FENCED: _ACQUIRING,
        ProducerState.CLOSED: ("close",),
    }
)
"""The methods that each state allows."""


def check_allowed(state: ProducerState, call: str, kafka_transactional_id: str) -> None:
    """Check that a method may be called in this state.

    Raises:
        InvalidTransitionError: The state does not allow the call; nothing was changed.
    """
    allowed = ALLOWED[state]
    if call not in allowed:
        raise InvalidTransitionError(
            f"{call}() is not allowed: the producer {state.value}.",
            transactional_id=kafka_transactional_id,
            next_step=f"allowed now: {', '.join(allowed)}",
            state=state,
            allowed=allowed,
        )
