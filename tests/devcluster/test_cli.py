"""`dualwrite dev`, called by a person or a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dualwrite.cli import main
from dualwrite.devcluster.registry import plan
from fixtures.tables import table


@pytest.mark.slow
def test_a_cluster_from_the_command_line(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dev", "up", "--name", "c", "--config", "num.partitions=3"]) == 0
    assert "c: Kafka" in capsys.readouterr().out
    assert main(["dev", "status", "--name", "c", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (status,) = found["clusters"]
    assert (found["version"], found["command"]) == (1, "dev status")
    assert status["ready"]
    assert status["bootstrap_servers"].startswith("127.0.0.1:")
    assert status["nodes"][0]["alive"]
    assert main(["dev", "status", "--all", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["clusters"]] == ["c"]
    assert main(["dev", "logs", "--name", "c", "--lines", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["dev", "up", "--name", "c", "--nodes", "3"]) == 1
    assert "Next step: " in capsys.readouterr().err
    assert main(["dev", "down", "--all", "--purge"]) == 0
    assert not state_dir.exists()


def test_an_error_is_a_short_message_with_exit_code_1(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dev", "status"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Error: There is no cluster 'default'.\nNext step: create it: dualwrite dev up --name default\n"


def test_a_cluster_that_does_not_exist_is_not_reported_as_removed(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dev", "down", "--purge", "--name", "typo"]) == 0
    assert capsys.readouterr().out == "There is no cluster typo.\n"


def test_all_clusters_are_stopped_though_the_records_of_some_are_damaged(
    state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        (state_dir / "clusters" / name).mkdir(parents=True)
        (state_dir / "clusters" / name / "cluster.json").write_text("{")
    plan("b", None, {}, None).save(state_dir / "clusters" / "b")
    assert main(["dev", "down", "--all", "--purge"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "Cluster b is removed.\n"
    assert [captured.err.count(f"clusters/{name}/cluster.json can't be read") for name in ("a", "b", "c")] == [1, 0, 1]
    assert captured.err.count("Next step: remove ") == 2
    for name in ("a", "c"):
        (state_dir / "clusters" / name / "cluster.json").unlink()


@table("arguments", ["dev up --config x", "dev nothing", "nothing", "dev up --nodes x"])
def test_wrong_usage_has_exit_code_2(arguments: str, state_dir: Path) -> None:
    assert main(arguments.split()) == 2
    assert not state_dir.exists()


def test_help_lists_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "dev" in capsys.readouterr().out


def test_missing_packages_name_the_pip_command_and_do_not_stop_other_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, extra in (("dualwrite.cli.dev", "dev"), ("typer", "cli")):
        with monkeypatch.context() as missing:
            missing.setitem(sys.modules, module, None)
            assert main(["dev", "status"]) == 1
            assert f'pip install "dualwrite[{extra}]"' in capsys.readouterr().err
            assert extra == "cli" or main(["--version"]) == 0
