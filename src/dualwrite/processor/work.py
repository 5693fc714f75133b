"""What one transaction of a processor does: the handler's work, and the move of the positions behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dualwrite.errors import DualWriteError
from dualwrite.transaction import Transaction

Finish = Callable[[Transaction[Any]], None]
"""The end of a transaction's work: a dead letter, the positions. Called in the transaction's thread."""

IsConflict = Callable[[BaseException], bool]
"""Whether an error of the handler is a conflict between transactions, after which the same transaction may succeed."""


class UnprocessableError(Exception):
    """The handler raised an exception, or what it sent was refused. Never leaves the processor.

    Args:
        reason: That exception.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"{type(reason).__qualname__}: {reason}")
        self.reason = reason


@contextmanager
def handling(is_conflict: IsConflict) -> Iterator[None]:
    """Around the handler: its own exceptions are told from those of dualwrite and of the database.

    Args:
        is_conflict: For errors of the store.

    Raises:
        UnprocessableError: The handler raised an exception of its own.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DualWriteError) or is_conflict(error):
            raise
        raise UnprocessableError(error) from error
