"""The code blocks of a page run: what a page under `docs/` (or README) may hold, and how a test runs it.

A page is one program. Its blocks run in the order of the page, in one Python process, in an empty folder:

| what stands in the page | what happens |
| --- | --- |
| a `python` block | It runs; names that an earlier block has defined are there. |
| `<!-- run -->` on the line before a `sh` block | bash runs the block where it stands, between the Python blocks around it. |
| a `sh` block without it | Nothing. |
| `<!-- not run: REASON -->` on the line before a `python` block | The block is only compiled. |
| `<!-- file: NAME -->` on the line before a block of any language | The block is written to the file. |

What a page must lead to stands in the page, too, on lines of their own, anywhere. It is compared after the program has ended:

| expectation | what is compared |
| --- | --- |
| `<!-- expect topic NAME: ["a", "b"] -->` | the values that a `read_committed` consumer sees, in this order |
| `<!-- expect topic NAME in any order: ["a", "b"] -->` | the same, sorted |
| `<!-- expect rows URL SELECT …: [["a", 1]] -->` | the rows that a query gives |
| `<!-- expect printed: "text" -->` | what the program prints holds the text |

Pages name servers as in `ADDRESSES`, and a test puts its own in their place. Each page gets an empty database, in which
only dualwrite's tables exist. SQLite's is a file in the program's folder, which the page itself makes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from confluent_kafka.admin import AdminClient

from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, limit
from spark.session import NOT_OURS

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"

BROKER: Final = "127.0.0.1:9092"
ADDRESSES: Final = {
    BROKER: "broker",
    "postgresql+psycopg://shop@127.0.0.1/shop": "postgresql",
    "postgresql://shop@127.0.0.1/shop": "libpq",
    "mariadb+pymysql://shop@127.0.0.1/shop": "mariadb",
    "zookeeper://127.0.0.1:2181/shop": "zookeeper",
}
"""The servers as pages name them, and what each is called by `substituted`."""

_RUN: Final = "run"
_NOT_RUN: Final = "not run: "
_FILE: Final = "file: "
_BLOCK: Final = re.compile(r"^(?:<!-- (run|not run: [^\n]+|file: [^\n]+) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE: Final = re.compile(r"^([ >\t]*)(`{3,}|~{3,})[ \t]*([^\n]*)$", re.MULTILINE)
_MARK: Final = re.compile(r"^.*<!-- *(?:run|not run|file|expect)\b.*$", re.MULTILINE)
_EXPECTATION: Final = re.compile(
    r"^<!-- expect (?:topic (?P<topic>\S+?)(?P<any> in any order)?|rows (?P<url>\S+) (?P<query>[^\n]+?)|(?P<printed>printed)): "
    r"(?P<value>[\[\"].*?) -->$",
    re.MULTILINE | re.DOTALL,
)
_DIRECTIVE: Final = re.compile(r"\{[\w:-]+\}.*")
_LANGUAGES: Final = frozenset(
    {"", "console", "dockerfile", "http", "ini", "json", "mermaid", "properties", "python", "sh", "sql", "text", "toml", "yaml"}
)
_PYTHON_DIRECTIVES: Final = ("{code-block} py", "{code} py", "{sourcecode} py", "{testcode}", "{doctest}")


class Block(NamedTuple):
    """A block of a page.

    Args:
        language: As the fence says.
        mark: `run`, `not run: REASON`, `file: NAME`, or an empty text.
        text: What it holds.
    """

    language: str
    mark: str
    text: str


class Step(NamedTuple):
    """What `_PROGRAM` does for one block; `line` is where the block's text begins in the page."""

    action: str
    line: int
    text: str


@dataclass(frozen=True)
class Expectation:
    """What a page must lead to; `value` is what stands in the page.

    Args:
        value: A list of values or rows, or the printed text.
        topic: The topic whose values are compared.
        in_any_order: Whether they are sorted first.
        url: The database whose rows are compared.
        query: What is asked there.
    """

    value: Any
    topic: str | None = None
    in_any_order: bool = False
    url: str | None = None
    query: str | None = None


