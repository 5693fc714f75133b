"""OpenTelemetry's spans of messages: what is sent and processed, and the context that goes with each message in its headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import Token
from functools import partial
from types import TracebackType
from typing import Any, Final

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, Setter, TextMapPropagator
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer

from dualwrite.observability import otel_names as names
from dualwrite.observability.tracing import SentMessage

_Headers = Iterable[tuple[str, bytes | str | None]]
_Attributes = dict[str, str | int | bool]

_MAX_LINKS: Final = 128
"""The SDK's default limit; it would drop the first ones."""

_GROUP: Final = context.create_key("dualwrite-consumer-group")


class _HeaderGetter(Getter[Any]):
    def get(self, carrier: _Headers, key: str) -> list[str] | None:
        return [_text(content) for name, content in carrier if name == key and content is not None] or None

    def keys(self, carrier: _Headers) -> list[str]:
        return [name for name, _ in carrier]


class _HeaderSetter(Setter[list[tuple[str, bytes]]]):
    def set(self, carrier: list[tuple[str, bytes]], key: str, value: str) -> None:
        carrier.append((key, value.encode()))


_GETTER: Final = _HeaderGetter()
_SETTER: Final = _HeaderSetter()


class MessageSpans:
    """Makes the spans of messages.

    Args:
        tracer: Starts the spans.
        propagator: Writes the context into headers and reads it; None: the global one of the moment.
    """

    def __init__(self, tracer: Tracer, propagator: TextMapPropagator | None) -> None:
        self._tracer = tracer
        self._propagator = propagator

    def sending(self, messages: Sequence[SentMessage]) -> list[tuple[str, bytes]]:
        """Make the span of a `send` or a `send_many`, and return the headers for its messages.

        A message that has a valid context in its headers keeps it, and nothing is added.
        """
        propagator = self._propagator or propagate.get_global_textmap()
        own = None
        if messages[0].headers:
            own = _creation_context(propagator, messages[0].headers)
        span = self._send_span(messages, own)
        if own is not None:
            return []
        added: list[tuple[str, bytes]] = []
        propagator.inject(added, None if span is None else trace.set_span_in_context(span), _SETTER)
        return added

    def _send_span(self, messages: Sequence[SentMessage], own: SpanContext | None) -> Span | None:
        """The span; None if nothing is recorded here."""
        if is_unsampled(trace.get_current_span()):
            return None
        first = messages[0]
        attributes = _operation(names.SEND)
        attributes[names.DESTINATION] = first.topic
        if len(messages) > 1:
            attributes[names.MESSAGE_COUNT] = len(messages)
        else:
            _describe(attributes, first.key, first.value)
        if first.partition is not None:
            attributes[names.PARTITION] = str(first.partition)
        span = self._tracer.start_span(
            f"{names.SEND} {first.topic}",
            kind=SpanKind.PRODUCER if own is None else SpanKind.CLIENT,  # which of them depends on whose context is sent
            attributes=attributes,
            links=[] if own is None else [Link(own)],
        )
        span.end()
        return span

    def processing(self, group_id: str | None, messages: Sequence[Any]) -> ContextBlock:
        """A block with the span of one message or of a batch; see `tracing.Tracer.processing`.

        One message: its context is the parent, its baggage is there, and what was current before is linked. A batch: the
        context of each message is linked.
        """
        before = context.get_current()
        attributes = _operation(names.PROCESS)
        group = group_id if group_id is not None else context.get_value(_GROUP, before)
        if group is not None:
            attributes[names.CONSUMER_GROUP] = str(group)
        if len(messages) == 1:
            inside, links = self._for_one(messages[0], attributes, before)
        else:
            inside, links = before, self._for_batch(messages, attributes)
        if is_unsampled(trace.get_current_span(inside)) and inside is before:
            return ContextBlock(inside, partial(_ended, None))
        topic = attributes.get(names.DESTINATION)
        span = self._tracer.start_span(
            names.PROCESS if topic is None else f"{names.PROCESS} {topic}",
            context=inside,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
        )
        return ContextBlock(context.set_value(_GROUP, group, trace.set_span_in_context(span, inside)), partial(_ended, span))

    def _for_one(self, message: Any, attributes: _Attributes, before: Context) -> tuple[Context, list[Link]]:
        attributes[names.DESTINATION] = message.topic()
        attributes[names.PARTITION] = str(message.partition())
        attributes[names.OFFSET] = message.offset()
        _describe(attributes, message.key(), message.value())
        headers = message.headers()
        if not headers:
            return before, []
        propagator = self._propagator or propagate.get_global_textmap()
        inside = propagator.extract(headers, before, _GETTER)
        ambient = trace.get_current_span(before).get_span_context()
        is_another = trace.get_current_span(inside).get_span_context() != ambient
        return inside, [Link(ambient)] if is_another and ambient.is_valid else []

    def _for_batch(self, messages: Sequence[Any], attributes: _Attributes) -> list[Link]:
        topics = {message.topic() for message in messages}
        if len(topics) == 1:
            attributes[names.DESTINATION] = topics.pop()
            partitions = {message.partition() for message in messages}
            if len(partitions) == 1:
                attributes[names.PARTITION] = str(partitions.pop())
        attributes[names.MESSAGE_COUNT] = len(messages)
        return list(self._links(messages))

    def _links(self, messages: Sequence[Any]) -> Iterator[Link]:
        """A link to each context in the messages; those of one `send_many` have the same."""
        propagator = self._propagator or propagate.get_global_textmap()
        fields = propagator.fields
        found: set[tuple[bytes | str | None, ...]] = set()
        for message in messages:
            headers = message.headers()
            if not headers:
                continue
            contents = tuple(content for name, content in headers if name in fields)
            if not contents or contents in found:
                continue
            found.add(contents)
            created = _creation_context(propagator, headers)
            if created is not None:
                yield Link(created)
            if len(found) == _MAX_LINKS:
                return


