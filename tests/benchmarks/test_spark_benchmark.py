"""The Spark benchmark runs, and verifies what it measures."""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.benchmark_process import environment_without_settings, run_benchmark
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.native.settings import NativeSettings
from spark.session import NOT_OURS, SUBMITTED

NO_PACKAGES = 3
PACKAGES = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0,org.postgresql:postgresql:42.7.7"
SMALL = ("--times", 2, "--flights", 500, "--rounds", 1, "--partitions", 2, "--memory", "768m")

Servers = tuple[str, ...]


@pytest.fixture
def servers(broker: DevCluster, postgres_url: str) -> Servers:
    """The command-line arguments for the servers."""
    return ("--url", postgres_url, "--kafka", broker.bootstrap_servers)


def run(environment: Mapping[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in environment_without_settings().items() if name not in NOT_OURS}
    return run_benchmark("spark.py", *arguments, environment={**ours, **environment, "PYSPARK_SUBMIT_ARGS": SUBMITTED})


@pytest.mark.soak
def test_this_sink_is_measured_and_verified(servers: Servers, spark_environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"

    done = run(spark_environment, *SMALL, "--no-parts", "--sinks", "dualwrite", "--json", file, *servers)

    assert done.returncode == 0, done.stderr
    assert "| this sink" in done.stdout
    assert "Verified: 1,000 rows" in done.stdout
    found = json.loads(file.read_text())
    assert {measured["name"]: measured["rows"] for measured in found["rounds"]} == {"dualwrite": 1000}


@pytest.mark.soak
def test_reading_and_the_parts_of_a_write_are_measured(
    servers: Servers, spark_environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"

    done = run(spark_environment, *SMALL, "--sinks", "read,dualwrite", "--json", file, *servers)

    assert done.returncode == 0, done.stderr
    assert "| this sink" in done.stdout
    assert "Verified: 1,000 rows" in done.stdout
    found = json.loads(file.read_text())
    assert {measured["name"]: measured["rows"] for measured in found["rounds"]} == {"read": 1000, "dualwrite": 1000}
    phases = {part["phase"]: part["share"] for part in found["parts"]["2"] if not part["name"]}
    assert phases.pop("whole") == 1
    assert sum(phases.values()) == pytest.approx(1)
    parts = {part["name"] for part in found["parts"]["2"]}
    assert {"rows: made, COPY into staging", "database transaction (rows moved)", "staging cleared"} <= parts


@pytest.mark.soak
def test_sparks_own_sinks_are_measured_and_verified(servers: Servers, spark_environment: dict[str, str]) -> None:
    done = run(spark_environment, *SMALL, "--no-parts", "--sinks", "dualwrite,spark", "--packages", PACKAGES, *servers)

    if done.returncode == NO_PACKAGES:  # also in CI: its package registry need not have them
        pytest.skip(f"Spark's resolver does not find the packages of Spark's own sinks: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert "| Spark's two sinks" in done.stdout
    assert "Verified: 2,000 rows" in done.stdout


def test_unknown_sinks_are_refused(benchmark_module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        benchmark_module("spark").arguments(["--sinks", "dualwrite,magic"])

    assert "magic: choose from" in capsys.readouterr().err


def test_sparks_own_kafka_sink_has_batches_as_large_as_ours(benchmark_module: Callable[[str], ModuleType]) -> None:
    sinks = benchmark_module("spark_sinks")

    assert NativeSettings.of(KafkaConfig.of("127.0.0.1:9092")).batch_bytes == int(sinks.KAFKA_SETTINGS["kafka.batch.size"])
    assert benchmark_module("spark").arguments([]).broker_warm_up > 0
