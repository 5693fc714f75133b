"""`dualwrite transactions` on a real broker: tables, JSON as its page describes it, exit codes, and the database's side."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Scene
from dualwrite.cli import main
from dualwrite.cli.options import in_our_order
from dualwrite.recovery import recoverer
from fixtures import json_pages
from fixtures.tables import table
from fixtures.transactions import HOUR_MS, PRODUCER_ID


@pytest.fixture
def opened(scene: Scene) -> str:
    """An id with an open transaction, an hour old by its message, on the topic of the same name."""
    return scene.open(timestamp=int(time.time() * 1000) - HOUR_MS)


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


# --- list -------------------------------------------------------------------------------------------------------------------


def test_list(scene: Scene, opened: str) -> None:
    code, found = scene.json("list", "--transactional-id-pattern", opened, "--state", "ongoing")
    assert (code, found["complete"], found["problems"]) == (0, True, [])
    (one,) = found["transactions"]
    assert (one["transactional_id"], one["coordinator"], one["state"]) == (opened, 1, "Ongoing")
    assert scene.json("list", "--producer-id", str(one["producer_id"]))[1]["transactions"] == [one]
    assert scene.run("list", "--running-longer-than", "3600")[:2] == (0, "No transactional id was found.\n")


def test_a_row_is_a_line_in_a_pipe(scene: Scene) -> None:
    """However long an id is."""
    name = scene.open(scene.new_name("x" * 300), scene.topic())
    for arguments in (("list", "--pattern", name), ("describe", name)):
        _, row = rows(scene.run(*arguments)[1])
        assert row[0] == name


# --- describe ---------------------------------------------------------------------------------------------------------------


def test_describe(scene: Scene, opened: str) -> None:
    code, found = scene.json("describe", "--transactional-id", opened)
    (one,) = found["transactions"]
    assert (code, one["known"], one["state"], one["timeout_ms"], one["database"]) == (0, True, "Ongoing", 60_000, None)
    assert one["partitions"] == [{"topic": opened, "partition": 0}]
    unknown = scene.new_name("unknown")
    code, out, err = scene.run("describe", opened, unknown)
    assert (code, len(rows(out)), err) == (1, 2, f"{unknown}: unknown to its coordinator (broker 1)\n")
    code, found = scene.json("describe", unknown)
    assert (code, found["complete"], found["transactions"][0]["known"]) == (1, True, False)


def test_describe_with_the_database(scene: Scene, opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = scene.crash("after_db_commit")
    name, kafka_id, row = left.name, left.kafka_id, left.row
    monkeypatch.setenv("DUALWRITE_DATABASE_URL", scene.url)
    for given in (name, kafka_id):
        code, found = scene.json("describe", given)
        (one,) = found["transactions"]
        assert (code, one["transactional_id"], one["state"]) == (0, kafka_id, "Ongoing")
        database = one["database"]
        assert (database["transactional_id"], database["fence"], database["owner"]) == (name, row.fence, row.owner)
        assert (database["decision"], database["prepared_state"]) == ("commit", str(row.prepared_state))
        assert database["why"] == "the database committed the transaction, and Kafka has it prepared"
    code, out, _ = scene.run("describe", name, opened, *scene.at)
    assert code == 0
    assert "the database committed the transaction" in out
    (line,) = [line for line in out.partition("In the database:")[2].splitlines() if line.startswith(opened)]
    assert "the database has no such id" in line
    assert main(["recover", "--yes"]) == 0
    assert scene.state(kafka_id) == "CompleteCommit"
    (one,) = scene.json("describe", kafka_id)[1]["transactions"]
    assert (one["database"]["decision"], one["database"]["prepared_state"]) == (None, None)


@pytest.mark.slow
def test_the_database_is_compared_with_kafka_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each id."""
    left = [scene.crash("after_db_commit") for _ in range(3)]
    looks = []
    real = recoverer.KafkaCheck

    def counted(*arguments: Any, **options: Any) -> Any:
        looks.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(recoverer, "KafkaCheck", counted)
    _, found = scene.json("describe", *(one.name for one in left), *scene.at)
    assert [one["database"]["decision"] for one in found["transactions"]] == ["commit"] * 3
    assert len(looks) == 1
    _, found = scene.json("stuck", "--longer-than", "0", *scene.at)
    decided = {one["topic"]: one["database"]["decision"] for one in found["stuck"] if one["topic"] in {o.topic for o in left}}
    assert decided == {one.topic: "commit" for one in left}
    assert len(looks) == 2


def test_what_kafka_knows_is_shown_without_the_database(scene: Scene, opened: str, tmp_path: Path) -> None:
    empty = f"sqlite:///{tmp_path}/empty.db"
    code, found = scene.json("describe", opened, "--url", empty)
    (one,) = found["transactions"]
    assert (code, one["state"], one["database"]["error"]["kind"]) == (1, "Ongoing", "StateTableMissingError")
    code, out, err = scene.run("describe", opened, "--url", empty)
    assert (code, "Ongoing" in out, "dualwrite db upgrade" in err) == (1, True, True)


# --- describe-producers -----------------------------------------------------------------------------------------------------


def test_describe_producers(scene: Scene, opened: str) -> None:
    code, found = scene.json("describe-producers", "--topic", opened, "--partition", "0", "--broker-id", "1")
    (one,) = found["partitions"]
    (producer,) = one["producers"]
    assert (code, one["partition"], producer["producer_epoch"], producer["transaction_start_offset"]) == (0, 0, 0, 0)
    assert producer["age_ms"] >= HOUR_MS
    missing = scene.new_name("missing")
    code, found = scene.json("describe-producers", "--topic", missing)
    assert (code, found["complete"], found["partitions"][0]["error"]["code"]) == (1, False, "UNKNOWN_TOPIC_OR_PARTITION")
    code, out, err = scene.run("describe-producers", "--topic", missing)
    assert (code, out) == (1, "")
    assert f"There is no topic '{missing}'" in err


