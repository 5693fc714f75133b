"""What the tests of commands over a cluster's transactions share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from dualwrite import migration
from dualwrite.cli import main
from dualwrite.devcluster import DevCluster
from dualwrite.stores.base import StateRow
from dualwrite.stores.registry import store_from_url
from dualwrite.testing import failpoints
from fixtures import json_pages
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended

Run = Callable[..., tuple[int, str, str]]
JsonOf = Callable[..., tuple[int, Any]]


@pytest.fixture
def environment(trusting_broker: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", trusting_broker.bootstrap_servers)
    monkeypatch.delenv("DUALWRITE_DATABASE_URL", raising=False)


@pytest.fixture
def called(environment: None, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `dualwrite …`: the exit code, and what was printed."""

    def run_it(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_it


@pytest.fixture
def called_json(called: Run) -> JsonOf:
    """Runs a command with --json, and compares the output with its page."""

    def run_it(*arguments: str) -> tuple[int, Any]:
        code, out, _ = called(*arguments, "--json")
        found = json.loads(out)
        name = arguments[1] if arguments[0] == "transactions" else arguments[0]
        json_pages.check(name, found)
        assert (found["version"], found["command"]) == (1, name)
        return code, found

    return run_it


@pytest.fixture
def run(called: Run) -> Run:
    """Runs `dualwrite transactions …`."""
    return lambda *arguments: called("transactions", *arguments)


@pytest.fixture
def json_of(called_json: JsonOf) -> JsonOf:
    """As `called_json`, for `dualwrite transactions …`."""
    return lambda *arguments: called_json("transactions", *arguments)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with dualwrite's tables; of another kind by an indirect parameter."""
    kind = getattr(request, "param", "sqlite")
    if kind != "sqlite":
        databases, broker = map(request.getfixturevalue, ("databases", "trusting_broker"))
        return str(databases.scene(kind, broker).url)
    made = f"sqlite:///{tmp_path}/app.db"
    migration.upgrade(made)
    return made


@dataclass(frozen=True)
class Crashed:
    """What a writer left: its id, its row, its topic."""

    name: str
    row: StateRow
    topic: str

    @property
    def kafka_id(self) -> str:
        return self.row.kafka_id(self.row.generation)


class Crash(Protocol):
    """Runs a writer that dies at a failpoint of its last transaction."""

    def __call__(self, point: str, *, transactions: int = 1, lanes: int = 1) -> Crashed: ...


@pytest.fixture
def crashed(environment: None, url: str, new_name: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Crash:
    """Runs a writer that dies at a failpoint of its last transaction."""

    def run_it(point: str, *, transactions: int = 1, lanes: int = 1) -> Crashed:
        name, topic = new_name("id"), new_name("topic")
        arguments = [name, topic, str(transactions)]
        with monkeypatch.context() as patch:
            patch.setenv("DUALWRITE_DATABASE_URL", url)
            patch.setenv("DUALWRITE_LANES", str(lanes))
            with ForkedProcess("cli.crashing_writer", arguments, failpoints=f"{point}#{transactions}=exit") as process:
                assert ended(process) == failpoints.EXIT_CODE
        with store_from_url(url) as store:
            row = store.read(name)
        assert row is not None
        return Crashed(name, row, topic)

    return run_it
