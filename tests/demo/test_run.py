"""The demo as users run it: real broker, real database, real kills."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka.admin import AdminClient
from rich.console import Console
from sqlalchemy import create_engine, inspect

from dualwrite.cli import main
from dualwrite.demo import flights, supervisor
from dualwrite.demo.run import run_demo
from dualwrite.demo.screen import Screen
from dualwrite.demo.supervisor import DemoError, Tally
from dualwrite.demo.verdict import Findings
from dualwrite.demo.worker import Options
from dualwrite.devcluster import DevCluster
from dualwrite.errors import MissingDependencyError
from dualwrite.settings import ProducerName
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT, until_received
from fixtures.tables import table
from fixtures.tiers import thinned


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty state directory, without a cluster `default` or anything from an earlier run."""
    place = tmp_path / "state"
    monkeypatch.setenv("DUALWRITE_STATE_DIR", str(place))
    return place


@pytest.fixture
def kafka(broker: DevCluster, state_dir: Path) -> dict[str, Any]:
    return {"bootstrap.servers": broker.bootstrap_servers}


def command(child: psutil.Process) -> list[str]:
    """The command line; empty for a process that has ended, which another test of this pytest worker may have left unreaped."""
    try:
        return child.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    assert not [child for child in psutil.Process().children() if "dualwrite.demo.worker" in command(child)]


def topics(kafka: dict[str, Any]) -> set[str]:
    found = AdminClient({**kafka, "log_level": 4}).list_topics(timeout=LIMIT).topics
    return {name for name in found if name.startswith("departures-")}


@pytest.mark.parametrize(
    ("producer", "pool"),
    thinned(product(["native", "librdkafka"], [False, True]), kept=[], quick=[("native", False), ("native", True)]),
)
def test_both_sides_agree_and_nothing_is_left_behind(
    kafka: dict[str, Any], state_dir: Path, producer: ProducerName, *, pool: bool
) -> None:
    before = topics(kafka)
    verdict = run_demo(Options(departures=300, kills=3, workers=2, producer=producer, kafka=kafka, pool=pool))
    assert verdict.all_agree, verdict.to_json()
    assert verdict.rows == verdict.messages == 300
    assert verdict.tally.kills == 3
    if pool:
        assert verdict.flights_per_commit > 1
    else:
        assert sum(verdict.tally.outcomes.values()) >= 2
    assert topics(kafka) == before
    assert not (state_dir / "demo").exists()


@pytest.mark.soak
def test_naive_runs_without_the_recipe_and_reports_what_it_found(kafka: dict[str, Any]) -> None:
    verdict = run_demo(Options(departures=200, kills=3, naive=True, kafka=kafka))
    assert verdict.tally.kills == 3
    assert verdict.rows == 200
    assert not verdict.tally.outcomes
    findings = verdict.findings
    assert verdict.messages == 200 - len(findings.lost) + len(findings.duplicated)
    assert replace(findings, lost=[], duplicated=[]) == Findings()


@pytest.mark.soak
@pytest.mark.parametrize("pool", [False, True])
def test_more_workers_than_work_and_more_kills_than_transactions(kafka: dict[str, Any], *, pool: bool) -> None:
    verdict = run_demo(Options(departures=1, kills=2, workers=2, kafka=kafka, pool=pool))
    assert verdict.all_agree, verdict.to_json()
    assert verdict.tally.kills == 2


