"""benchmarks/transactions.py runs, and finds every id that it has made."""

from __future__ import annotations

import re

import pytest

from benchmarks.benchmark_process import run_benchmark
from dualwrite.devcluster import DevCluster


@pytest.mark.slow
def test_every_id_is_found(broker: DevCluster) -> None:
    done = run_benchmark("transactions.py", "--ids", 40, "--kafka", broker.bootstrap_servers, seconds=60)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(list|describe) +(\d+) ids", done.stdout, re.MULTILINE) == [("list", "40"), ("describe", "40")]
