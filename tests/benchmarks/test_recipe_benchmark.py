"""The benchmark of the recipe runs, and verifies what it measures."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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


@pytest.mark.parametrize(("alternatives", "why"), [("recipe,magic", "magic: choose from"), ("pool", "add --threads")])
def test_options_that_cannot_be_measured_are_refused(
    benchmark_module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], alternatives: str, why: str
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        benchmark_module("recipe").arguments(["--alternatives", alternatives])

    assert why in capsys.readouterr().err
