"""What follows from an error of a transaction: whether time may change it, or one of the messages may have caused it. No I/O.

A message may cause more than an exception of the handler: a row that the flush of the ORM session refuses after it, a COMMIT
that a deferred constraint refuses, a transaction that takes too long. What says nothing about the messages, such as a database
that is away or a deadlock, must not count as an attempt: else an outage would make dead letters of messages that are in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

from dualwrite.errors import (
    DeserializationError,
    DualWriteError,
    InDoubtTransactionError,
    InvalidMessageError,
    MessageRefusedError,
    MessageTooLargeError,
    StoreCommitFailedError,
    StoreError,
    StoreUnavailableError,
    TransactionTimeoutError,
)

IsPassing = Callable[[BaseException], bool]
"""Whether an error of the database's driver, or of ours, says that the same transaction may succeed later."""


class Verdict(Enum):
    """What follows from an error."""

    IN_DOUBT = "the transaction may have committed"
    LATER = "the same transaction may succeed later"
    MESSAGE = "one of the messages may have caused it"
    STOP = "the processor can't continue"


_ABOUT_MESSAGES: Final = (
    DeserializationError,
    InvalidMessageError,
    MessageRefusedError,
    MessageTooLargeError,
    TransactionTimeoutError,
)
"""Whatever their `retriable` says: the same batch, or message, would fail again."""


def verdict_of(error: Exception, is_transient: IsPassing) -> Verdict:
    """What follows from an error of a transaction, whose both sides are rolled back unless it is in doubt.

    Args:
        error: What the transaction, or the handler in it, has raised.
        is_transient: Asked about the error, and about the causes of one that does not say by itself what it means.
    """
    if isinstance(error, InDoubtTransactionError):
        return Verdict.IN_DOUBT
    if isinstance(error, _ABOUT_MESSAGES):
        return Verdict.MESSAGE
    if is_transient(error):
        return Verdict.LATER
    # a StoreError of no other kind: the block went on after a statement that has failed, or has written too much
    if not isinstance(error, DualWriteError) or isinstance(error, StoreCommitFailedError) or type(error) is StoreError:
        return Verdict.LATER if any(map(_says_so(is_transient), _causes(error))) else Verdict.MESSAGE
    return Verdict.LATER if error.retriable else Verdict.STOP


def _says_so(is_transient: IsPassing) -> IsPassing:
    """Also our own errors say it: a commit that was not sent, since the database could not be reached."""
    return lambda cause: is_transient(cause) or isinstance(cause, StoreUnavailableError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What an error was raised from, or while handling, and so on."""
    seen = {id(error)}
    while (found := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(found) in seen:
            return
        seen.add(id(found))
        yield found
        error = found
