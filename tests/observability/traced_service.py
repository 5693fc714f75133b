"""A service in a process of its own: it handles one request, whose `traceparent` it gets, by a unit of a pool.

python -m observability.traced_service URL BOOTSTRAP PREFIX TOPIC NUMBER TRACEPARENT

It prints a line of JSON for each span that has ended, at once, so that it is there even if the process is killed.
"""

import json
import sys
from collections.abc import Sequence

from opentelemetry import propagate
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

import dualwrite
from crash.events import write_event
from crash.worker import say, timeouts
from dualwrite.observability import otel_traces
from observability.recorded_spans import parent_id, span_id, trace_id


class PrintingExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            say(json.dumps({"name": span.name, "trace": trace_id(span), "id": span_id(span), "parent": parent_id(span)}))
        return SpanExportResult.SUCCESS


def main() -> None:
    url, bootstrap, prefix, topic, number, parent = sys.argv[1:7]
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(PrintingExporter()))
    otel_traces.install(provider)

    def place_order(tx: dualwrite.Transaction) -> None:
        write_event(url, tx.db, prefix, int(number))
        tx.send(topic, number, key=prefix)

    settings = {"bootstrap.servers": bootstrap}
    with dualwrite.create_pool(url, kafka=settings, prefix=prefix, size=1, timeouts=timeouts()) as pool:
        request = propagate.extract({"traceparent": parent})
        with provider.get_tracer("service").start_as_current_span("POST /orders", context=request):
            pool.run(place_order)
    say("closed")
