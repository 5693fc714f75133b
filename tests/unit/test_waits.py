"""No wait of the tests turns a wrong record into a time limit: records are waited for with `until_recorded`, `until_received`.

`until(lambda: rows() == expected)` never ends when a row is there twice, `until(rows)` when it is lost. That is reported as a
time limit, and the test runs again in CI. So what `until` is called with must not read records, except to assert something
about them, which fails at once. What reads records is found by its calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

READS = {
    *("read_topic", "read_committed", "committed", "execute", "get_children"),
    *("rows", "messages", "numbers", "agree", "answers", "answered", "booked", "shown"),  # of scenes
}
"""Calls that read topics, groups' offsets, or databases; a function that calls them reads records, too, for its file."""

READS_NO_RECORDS = {"is_drained", "is_locked", "nothing_waits", "_says"}
"""Functions that call one of these for something else."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def calls(node: ast.AST) -> set[str]:
    """The names of what is called."""
    return {_name(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}


def readers(tree: ast.Module) -> set[str]:
    """The names of the file's functions that read records, in several steps, and of those everywhere."""
    bodies = [
        (node.name, calls(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("test_")
    ]
    found, before = set(READS), set[str]()
    while found != before:
        before = set(found)
        found |= {name for name, used in bodies if used & found and name not in READS_NO_RECORDS}
    return found


def conditions(tree: ast.Module) -> Iterator[Function]:
    """What `until` is called with."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _name(node.func) == "until":
            condition = node.args[0]
            if isinstance(condition, ast.Lambda):
                yield condition
            elif (name := _name(condition)) in functions:
                yield functions[name]


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def awaited_calls(condition: Function) -> set[str]:
    """The names of what it calls, without what it asserts."""
    asserted = {id(node) for one in ast.walk(condition) if isinstance(one, ast.Assert) for node in ast.walk(one)}
    return {_name(one.func) for one in ast.walk(condition) if isinstance(one, ast.Call) and id(one) not in asserted}


def wrong_waits(tree: ast.Module) -> list[int]:
    """The lines of such waits."""
    reading = readers(tree)
    return [condition.lineno for condition in conditions(tree) if awaited_calls(condition) & reading]


@pytest.mark.slow
def test_records_are_not_waited_for_with_until() -> None:
    files = {str(file.relative_to(TESTS)): file.read_text(encoding="utf-8") for file in TESTS.rglob("*.py")}
    found = {file: wrong_waits(ast.parse(text)) for file, text in files.items() if "until(" in text}
    assert {file: lines for file, lines in found.items() if lines} == {}, "use until_recorded or until_received"
