"""What the tests of commands over a cluster's transactions share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pytest

from dualwrite.devcluster import DevCluster
from dualwrite.stores.base import StateRow
from dualwrite.stores.registry import store_from_url
from dualwrite.testing import failpoints
from fixtures import json_pages
from fixtures.broker import make_topic, read_topic
from fixtures.command import output_of
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended

NewName = Callable[[str], str]
Run = Callable[..., tuple[int, str, str]]
"""Runs a command with these arguments: the exit code, stdout and stderr."""
JsonOf = Callable[..., tuple[int, Any]]
"""Runs a command with these arguments and --json: the exit code, and the document."""


@pytest.fixture
def environment(trusting_broker: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", trusting_broker.bootstrap_servers)
    monkeypatch.delenv("DUALWRITE_DATABASE_URL", raising=False)


@pytest.fixture
def called(environment: None, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `dualwrite …`: the exit code, and what was printed."""
    return partial(output_of, capsys)


@pytest.fixture
def called_json(called: Run) -> JsonOf:
    """Runs a command with --json, and compares the output with its page."""

    def run_it(*arguments: str) -> tuple[int, Any]:
        code, out, _ = called(*arguments, "--json")
        found = json.loads(out)
        name = arguments[1] if arguments[0] == "transactions" else arguments[0]
        json_pages.check(name, found)
        assert (found["version"], found["command"]) == (1, name if name == "stuck" else f"transactions {name}")
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
def url(request: pytest.FixtureRequest) -> str:
    """A database with dualwrite's tables; of another kind by an indirect parameter."""
    kind = getattr(request, "param", "sqlite")
    if kind == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    databases, broker = map(request.getfixturevalue, ("databases", "trusting_broker"))
    return str(databases.scene(kind, broker).url)


@pytest.fixture
def topic(trusting_broker: DevCluster, new_name: NewName) -> str:
    """An empty topic with one partition."""
    name = new_name("topic")
    make_topic(trusting_broker, name)
    return name


def state_of(json_of: JsonOf, transactional_id: str) -> str:
    """The state that `describe` shows."""
    _, found = json_of("describe", transactional_id)
    return str(found["transactions"][0]["state"])


def committed_count(broker: DevCluster, topic: str) -> int:
    """How many committed messages the topic has."""
    return len(read_topic(broker.bootstrap_servers, topic))


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
def crashed(environment: None, url: str, new_name: NewName, monkeypatch: pytest.MonkeyPatch) -> Crash:
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
