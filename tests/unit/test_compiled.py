"""Whether the part that runs once for each message is compiled is seen, and nothing else is."""

import ast
from pathlib import Path

import pytest

from dualwrite.cli import main
from dualwrite.kafka.native import is_compiled, records

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_said_which_form_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runs_compiled = not records.__file__.endswith(".py")
    assert is_compiled() is runs_compiled
    assert main(["--version"]) == 0
    assert ("(native producer: compiled)" in capsys.readouterr().out) is runs_compiled


def test_every_module_that_is_compiled_is_there() -> None:
    hook = ast.parse((ROOT / "hatch_build.py").read_text())
    (modules,) = [
        ast.literal_eval(node.value)
        for node in hook.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "MODULES" and node.value
    ]
    assert modules
    assert all((ROOT / "src" / module).is_file() for module in modules)
