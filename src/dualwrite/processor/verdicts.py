"""Decides what an error of a transaction means: whether a retry may succeed, or one of the messages may be the cause. No I/O.

A message can cause other errors than an exception in the handler: a row that the database rejects when the ORM session is
flushed after the handler, a COMMIT that fails because of a deferred constraint, a transaction that takes too long. An error
that says nothing about the messages, such as a deadlock or a database that can't be reached, must not count as an attempt:
otherwise an outage would turn valid messages into dead letters.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from dualwrite.errors import (
    AfterCommitError,
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
    causes_of,
)

IsPassing = Callable[[BaseException], bool]
"""Whether an error, the driver's or our own, says that the same transaction may succeed later."""


class Verdict(Enum):
    """What an error means for the processor."""

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
"""Regardless of their `retriable`: the same batch or message would fail again."""


_OFTEN_ABOUT_MESSAGES: Final = (
    AfterCommitError,  # of another transaction, which the handler has run
    StoreCommitFailedError,
)
"""Their causes decide. So do those of a plain StoreError: the block continued after a failed statement, or wrote too much."""


def verdict_of(error: Exception, is_transient: IsPassing, *, before: BaseException | None = None) -> Verdict:
    """Decide what an error of a transaction means. Both sides of it are rolled back, unless it is in doubt.

    Args:
        error: What the transaction, or the handler in it, has raised.
        is_transient: Called with the error, and also with its causes if the error itself does not say what it means.
        before: What was being handled before the transaction began; see `causes_of`.
    """
    if isinstance(error, InDoubtTransactionError):
        return Verdict.IN_DOUBT
    if isinstance(error, _ABOUT_MESSAGES):
        return Verdict.MESSAGE
    if is_transient(error):
        return Verdict.LATER
    if not isinstance(error, DualWriteError) or isinstance(error, _OFTEN_ABOUT_MESSAGES) or type(error) is StoreError:
        return Verdict.LATER if any(map(_says_so(is_transient), causes_of(error, before=before))) else Verdict.MESSAGE
    return Verdict.LATER if error.retriable else Verdict.STOP


def _says_so(is_transient: IsPassing) -> IsPassing:
    """Like `is_transient`, but also true for our own error for a COMMIT that was not sent, as the database was unreachable."""
    return lambda cause: is_transient(cause) or isinstance(cause, StoreUnavailableError)
