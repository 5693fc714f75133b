"""The gauges of real objects: pools, journals and processors while they work, and when they have ended."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prometheus_client import generate_latest

from crash.databases import Databases
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.observability import prometheus
from dualwrite.observability.metrics import read_gauges
from fixtures.pace import LIMIT, until
from pool.pool_scene import both, open_pool
from processor.processor_scene import ProcessorScene


def gauges(label: str) -> dict[tuple[str, ...], float]:
    """The gauges that have this label's value, without the prefix of their names."""
    return {
        (metric.name.removeprefix("dualwrite_"), *labels[1:]): value
        for metric, values in read_gauges().items()
        for labels, value in values.items()
        if labels[0] == label
    }


@pytest.fixture
def pool_scene(databases: Databases, broker: DevCluster) -> Scene:
    return databases.scene("sqlite", broker)


@pytest.fixture
def processor_scene(databases: Databases, broker: DevCluster, new_name: Any) -> ProcessorScene:
    return ProcessorScene(databases.scene("sqlite", broker).events, broker, new_name)


@pytest.mark.usefixtures("no_outage")
def test_a_service_with_metrics_installed_shows_its_units(pool_scene: Scene) -> None:
    prefix = pool_scene.transactional_id
    prometheus.install()
    try:
        with open_pool(pool_scene, size=2) as pool:
            pool.run(both, pool_scene, 1)
            shown = generate_latest().decode()
            assert f'dualwrite_units_total{{outcome="committed",prefix="{prefix}"}} 1.0' in shown
            assert f'dualwrite_transactions_total{{outcome="published",prefix="{prefix}"}} 1.0' in shown
            assert f'dualwrite_messages_total{{prefix="{prefix}"}} 1.0' in shown
            assert f'dualwrite_group_units_count{{prefix="{prefix}"}} 1.0' in shown
            assert f'dualwrite_leases_taken_total{{prefix="{prefix}"}} 2.0' in shown
            assert 'dualwrite_outage_open_seconds{side="kafka"} 0.0' in shown
            assert gauges(prefix) == {
                ("pool_writers",): 2,
                ("pool_busy_writers",): 0,
                ("pool_waiting_calls",): 0,
                ("pool_leases",): 2,
            }
    finally:
        prometheus.uninstall()
    assert gauges(prefix) == {}


@pytest.mark.soak
def test_a_processor_shows_its_lag_without_asking(processor_scene: ProcessorScene) -> None:
    scene, gate, waiting = processor_scene, threading.Event(), threading.Event()

    def handle(message: Any, tx: Any) -> None:
        if int(message.value()) >= 4:  # the second message of its partition
            waiting.set()
            assert gate.wait(LIMIT)
        scene.book(message, tx)

    scene.produce(range(8))
    with scene.running(handle, batch=1):
        assert waiting.wait(LIMIT)
        found = gauges(scene.group)
        assert found["processor_partitions",] == 4
        assert found["processor_idle_seconds",] > 0
        lags = {key[2]: lag for key, lag in found.items() if key[0] == "processor_lag_messages"}
        assert lags.keys() == {"0", "1", "2", "3"}
        assert 1 <= sum(lags.values()) <= 7
        ages = {key[2]: age for key, age in found.items() if key[0] == "processor_lag_seconds"}
        assert any(lags[partition] == 1 and age > 0 for partition, age in ages.items())
        gate.set()
        scene.wait_for(range(8))

        def lag() -> set[float]:
            now = gauges(scene.group)
            return {value for key, value in now.items() if key[0] in ("processor_lag_messages", "processor_lag_seconds")}

        until(lambda: lag() == {0})
    assert gauges(scene.group) == {}
