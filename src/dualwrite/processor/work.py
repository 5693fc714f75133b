"""What one transaction of a processor does: the handler's work, and the move of the positions behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualwrite.transaction import Transaction

Finish = Callable[[Transaction[Any]], None]
"""The end of a transaction's work: a dead letter, the positions. Called in the transaction's thread."""


class UnprocessableError(Exception):
    """One of the messages may have caused the failure of the transaction. Internal: the processor never raises it.

    Args:
        reason: What the transaction has raised.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"{type(reason).__qualname__}: {reason}")
        self.reason = reason
