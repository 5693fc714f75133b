"""`dualwrite transactions` on a real broker: tables, JSON as its page describes it, exit codes, and the database's side."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Crashed, JsonOf, NewName, Run
from dualwrite.cli import main
from dualwrite.cli.tool_options import in_our_order
from dualwrite.devcluster import DevCluster
from dualwrite.recovery import recoverer
from fixtures import json_pages
from fixtures.broker import make_topic, wait_for_markers
from fixtures.open_transactions import left_open
from fixtures.pace import LIMIT
from fixtures.raw_producer import write_behind_the_coordinator

HOUR_MS = 3_600_000


@pytest.fixture
def opened(trusting_broker: DevCluster, new_name: NewName) -> Iterator[str]:
    """An id with an open transaction, an hour old by its message, on the topic of the same name."""
    name = new_name("open")
    make_topic(trusting_broker, name)
    producer = left_open(trusting_broker.bootstrap_servers, name, name, timestamp=int(time.time() * 1000) - HOUR_MS)
    yield name
    producer.abort_transaction(LIMIT)


@pytest.fixture
def hanging(trusting_broker: DevCluster, new_name: NewName) -> str:
    """A topic with a hanging transaction of producer 4000000."""
    topic = new_name("hanging")
    make_topic(trusting_broker, topic)
    write_behind_the_coordinator(trusting_broker.bootstrap_servers, topic, 4_000_000, 0, int(time.time() * 1000) - HOUR_MS)
    return topic


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


# --- list -------------------------------------------------------------------------------------------------------------------


def test_list(opened: str, run: Run, json_of: JsonOf) -> None:
    code, out, err = run("list", "--pattern", opened, "--state", "ongoing")
    assert (code, err) == (0, "")
    headings, row = rows(out)
    assert headings == ["TransactionalId", "ProducerId", "Coordinator", "State"]
    assert (row[0], row[2:]) == (opened, ["1", "Ongoing"])
    code, found = json_of("list", "--transactional-id-pattern", opened)
    assert (code, found["complete"], found["problems"]) == (0, True, [])
    (one,) = found["transactions"]
    assert (one["transactional_id"], str(one["producer_id"]), one["state"]) == (opened, row[1], "Ongoing")
    assert json_of("list", "--producer-id", row[1])[1]["transactions"] == [one]
    assert run("list", "--running-longer-than", "3600")[:2] == (0, "No transactional id was found.\n")


def test_a_row_is_a_line_in_a_pipe(trusting_broker: DevCluster, run: Run, new_name: NewName) -> None:
    """However long an id is."""
    topic = new_name("long")
    make_topic(trusting_broker, topic)
    name = new_name("x" * 300)
    producer = left_open(trusting_broker.bootstrap_servers, name, topic)
    for arguments in (("list", "--pattern", name), ("describe", name)):
        _, row = rows(run(*arguments)[1])
        assert row[0] == name
    producer.abort_transaction(LIMIT)


# --- describe ---------------------------------------------------------------------------------------------------------------


def test_describe(opened: str, run: Run, json_of: JsonOf, new_name: NewName) -> None:
    code, out, err = run("describe", opened)
    assert (code, err) == (0, "")
    headings, row = rows(out)
    assert headings[0] == "TransactionalId"
    assert dict(zip(headings, row, strict=True))["TopicPartitions"] == f"{opened}-0"
    code, found = json_of("describe", "--transactional-id", opened)
    (one,) = found["transactions"]
    assert (code, one["known"], one["state"], one["timeout_ms"]) == (0, True, "Ongoing", 60_000)
    assert one["partitions"] == [{"topic": opened, "partition": 0}]
    assert one["database"] is None
    unknown = new_name("unknown")
    code, out, err = run("describe", opened, unknown)
    assert code == 1
    assert len(rows(out)) == 2
    assert err == f"{unknown}: unknown to its coordinator (broker 1)\n"
    code, found = json_of("describe", unknown)
    assert (code, found["complete"], found["transactions"][0]["known"]) == (1, True, False)


def test_describe_with_the_database(
    trusting_broker: DevCluster,
    opened: str,
    run: Run,
    json_of: JsonOf,
    crashed: Callable[[str], Crashed],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = crashed("after_db_commit")
    name, kafka_id, row = left.name, left.kafka_id, left.row
    monkeypatch.setenv("DUALWRITE_DATABASE_URL", url)
    for given in (name, kafka_id):
        code, found = json_of("describe", given)
        (one,) = found["transactions"]
        assert (code, one["transactional_id"], one["state"]) == (0, kafka_id, "Ongoing")
        database = one["database"]
        assert (database["transactional_id"], database["fence"], database["owner"]) == (name, row.fence, row.owner)
        assert (database["decision"], database["prepared_state"]) == ("commit", str(row.prepared_state))
        assert database["why"] == "the database committed the transaction, and Kafka has it prepared"
    code, out, _ = run("describe", name, opened, "--url", url)
    assert code == 0
    assert "the database committed the transaction" in out
    (line,) = [line for line in out.partition("In the database:")[2].splitlines() if line.startswith(opened)]
    assert "the database has no such id" in line
    assert main(["recover", "--yes"]) == 0
    wait_for_markers(trusting_broker.bootstrap_servers)
    _, found = json_of("describe", kafka_id)
    (one,) = found["transactions"]
    assert one["state"] == "CompleteCommit"
    assert (one["database"]["decision"], one["database"]["prepared_state"]) == (None, None)


@pytest.mark.slow
def test_the_database_is_compared_with_kafka_once(
    json_of: JsonOf, called_json: JsonOf, crashed: Callable[[str], Crashed], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each id."""
    left = [crashed("after_db_commit") for _ in range(3)]
    looks = []
    real = recoverer.KafkaCheck

    def counted(*arguments: Any, **options: Any) -> Any:
        looks.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(recoverer, "KafkaCheck", counted)
    _, found = json_of("describe", *(one.name for one in left), "--url", url)
    assert [one["database"]["decision"] for one in found["transactions"]] == ["commit"] * 3
    assert len(looks) == 1
    _, found = called_json("stuck", "--longer-than", "0", "--url", url)
    decided = {one["topic"]: one["database"]["decision"] for one in found["stuck"] if one["topic"] in {o.topic for o in left}}
    assert decided == {one.topic: "commit" for one in left}
    assert len(looks) == 2


