"""What a user's type checker finds: `handles.py` under mypy gives exactly the errors that it announces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("handles.py")
_ANNOUNCED = re.compile(r"# E: (.*)$")
_FOUND = re.compile(r"handles\.py:(\d+): error: (.*?)  \[")


@pytest.mark.slow
def test_a_type_checker_finds_exactly_the_wrong_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out, problems, _ = api.run(["--config-file", "pyproject.toml", "--no-pretty", str(CASES)])
    assert problems == ""
    announced = {
        number: found[1]
        for number, line in enumerate(CASES.read_text(encoding="utf-8").splitlines(), 1)
        if (found := _ANNOUNCED.search(line))
    }
    errors = {int(number): text for number, text in _FOUND.findall(out)}
    assert errors.keys() == announced.keys(), out
    for number, text in announced.items():
        assert text in errors[number], out
