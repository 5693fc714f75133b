"""What follows from each kind of error of a processor's transaction."""

from __future__ import annotations

import pytest

from dualwrite.errors import (
    AfterCommitError,
    BrokerAuthorizationError,
    BrokerUnavailableError,
    DeliveryError,
    DeserializationError,
    FencedError,
    InDoubtTransactionError,
    JournalFullError,
    JournalSwitchedError,
    LostTransactionError,
    MessageRefusedError,
    PoolTimeoutError,
    ProducerFencedError,
    SchemaRegistryUnavailableError,
    StateTableMissingError,
    StoreCommitFailedError,
    StoreError,
    StoreUnavailableError,
    TransactionControlError,
    TransactionTimeoutError,
    UnknownTopicError,
)
from dualwrite.processor.attempts import Verdict, verdict_of
from fixtures.tables import table


class AwayError(Exception):
    """The driver's."""


def is_transient(error: BaseException) -> bool:
    return isinstance(error, AwayError | ProducerFencedError)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def while_handling(error: Exception, other: Exception) -> Exception:
    error.__context__ = other
    return error


def instead_of(error: Exception, other: Exception) -> Exception:
    error.__context__, error.__suppress_context__ = other, True
    return error


def in_a_circle() -> Exception:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    return first


@table(
    ("error", "expected"),
    [
        (InDoubtTransactionError(""), Verdict.IN_DOUBT),
        (caused(InDoubtTransactionError(""), AwayError()), Verdict.IN_DOUBT),
        (ValueError("the handler's"), Verdict.MESSAGE),
        (in_a_circle(), Verdict.MESSAGE),
        (AfterCommitError("another transaction's"), Verdict.MESSAGE),
        (caused(AfterCommitError("another transaction's"), AwayError()), Verdict.LATER),
        (DeserializationError(""), Verdict.MESSAGE),
        (MessageRefusedError(""), Verdict.MESSAGE),
        (TransactionTimeoutError(""), Verdict.MESSAGE),
        (StoreCommitFailedError("a deferred constraint"), Verdict.MESSAGE),
        (StoreError("the block went on after an error"), Verdict.MESSAGE),
        (caused(StoreError(""), KeyError()), Verdict.MESSAGE),
        (AwayError(), Verdict.LATER),
        (caused(ValueError(""), AwayError()), Verdict.LATER),
        (while_handling(ValueError(""), AwayError()), Verdict.LATER),
        (instead_of(ValueError(""), AwayError()), Verdict.MESSAGE),
        (caused(StoreCommitFailedError(""), AwayError()), Verdict.LATER),
        (
            caused(StoreCommitFailedError(""), caused(StoreCommitFailedError("the original of a copy"), AwayError())),
            Verdict.LATER,
        ),
        (caused(StoreCommitFailedError("nothing was sent"), StoreUnavailableError("")), Verdict.LATER),
        (JournalSwitchedError("the gate has changed"), Verdict.LATER),
        (caused(JournalSwitchedError("interrupted"), DeliveryError("")), Verdict.LATER),
        (caused(ValueError("the handler's"), JournalSwitchedError("")), Verdict.LATER),
        (JournalFullError(""), Verdict.LATER),
        (caused(ValueError("the handler's"), BrokerUnavailableError("")), Verdict.LATER),
        (caused(ValueError("the handler's"), MessageRefusedError("")), Verdict.MESSAGE),
        (StoreUnavailableError(""), Verdict.LATER),
        (BrokerUnavailableError(""), Verdict.LATER),
        (DeliveryError(""), Verdict.LATER),
        (PoolTimeoutError(""), Verdict.LATER),
        (SchemaRegistryUnavailableError(""), Verdict.LATER),
        (ProducerFencedError("a generation that is over"), Verdict.LATER),
        (caused(FencedError(""), ProducerFencedError("")), Verdict.STOP),
        (LostTransactionError(""), Verdict.STOP),
        (UnknownTopicError(""), Verdict.STOP),
        (BrokerAuthorizationError(""), Verdict.STOP),
        (StateTableMissingError(""), Verdict.STOP),
        (TransactionControlError(""), Verdict.STOP),
    ],
    ids=repr,
)
def test_verdicts(error: Exception, expected: Verdict) -> None:
    assert verdict_of(error, is_transient) is expected


@pytest.mark.parametrize(("own", "expected"), [(KeyError(), Verdict.MESSAGE), (AwayError(), Verdict.LATER)], ids=repr)
def test_what_was_handled_before_the_transaction_is_no_cause(own: Exception, expected: Verdict) -> None:
    earlier = while_handling(AwayError("an earlier attempt's"), AwayError())
    error = while_handling(ValueError("the handler's"), while_handling(own, earlier))
    assert verdict_of(error, is_transient, before=earlier) is expected
