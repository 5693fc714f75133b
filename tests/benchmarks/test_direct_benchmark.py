"""benchmarks/direct.py compares this checkout with another one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from crash.databases import Databases
from dualwrite.devcluster import DevCluster
from fixtures.pace import limit

ROOT = Path(__file__).parents[2]
SHORT = ("--seconds", "0.1", "--rounds", "1", "--writers", "1,2", "--partitions", "1")


@pytest.mark.soak  # in CI: the benchmarks of the pool and the processor
def test_this_checkout_is_compared_with_another_one(databases: Databases, broker: DevCluster) -> None:
    """Here with itself."""
    scene = databases.scene("postgresql", broker)
    servers = ("--url", scene.url, "--kafka", broker.bootstrap_servers)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "direct.py", "--other", ROOT, *SHORT, *servers],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(60),
    )
    assert done.returncode == 0, done.stderr
    for writers in (1, 2):
        assert re.search(rf"\| {writers} \| \d+ µs \| [\d.]+ \([\d. to]+\) \| \d+ \| [\d.]+ \(", done.stdout), done.stdout


def test_a_folder_without_the_code_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "direct.py", "--other", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "has no src/dualwrite" in done.stderr) == (2, True)
