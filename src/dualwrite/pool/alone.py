"""Which functions of units run alone: those that have once changed what the other units of their group would see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from dualwrite.logs import SubjectLogger
from dualwrite.pool.call import Call

log = SubjectLogger(__name__)

_MOST: Final = 1_000
"""More functions are not remembered: they run twice, first with others and then alone."""


class AloneUnits:
    """The functions of a pool that run alone from now on. Any thread may use it.

    Args:
        prefix: The pool's prefix, for messages.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._functions: set[object] = set()

    def goes_alone(self, call: Call) -> bool:
        """Whether a call gets a transaction of its own."""
        return call.alone or (bool(self._functions) and _identity(call.unit) in self._functions)

    def add(self, call: Call, what: str) -> None:
        """From now on the call's function runs alone.

        Args:
            call: A call whose unit was refused.
            what: What it was about to do.
        """
        function = _identity(call.unit)
        if function not in self._functions and len(self._functions) < _MOST:
            self._functions.add(function)
            log.info(
                "%s runs in transactions of its own from now on: others would see %s", call.name, what, prefix=self._prefix
            )


def _identity(unit: Callable[..., Any]) -> object:
    """What the units of one function have in common: the code of the innermost function that it wraps."""
    found: Any = unit
    while True:
        if isinstance(found, functools.partial):
            found = found.func
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        elif hasattr(found, "__func__"):
            found = found.__func__
        else:
            break
    if not hasattr(found, "__code__"):
        found = type(found).__call__
    return getattr(found, "__code__", found)