# --- reading a page ---------------------------------------------------------------------------------------------------


def blocks(text: str) -> list[Block]:
    """The blocks of a page that have a language, in order."""
    return [Block(found[2], found[1] or "", found[3]) for found in _BLOCK.finditer(text)]


def steps(text: str) -> list[Step]:
    """What the page's program does, in order."""
    done = []
    for found in _BLOCK.finditer(text):
        mark, language, code = found[1] or "", found[2], found[3]
        line = text.count("\n", 0, found.start(3)) + 1
        if mark.startswith(_FILE):
            done.append(Step(mark, line, code))
        elif language == "python" and not mark.startswith(_NOT_RUN):
            done.append(Step("python", line, code))
        elif language == "sh" and mark == _RUN:
            done.append(Step("sh", line, code))
    return done


def expectations(text: str) -> list[Expectation]:
    """What the page must lead to, in order."""
    return [
        Expectation(json.loads(found["value"]), found["topic"], found["any"] is not None, found["url"], found["query"])
        for found in _EXPECTATION.finditer(text)
    ]


def runs(text: str) -> bool:
    """Whether there is anything to run."""
    return any(step.action in ("python", "sh") for step in steps(text))


def topics(text: str) -> set[str]:
    """The topics whose content the page states."""
    return {expected.topic for expected in expectations(text) if expected.topic is not None}


def needs_spark(text: str) -> bool:
    """Whether its program imports PySpark."""
    return any(step.action == "python" and "pyspark" in step.text for step in steps(text))


def checks_itself(text: str) -> bool:
    """Whether a run of the page could fail by more than an exception: by an expectation, or an assertion in its code."""
    asserted = any(re.search(r"^\s*assert ", step.text, re.MULTILINE) for step in steps(text) if step.action == "python")
    return asserted or bool(expectations(text))


def compile_all(text: str, name: str) -> None:
    """Compile each Python block of a page, also those that are not run.

    Raises:
        SyntaxError: One is not Python; it names the line of the page.
    """
    for found in _BLOCK.finditer(text):
        if found[2] == "python":
            compile("\n" * text.count("\n", 0, found.start(3)) + found[3], name, "exec", dont_inherit=True)


def mistakes(text: str) -> list[str]:
    """Marks and fences that look as if they had an effect, but have none: a page with one would never fail."""
    found = []
    inside: str | None = None
    for fence in _FENCE.finditer(text):
        indent, ticks, word = fence.groups()
        if inside is not None:
            if ticks.startswith(inside) and not word:
                inside = None
            continue
        inside = ticks
        if word.startswith(_PYTHON_DIRECTIVES) or not (word in _LANGUAGES or _DIRECTIVE.fullmatch(word)):
            found.append(f"a fence of an unknown kind: {fence[0]!r}")
        elif word in ("python", "sh") and (indent or ticks != "```"):
            found.append(f"a fence that is indented, or not of three backticks: {fence[0]!r}")
    if inside is not None:
        found.append("a fence that does not end")
    read = {line for match in (*_BLOCK.finditer(text), *_EXPECTATION.finditer(text)) for line in match[0].splitlines()}
    found += [f"a mark that is not read: {mark[0]!r}" for mark in _MARK.finditer(text) if mark[0] not in read]
    for language, mark, _ in blocks(text):
        if (mark == _RUN and language != "sh") or (mark.startswith(_NOT_RUN) and language != "python"):
            found.append(f"{mark!r} before a block of {language}")
    return found


# --- running it -------------------------------------------------------------------------------------------------------

