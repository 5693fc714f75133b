"""Metrics for Prometheus, by prometheus_client: `install` keeps them in a registry, which your service serves."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Final
from weakref import WeakKeyDictionary

from dualwrite.errors import MissingDependencyError
from dualwrite.observability.metrics import COUNTED, READ, Change, Metric, MetricsObserver, read_gauges, takes_largest
from dualwrite.observability.observers import add_observer, remove_observer

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import GaugeMetricFamily
except ModuleNotFoundError as missing:
    raise MissingDependencyError(
        "Metrics for Prometheus need the package prometheus-client, which is not installed.",
        next_step='pip install "dualwrite[prometheus]"',
    ) from missing

__all__ = ["install", "uninstall"]

log: Final = logging.getLogger(__name__)

_REFRESH_SECONDS: Final = 5.0
"""Seconds between two readings with several processes, which write them into files."""

_lock: Final = threading.Lock()
_installed: Final[WeakKeyDictionary[CollectorRegistry, _Registered]] = WeakKeyDictionary()


def install(registry: CollectorRegistry = REGISTRY) -> None:
    """Keep the metrics of all writers, pools, processors, relays and jobs of this process in a registry.

    Call it once at the start; with the same registry again it changes nothing. The metrics, with their labels, are in
    docs/operations/monitoring.md.

    With several processes behind one port (`PROMETHEUS_MULTIPROC_DIR`, for example gunicorn's workers) call it in each of them.
    The gauges are then written every 5 seconds by a thread of the process.

    Args:
        registry: A registry of prometheus_client; by default the one that its servers serve.

    Raises:
        ValueError: The registry already has metrics of these names from elsewhere.
    """
    with _lock:
        if registry not in _installed:
            _installed[registry] = _Registered(registry)


def uninstall(registry: CollectorRegistry = REGISTRY) -> None:
    """Remove the metrics from a registry; nothing happens if they are not in it."""
    with _lock:
        found = _installed.pop(registry, None)
        if found is not None:
            found.remove(registry)


class _Registered:
    """The metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families: dict[Metric, Counter | Histogram] = {}
        self._gauges: _Readings | _ReadingsInFiles | None = None
        has_several = not os.environ.keys().isdisjoint({"PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"})
        try:
            for metric in COUNTED:
                self._families[metric] = _family(metric, registry)
            self._gauges = _ReadingsInFiles(registry) if has_several else _Readings(registry)
        except BaseException:
            self._unregister(registry)
            raise
        self._observer = MetricsObserver(self._child)
        add_observer(self._observer)

    def remove(self, registry: CollectorRegistry) -> None:
        """Remove them."""
        remove_observer(self._observer)
        self._unregister(registry)

    def _unregister(self, registry: CollectorRegistry) -> None:
        for family in self._families.values():
            registry.unregister(family)
        if self._gauges is not None:
            self._gauges.remove(registry)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Change:
        family = self._families[metric]
        child = family.labels(*labels) if labels else family
        return child.inc if isinstance(child, Counter) else child.observe


def _family(metric: Metric, registry: CollectorRegistry) -> Counter | Histogram:
    if metric.kind == "counter":
        return Counter(metric.name, metric.help, metric.labels, registry=registry)
    return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)


def families(values: Mapping[Metric, Mapping[tuple[str, ...], float]]) -> Iterator[GaugeMetricFamily]:
    """Gauges with their values, by the values of their labels, as a collector returns them."""
    for metric, samples in values.items():
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in samples.items():
            family.add_metric(labels, value)
        yield family


class _Readings:
    """A collector of the gauges: each is read when the registry is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges now."""
        return families(read_gauges())

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The gauges without values, so that the registry need not read them to know their names."""
        for metric in READ:
            yield GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)

    def remove(self, registry: CollectorRegistry) -> None:
        """Remove it."""
        registry.unregister(self)


class _ReadingsInFiles:
    """The gauges of one of several processes: a thread writes them where the process that is asked finds them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = {
            metric: Gauge(
                *(metric.name, metric.help, metric.labels),
                registry=registry,
                multiprocess_mode="livemax" if takes_largest(metric) else "livesum",
            )
            for metric in READ
        }
        self._written: set[tuple[Metric, tuple[str, ...]]] = set()
        self._stopping = threading.Event()
        self._writing = threading.Lock()
        self._start()
        # no fork while the thread has locks of prometheus_client, which nobody would release in the child
        os.register_at_fork(
            before=self._writing.acquire, after_in_parent=self._writing.release, after_in_child=self._start_in_child
        )

    def remove(self, registry: CollectorRegistry) -> None:
        """Remove them, and end the thread."""
        self._stopping.set()
        for gauge in self._gauges.values():
            registry.unregister(gauge)

    def _start(self) -> None:
        if not self._stopping.is_set():
            threading.Thread(target=self._run, name="dualwrite readings", daemon=True).start()

    def _start_in_child(self) -> None:
        self._writing.release()
        self._start()

    def _run(self) -> None:
        has_failed = False
        while True:
            try:
                with self._writing:
                    self._write()
            except Exception:  # a full disk, for example: the next time may succeed
                if not has_failed:
                    log.exception("the gauges could not be written; this is logged once")
                has_failed = True
            if self._stopping.wait(_REFRESH_SECONDS):
                return

    def _write(self) -> None:
        found = {(metric, labels): value for metric, values in read_gauges().items() for labels, value in values.items()}
        for gone in self._written - found.keys():  # partitions that another process has now; files keep every label
            found[gone] = 0.0
        self._written |= found.keys()
        for (metric, labels), value in found.items():
            self._gauges[metric].labels(*labels).set(value)
