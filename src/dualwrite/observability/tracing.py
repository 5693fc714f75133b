"""Where traces come in: a tracer opens a span for each unit, gives each message its context, and links handlers to messages.

Unlike an observer, a tracer is called before the work, in the caller's context (`contextvars`), because it has to change
something: what the current span is, and the headers of a message. Like an observer it can't fail the work: if it raises an
exception, that is logged once, and the work goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol, TypeVar

log: Final = logging.getLogger(__name__)

T = TypeVar("T")

Headers = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]


class UnitTrace(Protocol):
    """The trace of one unit, or of one block of a writer. A unit that runs again has another trace."""

    def current(self) -> AbstractContextManager[object]:
        """A block in which the user's code runs, in its context: whatever it traces belongs to the unit.

        Of a coroutine's unit there are two at the same time, in the contexts of two threads.
        """

    def end(self, error: BaseException | None) -> None:
        """The unit's outcome is known: `error` is what its caller gets, None if it has committed."""


class Tracer(Protocol):
    """Makes spans; `set_tracer` installs one."""

    def unit(self, name: str, transactional_id: str, number: int) -> UnitTrace:
        """Begin the trace of a unit.

        Args:
            name: The name of the unit's function, or "transaction".
            transactional_id: The writer's logical id.
            number: The number of its transaction in the events; several units of a group have the same.
        """

    def sending(self, topic: str, headers: Headers | None, messages: int) -> Headers | None:
        """The headers for a message that is about to be sent in the current context, or for several equal ones.

        Args:
            topic: The topic.
            headers: The message's own headers.
            messages: The number of messages that get these headers.
        """

    def processing(self, group_id: str | None, messages: Sequence[Any]) -> AbstractContextManager[object]:
        """A context manager around the processing of consumed messages.

        Args:
            group_id: The consumer group; None for a single message of a batch whose processing has begun.
            messages: The messages: each has `topic()`, `partition()`, `offset()` and `headers()`, as in confluent-kafka.
        """


tracer: Tracer | None = None
"""The tracer of this process; `set_tracer` changes it."""

_has_failed = False


def set_tracer(new: Tracer | None) -> None:
    """Install the tracer of this process, or remove it."""
    global tracer, _has_failed
    tracer, _has_failed = new, False


class UndoneError(Exception):
    """The end of a unit's trace if the unit was undone together with others, and runs again."""


class _NoTrace:
    """The trace of a unit that has none."""

    def current(self) -> AbstractContextManager[object]:
        return _NO_BLOCK

    def end(self, error: BaseException | None) -> None: ...


_NO_BLOCK: Final = nullcontext()
NO_TRACE: Final[UnitTrace] = _NoTrace()


class _GuardedTrace:
    """A tracer's trace of a unit, whose errors are logged."""

    def __init__(self, trace: UnitTrace) -> None:
        self._trace = trace

    def current(self) -> AbstractContextManager[object]:
        return _block(self._trace.current)

    def end(self, error: BaseException | None) -> None:
        _guarded(lambda: self._trace.end(error), None)


def unit_trace(name: str, transactional_id: str, number: int) -> UnitTrace:
    """The trace of a unit that is about to run; one that does nothing if there is no tracer."""
    if tracer is None:
        return NO_TRACE
    current = tracer
    trace = _guarded(lambda: current.unit(name, transactional_id, number), None)
    return NO_TRACE if trace is None else _GuardedTrace(trace)


@contextmanager
def ending(trace: UnitTrace) -> Iterator[None]:
    """A block in which an error is the end of a trace."""
    try:
        yield
    except BaseException as error:
        trace.end(error)
        raise


def sent_headers(topic: str, headers: Headers | None, messages: int = 1) -> Headers | None:
    """The headers with which a message is sent, if there is a tracer."""
    current = tracer
    return headers if current is None else _guarded(lambda: current.sending(topic, headers, messages), headers)


def processing(group_id: str, messages: Sequence[Any]) -> AbstractContextManager[object]:
    """A block around the processing of a batch of messages."""
    current = tracer
    return _NO_BLOCK if current is None else _block(lambda: current.processing(group_id, messages))


def processing_one(message: Any, *, of: Sequence[Any]) -> AbstractContextManager[object]:
    """A block around the processing of a message, which is one `of` a batch in whose block this is."""
    current = tracer
    if current is None or len(of) == 1:
        return _NO_BLOCK
    return _block(lambda: current.processing(None, [message]))


@contextmanager
def _block(make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """A tracer's block, whose errors are logged; the user's errors pass through."""
    span = _guarded(make, None)
    if span is None:
        yield
        return
    _guarded(span.__enter__, None)
    try:
        yield
    except BaseException as error:
        raised = error
        _guarded(lambda: span.__exit__(type(raised), raised, raised.__traceback__), None)
        raise
    _guarded(lambda: span.__exit__(None, None, None), None)


def _guarded(function: Callable[[], T], otherwise: T) -> T:
    """What a tracer's function returns; `otherwise` if it fails."""
    global _has_failed  # noqa: PLW0603  (as above)
    try:
        return function()
    except Exception:
        if not _has_failed:
            _has_failed = True
            log.exception("the tracer has failed; this is logged once, and the work goes on without it")
        return otherwise
