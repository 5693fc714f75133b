"""What the tests of commands over a cluster's transactions share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dualwrite.cli import main
from dualwrite.devcluster import DevCluster
from fixtures import json_pages
from fixtures.broker import started

Run = Callable[..., tuple[int, str, str]]
JsonOf = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def trusting() -> Iterator[DevCluster]:
    """A broker that accepts transactional batches without asking the coordinator."""
    with started(config={"transaction.partition.verification.enable": "false"}) as cluster:
        yield cluster


@pytest.fixture
def environment(trusting: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", trusting.bootstrap_servers)
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
