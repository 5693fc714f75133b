"""Keep a KeyboardInterrupt, or a signal handler's SystemExit, if the interrupted cleanup of a library raises another error."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from types import TracebackType
from typing import Final, Self

_NOT_INTERRUPTS: Final = (Exception, GeneratorExit, CancelledError)
"""GeneratorExit only closes a generator; asyncio's CancelledError is behind the TimeoutError of an `asyncio.timeout`."""


class InterruptsFirst:
    """Raise the KeyboardInterrupt or SystemExit, or what else a signal handler has raised, in the context of another error.

    SQLAlchemy asserts in its `finally` clauses that a connection is in a state that the interrupt kept it from reaching, and
    drivers complain that it is closed. Such an error is raised then, with the interrupt as its context.
    """

    def __enter__(self) -> Self:
        self._outside = sys.exc_info()[1]  # the caller may be inside such an `except`
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        behind = error.__context__
        while behind is not None and behind is not self._outside:
            if not isinstance(behind, _NOT_INTERRUPTS):
                raise behind
            behind = behind.__context__
