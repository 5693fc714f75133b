"""The import graph of the package has no cycle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "docs" / "import_graph.py"


def test_the_package_has_no_import_cycle() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("no cycle")
    assert "  __main__" in done.stdout
