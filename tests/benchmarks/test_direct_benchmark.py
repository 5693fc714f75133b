"""benchmarks/direct.py compares this checkout with another one."""

import re
from pathlib import Path

import pytest

from benchmarks.benchmark_process import ROOT, run_benchmark
from crash.databases import Databases
from dualwrite.devcluster import DevCluster

SHORT = ("--seconds", "0.1", "--rounds", "1", "--writers", "1,2", "--partitions", "1")


@pytest.mark.soak  # in CI: the benchmarks of the pool and the processor
def test_this_checkout_is_compared_with_another_one(databases: Databases, broker: DevCluster) -> None:
    """Here with itself."""
    scene = databases.scene("postgresql", broker)
    servers = ("--url", scene.url, "--kafka", broker.bootstrap_servers)
    done = run_benchmark("direct.py", "--other", ROOT, *SHORT, *servers, seconds=60)
    assert done.returncode == 0, done.stderr
    for writers in (1, 2):
        assert re.search(rf"\| {writers} \| \d+ µs \| [\d.]+ \([\d. to]+\) \| \d+ \| [\d.]+ \(", done.stdout), done.stdout


@pytest.mark.slow
def test_a_folder_without_the_code_is_refused(tmp_path: Path) -> None:
    done = run_benchmark("direct.py", "--other", tmp_path)
    assert (done.returncode, "has no src/dualwrite" in done.stderr) == (2, True)
