"""The reference pages name what there is: each command and option, each argument and variable, each error."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

import dualwrite
from dualwrite import cli, errors, processor, settings
from dualwrite.cli import COMMANDS
from dualwrite.errors import DualWriteError
from dualwrite.jobs import job_tables  # noqa: F401  (its tables are dualwrite's, too)
from dualwrite.stores.sql.tables import metadata
from dualwrite.testing import pytest_plugin
from fixtures.tables import table

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
COMMANDS_PAGE = (REFERENCE / "commands.md").read_text(encoding="utf-8")
SETTINGS_PAGE = (REFERENCE / "settings.md").read_text(encoding="utf-8")
ERRORS_PAGE = (REFERENCE / "errors.md").read_text(encoding="utf-8")
API_PAGE = (REFERENCE / "api.md").read_text(encoding="utf-8")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, by what is typed after `dualwrite`."""
    for name in COMMANDS:
        group = typer.main.get_group(importlib.import_module(f"dualwrite.cli.{name.replace('-', '_')}").app)
        if not group.commands:  # the command is the group's callback
            yield name, group
        for below, command in group.commands.items():
            for deeper, leaf in getattr(command, "commands", {"": command}).items():
                if not leaf.hidden:
                    yield f"{name} {below} {deeper}".strip(), leaf


LEAVES = dict(commands())


def section(command: str) -> str:
    """What the page says about one command: its heading to the next one."""
    heading = f"\n## `dualwrite {command}`\n"
    assert COMMANDS_PAGE.count(heading) == 1, f"docs/reference/commands.md has no section on `dualwrite {command}`"
    return COMMANDS_PAGE.split(heading)[1].split("\n## ")[0]


def long_options(command: Any) -> set[str]:
    """The options of a command as they are typed, but for --help."""
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")} - {"--help"}


@table("command", sorted(LEAVES))
def test_a_command_has_a_section_with_exactly_its_options(command: str) -> None:
    text = re.sub(r"\bnot with [^;|\n]*|given by `--prefix`", "", section(command))  # mentions of other options
    named = set(re.findall(r"(?<![\w-])--[a-z][a-zA-Z-]+", text))
    assert named == long_options(LEAVES[command])


def test_every_section_is_about_an_existing_command() -> None:
    assert set(re.findall(r"^## `dualwrite ([^`]+)`$", COMMANDS_PAGE, re.MULTILINE)) == LEAVES.keys()


def test_options_of_the_program_are_named() -> None:
    program = typer.main.get_command(cli._app([]))
    for option in long_options(program):
        assert re.search(rf"`(dualwrite\s)?{option}`", COMMANDS_PAGE)


ARGUMENTS = {
    dualwrite.connect: "## Arguments of `connect`",
    dualwrite.recover: "## Arguments of `recover`",
    dualwrite.plan_recovery: "## Arguments of `recover`",
    dualwrite.open_recoverer: "## Arguments of `recover`",
    dualwrite.create_pool: "## Arguments of `create_pool`",
    processor.DualProcessor: "## Arguments of `DualProcessor`",
}


@table("function", ARGUMENTS)
def test_every_argument_is_named(function: Any) -> None:
    text = SETTINGS_PAGE.split(ARGUMENTS[function])[1].split("\n## ")[0]
    for name in inspect.signature(function).parameters:
        assert name == "connecting" or f"\n| `{name}` |" in text  # those of `connect`, which have their own table


@pytest.mark.parametrize("options", [dualwrite.PoolOptions, processor.ProcessorOptions])
def test_every_option_is_named_with_its_default(options: type[Any]) -> None:
    text = SETTINGS_PAGE.split(f"### `{options.__name__}`")[1].split("\n## ")[0]
    for option in fields(options):
        row = re.search(rf"^\| `{option.name}` \|.*\| (.*) \|$", text, re.MULTILINE)
        assert row is not None
        assert row[1].strip("`") == str(option.default).join('""' if isinstance(option.default, str) else ["", ""])


def test_every_time_limit_is_named_with_its_default() -> None:
    defaults = ", ".join(f"{limit.name}={limit.default}" for limit in fields(dualwrite.Timeouts))
    assert f"`Timeouts({defaults})`" in SETTINGS_PAGE
    for limit in fields(dualwrite.Timeouts):
        assert f"\n| `{limit.name}` |" in SETTINGS_PAGE


def test_every_environment_variable_is_named() -> None:
    assert settings.__doc__ is not None
    variables = re.findall(r"DUALWRITE_[A-Z_]+", settings.__doc__)
    limits = [f"DUALWRITE_TIMEOUT_{limit.name.upper()}" for limit in fields(dualwrite.Timeouts)]
    of_the_plugin = [variable for variable, _ in pytest_plugin._GIVEN.values()]
    for variable in (*variables, *limits, *of_the_plugin, "DUALWRITE_TESTING", "DUALWRITE_FAILPOINTS"):
        assert f"`{variable}" in SETTINGS_PAGE


KINDS = sorted(
    name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DualWriteError)
)  # fmt: skip


@table("name", KINDS)
def test_every_error_is_listed_with_its_next_step_and_retriability(name: str) -> None:
    found = re.search(
        rf"autoexception:: dualwrite\.errors\.{name}(?:\(\))?\n.*?^Retriable: (yes|no)\. Next step: \S",
        ERRORS_PAGE,
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None
    assert (found[1] == "yes") is getattr(errors, name).retriable


PACKAGES = [
    "dualwrite",
    "dualwrite.admin",
    "dualwrite.aio",
    "dualwrite.devcluster",
    "dualwrite.diagnosis",
    "dualwrite.kafka",
    "dualwrite.processor",
    "dualwrite.spark",
    "dualwrite.testing.stores",
]


@table("package", PACKAGES)
def test_every_public_name_is_in_the_api_page_or_the_page_of_errors(package: str) -> None:
    documented = set(re.findall(rf":: {re.escape(package)}\.(\w+)$", API_PAGE, re.MULTILINE)) | set(KINDS)
    parts = set(re.findall(r"`(\w+Conformance)`", API_PAGE))  # named in a sentence
    assert set(importlib.import_module(package).__all__) <= documented | parts


def test_the_list_of_tables_has_all_of_them() -> None:
    """In the guide, and their number in README."""
    made = set(metadata.tables)
    guide = (ROOT / "docs" / "guides" / "migrations.md").read_text(encoding="utf-8")
    rows = re.search(r"(?<=\| --- \| --- \| --- \|\n)(\|.*\n)+", guide)
    assert rows is not None
    named = [name for row in rows[0].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(made)
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"`kafka_transaction_state`, `kafka_transaction_store`, and {words[len(made) - 2]} more" in readme
