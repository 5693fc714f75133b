"""README does not rot: its Python runs, in order, and so do the shell commands marked `<!-- run -->`, on a real broker."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dualwrite import failpoints, settings
from dualwrite.cli import COMMANDS
from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic
from fixtures.pace import limit
from spark.session import NOT_OURS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVERS = "127.0.0.1:9092"  # README's broker; the tests put theirs in its place
_BLOCK = re.compile(r"^(<!-- run -->\n)?```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPARK = README[README.index("\n## Spark\n") : README.index("\n## Which producer\n")]

Run = Callable[..., str]


def blocks(text: str = README) -> list[tuple[str, bool, str]]:
    """Language, whether it is marked, and text of each block."""
    return [(found[2], found[1] is not None, found[3]) for found in _BLOCK.finditer(text)]


def program(text: str, broker: DevCluster) -> str:
    """All Python blocks, in the order of the text."""
    found = "".join(block for language, _, block in blocks(text) if language == "python")
    assert found
    return found.replace(SERVERS, broker.bootstrap_servers)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in a folder of the test's own; what it prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DUALWRITE_") and name not in NOT_OURS}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"

    def run(*command: str, **environment: str) -> str:
        env = environ | environment
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit(240), check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.slow
def test_readme_runs(broker: DevCluster, committed: Callable[[str], list[bytes | None]], run: Run) -> None:
    """One program of all Python blocks but Spark's; the marked shell blocks run where they stand."""
    python = program(README.replace(_SPARK, ""), broker)
    shell = [text.replace(SERVERS, broker.bootstrap_servers) for _, marked, text in blocks() if marked]
    assert len(shell) == 2
    make_topic(broker, "orders")
    before, after = shell

    run("bash", "-euc", before)
    printed = run(sys.executable, "-W", "ignore", "-c", python)
    assert "committed on both sides" in printed
    assert "shop-1" in run("bash", "-euc", after)
    assert committed("orders") == [b'{"item": "lamp"}', b"carpet", b"lamp", b"chair", b"table"]
    rows = run(
        sys.executable, "-c", "import sqlite3; print(sqlite3.connect('shop.db').execute('select item from orders').fetchall())"
    )
    assert rows.strip() == "[('lamp',), ('chair',), ('table',)]"


@pytest.mark.soak  # a Spark of its own; tests/spark does what these blocks do
def test_readmes_spark_examples_run(
    broker: DevCluster,
    run: Run,
    tmp_path: Path,
    spark_environment: dict[str, str],
    new_name: Callable[[str], str],
    committed: Callable[[str], list[bytes | None]],
) -> None:
    """One program of Spark's blocks after README's first, which makes the table."""
    topic = new_name("orders")
    first = README[: README.index("\n## Set-up\n")]
    python = program(first + _SPARK, broker).replace('"topic": "orders"', f'"topic": "{topic}"')
    python = python.replace('send_many("orders"', f'send_many("{topic}"')
    run("bash", "-euc", next(text for _, marked, text in blocks() if marked))
    run(sys.executable, "-W", "ignore", "-c", python, **spark_environment)
    rows = [(101, "sofa"), (102, "shelf"), (103, "stool"), *((number, f"bench {number}") for number in range(201, 211))]
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT id, item FROM orders WHERE id > 100 ORDER BY id").fetchall() == rows
    of_the_source = [f'{{"id":{number},"item":"{item}"}}' for number, item in rows[:3]]
    assert sorted(value.decode() for value in committed(topic) if value) == sorted(
        [*of_the_source, *(item for _, item in rows[3:])]
    )


def test_the_options_of_spark_are_those_of_its_docstring() -> None:
    """`dualwrite.spark` is where they are written; README has them as they stand there."""
    pytest.importorskip("pyspark")
    import dualwrite.spark  # noqa: PLC0415
    from dualwrite.spark.options import NAMES  # noqa: PLC0415

    table = [line for line in (dualwrite.spark.__doc__ or "").splitlines() if line.startswith("| ")]
    assert "\n".join(table) in _SPARK
    told = re.findall(r"`([\w.]+)`", "".join(line.split("|")[1] for line in table))
    assert set(NAMES) - {"value.columns"} <= set(told)


def test_the_two_set_up_commands_stand_there_as_they_are() -> None:
    commands = [text for language, _, text in blocks() if language == "sh"]
    assert 'pip install ".[demo]" && dualwrite demo\n' in commands
    assert 'pip install -e ".[test]" && pytest\n' in commands


def test_ci_runs_readmes_test_command() -> None:
    assert "\nstep pytest\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_is_told(command: str) -> None:
    assert f"`dualwrite {command}" in README


@pytest.mark.parametrize("point", failpoints.NAMES)
def test_every_failpoint_is_told(point: str) -> None:
    assert f"`{point}`" in README


def test_every_environment_variable_is_told() -> None:
    assert settings.__doc__ is not None
    for variable in re.findall(r"DUALWRITE_[A-Z_]+", settings.__doc__):
        assert variable in README


def test_every_file_that_readme_names_is_there() -> None:
    for name in ("docker-compose.yml", "constraints.txt", "examples"):
        assert name in README
        assert (ROOT / name).exists()
