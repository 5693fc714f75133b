"""Spans that the SDK has recorded in memory, as the tests of traces look at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id

from dualwrite.observability import otel_traces


class RecordedSpans:
    """What a provider of its own has recorded.

    Attributes:
        tracer: Starts spans of the test, as a service does.
        provider: The provider.
    """

    def __init__(self, **settings: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **settings)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans {name!r} in {[span.name for span in self.all]}"
        return found[0]

    def children(self, parent: ReadableSpan) -> list[str]:
        """The names of a span's children, sorted."""
        return sorted(span.name for span in self.all if parent_id(span) == span_id(parent))

    def child(self, parent: ReadableSpan, name: str) -> ReadableSpan:
        found = [span for span in self.named(name) if parent_id(span) == span_id(parent)]
        assert len(found) == 1, f"{name!r} is not the one child of {parent.name!r}, which has {self.children(parent)}"
        return found[0]

    def clear(self) -> None:
        self._exporter.clear()


@contextmanager
def recording(**settings: Any) -> Iterator[RecordedSpans]:
    """Record the spans of this process during a block."""
    spans = RecordedSpans(**settings)
    otel_traces.install(spans.provider)
    try:
        yield spans
    finally:
        otel_traces.uninstall()
        spans.provider.shutdown()


def trace_id(span: ReadableSpan) -> str:
    return format_trace_id(span.context.trace_id)


def span_id(span: ReadableSpan) -> str:
    return format_span_id(span.context.span_id)


def parent_id(span: ReadableSpan) -> str | None:
    return None if span.parent is None else format_span_id(span.parent.span_id)


def linked(span: ReadableSpan) -> set[str]:
    """The ids of the spans that a span links to."""
    return {format_span_id(link.context.span_id) for link in span.links}


def traceparent(span: ReadableSpan) -> bytes:
    """The header of a message that was sent in a span."""
    return f"00-{trace_id(span)}-{span_id(span)}-{span.context.trace_flags:02x}".encode()
