"""The pool's benchmark runs, and verifies what it measures."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree.ElementTree import parse

import pytest

from benchmarks.benchmark_process import run_benchmark
from dualwrite.devcluster import DevCluster

TITLES = (
    "plain commit",
    "commit, then produce",
    "outbox + relay",
    "a writer each",
    "pool.transaction()",
    "pool",
    'pool, "decided"',
)
ROUND_TRIP = 0.001
ROUND_TRIPS = {
    "plain": (2, 0),
    "naive": (2, 1),
    "outbox": (2, 0),
    "writers": (1, 1),
    "own": (1, 1),
    "pool": (1, 1),
    "pool-decided": (1, 1),
}
"""How often a call waits for the database and for Kafka, at least; a caution against a way around the proxy."""
SHORT = ("--quick", "--seconds", 0.2, "--callers", 2)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_benchmark("pool.py", *arguments, seconds=270)


@pytest.mark.slow
def test_every_alternative_is_measured_and_verified_with_a_network_in_between(postgres_url: str, tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "pool.svg"
    place = ("--rtt", ROUND_TRIP * 1000, "--handles", "psycopg", "--callers-kind", "threads", "--url", postgres_url)

    done = run(*SHORT, *place, "--json", figures, "--svg", picture)

    assert done.returncode == 0, done.stderr
    for title in TITLES:
        assert f"| {title}" in done.stdout
    found = json.loads(figures.read_text())
    verified = {each["figures"]["alternative"]: each["figures"]["verified"] for each in found["rounds"]}
    assert verified.pop("plain") == 0
    assert set(verified) == {"naive", "outbox", "writers", "own", "pool", "pool-decided"}
    assert all(messages > 0 for messages in verified.values())
    assert {point["alternative"] for point in found["points"]} == {"plain", *verified}
    for point in found["points"]:
        assert point["round_trip"] == ROUND_TRIP
        assert point["proxy late"]["median"] >= 0
        assert (point["pool's writers"] is not None) == (point["alternative"] in {"own", "pool", "pool-decided"})
        database, kafka = ROUND_TRIPS[point["alternative"]]
        assert point["call p50"] >= (database + kafka) * ROUND_TRIP, point["alternative"]
    assert found["network"]["pings"][-1]["lone"]["p50"] >= ROUND_TRIP
    (clocked,) = found["phases"]
    assert clocked["phases"]["groups"] > 0
    assert 1 <= clocked["phases"]["units"] <= 2
    means = clocked["phases"]["mean"]
    assert means.pop("waiting") >= 0, "0 if each writer had a single group"
    assert len(means) == 5
    assert all(seconds > 0 for seconds in means.values())
    assert parse(picture).getroot().tag.endswith("svg")


@pytest.mark.soak  # in CI: threads, above
@pytest.mark.parametrize("handles", ["core", "core,psycopg"])
def test_tasks_can_be_callers_too(broker: DevCluster, postgres_url: str, handles: str) -> None:
    servers = ("--url", postgres_url, "--kafka", broker.bootstrap_servers)

    measured = ("--alternatives", "plain,naive,outbox,pool", "--plain-connections", "1,2", "--no-two-phase")
    done = run(*SHORT, "--handles", handles, "--callers-kind", "asyncio", *measured, *servers)

    assert done.returncode == 0, done.stderr
    assert "two-phase commit: not used" in done.stdout
    assert "Plain commits were measured with 1, 2 connections" in done.stdout
    for handle in handles.split(","):
        assert re.search(rf"\| asyncio +\| {handle} +\| 2 +\| pool", done.stdout)


@pytest.mark.soak
def test_sqlalchemy_core_is_a_handle_too(broker: DevCluster, postgres_url: str) -> None:
    servers = ("--url", postgres_url, "--kafka", broker.bootstrap_servers)

    done = run(*SHORT, "--handles", "core", "--callers-kind", "threads", "--no-phases", *servers)

    assert done.returncode == 0, done.stderr
    assert "| threads     | core   | 2       | a writer each" in done.stdout
    assert "Where the time" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--alternatives", "pool,magic"), "magic: choose from"),
        (("--alternatives", "pool-decided", "--no-two-phase"), "needs two-phase commit"),
        (("--alternatives", "pool", "--svg"), "relative to plain"),
        (("--callers", "8,0"), "must be at least 1"),
        (("--rtt", "0,-1"), "must be at least 0"),
        (("--rtt", "0,1", "--kafka", "127.0.0.1:9092"), "a broker of our own"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(
    benchmark_module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        benchmark_module("pool").arguments(arguments)

    assert why in capsys.readouterr().err
