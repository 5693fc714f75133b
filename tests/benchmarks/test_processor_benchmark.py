"""The processor's benchmark runs, and verifies what it measures."""

import pytest

from benchmarks.benchmark_process import run_benchmark
from dualwrite.devcluster import DevCluster


@pytest.mark.slow
def test_every_alternative_is_measured_and_verified(broker: DevCluster, postgres_url: str) -> None:
    short = ("--messages", "200", "--batches", "1,100", "--members", "1,2", "--rounds", "1")
    done = run_benchmark("processor.py", *short, "--kafka", broker.bootstrap_servers, "--url", postgres_url)
    assert done.returncode == 0, done.stderr
    assert "'fsync': 'o" in done.stdout
    for batch in ("Batches of 1: 200 messages", "Batches of 100: 200 messages"):
        assert f"{batch}, 1 member" in done.stdout
        assert f"{batch}, 2 members" in done.stdout
    for alternative in (
        "DualProcessor",
        "DualProcessor, decided",
        "DualProcessor on a pool, decided",
        "database, then offsets",
        "consume-transform-produce",
    ):
        assert done.stdout.count(f"| {alternative} |") == 4
