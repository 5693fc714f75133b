"""What one transaction of a processor does: the handler's work, and moving the positions past the processed messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualwrite.transaction import Transaction

Finish = Callable[[Transaction[Any]], None]
"""The end of a transaction's work: sends a dead letter, if any, and moves the positions. Called in the transaction's thread."""


class UnprocessableError(Exception):
    """One of the messages may have caused the failure of the transaction. Internal: the processor never raises it.

    Args:
        reason: The exception that the transaction raised.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"{type(reason).__qualname__}: {reason}")
        self.reason = reason