class ContextBlock:
    """A block in which a context is the current one. After it, no task has the context that was inside.

    It may end in another task than it began in, if it is inside an asynchronous generator: it begins in the task of the
    generator's reader, and if the reader leaves the generator, the event loop ends it in a task of its own. Nothing can be
    detached from the reader's task there.

    Args:
        inside: The context. The block changes it if it ends in another task: nobody else may have this object.
        left: Called after the block with what it has raised, or None.
    """

    __slots__ = ("_before", "_inside", "_left", "_token")

    def __init__(self, inside: Context, left: Callable[[BaseException | None], object]) -> None:
        self._inside = inside
        self._left = left
        self._before: Context = inside
        self._token: Token[Context] | None = None

    def __enter__(self) -> None:
        self._before = context.get_current()
        self._token = context.attach(self._inside)

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._token is not None:
            self._detach(self._token)
        self._left(error)

    def _detach(self, token: Token[Context]) -> None:
        try:
            token.var.reset(token)  # unlike context.detach, it says if this is another task
        except ValueError:  # where it began, the context can't be replaced, so it becomes what was there before
            for key in self._inside.keys() - self._before.keys():
                dict.pop(self._inside, key)
            dict.update(self._inside, self._before)


def _ended(span: Span | None, error: BaseException | None) -> None:
    """End the span of a block, which has perhaps raised an error."""
    if span is not None:
        if error is not None:
            record_error(span, error)
        span.end()


def is_unsampled(span: Span) -> bool:
    """Whether a span belongs to a trace that is not sampled here: what belongs to it makes no spans."""
    return not span.is_recording() and span.get_span_context().is_valid and not span.get_span_context().is_remote


def record_error(span: Span, error: BaseException) -> None:
    """Record why something has failed. An interrupt or a cancellation is named, and is no error."""
    if not span.is_recording():
        return
    span.set_attribute(names.ERROR_TYPE, f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."))
    if isinstance(error, Exception):
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, f"{error}"))


def _creation_context(propagator: TextMapPropagator, headers: _Headers) -> SpanContext | None:
    """The context in headers; None if there is no valid one."""
    fields = propagator.fields
    if not any(name in fields for name, _ in headers):
        return None
    found = trace.get_current_span(propagator.extract(headers, Context(), _GETTER)).get_span_context()
    return found if found.is_valid else None


def _operation(name: str) -> _Attributes:
    return {names.SYSTEM: names.KAFKA, names.OPERATION_NAME: name, names.OPERATION_TYPE: name}


def _describe(attributes: _Attributes, key: Any, value: Any) -> None:
    """The attributes of a single message: its key, if it is text, and whether it is a tombstone."""
    if isinstance(key, bytes):
        with suppress(UnicodeDecodeError):
            attributes[names.KEY] = key.decode()
    elif isinstance(key, str | int):
        attributes[names.KEY] = str(key)
    if value is None:
        attributes[names.TOMBSTONE] = True


def _text(content: bytes | str) -> str:
    return content if isinstance(content, str) else content.decode(errors="replace")
