"""The time limit of a call that adds messages: how long it waits while the brokers store nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from dualwrite.deadline import Deadline


class Patience:
    """The waits of one call; each of them is a `with` block that gets the deadline for it.

    All waits share one limit, which starts again when the brokers have stored something: a call with millions of messages may
    take longer than the limit as long as it makes progress. Only waiting counts, not the time in which the caller makes the
    messages.

    Args:
        seconds: The limit.
        stored: The number of records that were stored so far.
    """

    __slots__ = ("_deadline", "_left", "_seconds", "_seen", "_stored")

    def __init__(self, seconds: float, stored: Callable[[], int]) -> None:
        self._seconds = self._left = seconds
        self._stored = stored
        self._seen = stored()

    @classmethod
    def of(cls, limit: float | Deadline | Patience) -> Patience:
        """The patience itself; or, for a single message, one that ends at a deadline, or so many seconds from now."""
        return limit if isinstance(limit, Patience) else _Until(Deadline.of(limit))

    def __enter__(self) -> Deadline:
        self._deadline = Deadline.after(self._left)
        self._deadline.seconds = self._seconds  # for error messages
        return self._deadline

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        stored = self._stored()
        self._left = self._deadline.left if stored == self._seen else self._seconds
        self._seen = stored


class _Until(Patience):
    """A limit that does not start again: a deadline."""

    __slots__ = ()

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def __enter__(self) -> Deadline:
        return self._deadline

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        pass
