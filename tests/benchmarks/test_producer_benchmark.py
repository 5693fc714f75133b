"""The benchmark of producers runs, and verifies what it measures."""

import subprocess
import sys
from pathlib import Path

import pytest

from dualwrite.devcluster import DevCluster
from fixtures.pace import limit

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "producer.py"
SHORT = (
    *("--seconds", "0.1", "--rounds", "1", "--ids", "2", "--poll", "0.1"),
    *("--bulk", "1000", "--bulk-transactions", "2", "--memory", "500"),
)


@pytest.mark.soak  # in CI: the benchmarks of the pool and the processor
def test_every_producer_is_measured_and_verified(broker: DevCluster) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARK, *SHORT, "--kafka", broker.bootstrap_servers],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(240),
    )
    assert done.returncode == 0, done.stderr
    for title in ("One message, one id", "2 ids in turn", "2 ids, a thread each", "2 transactions of 1,000", "Resident memory"):
        assert title in done.stdout
    for producer in ("confluent-kafka", "native, plain", "native, 2PC", "native, 2PC, send_many"):
        assert f"| {producer} |" in done.stdout
