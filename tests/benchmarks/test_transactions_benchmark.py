"""benchmarks/transactions.py runs, and finds every id that it has made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from dualwrite.devcluster import DevCluster
from fixtures.pace import LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "transactions.py"


def test_every_id_is_found(broker: DevCluster) -> None:
    command = [sys.executable, str(SCRIPT), "--ids", "40", "--kafka", broker.bootstrap_servers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(list|describe) +(\d+) ids", done.stdout, re.MULTILINE) == [("list", "40"), ("describe", "40")]
