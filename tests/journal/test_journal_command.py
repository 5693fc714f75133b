"""`dualwrite journal`: what is in a journal, and publishing it without a pool; and `dualwrite status` of an open one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from crash.databases import Databases
from dualwrite import cli
from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql import SqlStateStore
from journal.journal_scene import DrainScene, message


@pytest.fixture
def at(databases: Databases, broker: DevCluster, tmp_path: Path) -> Iterator[DrainScene]:
    del tmp_path
    scene = databases.scene("sqlite", broker)
    engine = sa.create_engine(scene.url)
    yield DrainScene(scene, SqlStateStore(engine))
    engine.dispose()


def run(at: DrainScene, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = cli.main([*words, "--url", at.scene.url])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


def test_a_journal_is_listed_exported_and_drained(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    at.write(1, 2)
    (listed,) = json.loads(run(at, capsys, "journal", "list", "--json"))["journals"]
    assert (listed["prefix"], listed["gate"], listed["messages"], listed["bytes"]) == (at.prefix, "open", 2, 4)
    assert at.prefix in run(at, capsys, "journal", "list", "--prefix", at.prefix)
    assert "2 messages" in run(at, capsys, "status")
    exported = [json.loads(line) for line in run(at, capsys, "journal", "export", "--prefix", at.prefix).splitlines()]
    assert [(each["topic"], each["value"]) for each in exported] == [(at.scene.topic, "1"), (at.scene.topic, "2")]
    drained = run(at, capsys, "journal", "drain", "--prefix", at.prefix, "--kafka", at.scene.bootstrap)
    assert "it had 2 messages" in drained
    assert not at.gate.is_open
    assert at.published == [message(1), message(2)]
    assert run(at, capsys, "journal", "export", "--prefix", at.prefix) == ""


def test_a_prefix_without_a_journal_is_refused(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["journal", "drain", "--prefix", "nobody", "--url", at.scene.url, "--kafka", at.scene.bootstrap])
    assert code == 2
    assert "nobody" in capsys.readouterr().err
