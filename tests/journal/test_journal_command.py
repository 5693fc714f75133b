"""`dualwrite journal`: what is in it, and publishing it without a pool; what `status`, `stuck` and `doctor` say of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

import dualwrite
from crash.databases import Databases
from dualwrite import JournalLimits, PoolOptions, cli
from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import drainer_id, journaled_prefix
from fixtures import json_pages
from fixtures.pace import until
from journal.journal_scene import DrainScene, message


@pytest.fixture
def at(databases: Databases, broker: DevCluster, tmp_path: Path) -> Iterator[DrainScene]:
    del tmp_path
    scene = databases.scene("sqlite", broker)
    engine = sa.create_engine(scene.url)
    yield DrainScene(scene, SqlStateStore(engine))
    engine.dispose()


def run(at: DrainScene, capsys: pytest.CaptureFixture[str], *words: str, code: int | None = 0) -> str:
    """What a command prints; `code` is its exit code, or None: it depends on what other tests have left at the broker."""
    found = cli.main([*words, "--url", at.scene.url])
    shown = capsys.readouterr()
    assert code in (None, found), shown.err
    return shown.out or shown.err


def change(at: DrainScene, statement: str) -> None:
    with at.store.engine.begin() as connection:
        connection.execute(sa.text(statement))


def test_a_journal_is_listed_exported_and_drained(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    at.write(1, 2)
    (listed,) = json.loads(run(at, capsys, "journal", "list", "--json"))["journals"]
    assert (listed["prefix"], listed["gate"], listed["messages"], listed["bytes"]) == (at.prefix, "open", 2, 4)
    assert at.prefix in run(at, capsys, "journal", "list", "--prefix", at.prefix)
    assert "2 messages to be published. It waits for Kafka, or a process" in run(at, capsys, "status")
    exported = [json.loads(line) for line in run(at, capsys, "journal", "export", "--prefix", at.prefix).splitlines()]
    assert [(each["topic"], each["value"]) for each in exported] == [(at.scene.topic, "1"), (at.scene.topic, "2")]
    drained = run(at, capsys, "journal", "drain", "--prefix", at.prefix, "--kafka", at.scene.bootstrap)
    assert "it had 2 messages" in drained
    assert not at.gate.is_open
    assert at.published == [message(1), message(2)]
    assert run(at, capsys, "journal", "export", "--prefix", at.prefix) == ""


def test_a_journal_that_can_not_be_drained_is_told_as_such(
    at: DrainScene, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    at.write(1)
    caplog.set_level(logging.DEBUG, "dualwrite")
    change(at, "CREATE TRIGGER keeps BEFORE DELETE ON dualwrite_journal BEGIN SELECT RAISE(ABORT, 'rows are kept'); END")
    options = PoolOptions(when_kafka_is_down="journal")
    with dualwrite.create_pool(at.store, kafka=at.scene.bootstrap, prefix=at.prefix, options=options) as pool:
        until(lambda: at.gate.failure is not None, "the failure is stored")
        for command in (["status"], ["journal", "list"], ["doctor"], ["stuck", "--kafka", at.scene.bootstrap]):
            told = " ".join(run(at, capsys, *command, code=None).split())
            assert "can't be published" in told, command
            assert "rows are kept" in told, command
        (state,) = json.loads(run(at, capsys, "status", "--json", code=3))["journals"]
        assert state["waits_for"] == "failure"
        assert "rows are kept" in state["failure"]
        assert state["next_command"].startswith(f"dualwrite journal drain --prefix {at.prefix}")
        assert pool.check().is_ready  # units go on: they are written into the journal
        until(lambda: bool(told_by(caplog, "DEBUG")), "it was tried again")
        (warning,) = told_by(caplog, "WARNING")
        assert (warning.exc_info, "\n" in warning.getMessage()) == (None, False)
        change(at, "DROP TRIGGER keeps")
        until(lambda: not at.gate.is_open, "the journal's gate closed")
        assert at.gate.failure is None
    assert at.published == [message(1)]


def told_by(caplog: pytest.LogCaptureFixture, level: str) -> list[logging.LogRecord]:
    """The records that say that the journal can't be emptied."""
    return [each for each in caplog.records if each.levelname == level and "can't be emptied" in each.getMessage()]


def test_a_prefix_without_a_journal_is_refused(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["journal", "drain", "--prefix", "nobody", "--url", at.scene.url, "--kafka", at.scene.bootstrap])
    assert code == 2
    assert "nobody" in capsys.readouterr().err


