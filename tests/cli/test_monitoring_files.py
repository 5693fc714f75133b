"""The dashboard and the alert rules: every metric and label in them exists; a real Prometheus scrapes, and accepts them."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from cli.conftest import Scene
from crash.databases import Databases
from crash.scene import Scene as PoolScene
from dualwrite.cli.metrics import EXPORTED, LATE_SECONDS, Exporter
from dualwrite.devcluster import DevCluster
from dualwrite.observability import prometheus
from dualwrite.observability.metrics import COUNTED, READ
from dualwrite.settings import Settings
from fixtures.pace import LIMIT, until
from fixtures.prometheus_server import DASHBOARD, MONITORING, filled_in, program, scraping
from pool.pool_scene import both, open_pool

HERE = Path(__file__).parent
ALERTS = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))

METRICS = {metric.name: metric for metric in (*COUNTED, *READ, *EXPORTED)}
PARTS = ("_bucket", "_sum", "_count")
_OF_METRIC = re.compile(r"\b(dualwrite_[a-z_]+)(?:\{([^}]*)\})?")


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [*panels, *(rule["expr"] for rule in rules())]


def metric_of(name: str) -> str:
    """The metric to which a series of this name belongs."""
    for part in PARTS:
        histogram = METRICS.get(name.removesuffix(part))
        if name.endswith(part) and histogram is not None and histogram.kind == "histogram":
            return histogram.name
    return name


def test_every_metric_and_label_of_an_expression_exists() -> None:
    assert len(expressions()) > 40
    for expression in expressions():
        found = _OF_METRIC.findall(expression)
        assert found, expression
        labels = {label for name, _ in found for label in METRICS[metric_of(name)].labels} | {"le"}
        matched = {label for _, matchers in found for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)}
        grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
        assert matched | grouped <= labels, expression
        for name, _ in found:
            kind = METRICS[metric_of(name)].kind
            assert (kind == "histogram") == name.endswith(PARTS), expression
            assert (kind == "gauge") != bool(re.search(rf"(rate|increase)\(\s*{name}\b", expression)), expression


def test_labels_in_the_texts_of_alerts_are_those_of_their_metrics() -> None:
    for rule in rules():
        labels = {label for name, _ in _OF_METRIC.findall(rule["expr"]) for label in METRICS[metric_of(name)].labels}
        used = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
        assert used <= labels, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
    assert len({rule["alert"] for rule in rules()}) == len(rules())


def test_panels_have_titles_of_their_own_and_do_not_overlap() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.fixture
def pool_scene(databases: Databases, broker: DevCluster) -> PoolScene:
    return databases.scene("sqlite", broker)


# --- with Prometheus --------------------------------------------------------------------------------------------------------


def test_promtool_accepts_the_rules_and_they_fire() -> None:
    for arguments in (["check", "rules", str(MONITORING / "alerts.yml")], ["test", "rules", str(HERE / "alert_cases.yml")]):
        done = subprocess.run(
            [program("promtool"), *arguments], capture_output=True, text=True, timeout=LIMIT, check=False, cwd=HERE
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_real_prometheus_scrapes_both_and_answers_every_expression(
    recovery_scene: Scene, pool_scene: PoolScene, tmp_path: Path
) -> None:
    recovery_scene.crash("after_db_commit", "shop.1")
    exporter = Exporter(Settings.from_environment(), ["database", "kafka"], limit=LIMIT, late=LATE_SECONDS)
    of_exporter, of_service = CollectorRegistry(), CollectorRegistry()
    of_exporter.register(exporter)
    with ExitStack() as ending:
        prometheus.install(of_service)
        ending.callback(prometheus.uninstall, of_service)
        pool = ending.enter_context(open_pool(pool_scene, size=2))
        pool.run(both, pool_scene, 1)
        server = ending.enter_context(scraping(tmp_path, of_service, of_exporter))
        query = server.query
        prefix = pool_scene.transactional_id
        until(lambda: query(f'dualwrite_units_total{{prefix="{prefix}",outcome="committed"}} > 0'))
        until(lambda: query('dualwrite_open_transactions{prefix="shop",decision="commit"} == 1'))
        assert query('dualwrite_up{side="kafka"} == 1')
        assert query("dualwrite_kafka_stuck_seconds > 0")
        until(server.has_scraped_all)
        for expression in expressions():
            query(filled_in(expression))
        shown = {name for name in METRICS if query(f'count({{__name__=~"{name}(_count)?"}})')}
        used = {metric_of(name) for expression in expressions() for name, _ in _OF_METRIC.findall(expression)}
        assert len(shown & used) > 15, used - shown
