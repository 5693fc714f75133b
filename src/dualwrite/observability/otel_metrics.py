"""Metrics for OpenTelemetry: `install` makes instruments of a meter, whose provider your service configures."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import Final

from dualwrite.errors import MissingDependencyError
from dualwrite.observability.metrics import COUNTED, READ, Change, Metric, MetricsObserver, read_gauges
from dualwrite.observability.observers import add_observer, remove_observer

try:
    from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, MeterProvider, Observation, get_meter
except ModuleNotFoundError as missing:
    raise MissingDependencyError(
        "Metrics for OpenTelemetry need the package opentelemetry-api, which is not installed.",
        next_step='pip install "dualwrite[otel]"',
    ) from missing

__all__ = ["install", "uninstall"]

_lock: Final = threading.Lock()
_installed: Final[dict[MeterProvider | None, _Metrics]] = {}


def install(provider: MeterProvider | None = None) -> None:
    """Record the metrics of all writers, pools, processors, relays and jobs of this process with OpenTelemetry.

    Call it once at the start; with the same provider again it changes nothing. The names are those of
    docs/operations/monitoring.md in OpenTelemetry's form: `dualwrite_step_seconds` is the histogram `dualwrite.step` in
    seconds, `dualwrite_units_total` the counter `dualwrite.units`. Labels are attributes.

    Args:
        provider: The provider of the meter; None for the global one, which may be set later.
    """
    with _lock:
        if provider not in _installed:
            _installed[provider] = _Metrics(get_meter("dualwrite", meter_provider=provider))


def uninstall(provider: MeterProvider | None = None) -> None:
    """Record nothing any more; the instruments stay, as OpenTelemetry has no way to remove them."""
    with _lock:
        found = _installed.pop(provider, None)
        if found is not None:
            found.stop()


class _Metrics:
    """The instruments of one meter."""

    def __init__(self, meter: Meter) -> None:
        self._is_stopped = False
        self._instruments = {metric: _instrument(metric, meter) for metric in COUNTED}
        for metric in READ:
            meter.create_observable_gauge(
                metric.otel_name, callbacks=[partial(self._read, metric)], unit=metric.unit, description=metric.help
            )
        self._observer = MetricsObserver(self._child)
        add_observer(self._observer)

    def stop(self) -> None:
        """Record nothing any more."""
        self._is_stopped = True
        remove_observer(self._observer)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Change:
        instrument = self._instruments[metric]
        attributes = dict(zip(metric.labels, labels, strict=True))
        if isinstance(instrument, Counter):
            return partial(instrument.add, attributes=attributes)
        return partial(instrument.record, attributes=attributes)

    def _read(self, metric: Metric, _options: CallbackOptions) -> Iterable[Observation]:
        if self._is_stopped:
            return ()
        values = read_gauges()[metric]
        return [Observation(value, dict(zip(metric.labels, labels, strict=True))) for labels, value in values.items()]


def _instrument(metric: Metric, meter: Meter) -> Counter | Histogram:
    if metric.kind == "counter":
        return meter.create_counter(metric.otel_name, unit=metric.unit, description=metric.help)
    return meter.create_histogram(
        metric.otel_name,
        unit=metric.unit,
        description=metric.help,
        explicit_bucket_boundaries_advisory=metric.buckets,
    )