def test_what_kafka_knows_is_shown_without_the_database(opened: str, json_of: JsonOf, run: Run, tmp_path: Path) -> None:
    empty = f"sqlite:///{tmp_path}/empty.db"
    code, found = json_of("describe", opened, "--url", empty)
    (one,) = found["transactions"]
    assert (code, one["state"], one["database"]["error"]["kind"]) == (1, "Ongoing", "StateTableMissingError")
    code, out, err = run("describe", opened, "--url", empty)
    assert code == 1
    assert "Ongoing" in out
    assert "dualwrite db upgrade" in err


# --- describe-producers -----------------------------------------------------------------------------------------------------


def test_describe_producers(opened: str, run: Run, json_of: JsonOf, new_name: NewName) -> None:
    code, out, err = run("describe-producers", "--topic", opened, "--partition", "0", "--broker-id", "1")
    assert (code, err) == (0, "")
    headings, row = rows(out)
    assert headings[:4] == ["Partition", "ProducerId", "ProducerEpoch", "StartOffset"]
    assert (row[0], row[2:4]) == ("0", ["0", "0"])
    code, found = json_of("describe-producers", "--topic", opened)
    (one,) = found["partitions"]
    (producer,) = one["producers"]
    assert (code, producer["transaction_start_offset"], str(producer["producer_id"])) == (0, 0, row[1])
    assert producer["age_ms"] >= HOUR_MS
    missing = new_name("missing")
    code, found = json_of("describe-producers", "--topic", missing)
    assert (code, found["complete"], found["partitions"][0]["error"]["code"]) == (1, False, "UNKNOWN_TOPIC_OR_PARTITION")
    code, out, err = run("describe-producers", "--topic", missing)
    assert (code, out) == (1, "")
    assert f"There is no topic '{missing}'" in err


def test_an_unreachable_broker(opened: str, run: Run) -> None:
    """Not an empty answer."""
    for command in ("describe-producers", "find-hanging"):
        code, out, err = run(command, "--topic", opened, "--broker", "9")
        assert (code, out) == (2, "")
        assert "There is no broker 9." in err
        assert "choose one of the brokers 1" in err


