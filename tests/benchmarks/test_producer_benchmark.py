"""The benchmark of producers runs, and verifies what it measures."""

import pytest

from benchmarks.benchmark_process import run_benchmark
from dualwrite.devcluster import DevCluster

SHORT = (
    *("--seconds", "0.1", "--rounds", "1", "--ids", "2", "--poll", "0.1"),
    *("--bulk", "1000", "--bulk-transactions", "2", "--memory", "500"),
)


@pytest.mark.soak  # in CI: the benchmarks of the pool and the processor
def test_every_producer_is_measured_and_verified(broker: DevCluster) -> None:
    done = run_benchmark("producer.py", *SHORT, "--kafka", broker.bootstrap_servers)
    assert done.returncode == 0, done.stderr
    for title in ("One message, one id", "2 ids in turn", "2 ids, a thread each", "2 transactions of 1,000", "Resident memory"):
        assert title in done.stdout
    for producer in ("confluent-kafka", "native, plain", "native, 2PC", "native, 2PC, send_many"):
        assert f"| {producer} |" in done.stdout
