"""What each event adds to the metrics, in Prometheus' form and in OpenTelemetry's; and how they are installed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from dualwrite.cli.metrics import EXPORTED
from dualwrite.errors import InDoubtTransactionError, LostTransactionError
from dualwrite.observability import events, otel_metrics, prometheus
from dualwrite.observability.events import Event, Steps
from dualwrite.observability.metrics import COUNTED, READ, Metric, prefix_of
from dualwrite.observability.observers import notify
from dualwrite.observability.readings import Reading, add_source
from fixtures.pace import LIMIT, until
from fixtures.tables import table

ROOT = Path(__file__).parents[2]
OF = ("shop.1", "shop.1~1", 7)
IN_DOUBT = InDoubtTransactionError("?", transactional_id="shop.1")
LOST = LostTransactionError("lost", transactional_id="shop.1")
STEPS = Steps(0.1, 0.2, 0.0, 0.3, 0.4)

CASES: list[tuple[Event, dict[tuple[str, ...], float]]] = [
    (
        events.TransactionCommitted(*OF, "published", 3, 1.5, STEPS, was_in_doubt=False),
        {
            ("transactions_total", "shop", "published"): 1,
            ("transaction_seconds_sum", "shop"): 1.5,
            ("messages_total", "shop"): 3,
            ("step_seconds_sum", "block"): 0.1,
            ("step_seconds_sum", "delivery"): 0.2,
            ("step_seconds_count", "record"): 0,  # it did not have the step
            ("step_seconds_sum", "database_commit"): 0.3,
            ("step_seconds_sum", "kafka_commit"): 0.4,
        },
    ),
    (events.TransactionCommitted(*OF, "journaled", 3, 1.5, STEPS, False), {("transactions_total", "shop", "journaled"): 1}),
    (events.TransactionRolledBack(*OF, ValueError(), 1.0), {("transactions_total", "shop", "rolled_back"): 1}),
    (events.TransactionInDoubt(*OF, IN_DOUBT, 1.0), {("transactions_total", "shop", "in_doubt"): 1}),
    (events.TransactionInDoubt(*OF, KeyboardInterrupt(), 1.0), {("transactions_total", "shop", "in_doubt"): 1}),
    (events.TransactionLost(*OF, LOST, 1.0), {("transactions_total", "shop", "lost"): 1}),
    (events.GroupFormed("shop.1", 7, 12), {("group_units_sum", "shop"): 12, ("group_units_bucket", "shop", "16.0"): 1}),
    (
        events.UnitEnded("shop", "order", 0.2, 0.5, None),
        {("units_total", "shop", "committed"): 1, ("unit_seconds_sum", "shop"): 0.5, ("unit_waited_seconds_sum", "shop"): 0.2},
    ),
    (events.UnitEnded("shop", "order", 0.2, 0.5, KeyError()), {("units_total", "shop", "failed"): 1}),
    (events.UnitEnded("shop", "order", 0.2, 0.5, IN_DOUBT), {("units_total", "shop", "in_doubt"): 1}),
    (events.UnitEnded("shop", "order", 0.2, 0.5, LOST), {("units_total", "shop", "lost"): 1}),
    (events.LeaseTaken("shop", "shop.1"), {("leases_taken_total", "shop"): 1}),
    (events.LeaseLost("shop", "shop.1"), {("leases_lost_total", "shop"): 1}),
    (events.TransactionRecovered("shop.1~2", 4, "PUBLISHED_AGAIN"), {("recoveries_total", "published_again"): 1}),
    (events.MessagesPublishedAgain("shop.1", 5), {("messages_published_again_total", "shop"): 5}),
    (events.TransactionsForgotten("shop.1~2", 3, 5), {("forgotten_transactions_total", "shop"): 3}),
    (events.JournalOpened("shop"), {("journal_openings_total", "shop"): 1}),
    (
        events.BatchProcessed("billing.2", {"orders": 3, "refunds": 1}, 0.5),
        {
            ("batches_total", "billing.2", "processed"): 1,
            ("batch_seconds_sum", "billing.2"): 0.5,
            ("messages_processed_total", "billing.2", "orders"): 3,
            ("messages_processed_total", "billing.2", "refunds"): 1,
        },
    ),
    (events.BatchFailed("billing", 3, ValueError()), {("batches_total", "billing", "failed"): 1}),
    (events.DeadLettered("billing.2", "orders", None), {("dead_letters_total", "billing.2"): 1}),  # a consumer group
    (events.DeadLettered("relay.outbox.1", "", None), {("dead_letters_total", "relay.outbox"): 1}),  # a shard's id
    (
        events.RowsRelayed("relay.outbox.1", 9, 0.5),
        {("relayed_rows_total", "relay.outbox"): 9, ("relay_seconds_sum", "relay.outbox"): 0.5},
    ),
    (
        events.TaskPrepared("job", "spark.3.0", 9, 2.0),
        {("job_tasks_total", "spark"): 1, ("job_task_seconds_sum", "spark"): 2.0},
    ),
    (events.TaskFailed("job", "spark.3.0", ValueError(), 2.0), {("job_tasks_failed_total", "spark"): 1}),
    (events.JobAborted("spark", "job"), {("jobs_aborted_total", "spark"): 1}),
    (events.JobCommitted("job", 4, 2.0), {("jobs_total",): 1, ("job_commit_seconds_sum",): 2.0}),
    (events.OutageBegan("Kafka at k:9092", "x"), {("outages_total", "kafka"): 1}),
    (events.OutageEnded("The database db", 3.0), {("outage_seconds_total", "database"): 3.0}),
]

NOT_COUNTED = {
    *(events.TransactionBegun, events.MessagesDelivered, events.StateRecorded, events.DatabaseCommitted),  # in `steps`
    *(events.JournalClosed, events.Event, events.TransactionEvent),
}


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    made = CollectorRegistry()
    prometheus.install(made)
    yield made
    prometheus.uninstall(made)


class Source:
    """Something with readings."""

    def __init__(self, *readings: Reading) -> None:
        self._readings = readings
        add_source(self)

    def readings(self) -> tuple[Reading, ...]:
        return self._readings


# --- the table --------------------------------------------------------------------------------------------------------------


def test_names_follow_the_rules_and_differ() -> None:
    metrics = (*COUNTED, *READ, *EXPORTED)
    assert len({metric.name for metric in metrics}) == len(metrics)
    assert len({metric.otel_name for metric in (*COUNTED, *READ)}) == len((*COUNTED, *READ))
    for metric in metrics:
        assert re.fullmatch("dualwrite(_[a-z]+)+", metric.name), metric
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        assert metric.help.endswith((".", "…")), metric
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric
        assert "seconds" not in metric.otel_name, metric


@table(
    "transactional_id, prefix",
    [("shop.3", "shop"), ("shop.3~1", "shop"), ("shop", "shop"), ("shop.eu.3", "shop.eu"), ("shop.x", "shop.x"), (".3", ".3")],
)
def test_ids_belong_to_their_prefix(transactional_id: str, prefix: str) -> None:
    assert prefix_of(transactional_id) == prefix


def test_every_event_has_a_case() -> None:
    every = {found for found in vars(events).values() if isinstance(found, type) and issubclass(found, Event)}
    assert {type(event) for event, _ in CASES} == every - NOT_COUNTED


def test_the_page_has_every_metric() -> None:
    page = (ROOT / "docs/operations/metrics.md").read_text()
    for metric in (*COUNTED, *READ, *EXPORTED):
        kind = " (histogram)" if metric.kind == "histogram" else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{metric.name}`{kind} | {labels} | {metric.help} |" in page


# --- Prometheus -------------------------------------------------------------------------------------------------------------


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """The samples without the prefix of their names, by name and the values of labels."""
    return {
        (sample.name.removeprefix("dualwrite_"), *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


@table("event, expected", CASES, ids=lambda each: type(each).__name__)
def test_events_change_prometheus_metrics(event: Event, expected: dict[tuple[str, ...], float]) -> None:
    registry = CollectorRegistry()
    prometheus.install(registry)
    try:
        notify(event)
        found = samples(registry)
        assert {name: found[name] for name in expected} == expected
    finally:
        prometheus.uninstall(registry)


def test_installing_twice_counts_once_and_uninstalling_removes_everything(registry: CollectorRegistry) -> None:
    prometheus.install(registry)
    notify(events.JobCommitted("job", 4, 2.0))
    assert samples(registry)["jobs_total",] == 1
    prometheus.uninstall(registry)
    assert generate_latest(registry) == b""
    prometheus.uninstall(registry)
    prometheus.install(registry)  # the names are free
    assert samples(registry)["jobs_total",] == 0


def test_gauges_of_the_same_labels_are_added_and_the_oldest_age_counts(registry: CollectorRegistry) -> None:
    of_pool = {"prefix": "metrics-test"}
    kept = [
        Source(Reading("pool_waiting_calls", 2, of_pool), Reading("journal_age_seconds", 8, of_pool)),
        Source(Reading("pool_waiting_calls", 3, of_pool), Reading("journal_age_seconds", 5, of_pool)),
    ]
    found = samples(registry)
    assert found["pool_waiting_calls", "metrics-test"] == 5
    assert found["journal_age_seconds", "metrics-test"] == 8
    del kept
    assert ("pool_waiting_calls", "metrics-test") not in samples(registry)


def test_metrics_of_several_processes_are_added(tmp_path: Path) -> None:
    program = """
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        from dualwrite.observability import events, prometheus
        from dualwrite.observability.observers import notify
        from dualwrite.observability.readings import Reading, add_source
        import os, struct, time

        class Source:
            def readings(self):
                return [Reading("pool_waiting_calls", 2, {"prefix": "shop"})]

        kept = Source()
        add_source(kept)
        prometheus.install()
        ends, kept_open = os.pipe()
        child = os.fork()
        notify(events.UnitEnded("shop", "order", 0.25, 0.5, None))
        def seen():
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)
            try:
                return generate_latest(registry).decode()
            except struct.error:  # prometheus_client reads a file that it is about to create in another process
                return ""
        expected = ['dualwrite_units_total{outcome="committed",prefix="shop"} 2.0',
                    'dualwrite_pool_waiting_calls{prefix="shop"} 4.0']
        if child == 0:
            os.close(kept_open)
            os.read(ends, 1)  # until the parent has ended: its gauges are there as long as it lives
            os._exit(0)
        while not all(line in seen() for line in expected):
            time.sleep(0.05)
    """
    done = subprocess.run(  # its registry is decided when prometheus_client is imported
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program)],
        env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        timeout=LIMIT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_worker_of_uvicorn_that_was_killed_leaves_no_gauges(tmp_path: Path) -> None:
    """The service of the page, with a reading: gauges are those of living workers, and what was counted stays."""
    page = (ROOT / "docs" / "operations" / "metrics.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- file: metered.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    reading = """
        from dualwrite.observability import events
        from dualwrite.observability.observers import notify
        from dualwrite.observability.readings import Reading, add_source

        class Source:
            def readings(self):
                return [Reading("pool_waiting_calls", 2, {"prefix": "shop"})]

        kept = Source()
        add_source(kept)

        @app.get("/order")
        def order():
            notify(events.UnitEnded("shop", "order", 0.25, 0.5, None))
    """
    (tmp_path / "metered.py").write_text(found[1] + textwrap.dedent(reading))
    folder = tmp_path / "metrics"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "uvicorn", "--workers", "2", "--log-level", "warning", "--port", address.split(":")[1]]
    with subprocess.Popen(
        [*command, "metered:app"], cwd=tmp_path, env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    ) as server:
        try:

            def metrics() -> str:
                with suppress(OSError):
                    return str(urllib.request.urlopen(f"http://{address}/metrics/", timeout=LIMIT).read().decode())
                return ""

            def workers() -> set[int]:
                return {int(file.stem.rpartition("_")[2]) for file in folder.glob("gauge_livesum_*.db")}

            until(lambda: 'dualwrite_pool_waiting_calls{prefix="shop"} 4.0' in metrics(), metrics)
            urllib.request.urlopen(f"http://{address}/order", timeout=LIMIT).close()
            killed = workers().pop()
            os.kill(killed, signal.SIGKILL)
            until(lambda: killed not in workers() and len(workers()) == 2, lambda: f"{workers()}")
            until(lambda: 'dualwrite_pool_waiting_calls{prefix="shop"} 4.0' in metrics(), metrics)
            assert 'dualwrite_units_total{outcome="committed",prefix="shop"} 1.0' in metrics()
        finally:
            server.terminate()
            server.wait(LIMIT)
    assert workers() == set(), "those that end take their gauges with them"


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("prometheus", "prometheus_client", "prometheus"), ("otel_metrics", "opentelemetry", "otel")],
)
def test_without_the_package_the_error_names_the_extra(module: str, package: str, extra: str) -> None:
    program = f"""
        import sys
        sys.modules["{package}"] = sys.modules["{package}.metrics"] = None
        import dualwrite, dualwrite.observability
        try:
            import dualwrite.observability.{module}
        except dualwrite.MissingDependencyError as error:
            print(error.next_step)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=LIMIT
    )
    assert done.stdout.strip() == f'pip install "dualwrite[{extra}]"'


