"""Metrics for OpenTelemetry: `install` makes instruments of a meter, whose provider your service configures."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from dualwrite.errors import MissingDependencyError
from dualwrite.observability.metrics import COUNTED, READ, Change, Metric, MetricsObserver, read_gauges
from dualwrite.observability.observers import add_observer, remove_observer

try:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation, get_meter
except ModuleNotFoundError as missing:
    raise MissingDependencyError(
        "Metrics for OpenTelemetry need the package opentelemetry-api, which is not installed.",
        next_step='pip install "dualwrite[otel]"',
    ) from missing

__all__ = ["install", "uninstall"]

_lock: Final = threading.Lock()
_installed: Final[dict[MeterProvider | None, _Instruments]] = {}


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
            _installed[provider] = _Instruments(get_meter("dualwrite", meter_provider=provider))


def uninstall(provider: MeterProvider | None = None) -> None:
    """Record nothing any more; the instruments stay, as OpenTelemetry has no way to remove them."""
    with _lock:
        found = _installed.pop(provider, None)
        if found is not None:
            found.stop()


class _Total:
    """The value of a counter. OpenTelemetry reads it when it collects: adding to its own counters takes some 5 µs each."""

    def __init__(self) -> None:
        self.value = 0.0
        self._lock = threading.Lock()

    def add(self, amount: float) -> None:
        """Add to it."""
        with self._lock:
            self.value += amount


class _Instruments:
    """The instruments of one meter."""

    def __init__(self, meter: Meter) -> None:
        self._is_stopped = False
        self._histograms: dict[Metric, Histogram] = {}
        self._totals: dict[Metric, dict[tuple[str, ...], _Total]] = {}
        for metric in COUNTED:
            of_metric: dict[str, Any] = {"name": metric.otel_name, "unit": metric.unit, "description": metric.help}
            if metric.kind == "counter":
                self._totals[metric] = {}
                meter.create_observable_counter(callbacks=[partial(self._counted, metric)], **of_metric)
            else:
                limits = metric.buckets
                self._histograms[metric] = meter.create_histogram(explicit_bucket_boundaries_advisory=limits, **of_metric)
        for metric in READ:
            read = [partial(self._read, metric)]
            meter.create_observable_gauge(metric.otel_name, callbacks=read, unit=metric.unit, description=metric.help)
        self._observer = MetricsObserver(self._child)
        add_observer(self._observer)

    def stop(self) -> None:
        """Record nothing any more."""
        self._is_stopped = True
        remove_observer(self._observer)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Change:
        if metric in self._totals:
            return self._totals[metric].setdefault(labels, _Total()).add
        return partial(self._histograms[metric].record, attributes=_attributes(metric, labels))

    def _counted(self, metric: Metric, _options: CallbackOptions) -> Iterable[Observation]:
        totals = {} if self._is_stopped else dict(self._totals[metric])
        return [Observation(total.value, _attributes(metric, labels)) for labels, total in totals.items()]

    def _read(self, metric: Metric, _options: CallbackOptions) -> Iterable[Observation]:
        values = {} if self._is_stopped else read_gauges()[metric]
        return [Observation(value, _attributes(metric, labels)) for labels, value in values.items()]


def _attributes(metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(metric.labels, labels, strict=True))
