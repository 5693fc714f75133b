"""Traces with OpenTelemetry: `install()` makes spans of units, transactions and messages, with the extra `otel`.

A unit, or a block of a writer, has a span. The spans of what it sends, of the delivery, and of both commits are its children;
each unit of a group has its own. Messages carry the context in their headers, so that a consumer continues the trace.
docs/operations/tracing.md describes the spans, `otel_names` has their names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from dualwrite.errors import MissingDependencyError

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
except ImportError as error:
    raise MissingDependencyError(
        "dualwrite.observability.otel_traces needs opentelemetry-api.", next_step='pip install "dualwrite[otel]"'
    ) from error

from dualwrite.observability import events, tracing
from dualwrite.observability import otel_names as names
from dualwrite.observability.metrics import outcome_of
from dualwrite.observability.observers import add_observer, remove_observer
from dualwrite.observability.otel_messages import ContextBlock, MessageSpans, record_error
from dualwrite.observability.tracing import Carrier, JobStep, SentMessage, UndoneError

_MAX_TRANSACTIONS: Final = 10_000
"""Transactions without an end are forgotten, the oldest first: an interrupt has ended them before they could report it."""

_LOST_OUTCOMES: Final = frozenset({"LOST", "UNVERIFIED"})
"""Outcomes of recovery that are errors."""

_OUTCOMES: Final = {"rolled_back": names.ROLLED_BACK, "in_doubt": names.IN_DOUBT, "lost": names.LOST}
_FAILURES: Final[Mapping[type[events.Event], str]] = {
    events.TransactionRolledBack: names.ROLLED_BACK,
    events.TransactionInDoubt: names.IN_DOUBT,
    events.TransactionLost: names.LOST,
}
_FLUSH_MILLIS: Final = 5000
_JOB_STEPS: Final[Mapping[JobStep, str]] = {
    "write": names.JOB_WRITE,
    "task": names.JOB_TASK,
    "commit": names.JOB_COMMIT,
    "abort": names.JOB_ABORT,
    "commit database": names.DATABASE_COMMIT,
    "commit kafka": names.KAFKA_COMMIT,
}
_JOB_ATTRIBUTES: Final = {"job": names.JOB, "partition": names.JOB_PARTITION, "attempt": names.JOB_ATTEMPT}

_NO_CONTEXT: Final = Context()

_lock: Final = threading.Lock()
_installed: tuple[TracerProvider | None, TextMapPropagator | None, _Traces] | None = None


def install(tracer_provider: TracerProvider | None = None, propagator: TextMapPropagator | None = None) -> None:
    """Make spans of all writers, pools and processors of this process from now on; the same call again changes nothing.

    With other arguments it replaces what was installed before.

    Args:
        tracer_provider: Where spans go; None: the global one, which may be set later.
        propagator: Writes the context into messages' headers, and reads it; None: the global one, which by default writes
            `traceparent`, `tracestate` and `baggage`.
    """
    global _installed  # noqa: PLW0603  (one for the process, like `tracing.tracer`)
    with _lock:
        if _installed is not None and _installed[:2] == (tracer_provider, propagator):
            return
        _remove()
        traces = _Traces(tracer_provider, propagator)
        _installed = tracer_provider, propagator, traces
        add_observer(traces.observe)
        tracing.set_tracer(traces)


def uninstall() -> None:
    """Make no more spans. Those of units that are running are ended with them."""
    with _lock:
        _remove()


def _remove() -> None:
    global _installed  # noqa: PLW0603  (as above)
    if _installed is not None:
        traces = _installed[2]
        _installed = None
        remove_observer(traces.observe)
        if tracing.tracer is traces:
            tracing.set_tracer(None)


class _Unit:
    """The span of a unit or a block; a `tracing.UnitTrace`.

    Attributes:
        span: The span.
        outcome: What the events of its transaction say, before its end is known.
        is_over: Whether it has ended without taking part in the commit.
    """

    __slots__ = ("_raised", "is_over", "outcome", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.outcome: str | None = None
        self.is_over = False
        self._raised: BaseException | None = None

    def current(self) -> AbstractContextManager[object]:
        return ContextBlock(trace.set_span_in_context(self.span), self.raised)

    def raised(self, error: BaseException | None) -> None:
        """Note what the unit has raised, if anything, at that time; perhaps in two threads."""
        if error is not None and error is not self._raised:
            self._raised = error
            record_error(self.span, error)

    def end(self, error: BaseException | None) -> None:
        self.is_over = error is not None
        if not self.span.is_recording():
            return
        if error is None:
            outcome = self.outcome or names.COMMITTED
        elif isinstance(error, UndoneError):
            outcome = names.UNDONE
        else:
            outcome = self.outcome or _OUTCOMES[outcome_of(error, "rolled_back")]
            self.raised(error)
        self.span.set_attribute(names.OUTCOME, outcome)
        self.span.end()


class _TracedTransaction:
    """What is known of a transaction with recorded units, until its outcome is.

    Attributes:
        units: Those that have begun in it.
        is_decided: Whether the database has committed: the next commit is Kafka's.
        last: When its last step has ended, in nanoseconds since 1970; 0 before the first one.
    """

    __slots__ = ("is_decided", "last", "units")

    def __init__(self) -> None:
        self.units: list[_Unit] = []
        self.is_decided = False
        self.last = 0

    @property
    def taking_part(self) -> list[_Unit]:
        """The units that were not undone."""
        return [unit for unit in self.units if not unit.is_over]


class _JobSpans:
    """Makes the spans of jobs: the driver's write is the parent of the tasks and of the commit, which are in other processes.

    Spark ends its Python workers without Python's exit handlers. So what is not exported yet is exported at the end of each
    step.

    Args:
        tracer: Starts them.
        provider: Where they go; None: the global one.
        propagator: Writes and reads contexts; None: the global one.
    """

    def __init__(self, tracer: Tracer, provider: TracerProvider | None, propagator: TextMapPropagator | None) -> None:
        self._tracer = tracer
        self._provider = provider
        self._propagator = propagator

    @contextmanager
    def step(self, step: JobStep, carrier: Carrier, attributes: Mapping[str, str | int]) -> Iterator[Carrier]:
        """See `tracing.Tracer.job_step`."""
        propagator = self._propagator or propagate.get_global_textmap()
        is_kafka = step == "commit kafka"
        try:
            with self._tracer.start_as_current_span(
                _JOB_STEPS[step],
                context=propagator.extract(dict(carrier)) if carrier else None,
                kind=SpanKind.CLIENT if is_kafka else SpanKind.INTERNAL,
                attributes={
                    **{_JOB_ATTRIBUTES[name]: content for name, content in attributes.items()},
                    **({names.SYSTEM: names.KAFKA} if is_kafka else {}),
                },
            ):
                context: dict[str, str] = {}
                propagator.inject(context)
                yield tuple(context.items())
        finally:
            if not step.startswith("commit "):
                self._flush()

    def _flush(self) -> None:
        flush = getattr(self._provider or trace.get_tracer_provider(), "force_flush", None)  # the SDK's
        if flush is not None:
            flush(_FLUSH_MILLIS)


class _Traces:
    """The tracer, and the observer that makes spans of a transaction's steps, for each unit in it."""

    def __init__(self, tracer_provider: TracerProvider | None, propagator: TextMapPropagator | None) -> None:
        self._tracer = trace.get_tracer("dualwrite", tracer_provider=tracer_provider, schema_url=names.SCHEMA_URL)
        messages = MessageSpans(self._tracer, propagator)
        self.sending: Callable[[Sequence[SentMessage]], Sequence[tuple[str, bytes]]] = messages.sending
        self.processing: Callable[[str | None, Sequence[Any]], AbstractContextManager[object]] = messages.processing
        self.job_step: Callable[[JobStep, Carrier, Mapping[str, str | int]], AbstractContextManager[Carrier]] = _JobSpans(
            self._tracer, tracer_provider, propagator
        ).step
        self._open: dict[int, _TracedTransaction] = {}
        self._observers: dict[type[events.Event], Callable[[Any], object]] = {
            events.GroupFormed: self._formed,
            events.MessagesDelivered: self._delivered,
            events.DatabaseCommitted: self._decided,
            events.TransactionCommitted: self._committed,
            **dict.fromkeys(_FAILURES, self._failed),
            events.TransactionRecovered: self._recovered,
            events.MessagesPublishedAgain: self._published_again,
        }

    def unit(self, name: str, transactional_id: str, number: int, waited: float) -> _Unit:
        attributes: dict[str, str | float] = {names.TRANSACTIONAL_ID: transactional_id}
        if waited:
            attributes[names.WAITED] = waited
        unit = _Unit(self._tracer.start_span(name, attributes=attributes))
        if number and unit.span.is_recording():
            self._open.setdefault(number, _TracedTransaction()).units.append(unit)
            if len(self._open) > _MAX_TRANSACTIONS:
                self._open.pop(next(iter(self._open)), None)
        return unit

    # --- the steps of transactions ----------------------------------------------------------------------------------------

    def observe(self, event: events.Event) -> None:
        """Make the spans of an event; an observer."""
        observer = self._observers.get(type(event))
        if observer is not None:
            observer(event)

    def _formed(self, event: events.GroupFormed) -> None:
        if (found := self._open.get(event.number)) is not None:
            for unit in found.taking_part:
                unit.span.set_attribute(names.GROUP_SIZE, event.units)

    def _delivered(self, event: events.MessagesDelivered) -> None:
        if (found := self._open.get(event.number)) is not None and event.messages:
            self._step(found, event, names.DELIVER, event.seconds, messages=event.messages)

    def _decided(self, event: events.DatabaseCommitted) -> None:
        if (found := self._open.get(event.number)) is not None:
            self._step(found, event, names.DATABASE_COMMIT, event.seconds)
            found.is_decided = True
            for unit in found.taking_part:  # whatever its caller gets, perhaps an interrupt
                unit.outcome = names.COMMITTED

    def _committed(self, event: events.TransactionCommitted) -> None:
        if (found := self._open.pop(event.number, None)) is None:
            return
        if not found.is_decided:  # COMMIT was not answered: this has found out
            self._step(found, event, names.DATABASE_COMMIT, event.steps.database_commit)
        elif event.outcome == "published" and event.messages:
            self._step(found, event, names.KAFKA_COMMIT, event.steps.kafka_commit, messages=event.messages)
        for unit in found.taking_part:
            unit.outcome = names.JOURNALED if event.outcome == "journaled" else names.COMMITTED
            if event.was_in_doubt:
                unit.span.set_attribute(names.WAS_IN_DOUBT, value=True)

    def _failed(self, event: events.TransactionRolledBack | events.TransactionInDoubt | events.TransactionLost) -> None:
        """Note the outcome. Unless it is rolled back, a commit is what has failed: Kafka's, if the database has committed."""
        if (found := self._open.pop(event.number, None)) is None:
            return
        if not isinstance(event, events.TransactionRolledBack):
            name = names.KAFKA_COMMIT if found.is_decided else names.DATABASE_COMMIT
            seconds = (time.time_ns() - found.last) / 1e9 if found.last else 0.0
            self._step(found, event, name, seconds, error=event.error)
        for unit in found.taking_part:
            unit.outcome = _FAILURES[type(event)]
            unit.span.set_attribute(names.LANE, event.lane)

    def _step(
        self,
        transaction: _TracedTransaction,
        event: events.TransactionEvent,
        name: str,
        seconds: float,
        *,
        messages: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Make a span of a step that has just ended, in the trace of each unit."""
        end = time.time_ns()
        start = end - round(seconds * 1e9)
        is_first, transaction.last = not transaction.last, end
        attributes: dict[str, str | int] = {names.TRANSACTIONAL_ID: event.transactional_id, names.LANE: event.lane}
        kind = SpanKind.INTERNAL
        if name != names.DATABASE_COMMIT:
            attributes[names.SYSTEM] = names.KAFKA
            kind = SpanKind.CLIENT
        if messages:
            attributes[names.MESSAGE_COUNT] = messages
        for unit in transaction.taking_part:
            if is_first:
                unit.span.set_attribute(names.LANE, event.lane)
            parent = trace.set_span_in_context(unit.span, _NO_CONTEXT)
            span = self._tracer.start_span(name, context=parent, kind=kind, attributes=attributes, start_time=start)
            if error is not None:
                record_error(span, error)
            span.end(end)

    # --- recovery -----------------------------------------------------------------------------------------------------------

    def _recovered(self, event: events.TransactionRecovered) -> None:
        span = self._tracer.start_span(
            names.RECOVER,
            attributes={
                names.TRANSACTIONAL_ID: event.transactional_id,
                names.GENERATION: event.generation,
                names.RECOVERY_OUTCOME: event.outcome,
            },
        )
        if event.outcome in _LOST_OUTCOMES:
            span.set_status(Status(StatusCode.ERROR, f"the messages of a transaction are {event.outcome}"))
        span.end()

    def _published_again(self, event: events.MessagesPublishedAgain) -> None:
        attributes: dict[str, str | int] = {names.TRANSACTIONAL_ID: event.transactional_id, names.MESSAGE_COUNT: event.messages}
        self._tracer.start_span(names.PUBLISH_AGAIN, attributes=attributes).end()