@pytest.mark.soak
def test_command(kafka: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    servers = ["--kafka", kafka["bootstrap.servers"]]
    assert main(["demo", "--departures=30", "--kills=1", *servers]) == 0
    assert "All agree: each of 30 departures" in capsys.readouterr().out
    assert main(["demo", "--departures=10", "--kills=0", *servers, "--json", "--keep", f"--data-dir={tmp_path / 'data'}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["all_agree"] is True
    places = found["places"]
    assert places["topic"] in topics(kafka)
    assert set(inspect(create_engine(places["database"])).get_table_names()) > set(places["tables"].split(", "))
    assert Path(places["logs"]).is_relative_to(tmp_path / "data")


@pytest.mark.slow
def test_disagreement_is_exit_code_1_with_the_next_step(
    kafka: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualwrite.demo.run._content", lambda _: None)
    assert main(["demo", "--departures", "10", "--kills", "0", "--kafka", kafka["bootstrap.servers"]]) == 1
    printed = capsys.readouterr().out
    assert "DISAGREEMENT: 10 lost, 10 phantom." in printed
    database = next(line for line in printed.splitlines() if line.startswith("database: ")).removeprefix("database: sqlite:///")
    assert Path(database).is_file()


@table("option", ["--departures=0", "--kills=-1", "--workers=0", "--workers=33", "--url=mongodb://x", "--naive --pool"])
def test_bad_options(option: str, state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *option.split()]) == 1
    assert "Error: " in capsys.readouterr().err
    assert not state_dir.exists()


def test_missing_flights(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "_PACKAGE", "no_such_package")
    with pytest.raises(MissingDependencyError, match=r"(?s)pip install .*demo"):
        run_demo(Options())
    assert not state_dir.exists()


@pytest.mark.slow
def test_unreachable_kafka(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualwrite.demo.run._ADMIN_TIMEOUT", 1.0)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1\b"):
        run_demo(Options(kafka={"bootstrap.servers": "127.0.0.1:1"}))
    assert not (state_dir / "demo").exists()


@pytest.mark.slow
def test_a_worker_that_always_fails_ends_the_demo_with_its_reason(
    kafka: dict[str, Any], monkeypatch: pytest.MonkeyPatch, state_dir: Path
) -> None:
    monkeypatch.setattr(supervisor, "MAX_ERRORS", 2)
    monkeypatch.setenv("DUALWRITE_FAILPOINTS", "after_begin=raise")
    with pytest.raises(DemoError, match="FailpointError") as caught:
        run_demo(Options(departures=10, kills=0, workers=1, kafka=kafka))
    assert "FailpointError" in caught.value.log_file.read_text()


@pytest.mark.slow
def test_a_worker_that_fails_once_is_in_the_verdict(kafka: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_FAILPOINTS", "after_db_commit#5=exit:7")
    verdict = run_demo(Options(departures=8, kills=0, workers=1, kafka=kafka))
    assert verdict.findings.agree
    assert not verdict.all_agree
    assert verdict.tally.errors == ["worker 0: ended with exit code 7"]
    assert verdict.tally.outcomes["COMMITTED"] == 1


def committed(state_dir: Path) -> list[Any]:
    """A departure that a worker of the demo on SQLite has committed."""
    for file in state_dir.glob("demo/*/demo.db"):
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(file)) as connection:  # the file is being created
            return connection.execute(f"SELECT number FROM dualwrite_demo_{file.parent.name}_departures LIMIT 1").fetchall()
    return []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "option"), list(product([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ["--departures=50000", "--pool"]))
)
def test_ctrl_c_stops_workers_and_broker_and_reports_the_progress(state_dir: Path, number: signal.Signals, option: str) -> None:
    code = "import sys, dualwrite.cli as c; sys.exit(c.main())"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, "demo", "--departures=50000", option],
        env={**os.environ, "DUALWRITE_STATE_DIR": str(state_dir)},
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        until_received(lambda: committed(state_dir), "a departure", seconds=2 * LIMIT, pause=0.1)  # a broker is started first
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        _, told = demo.communicate(timeout=LIMIT)
    assert demo.returncode == 130
    assert "Interrupted after" in told
    assert "Traceback" not in told
    assert len(children) == 1
    assert not any(child.is_running() for child in children)
    assert not [path for path in state_dir.rglob("*") if path.is_file()]


def assert_nothing_is_left(url: str) -> None:
    """Nothing of the demo is in the user's database."""
    with SqlStateStore.from_url(url) as store:
        assert not store.list("demo-")
        assert not store.leases.entries("demo-")
        assert not [name for name in inspect(store.engine).get_table_names() if name.startswith("dualwrite_demo")]


@pytest.mark.soak
@pytest.mark.parametrize(("naive", "pool"), [(False, False), (True, False), (False, True)])
def test_postgresql(kafka: dict[str, Any], postgres_url: str, *, naive: bool, pool: bool) -> None:
    departures = 20_000 if pool else 2000
    verdict = run_demo(Options(departures=departures, kills=20, url=postgres_url, kafka=kafka, naive=naive, pool=pool))
    assert verdict.tally.kills == 20
    if naive:
        assert not verdict.findings.agree
    else:
        assert verdict.all_agree, verdict.to_json()
    assert_nothing_is_left(postgres_url)


class InterruptedAfterTheFirstKill(Screen):
    """Ctrl-C when the second process of a killed worker is starting."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))

    def show(self, tally: Tally, transactions: int) -> None:
        del transactions
        if tally.kills:
            raise KeyboardInterrupt


@pytest.mark.parametrize("pool", thinned([False, True], kept=[True]))
@pytest.mark.soak
def test_ctrl_c_after_a_kill_leaves_nothing_in_the_users_database(
    kafka: dict[str, Any], postgres_url: str, *, pool: bool
) -> None:
    before = topics(kafka)
    with pytest.raises(KeyboardInterrupt):
        run_demo(Options(departures=1000, kills=2, url=postgres_url, kafka=kafka, pool=pool), InterruptedAfterTheFirstKill())
    assert_nothing_is_left(postgres_url)
    assert topics(kafka) == before