# --- find-hanging -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_find_hanging(opened: str, hanging: str, run: Run, json_of: JsonOf) -> None:
    code, out, err = run("find-hanging", "--topic", hanging)
    assert (code, err) == (1, "")
    headings, row, _ = rows(out)
    assert headings[:4] == ["Topic", "Partition", "ProducerId", "ProducerEpoch"]
    assert row[:5] == [hanging, "0", "4000000", "0", "0"]
    assert out.splitlines()[1].rstrip().endswith("no coordinator knows its producer id")
    assert out.splitlines()[2] == "Searched 1 partition with 1 open transaction; examined those older than 1200 s."
    code, found = json_of("find-hanging", "--broker", "1", "--max-transaction-timeout", "15")
    assert (code, found["complete"], found["limit_ms"]) == (1, True, 900_000)
    by_topic = {one["topic"]: one for one in found["hanging"]}
    assert opened not in by_topic
    assert (by_topic[hanging]["reason"], by_topic[hanging]["transaction_start_offset"]) == ("UNKNOWN_PRODUCER", 0)
    code, out, err = run("find-hanging", "--topic", opened)
    assert (code, err) == (0, "")
    assert out.startswith("No hanging transaction was found.\nSearched 1 partition with 1 open transaction")


def test_find_hanging_in_a_missing_topic_or_broker(json_of: JsonOf, new_name: NewName) -> None:
    code, found = json_of("find-hanging", "--topic", new_name("missing"))
    assert (code, found["complete"], found["hanging"]) == (1, False, [])
    assert found["unreadable"][0]["error"]["kind"] == "UnknownTopicError"


# --- as with Apache's tool --------------------------------------------------------------------------------------------------


def test_apaches_command_line(opened: str, run: Run, trusting_broker: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS")
    before = ("--bootstrap-server", trusting_broker.bootstrap_servers)
    assert opened in run(*before, "list", "--transactional-id-pattern", opened)[1]
    assert opened in run(*before, "--json", "describe", "--transactional-id", opened)[1]
    code, _, err = run("--yes", *before, "--without-database", "force-terminate", "no-such-id")
    assert (code, "does not know this transactional id" in err) == (1, True)
    code, out, _ = run(*before, "list", "--pattern", opened, "--duration-filter", "3600000")
    assert (code, out) == (0, "No transactional id was found.\n")
    assert opened in run(*before, "list", "--pattern", opened, "--duration-filter", "-1")[1]


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
def test_wrong_usage_and_an_unreachable_cluster_end_with_2(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    code, out, err = run(*arguments, "--json")
    assert code == 2
    assert message in err
    document = json.loads(out)
    json_pages.check_error(document)
    assert message.split("'", maxsplit=1)[0] in document["error"]["message"]


@pytest.mark.parametrize("arguments", [["transactions", "describe", "id"], ["transactions", "list"], ["stuck"], ["watch"]])
def test_an_invalid_setting_of_the_environment_is_a_usage_error(
    called: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_TIMEOUT_CLAIM", "soon")
    code, out, err = called(*arguments)
    if arguments != ["watch"]:  # which has no terminal here
        assert "DUALWRITE_TIMEOUT_CLAIM" in err
    assert (code, out) == (2, "")


def test_a_refusal_with_json_is_a_document(opened: str, run: Run) -> None:
    code, out, err = run("abort", "--topic", opened, "--partition", "0", "--start-offset", "0", "--yes", "--json")
    document = json.loads(out)
    json_pages.check_error(document)
    assert (code, document["error"]["kind"]) == (1, "RepairRefusedError")
    code, out, err = run("force-terminate", opened, "--json")
    assert (code, json.loads(out)["error"]["kind"]) == (2, "UsageError")
    assert "add --yes" in err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["list", "describe", "describe-producers", "find-hanging"])
def test_every_documented_field_is_present(opened: str, hanging: str, run: Run, command: str) -> None:
    """Those of errors and the database are compared above, of brokers that are down and of missing ACLs in tests/kafka."""
    arguments = {"describe": [opened], "describe-producers": ["--topic", opened], "find-hanging": ["--topic", hanging]}
    seen = json_pages.check(command, json.loads(run(command, *arguments.get(command, []), "--json")[1]))
    always = {path for path, (_, may_be_null) in json_pages.schema_of(command).items() if not may_be_null}
    elsewhere = re.compile(r"problems|hidden|undecided|unreadable|.*(error|database)\b")
    assert [path for path in always - seen if not elsewhere.match(path)] == []
