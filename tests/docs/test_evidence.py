"""The page of evidence is the one that `tools/evidence.py` writes."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import check_history
import evidence
import pytest

HISTORIES: Final = evidence.RESULTS / "histories"


def test_the_page_is_made_of_the_results() -> None:
    assert evidence.PAGE.read_text(encoding="utf-8") == evidence.page(evidence.results()), "python tools/evidence.py writes it"


def test_a_kind_without_a_renderer_of_its_own_is_tables() -> None:
    result = {
        "kind": "simulator",
        "date": "2026-11-29",
        "command": "python tools/simulate.py",
        "dualwrite": "0123abcd",
        "versions": {"python": ["3.11.7"]},
        "operations": 1_000_000,
        "faults": {"a request lost": 7},
        "anomalies": {},
        "rows": [{"rule": "F1", "seeds until found": 12}],
    }
    page = evidence.page([result])
    assert "| Simulator | 1 | 1,000,000 | 7 | 0 |" in page
    assert "| F1 | 12 |" in page
    assert "`python tools/simulate.py`" in page


def test_the_published_histories_have_no_anomaly() -> None:
    _check_kinds(path for path in HISTORIES.iterdir() if path.is_dir())


@pytest.mark.soak
def test_the_published_histories_of_a_long_round_have_no_anomaly(tmp_path: Path) -> None:
    for path in HISTORIES.glob("*.tar.xz"):
        with tarfile.open(path) as packed:
            packed.extractall(tmp_path, filter="data")
    assert _check_kinds(path for run in tmp_path.iterdir() for path in run.iterdir()) == 185_380


@pytest.mark.parametrize("given", [["--result", "/mine/x.json"], ["--result=/mine/x.json"], []])
def test_a_command_names_no_place_of_this_machine(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/mine/tools/simulate.py", "--seeds", "10", *given, "--without", "F1"])
    assert evidence.command_without("--result") == "python tools/simulate.py --seeds 10 --without F1"


def _check_kinds(folders: Iterable[Path]) -> int:
    """Judge the kinds of clients of a round, and count their operations."""
    count = 0
    for folder in folders:
        found = check_history.check(sorted(folder.glob("*.jsonl*")))
        assert found["operations"]["ok"]
        assert not any(anomaly["count"] for anomaly in found["anomalies"].values()), check_history.table(found)
        count += sum(found["operations"].values())
    assert count
    return count