def test_an_unreachable_broker(scene: Scene, opened: str) -> None:
    """Not an empty answer."""
    for command in ("describe-producers", "find-hanging"):
        code, out, err = scene.run(command, "--topic", opened, "--broker", "9")
        assert (code, out) == (2, "")
        assert "There is no broker 9." in err
        assert "choose one of the brokers 1" in err


# --- find-hanging -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_find_hanging(scene: Scene, opened: str) -> None:
    hanging = scene.hang()
    code, found = scene.json("find-hanging", "--broker", "1", "--max-transaction-timeout", "15")
    assert (code, found["complete"], found["limit_ms"]) == (1, True, 900_000)
    by_topic = {one["topic"]: one for one in found["hanging"]}
    assert opened not in by_topic
    found = by_topic[hanging]
    assert (found["reason"], found["producer_id"], found["transaction_start_offset"]) == ("UNKNOWN_PRODUCER", PRODUCER_ID, 0)
    code, out, err = scene.run("find-hanging", "--topic", opened)
    assert (code, err) == (0, "")
    assert out.startswith("No hanging transaction was found.\nSearched 1 partition with 1 open transaction")


def test_find_hanging_in_a_missing_topic(scene: Scene) -> None:
    code, found = scene.json("find-hanging", "--topic", scene.new_name("missing"))
    assert (code, found["complete"], found["hanging"]) == (1, False, [])
    assert found["unreadable"][0]["error"]["kind"] == "UnknownTopicError"


# --- as with Apache's tool --------------------------------------------------------------------------------------------------


def test_apaches_command_line(scene: Scene, opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS")
    before = ("--bootstrap-server", scene.servers)
    assert opened in scene.run(*before, "list", "--transactional-id-pattern", opened)[1]
    assert opened in scene.run(*before, "--json", "describe", "--transactional-id", opened)[1]
    err = scene.refused(1, "--yes", *before, "--without-database", "force-terminate", "no-such-id")
    assert "does not know this transactional id" in err
    code, out, _ = scene.run(*before, "list", "--pattern", opened, "--duration-filter", "3600000")
    assert (code, out) == (0, "No transactional id was found.\n")
    assert opened in scene.run(*before, "list", "--pattern", opened, "--duration-filter", "-1")[1]


@table(
    ("given", "ours"),
    [
        ("--bootstrap-server x list --state y", "list --bootstrap-server x --state y"),
        ("--bootstrap-server=x --json list", "list --bootstrap-server=x --json"),
        ("list --kafka x", "list --kafka x"),
        ("--kafka list describe id", "describe --kafka list id"),
        ("--help", "--help"),
        ("--kafka x unknown", "--kafka x unknown"),
        ("", ""),
    ],
)
def test_options_before_the_command(given: str, ours: str) -> None:
    assert in_our_order(given.split(), {"list", "describe"}) == ours.split()


# --- usage ------------------------------------------------------------------------------------------------------------------


@table(
    ("arguments", "message"),
    [
        (["list", "--state", "Opened"], "'Opened' is not a transaction state"),
        (["list", "--kafka", "127.0.0.1:1", "--timeout", "0.5"], "No Kafka broker can be reached"),
        (["describe"], "at least one transactional id"),
        (["find-hanging", "--partition", "0"], "without a topic"),
        (["describe-producers"], "--topic"),
        (["find-hanging", "--broker", "9"], "There is no broker 9."),
    ],
)
def test_wrong_usage_and_an_unreachable_cluster_end_with_2(scene: Scene, arguments: list[str], message: str) -> None:
    code, out, err = scene.run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    code, out, err = scene.run(*arguments, "--json")
    assert (code, message in err) == (2, True)
    document = json.loads(out)
    json_pages.check_error(document)
    assert message.split("'", maxsplit=1)[0] in document["error"]["message"]


@table("command", ["transactions describe id", "transactions list", "stuck"])
def test_an_invalid_setting_of_the_environment_is_a_usage_error(
    scene: Scene, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_TIMEOUT_CLAIM", "soon")
    code, out, err = scene.call(*command.split())
    assert (code, out) == (2, "")
    assert "DUALWRITE_TIMEOUT_CLAIM" in err


def test_a_refusal_with_json_is_a_document(scene: Scene, opened: str) -> None:
    code, out, err = scene.run("abort", "--topic", opened, "--partition", "0", "--start-offset", "0", "--yes", "--json")
    document = json.loads(out)
    json_pages.check_error(document)
    assert (code, document["error"]["kind"]) == (1, "RepairRefusedError")
    code, out, err = scene.run("force-terminate", opened, "--json")
    assert (code, json.loads(out)["error"]["kind"]) == (2, "UsageError")
    assert "add --yes" in err


@pytest.mark.slow
def test_every_documented_field_is_present(scene: Scene, opened: str) -> None:
    """Those of errors and the database are compared above, of brokers that are down and of missing ACLs in tests/kafka."""
    elsewhere = re.compile(r"problems|hidden|undecided|unreadable|.*(error|database)\b")
    for arguments in (
        ("list",),
        ("describe", opened),
        ("describe-producers", "--topic", opened),
        ("find-hanging", "--topic", scene.hang()),
    ):
        seen = json_pages.check(arguments[0], json.loads(scene.run(*arguments, "--json")[1]))
        always = {path for path, (_, may_be_null) in json_pages.schema_of(arguments[0]).items() if not may_be_null}
        assert [path for path in always - seen if not elsewhere.match(path)] == []
