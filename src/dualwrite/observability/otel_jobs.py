"""The spans of jobs: the driver's write is the parent of the tasks and of the commit, which are in other processes.

Spark ends its Python workers without Python's exit handlers. So what is not exported yet is exported at the end of each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import propagate, trace
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import SpanKind, Tracer, TracerProvider

from dualwrite.observability import otel_names as names
from dualwrite.observability.tracing import Carrier, JobStep

_FLUSH_MILLIS: Final = 5000
_NAMES: Final[Mapping[JobStep, str]] = {
    "write": names.JOB_WRITE,
    "task": names.JOB_TASK,
    "commit": names.JOB_COMMIT,
    "abort": names.JOB_ABORT,
    "commit database": names.DATABASE_COMMIT,
    "commit kafka": names.KAFKA_COMMIT,
}
_ATTRIBUTES: Final = {"job": names.JOB, "partition": names.JOB_PARTITION, "attempt": names.JOB_ATTEMPT}


class JobSpans:
    """Makes the spans of jobs.

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
                _NAMES[step],
                context=propagator.extract(dict(carrier)) if carrier else None,
                kind=SpanKind.CLIENT if is_kafka else SpanKind.INTERNAL,
                attributes={
                    **{_ATTRIBUTES[name]: content for name, content in attributes.items()},
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