def test_dualwrite_imports_neither_package() -> None:
    program = """
        import sys, dualwrite, dualwrite.observability, dualwrite.pool.pool
        print({name.partition(".")[0] for name in sys.modules} & {"prometheus_client", "opentelemetry"})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=LIMIT
    )
    assert done.stdout.strip() == "set()"


# --- OpenTelemetry ----------------------------------------------------------------------------------------------------------


def test_the_same_metrics_are_recorded_with_opentelemetry() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    otel_metrics.install(provider)
    otel_metrics.install(provider)
    kept = Source(Reading("pool_waiting_calls", 2, {"prefix": "shop"}))
    try:
        for event, _ in CASES:
            notify(event)
        found = _points(reader)
    finally:
        otel_metrics.uninstall(provider)
        provider.shutdown()
    del kept
    assert found["dualwrite.units", "shop", "committed"].value == 1
    unit = found["dualwrite.unit", "shop"]
    assert (unit.count, unit.sum) == (4, 2.0)
    assert found["dualwrite.group_units", "shop"].explicit_bounds[:2] == (1.0, 2.0)
    assert found["dualwrite.pool_waiting_calls", "shop"].value == 2
    assert {name for name, *_ in found} >= {metric.otel_name for metric in COUNTED}


def _points(reader: InMemoryMetricReader) -> dict[tuple[str, ...], Any]:
    """The points by the metric's name and the values of attributes; its units are those of the table."""
    by_name: dict[str, Metric] = {metric.otel_name: metric for metric in (*COUNTED, *READ)}
    found: dict[tuple[str, ...], Any] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                assert metric.unit == by_name[metric.name].unit
                for point in metric.data.data_points:
                    assert point.attributes is not None
                    found[metric.name, *map(str, point.attributes.values())] = point
    return found