def test_a_journal_that_another_process_publishes_is_left_to_it(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    at.write(1)
    drain = ("journal", "drain", "--prefix", at.prefix, "--kafka", at.scene.bootstrap)
    at.store.leases.acquire([drainer_id(at.prefix)], "a pool on another host", seconds=600)
    refused = run(at, capsys, *drain, code=1)
    assert "is being published by a pool on another host" in refused
    assert at.gate.entries == 1
    shown = json.loads(run(at, capsys, "journal", "list", "--json"))["journals"][0]
    assert shown["published_by"] == "a pool on another host"
    at.store.leases.release([drainer_id(at.prefix)], "a pool on another host")
    run(at, capsys, *drain)
    assert at.published == [message(1)]
    assert all(each.has_ended for each in at.store.leases.entries(drainer_id(at.prefix)))


def test_a_journal_whose_gate_a_process_needs_open_is_drained_and_well(
    at: DrainScene, capsys: pytest.CaptureFixture[str]
) -> None:
    at.write(1, 2)
    at.store.leases.acquire([f"{journaled_prefix(at.prefix)}.1"], "a pool on another host", seconds=600)
    run(at, capsys, "journal", "drain", "--prefix", at.prefix, "--kafka", at.scene.bootstrap)
    assert at.published == [message(1), message(2)]
    assert at.gate.is_open
    (shown,) = json.loads(run(at, capsys, "status", "--json"))["journals"]
    assert (shown["waits_for"], shown["messages"], shown["kept_by"]) == (None, 0, ["a pool on another host"])
    assert "Its pools write into it always (a pool on another host): 0 messages to be" in run(at, capsys, "status")
    assert json.loads(run(at, capsys, "stuck", "--json", "--kafka", at.scene.bootstrap, code=None))["journals"] == []
    assert "waits for" not in run(at, capsys, "journal", "list")
    assert f"journal {at.prefix}" not in run(at, capsys, "doctor", code=None)


def test_an_open_journal_that_nobody_publishes_is_shown(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    at.write(1, 2)
    command = f"dualwrite journal drain --prefix {at.prefix} --url {at.scene.url} --kafka {at.scene.bootstrap}"
    kafka = ("--kafka", at.scene.bootstrap)
    out = run(at, capsys, "stuck", *kafka, code=1)
    assert "It waits for a process to publish it: no pool of its prefix is running." in out
    assert out.endswith(f"Next: {command}\n")
    document = json.loads(run(at, capsys, "stuck", "--json", *kafka, code=1))
    json_pages.check("stuck", document)
    (found,) = document["journals"]
    assert (found["waits_for"], found["next_command"], found["messages"]) == ("publisher", command, 2)
    findings = json.loads(run(at, capsys, "doctor", "--json", *kafka))["findings"]
    (about,) = [each for each in findings if each["about"] == f"journal {at.prefix}"]
    assert (about["severity"], about["change"]) == ("weak", f"dualwrite journal drain --prefix {at.prefix}")
    run(at, capsys, "journal", "drain", "--prefix", at.prefix, *kafka)
    assert json.loads(run(at, capsys, "stuck", "--json", *kafka, code=None))["journals"] == []


def test_a_journal_is_shown_while_kafka_is_down(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    at.write(1)
    down = ("--kafka", "127.0.0.1:9", "--timeout", "0.5")
    assert cli.main(["stuck", *down, "--url", at.scene.url]) == 2
    shown = capsys.readouterr()
    assert "with 1 message to be published. It waits for Kafka, which does not answer." in shown.out
    assert "Error" in shown.err
    findings = json.loads(run(at, capsys, "doctor", "--json", *down, code=1))["findings"]
    assert [each["severity"] for each in findings if each["about"] == f"journal {at.prefix}"] == ["note"]


def test_messages_behind_a_closed_gate_are_found_and_published(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody has changed the table: closing the gate leaves none."""
    at.write(*range(700))  # more than one batch
    change(at, "UPDATE dualwrite_journal_gate SET epoch = epoch + 1")
    findings = json.loads(run(at, capsys, "doctor", "--json", code=1))["findings"]
    assert [each["severity"] for each in findings if each["about"] == f"journal {at.prefix}"] == ["broken"]
    assert "are left in it" in run(at, capsys, "status", code=3)
    run(at, capsys, "journal", "drain", "--prefix", at.prefix, "--kafka", at.scene.bootstrap)
    assert at.published == [message(number) for number in range(700)]
    assert "journal" not in run(at, capsys, "status")


def test_a_journal_waits_for_the_pool_that_is_running(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    at.write(1)
    at.store.leases.acquire([f"{at.prefix}.1", f"{at.prefix}.2"], "pool host:7", seconds=600)
    document = json.loads(run(at, capsys, "stuck", "--kafka", at.scene.bootstrap, "--json", code=1))
    (found,) = document["journals"]
    assert (found["waits_for"], found["pools"], found["next_command"]) == ("pool", ["pool host:7"], None)
    assert "waits for a pool of its prefix (pool host:7)" in run(at, capsys, "stuck", "--kafka", at.scene.bootstrap, code=1)


def test_missing_tables_of_journals_are_reported(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    change(at, "DROP TABLE dualwrite_journal")
    (found,) = [
        each for each in json.loads(run(at, capsys, "doctor", "--json", code=1))["findings"] if each["about"] == "journal"
    ]
    assert (found["severity"], found["change"]) == ("broken", "dualwrite db upgrade")
    assert at.prefix in found["what"]
    change(at, "DROP TABLE dualwrite_journal_gate")
    findings = json.loads(run(at, capsys, "doctor", "--json"))["findings"]
    assert [(each["severity"], each["change"]) for each in findings if each["about"] == "journal"] == [
        ("note", "dualwrite db upgrade, if you want one")
    ]
    run(at, capsys, "stuck", "--kafka", at.scene.bootstrap, code=None)


def test_the_limits_of_who_found_the_gate_open_last_are_shown(at: DrainScene, capsys: pytest.CaptureFixture[str]) -> None:
    at.journal.prepare("other")
    assert at.journal.open("other", "a test", JournalLimits(entries=7, size=3, age=0.5))
    assert not at.journal.open("other", "another one", JournalLimits(entries=2, size=3, age=0.5))
    limits = {each["prefix"]: each["limits"] for each in json.loads(run(at, capsys, "journal", "list", "--json"))["journals"]}
    default = JournalLimits()
    assert limits == {
        "other": {"messages": 2, "bytes": 3, "age_ms": 500},
        at.prefix: {"messages": default.entries, "bytes": default.size, "age_ms": default.age * 1000},
    }


@pytest.mark.slow
def test_a_journal_is_published_on_the_cluster_of_its_prefix_only(
    at: DrainScene, other_broker: DevCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: its entries, and its dead letters. The drainer's ids are new."""
    elsewhere = replace(at.scene, bootstrap=other_broker.bootstrap_servers)
    there, here = ("--kafka", elsewhere.bootstrap), ("--kafka", at.scene.bootstrap)
    with replace(at.scene, transactional_id=f"{at.prefix}.1").connect(at.store):
        pass
    at.write(1)
    change(at, f"UPDATE dualwrite_journal SET topic = 'no topic!' WHERE prefix = '{at.prefix}'")
    at.write(2)
    drain = ("journal", "drain", "--prefix", at.prefix)
    assert f": {at.prefix}.1. Nothing was changed" in run(at, capsys, *drain, *there, code=1)
    assert (at.gate.is_open, at.gate.entries, elsewhere.messages()) == (True, 2, [])
    row = at.store.read(f"{at.prefix}.1")
    assert row is not None
    assert f"It is published only on Kafka cluster {row.cluster_id}." in run(at, capsys, "stuck", *there, code=None)
    run(at, capsys, *drain, *here)
    change(at, f"UPDATE dualwrite_dead_letter SET source_row = replace(source_row, 'no topic!', '{at.scene.topic}')")
    replay = ("journal", "replay", "--prefix", at.prefix, "--all")
    assert "on cluster" in run(at, capsys, *replay, *there, code=1)
    assert (at.published, elsewhere.messages()) == ([message(2)], [])
    assert "Published 1 dead letter" in run(at, capsys, *replay, *here)
    assert at.published == [message(2), message(1)]


def test_messages_that_kafka_has_refused_are_listed_replayed_and_dropped(
    at: DrainScene, capsys: pytest.CaptureFixture[str]
) -> None:
    """The database has no outbox table."""
    at.write(1, 2)
    change(at, f"UPDATE dualwrite_journal SET topic = 'no topic!' WHERE prefix = '{at.prefix}'")
    at.write(3)
    kafka = ("--kafka", at.scene.bootstrap)
    run(at, capsys, "journal", "drain", "--prefix", at.prefix, *kafka)
    assert at.published == [message(3)]
    relay = ("--name", drainer_id(at.prefix))
    findings = json.loads(run(at, capsys, "doctor", "--json"))["findings"]
    (step,) = [each["change"] for each in findings if each["about"] == f"journal {at.prefix}"]
    assert (
        step
        == f"see dualwrite relay dead list --name {drainer_id(at.prefix)}; then dualwrite journal replay --prefix {at.prefix}"
    )
    first, second = json.loads(run(at, capsys, "relay", "dead", "list", "--json", *relay))["letters"]
    assert "no topic!" in run(at, capsys, "relay", "dead", "show", "--letter", str(first["id"]), *relay)
    replay = ("journal", "replay", "--prefix", at.prefix, *kafka)
    run(at, capsys, *replay, "--letter", str(first["id"]), code=1)
    letters = f"UPDATE dualwrite_dead_letter SET source_row = replace(source_row, 'no topic!', '{at.scene.topic}')"
    change(at, letters)
    assert "Published 1 dead letter" in run(at, capsys, *replay, "--letter", str(first["id"]))
    assert at.published == [message(3), message(1)]
    assert "Deleted 1 dead letter" in run(at, capsys, "relay", "dead", "drop", "--letter", str(second["id"]), "--yes", *relay)
    run(at, capsys, *replay, code=2)
    assert "Published 0 dead letters" in run(at, capsys, *replay, "--letter", str(second["id"]))
