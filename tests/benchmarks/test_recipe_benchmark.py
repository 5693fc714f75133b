"""The benchmark of the recipe runs, and verifies what it measures."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.benchmark_process import run_benchmark
from dualwrite.devcluster import DevCluster

ALTERNATIVES = ("database commit only", "naive", "outbox + relay", "recipe (dualwrite)")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_benchmark("recipe.py", *arguments)


@pytest.mark.soak  # in CI: the benchmarks of the pool and the processor
def test_every_alternative_is_measured_and_verified(broker: DevCluster, postgres_url: str, tmp_path: Path) -> None:
    servers = ("--url", postgres_url, "--kafka", broker.bootstrap_servers)
    file = tmp_path / "figures.json"

    done = run("--no-warm-up", "--seconds", 0.2, "--rounds", 1, "--writers", 1, "--json", file, *servers)

    assert done.returncode == 0, done.stderr
    for title in ALTERNATIVES:
        assert f"| {title}" in done.stdout
    found = json.loads(file.read_text())
    verified = {measured["alternative"]: measured["verified"] for measured in found["rounds"]}
    assert verified.pop("database") == 0
    assert set(verified) == {"naive", "outbox", "recipe"}
    assert all(messages > 0 for messages in verified.values())
    shares = {step["name"]: step["share"] for step in found["steps"]}
    assert shares.pop("whole transaction") == 1
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.soak
def test_threads_can_be_writers_too(broker: DevCluster, postgres_url: str) -> None:
    servers = ("--url", postgres_url, "--kafka", broker.bootstrap_servers)

    done = run(
        "--seconds", 0.3, "--rounds", 1, "--writers", 2, "--threads", "--alternatives", "recipe,pool", "--no-steps", *servers
    )

    assert done.returncode == 0, done.stderr
    assert "writers are: threads" in done.stdout
    assert "| pool (dualwrite)" in done.stdout


def test_the_steps_are_those_of_the_chosen_producer(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = benchmark_module("recipe")
    producers = []

    def take_apart(target: Any, *_: object, **__: object) -> tuple[list[object], int]:
        producers.append(target.producer)
        return [], 0

    monkeypatch.setattr(recipe, "take_apart", take_apart)
    monkeypatch.setattr(recipe, "verify", lambda *_, **__: 0)
    monkeypatch.setattr(recipe.workload, "prepare", lambda _: None)
    monkeypatch.setattr(recipe.workload, "remove", lambda _: None)
    servers = SimpleNamespace(url="sqlite://", kafka={}, brokers={1}, make_topic=lambda *_: None)

    recipe.measure_steps(servers, recipe.arguments(["--producer", "librdkafka"]))

    assert producers == ["librdkafka"]


def test_alternatives_take_turns_at_being_first(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = benchmark_module("recipe")
    measured = []

    def measure(case: Any, _: float) -> SimpleNamespace:
        measured.append(case.alternative)
        return SimpleNamespace(rate=1.0)

    recipe.measure_all(SimpleNamespace(measure=measure), recipe.arguments(["--no-warm-up", "--rounds", "4", "--writers", "1"]))

    assert {measured[place] for place in range(0, 16, 4)} == {"database", "naive", "outbox", "recipe"}


@pytest.mark.parametrize(
    ("options", "seconds"),
    [(["--no-warm-up"], 0.0), (["--no-warm-up", "--broker-warm-up", "7"], 7.0), (["--broker-warm-up", "7"], 7.0)],
)
def test_an_explicit_warm_up_of_the_broker_is_kept(
    benchmark_module: Callable[[str], ModuleType], options: list[str], seconds: float
) -> None:
    assert benchmark_module("recipe").arguments(options).broker_warm_up == seconds


def test_a_message_that_is_never_visible_is_an_error(benchmark_module: Callable[[str], ModuleType]) -> None:
    arrivals = benchmark_module("arrivals").Arrivals()
    arrivals._seen = [(benchmark_module("orders").Order(0, number).body.encode(), 1.0) for number in range(2)]

    assert arrivals.collect(2, 0.0) == [(0, 0, 1.0), (0, 1, 1.0)]
    with pytest.raises(TimeoutError, match="only 2 of 3"):
        arrivals.collect(3, 0.0)


@pytest.mark.parametrize(("alternatives", "why"), [("recipe,magic", "magic: choose from"), ("pool", "add --threads")])
def test_options_that_cannot_be_measured_are_refused(
    benchmark_module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], alternatives: str, why: str
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        benchmark_module("recipe").arguments(["--alternatives", alternatives])

    assert why in capsys.readouterr().err