_PROGRAM: Final = """\
import json as _json, pathlib as _pathlib, subprocess as _subprocess, sys as _sys
import dualwrite.settings as _settings
_page, _steps, _switch_after = _sys.argv[1:]
_sys.argv[:] = [_page]
_settings.SWITCH_AFTER = float(_switch_after)
for _action, _line, _text in _json.loads(_pathlib.Path(_steps).read_text(encoding="utf-8")):
    _sys.stdout.flush()
    if _action == "python":
        exec(compile("\\n" * (_line - 1) + _text, _page, "exec", dont_inherit=True))
    elif _action == "sh":
        _subprocess.run(["bash", "-euc", _text], check=True)
    else:
        _file = _pathlib.Path(_action.removeprefix("file: "))
        _file.parent.mkdir(parents=True, exist_ok=True)
        _file.write_text(_text, encoding="utf-8")
"""
"""Runs the steps in its own `__main__`: Spark pickles functions from there by value.

That a busy machine answers late is no outage: a pool with a journal waits for as long as other tests do.
"""


def substituted(text: str, addresses: Mapping[str, str]) -> str:
    """The text with the test's servers.

    Args:
        text: A page, or a part of one.
        addresses: The test's address for each kind of server (see `ADDRESSES`) that the text names.
    """
    for told, kind in ADDRESSES.items():
        if told in text:
            text = text.replace(told, addresses[kind])
    return text


def kinds_of_servers(text: str) -> list[str]:
    """Which servers the page needs, in the words of `ADDRESSES`."""
    return [kind for told, kind in ADDRESSES.items() if told in text]


def messages_before(broker: DevCluster, topic: str, committed: Callable[[str], list[bytes | None]]) -> int:
    """How many messages other pages have left in a topic; it is made, with one partition, if it is missing."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    if topic not in admin.list_topics(timeout=LIMIT).topics:
        make_topic(broker, topic)
    return len(committed(topic))


def run_program(text: str, folder: Path, *, name: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a page's program in a folder, and return what it prints.

    Args:
        text: The page, with the test's servers.
        folder: Where it runs.
        name: What tracebacks call it.
        environment: More variables.

    Raises:
        AssertionError: It failed.
    """
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DUALWRITE_") and key not in NOT_OURS}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tools"), environ.get("PYTHONPATH")]))
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ |= environment or {}
    program, listed = folder / ".program.py", folder / ".steps.json"
    program.write_text(_PROGRAM, encoding="utf-8")
    listed.write_text(json.dumps(steps(text)), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", str(program), name, str(listed), str(LIMIT)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=limit(240), check=False)
    assert done.returncode == 0, f"{name} failed with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check(
    text: str, folder: Path, printed: str, committed: Callable[[str], list[bytes | None]], before: Mapping[str, int]
) -> None:
    """Compare what the page must lead to with what there is.

    Args:
        text: The page, with the test's servers.
        folder: Where its program ran.
        printed: What that printed.
        committed: The values that a topic has.
        before: How many of them were there before the program ran.

    Raises:
        AssertionError: Something is different.
    """
    for expected in expectations(text):
        if expected.topic is not None:
            values = [value and value.decode() for value in committed(expected.topic)[before[expected.topic] :]]
            wanted = expected.value
            if expected.in_any_order:
                values, wanted = sorted(values, key=str), sorted(wanted, key=str)
            assert values == wanted, f"topic {expected.topic}"
        elif expected.url is not None:
            assert rows(expected.url, str(expected.query), folder) == expected.value, expected.query
        else:
            assert expected.value in printed, printed


def rows(url: str, query: str, folder: Path) -> list[list[Any]]:
    """The rows of a query; a relative path of SQLite is one in the folder."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        assert (folder / str(parsed.database)).exists(), f"the page made no {parsed.database}"
        parsed = parsed.set(database=str(folder / str(parsed.database)))
    engine = sa.create_engine(parsed, poolclass=sa.NullPool)
    try:
        with engine.connect() as connection:
            return [list(row) for row in connection.execute(sa.text(query))]
    finally:
        engine.dispose()
