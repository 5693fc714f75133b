"""Where traces come in: a tracer opens a span for each unit, gives each message its context, and links handlers to messages.

Unlike an observer, a tracer is called before the work, in the caller's context (`contextvars`), because it has to change
something: what the current span is, and the headers of a message. Like an observer it can't fail the work: if it raises an
exception, that is logged once, and the work goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

log: Final = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

JobStep: TypeAlias = Literal["write", "task", "commit", "abort", "commit database", "commit kafka"]
"""A step of a job: the driver begins the write, tasks run, the driver commits (on both sides) or aborts."""

Carrier: TypeAlias = tuple[tuple[str, str], ...]
"""A context as it goes to other processes: the names and texts of the propagator, such as `traceparent`."""


class SentMessage(Protocol):
    """A message that is about to be sent; its headers are those that the user has given."""

    @property
    def topic(self) -> str: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...
    @property
    def partition(self) -> int | None: ...

    def _replace(self, *, headers: list[tuple[str, bytes | None]] | None = ...) -> Self: ...


M = TypeVar("M", bound=SentMessage)


class UnitTrace(Protocol):
    """The trace of one run of a unit, or of one block of a writer. A unit that runs again has another trace."""

    def current(self) -> AbstractContextManager[object]:
        """A block in which the user's code runs, in its context: whatever it traces belongs to the unit.

        Of a coroutine's unit there are two at the same time, in the contexts of two threads.
        """

    def end(self, error: BaseException | None) -> None:
        """The outcome is known; called once.

        Args:
            error: What the caller gets, None if the unit has committed. If it runs again: why it was undone, UndoneError if
                that was because of others.
        """


class Tracer(Protocol):
    """Makes spans; `set_tracer` installs one."""

    def unit(self, name: str, transactional_id: str, number: int, waited: float) -> UnitTrace:
        """Begin the trace of a unit, in the context of its caller.

        Args:
            name: The name of the unit's function, or "transaction".
            transactional_id: The writer's logical id.
            number: The number of its transaction in the events; several units of a group have the same.
            waited: Seconds since its caller has called the pool; 0 for a block.
        """

    def sending(self, messages: Sequence[SentMessage]) -> Sequence[tuple[str, bytes]]:
        """Headers for messages that are about to be sent to one topic, in the current context.

        Args:
            messages: The one of a `send`, or those of a `send_many`, which have no headers.

        Returns:
            What each of them gets in addition to its own headers. A header that it has already is not added.
        """

    def processing(self, group_id: str | None, messages: Sequence[Any]) -> AbstractContextManager[object]:
        """A context manager around an attempt to process consumed messages, which ends with their commit.

        Args:
            group_id: The consumer group; None for a single message of a batch, inside the block of the batch.
            messages: The messages: each has `topic()`, `partition()`, `offset()`, `key()`, `value()` and `headers()`, as in
                confluent-kafka.
        """

    def job_step(self, step: JobStep, carrier: Carrier, attributes: Mapping[str, str | int]) -> AbstractContextManager[Carrier]:
        """A context manager around a step of a job, which returns the context for the steps below it in other processes.

        Args:
            step: The step.
            carrier: The context that it belongs to; empty for the current one.
            attributes: `job`, and for a task `partition` and `attempt`.
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

    __slots__ = ("_has_ended", "_trace")

    def __init__(self, trace: UnitTrace) -> None:
        self._trace = trace
        self._has_ended = False

    def current(self) -> AbstractContextManager[object]:
        return _Block(lambda: self._trace.current())  # noqa: PLW0108  (reading the attribute may fail, too)

    def end(self, error: BaseException | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            _tried(lambda: self._trace.end(error), None)


def unit_trace(name: str, transactional_id: str, number: int, waited: float = 0.0) -> UnitTrace:
    """The trace of a unit that is about to run; one that does nothing if there is no tracer. It may be ended repeatedly."""
    current = tracer
    if current is None:
        return NO_TRACE
    return _tried(lambda: _GuardedTrace(current.unit(name, transactional_id, number, waited)), NO_TRACE)


@contextmanager
def ending(trace: UnitTrace) -> Iterator[None]:
    """A block in which an error is the end of a trace."""
    try:
        yield
    except BaseException as error:
        trace.end(error)
        raise


def traced(messages: list[M]) -> list[M]:
    """The messages of one call of `send` or `send_many` as they are sent: with the headers of their trace."""
    current = tracer
    if current is None or not messages:
        return messages
    return _tried(lambda: _with_headers(messages, current), messages)


def _with_headers(messages: list[M], current: Tracer) -> list[M]:
    added = list(current.sending(messages))
    for _, content in added:
        if not isinstance(content, bytes):
            raise TypeError(f"a tracer must return bytes for headers, not {type(content).__name__}")
    return [_with(message, added) for message in messages] if added else messages


def _with(message: M, added: list[tuple[str, bytes]]) -> M:
    """A message with more headers, unless it has them."""
    own = message.headers
    if not own:
        return message._replace(headers=[*added])
    names = {name for name, _ in own}
    return message._replace(headers=[*own, *(each for each in added if each[0] not in names)])


def processing(group_id: str, messages: Sequence[Any]) -> AbstractContextManager[object]:
    """A block around the processing of a batch of messages."""
    current = tracer
    return _NO_BLOCK if current is None else _Block(lambda: current.processing(group_id, messages))


def processing_one(message: Any, *, of: Sequence[Any]) -> AbstractContextManager[object]:
    """A block around the processing of a message, which is one `of` a batch in whose block this is."""
    current = tracer
    if current is None or len(of) == 1:
        return _NO_BLOCK
    return _Block(lambda: current.processing(None, [message]))


@contextmanager
def job_step(step: JobStep, carrier: Carrier = (), **attributes: str | int) -> Iterator[Carrier]:
    """A block around a step of a job; returns the context for steps in other processes, or `carrier` without a tracer."""
    current = tracer
    if current is None:
        yield carrier
        return
    with _Block(lambda: current.job_step(step, carrier, attributes)) as found:
        yield carrier if found is None else found


class _Block(Generic[T_co]):
    """A tracer's block, whose errors are logged; the user's errors pass through."""

    __slots__ = ("_block", "_make")

    def __init__(self, make: Callable[[], AbstractContextManager[T_co]]) -> None:
        self._make = make
        self._block: AbstractContextManager[object] = _NO_BLOCK

    def __enter__(self) -> T_co | None:
        return _tried(self._entered, None)

    def _entered(self) -> T_co:
        block = self._make()
        entered = block.__enter__()
        self._block = block
        return entered

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _tried(lambda: self._block.__exit__(kind, error, trace), None)


def _tried(call: Callable[[], T], otherwise: T) -> T:
    """What a call of the tracer returns. If it fails, that is logged if it is the first time, and the work goes on."""
    global _has_failed  # noqa: PLW0603  (as above)
    try:
        return call()
    except Exception:
        if not _has_failed:
            _has_failed = True
            log.exception("the tracer has failed; this is logged once, and the work goes on without it")
        return otherwise
