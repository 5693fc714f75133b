"""tools/soak.py itself: a short run of all kinds of clients, and one that is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fixtures.pace import LIMIT, limit

SOAK = Path(__file__).parents[2] / "tools" / "soak.py"


@pytest.mark.soak
@pytest.mark.timeout(limit(1800))
def test_a_short_run_finds_nothing_and_keeps_its_histories(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--minutes", "1.5", "--seed", "3", "--every", "3", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(1800), check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["kind"] == "soak"
    assert not any(result["anomalies"].values())
    assert sum(result["faults"].values())
    for row in result["rows"]:
        assert row["operations"], row
        assert [*(tmp_path / "003" / row["clients"].replace(" ", "-")).glob("*.jsonl.gz")]


@pytest.mark.soak
@pytest.mark.timeout(limit(900))
def test_a_run_that_is_interrupted_recovers_and_judges_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--hours", "1", "--only", "pool,relays", "--brokers", "1", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        end = time.monotonic() + 5 * LIMIT
        while not [*tmp_path.glob("*/relays/*.jsonl")] and time.monotonic() < end:
            time.sleep(0.5)
        time.sleep(20)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal: to the clients, too
        output, _ = process.communicate(timeout=limit(600))
    assert process.returncode == 0, output
    assert {row["clients"] for row in json.loads((tmp_path / "soak.json").read_text())["rows"]} == {"pool", "relays"}
