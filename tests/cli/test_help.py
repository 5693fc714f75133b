"""`dualwrite COMMAND --help` shows everything that the docstring of the command says."""

from __future__ import annotations

import importlib
import inspect

import pytest

from dualwrite.cli import main

COMMANDS = ("recover", "status", "doctor", "forget", "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_all_paragraphs_are_shown(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "120")
    function = importlib.import_module(f"dualwrite.cli.{command}").app.registered_callback.callback
    assert main([command, "--help"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    for paragraph in inspect.getdoc(function).split("\n\n"):
        assert "".join(paragraph.replace("`", "").split())[:60] in shown
