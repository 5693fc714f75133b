"""What the option `observe` calls in Spark's Python processes: each event and exported span is a line of a file.

It is in this folder because Spark's workers can import nothing else of the tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id

from dualwrite.observability import Event, add_observer, otel_traces
from dualwrite.testing.failpoints import ENVIRONMENT_VARIABLE

PLACE = "spans"
"""The name of the file, which is in the folder of the failpoints' file."""


def _append(line: dict[str, object]) -> None:
    failpoints = Path(os.environ[ENVIRONMENT_VARIABLE].removeprefix("@"))
    with failpoints.with_name(PLACE).open("a") as file:
        file.write(json.dumps(line) + "\n")


class FileExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            _append(
                {
                    "name": span.name,
                    "trace": format_trace_id(span.context.trace_id),
                    "id": format_span_id(span.context.span_id),
                    "parent": None if span.parent is None else format_span_id(span.parent.span_id),
                    "process": os.getpid(),
                    "attributes": dict(span.attributes or {}),
                    "status": span.status.status_code.name,
                }
            )
        return SpanExportResult.SUCCESS


def install() -> None:
    """Make spans, in batches that are exported a long time later: unless dualwrite flushes them, they are lost."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(FileExporter(), schedule_delay_millis=3_600_000))
    otel_traces.install(provider)
    add_observer(_observe)


def _observe(event: Event) -> None:
    _append({"event": type(event).__name__})


def fail() -> None:
    raise ValueError("no observer today")
