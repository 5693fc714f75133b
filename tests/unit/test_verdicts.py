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
    HostClockError,
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
    StoreNotWritableError,
    StoreUnavailableError,
    TransactionControlError,
    TransactionTimeoutError,
    UnknownTopicError,
)
from dualwrite.observability.outages import ErrorMeaning
from dualwrite.processor.attempts import meaning_of
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
        (InDoubtTransactionError(""), ErrorMeaning.IN_DOUBT),
        (caused(InDoubtTransactionError(""), AwayError()), ErrorMeaning.IN_DOUBT),
        (ValueError("the handler's"), ErrorMeaning.CONTENT),
        (in_a_circle(), ErrorMeaning.CONTENT),
        (AfterCommitError("another transaction's"), ErrorMeaning.CONTENT),
        (caused(AfterCommitError("another transaction's"), AwayError()), ErrorMeaning.LATER),
        (DeserializationError(""), ErrorMeaning.CONTENT),
        (MessageRefusedError(""), ErrorMeaning.CONTENT),
        (TransactionTimeoutError(""), ErrorMeaning.CONTENT),
        (StoreCommitFailedError("a deferred constraint"), ErrorMeaning.CONTENT),
        (StoreError("the block went on after an error"), ErrorMeaning.CONTENT),
        (caused(StoreError(""), KeyError()), ErrorMeaning.CONTENT),
        (AwayError(), ErrorMeaning.LATER),
        (caused(ValueError(""), AwayError()), ErrorMeaning.LATER),
        (while_handling(ValueError(""), AwayError()), ErrorMeaning.LATER),
        (instead_of(ValueError(""), AwayError()), ErrorMeaning.CONTENT),
        (caused(StoreCommitFailedError(""), AwayError()), ErrorMeaning.LATER),
        (
            caused(StoreCommitFailedError(""), caused(StoreCommitFailedError("the original of a copy"), AwayError())),
            ErrorMeaning.LATER,
        ),
        (caused(StoreCommitFailedError("nothing was sent"), StoreUnavailableError("")), ErrorMeaning.LATER),
        (JournalSwitchedError("the gate has changed"), ErrorMeaning.LATER),
        (caused(JournalSwitchedError("interrupted"), DeliveryError("")), ErrorMeaning.LATER),
        (caused(ValueError("the handler's"), JournalSwitchedError("")), ErrorMeaning.LATER),
        (JournalFullError(""), ErrorMeaning.LATER),
        (caused(ValueError("the handler's"), BrokerUnavailableError("")), ErrorMeaning.LATER),
        (caused(ValueError("the handler's"), MessageRefusedError("")), ErrorMeaning.CONTENT),
        (StoreUnavailableError(""), ErrorMeaning.LATER),
        (StoreNotWritableError(""), ErrorMeaning.LATER),
        (HostClockError(""), ErrorMeaning.LATER),
        (caused(ValueError("the handler's"), HostClockError("")), ErrorMeaning.LATER),
        (BrokerUnavailableError(""), ErrorMeaning.LATER),
        (DeliveryError(""), ErrorMeaning.LATER),
        (PoolTimeoutError(""), ErrorMeaning.LATER),
        (SchemaRegistryUnavailableError(""), ErrorMeaning.LATER),
        (ProducerFencedError("a generation that is over"), ErrorMeaning.LATER),
        (caused(FencedError(""), ProducerFencedError("")), ErrorMeaning.STOP),
        (LostTransactionError(""), ErrorMeaning.STOP),
        (UnknownTopicError(""), ErrorMeaning.STOP),
        (BrokerAuthorizationError(""), ErrorMeaning.STOP),
        (StateTableMissingError(""), ErrorMeaning.STOP),
        (TransactionControlError(""), ErrorMeaning.STOP),
    ],
    ids=repr,
)
def test_verdicts(error: Exception, expected: ErrorMeaning) -> None:
    assert meaning_of(error, is_transient) is expected


@pytest.mark.parametrize(("own", "expected"), [(KeyError(), ErrorMeaning.CONTENT), (AwayError(), ErrorMeaning.LATER)], ids=repr)
def test_what_was_handled_before_the_transaction_is_no_cause(own: Exception, expected: ErrorMeaning) -> None:
    earlier = while_handling(AwayError("an earlier attempt's"), AwayError())
    error = while_handling(ValueError("the handler's"), while_handling(own, earlier))
    assert meaning_of(error, is_transient, before=earlier) is expected
