"""Ctrl-C ends a command with exit code 130, also while the command is being imported."""

from collections.abc import Callable

import pytest
import typer

from dualwrite import cli


class Interrupts:
    """A descriptor as cached_property is: Python 3.11 wraps what its `__set_name__` raises in a RuntimeError."""

    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def interrupted_while_importing() -> None:
    type("Imported", (), {"attribute": Interrupts()})


def interrupted() -> None:
    raise KeyboardInterrupt


def broken() -> None:
    raise RuntimeError("a mistake in the program")


def command_that(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.callback(invoke_without_command=True)(work)
    monkeypatch.setattr(cli, "_load", lambda _name: app)


@pytest.mark.parametrize("work", [interrupted, interrupted_while_importing])
def test_ctrl_c_has_an_exit_code_of_its_own(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(work, monkeypatch)
    assert cli.main(["doctor"]) == 130


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(broken, monkeypatch)
    with pytest.raises(RuntimeError, match="a mistake in the program"):
        cli.main(["doctor"])
