"""Ctrl-C stays Ctrl-C, where the clean-up of a library that it cut short raises something else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self


class InterruptsFirst:
    """Raise the KeyboardInterrupt that hides behind another error.

    SQLAlchemy asserts in its `finally` clauses that a connection is in the state that the interrupt kept it from, and
    drivers complain that it is closed. What is raised then is the AssertionError, with the interrupt as its context.
    """

    def __enter__(self) -> Self:
        self._outside = sys.exc_info()[1]  # the caller may be at work in an `except KeyboardInterrupt`
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        behind = error.__context__
        while behind is not None and behind is not self._outside:
            if isinstance(behind, KeyboardInterrupt):
                raise behind
            behind = behind.__context__
