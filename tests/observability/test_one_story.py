"""A service under load whose broker is killed: callers, metrics, dashboard, alerts, traces, log and console tell the same."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
from prometheus_client import CollectorRegistry

import dualwrite
from console.console_scene import Browser, operator
from crash.scene import Scene
from dualwrite import DualWriteError, InDoubtTransactionError, PoolOptions, Settings, Timeouts
from dualwrite.cli.metrics import LATE_SECONDS, Exporter
from dualwrite.console import console
from dualwrite.devcluster import DevCluster
from dualwrite.observability import otel_names, prometheus
from fixtures.broker import started
from fixtures.pace import LIMIT, joined, limit, until
from fixtures.prometheus_server import Prometheus, panel, scraping
from observability.recorded_spans import RecordedSpans, recording
from pool.pool_scene import both, open_pool

CALLERS = 8
SCRAPES = min(10, round(limit(3)))
"""Seconds between two looks of Prometheus, which give a busy machine time to answer."""

PAUSE = 0.1
"""Seconds between two units of a caller: what looks on runs in this process as well."""


@pytest.fixture
def broker() -> Iterator[DevCluster]:
    """A broker to kill."""
    with started() as cluster:
        yield cluster


class Load:
    """Threads that call a pool, one unit after another; each knows the outcome of its units."""

    def __init__(self, pool: dualwrite.WriterPool[Any], scene: Scene) -> None:
        self.committed: list[int] = []
        self.failed: list[Exception] = []
        self.in_doubt: set[int] = set()
        self._pool, self._scene = pool, scene
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(first,), daemon=True) for first in range(CALLERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            joined(thread)

    def until_more(self, count: int) -> None:
        """Wait until more units have committed."""
        wanted = len(self.committed) + count
        until(lambda: len(self.committed) >= wanted, lambda: f"{len(self.committed)} committed, and errors {self.failed[-3:]}")

    def _call(self, number: int) -> None:
        while not self._stopping.is_set():
            try:
                self._pool.run(both, self._scene, number)
            except DualWriteError as error:
                self.failed.append(error)
                if isinstance(error, InDoubtTransactionError):
                    self.in_doubt.add(number)
            else:
                self.committed.append(number)
            number += CALLERS
            self._stopping.wait(PAUSE)


class Monitoring:
    """What the dashboard of the example shows of a prefix, and the alert about Kafka."""

    def __init__(self, server: Prometheus, prefix: str) -> None:
        self._server = server
        self._prefix = prefix

    def shows_outage(self) -> bool | None:
        """Whether Kafka is down, by the service, `dualwrite metrics`, and the alert; None while they do not agree."""
        service = self._server.value(panel("Outages")) > 0
        exporter = self._server.value(panel("Sides that answer")) == 1  # the database's
        alert = bool(self._server.query('ALERTS{alertname="DualwriteSideDown",side="kafka"}'))
        return service if service == exporter == alert else None

    def endings(self) -> set[str]:
        """The outcomes of units in the last minute; one that occurred only once is not among them: `rate` needs two."""
        found = self._server.query(f"{panel('Units per second', self._prefix)} > 0")
        return {each["metric"]["outcome"] for each in found}

    def units(self, outcomes: Sequence[str]) -> list[float]:
        """The numbers of units with these outcomes."""
        name = f'dualwrite_units_total{{prefix="{self._prefix}"'
        return [self._server.value(f'{name},outcome="{outcome}"}}') for outcome in outcomes]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def units_by_outcome(spans: RecordedSpans) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for span in spans.all:
        outcome = (span.attributes or {}).get(otel_names.OUTCOME)
        if outcome is not None:
            found[outcome] = found.get(outcome, 0) + 1
    return found


def about_kafka(caplog: pytest.LogCaptureFixture, what: str) -> int:
    """How many records of the log say this of Kafka."""
    texts = [record.getMessage() for record in caplog.records if record.name == "dualwrite.outages"]
    return len([text for text in texts if text.startswith("Kafka at") and what in text])


@pytest.mark.soak
@pytest.mark.usefixtures("no_outage")
def test_callers_metrics_dashboard_alerts_traces_log_and_console_tell_the_same(
    scene: Scene, broker: DevCluster, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    registry, exported, prefix = CollectorRegistry(), CollectorRegistry(), scene.transactional_id
    url = scene.events.database.url.render_as_string(hide_password=False)
    settings = Settings(database_url=url, kafka={"bootstrap.servers": broker.bootstrap_servers})
    exported.register(Exporter(settings, ["database", "kafka"], limit=SCRAPES - 1, late=LATE_SECONDS))
    with ExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.WARNING, "dualwrite"))
        prometheus.install(registry)
        stack.callback(prometheus.uninstall, registry)
        spans = stack.enter_context(recording())
        brief = Timeouts(claim=LIMIT, kafka=3.0, delivery=2.0)
        pool = stack.enter_context(open_pool(scene, options=PoolOptions(timeout=LIMIT), timeouts=brief))
        monitoring = Monitoring(stack.enter_context(scraping(tmp_path, registry, exported, every=SCRAPES)), prefix)
        pages = console(pool, authorize=operator)
        stack.callback(pages.close)
        browser = Browser(pages)

        def is_all_read() -> bool:
            return "be read" not in browser.section("verdict")  # what other tests have left in the database may be there

        with Load(pool, scene) as load:
            load.until_more(100)
            until(is_all_read, "a console that has read both sides")
            until(
                lambda: monitoring.endings() == {"committed"} and monitoring.shows_outage() is False, "units in the dashboard"
            )
            broker.kill()
            until(lambda: bool(load.failed), "a unit that fails")
            until(lambda: value(registry, "dualwrite_outages_total", side="kafka") > 0, "an outage in the metrics")
            until(lambda: not is_all_read(), "the outage in the console")
            until(monitoring.shows_outage, "the outage in the dashboard, and an alert")
            broker.start(timeout=LIMIT)
            load.until_more(100)
            until(lambda: "committed" in monitoring.endings(), "units in the dashboard again, which shows those of a while")
        until(lambda: about_kafka(caplog, "answers again") > 0, "the end of the outage in the log")
        until(is_all_read, "the end of the outage in the console")
        until(lambda: monitoring.shows_outage() is False, "the end of the outage in the dashboard, and of the alert")
        rates = browser.section("rates")
        names = ("committed", "failed", "in_doubt", "lost")
        outcomes = [value(registry, "dualwrite_units_total", prefix=prefix, outcome=name) for name in names]
        outages = value(registry, "dualwrite_outages_total", side="kafka")
        until(lambda: monitoring.units(names) == outcomes, "all units at Prometheus")
        assert monitoring.endings() <= {name for name, count in zip(names, outcomes, strict=True) if count}
    committed, failed = len(load.committed), len(load.failed)
    there = set(scene.agree())
    assert set(load.committed) <= there <= {*load.committed, *load.in_doubt}
    assert f"{committed} units committed, {failed} failed" in rates
    assert (outcomes[0], sum(outcomes)) == (committed, committed + failed)
    assert units_by_outcome(spans)[otel_names.COMMITTED] == committed
    assert outages == about_kafka(caplog, "does not answer") > 0
