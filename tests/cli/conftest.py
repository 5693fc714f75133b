"""The scene of the tests of commands over a cluster's transactions: a broker, a database, and what writers left on both."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dualwrite.devcluster import DevCluster
from dualwrite.stores.base import StateRow
from dualwrite.stores.registry import store_from_url
from dualwrite.testing import failpoints
from fixtures import json_pages
from fixtures.broker import TRUSTING, read_topic, started, wait_for_markers
from fixtures.command import output_of
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended
from fixtures.transactions import NewName, Transactions

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="session")
def trusting_broker() -> Iterator[DevCluster]:
    """One for all modules: they run in one process, one after another."""
    with started(config=TRUSTING) as cluster:
        yield cluster


@dataclass(frozen=True)
class Crashed:
    """What a writer left: its id, its row, its topic."""

    name: str
    row: StateRow
    topic: str

    @property
    def kafka_id(self) -> str:
        return self.row.kafka_id(self.row.generation)


class Scene(Transactions):
    """A broker on which transactions can be made to hang, which the environment names; a database that only options name."""

    def __init__(self, broker: DevCluster, new_name: NewName, request: pytest.FixtureRequest) -> None:
        super().__init__(broker, new_name)
        self.request = request

    @property
    def url(self) -> str:
        """A database with dualwrite's tables; of another kind by the parameter `kind` of a test."""
        return str(self.request.getfixturevalue("url"))

    @property
    def at(self) -> tuple[str, str]:
        """The option that names the database."""
        return "--url", self.url

    # --- commands

    def call(self, *arguments: str) -> tuple[int, str, str]:
        """Run `dualwrite …`: the exit code, and what was printed on stdout and stderr."""
        return output_of(self.request.getfixturevalue("capsys"), *arguments)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run `dualwrite transactions …`."""
        return self.call("transactions", *arguments)

    def ends(self, code: int, *arguments: str) -> str:
        """Run `dualwrite …`, which ends with this code; what it printed on stderr."""
        found, _, err = self.call(*arguments)
        assert found == code, err
        return err

    def refused(self, code: int, *arguments: str) -> str:
        """The same for `dualwrite transactions …`."""
        return self.ends(code, "transactions", *arguments)

    def document(self, *arguments: str) -> tuple[int, Any]:
        """Run `dualwrite …` with --json: the exit code, and the document."""
        code, out, _ = self.call(*arguments, "--json")
        return code, json.loads(out)

    def json(self, *arguments: str) -> tuple[int, Any]:
        """Run `dualwrite transactions …` or `dualwrite stuck …` with --json, and compare the output with its page."""
        words = arguments if arguments[0] == "stuck" else ("transactions", *arguments)
        code, found = self.document(*words)
        json_pages.check(arguments[0], found)
        assert (found["version"], found["command"]) == (1, " ".join(words[: 1 if words[0] == "stuck" else 2]))
        return code, found

    def state(self, transactional_id: str) -> str:
        """The state that `describe` shows, when no marker is pending."""
        wait_for_markers(self.servers)
        return str(self.json("describe", transactional_id)[1]["transactions"][0]["state"])

    # --- what they are about

    def crash(self, point: str, name: str | None = None, *, transactions: int = 1, lanes: int = 1) -> Crashed:
        """Run a writer in its own process, which exits at a failpoint of its last transaction."""
        name, topic = name or self.new_name("id"), self.new_name("topic")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DUALWRITE_DATABASE_URL", self.url)
            patch.setenv("DUALWRITE_LANES", str(lanes))
            arguments = [name, topic, str(transactions)]
            with ForkedProcess("cli.crashing_writer", arguments, failpoints=f"{point}#{transactions}=exit") as process:
                assert ended(process) == failpoints.EXIT_CODE
        with store_from_url(self.url) as store:
            row = store.read(name)
        assert row is not None
        return Crashed(name, row, topic)

    def committed(self, topic: str) -> int:
        """How many committed messages a topic has."""
        return len(read_topic(self.servers, topic))


@pytest.fixture
def environment(trusting_broker: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", trusting_broker.bootstrap_servers)
    monkeypatch.delenv("DUALWRITE_DATABASE_URL", raising=False)


@pytest.fixture
def scene(trusting_broker: DevCluster, environment: None, new_name: NewName, request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(trusting_broker, new_name, request)
    yield made
    made.producers.clear()


@pytest.fixture
def recovery_scene(
    broker: DevCluster, url: str, new_name: NewName, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    """On the broker with two-phase commit; the environment names the database, too, and there is no terminal."""
    monkeypatch.setenv("DUALWRITE_DATABASE_URL", url)
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    monkeypatch.setenv("DUALWRITE_LANES", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return Scene(broker, new_name, request)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    kind = getattr(request, "param", "sqlite")
    if kind == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    databases, broker = map(request.getfixturevalue, ("databases", "trusting_broker"))
    return str(databases.scene(kind, broker).url)
