"""`dualwrite transactions of | abort | force-terminate | complete` on a real broker, with and without a database."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cli.conftest import Crash, JsonOf, NewName, Run, committed_count, state_of
from crash.databases import DATABASES
from dualwrite import migration
from dualwrite.cli import main
from dualwrite.devcluster import DevCluster
from fixtures.broker import wait_for_markers
from fixtures.open_transactions import left_open
from fixtures.pace import LIMIT
from fixtures.raw_producer import write_behind_the_coordinator
from fixtures.tiers import thinned

PRODUCER_ID = 4_000_000

every_database = pytest.mark.parametrize(
    "url", thinned(DATABASES, kept=["sqlite", "postgresql", "zookeeper"], quick=["sqlite"]), indirect=True
)


@pytest.fixture
def hanging(trusting_broker: DevCluster, topic: str) -> str:
    """A topic with a hanging transaction."""
    write_behind_the_coordinator(trusting_broker.bootstrap_servers, topic, PRODUCER_ID, 0, int(time.time() * 1000))
    return topic


# --- of ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_transaction_of_a_record(
    trusting_broker: DevCluster, topic: str, run: Run, json_of: JsonOf, new_name: NewName
) -> None:
    name = new_name("id")
    producer = left_open(trusting_broker.bootstrap_servers, name, topic)
    record = ("of", "--topic", topic, "--partition", "0", "--offset", "0")
    code, out, err = run(*record)
    assert (code, err) == (1, "")
    lines = dict(line.split("  ", 1) for line in out.splitlines()[1:])
    assert out.splitlines()[0] == f"The record {topic}-0 at 0:"
    assert lines["Transaction"].strip() == "open"
    assert lines["TransactionalId"].strip() == f"{name} (coordinator: broker 1)"
    code, found = json_of(*record)
    assert (code, found["record"]["ending"], found["record"]["transactional_id"]) == (1, "OPEN", name)
    producer.commit_transaction(LIMIT)
    wait_for_markers(trusting_broker.bootstrap_servers)
    code, found = json_of(*record)
    assert (code, found["record"]["ending"], found["record"]["now"]["state"]) == (0, "COMMITTED", "CompleteCommit")
    code, out, err = run("of", "--topic", topic, "--partition", "0", "--offset", "2")
    assert (code, out) == (2, "")
    assert f"There is no record {topic}-0 at 2" in err


def test_the_transaction_of_a_record_with_the_database(crashed: Crash, url: str, run: Run, json_of: JsonOf) -> None:
    left = crashed("after_db_commit")
    record = ("of", "--topic", left.topic, "--partition", "0", "--offset", "0", "--url", url)
    code, found = json_of(*record)
    assert (code, found["record"]["transactional_id"], found["record"]["database"]["decision"]) == (1, left.kafka_id, "commit")
    assert "the database committed the transaction, and Kafka has it prepared" in run(*record)[1]


# --- abort ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_abort(trusting_broker: DevCluster, hanging: str, run: Run) -> None:
    where = ("abort", "--topic", hanging, "--partition", "0", "--start-offset", "0")
    code, out, err = run(*where, "--yes")
    assert code == 1
    assert "an ACL that denies Describe hides its transactional id" in err
    code, out, err = run(*where, "--force")
    assert code == 2
    assert "no coordinator knows its producer id" in out
    assert "Confirming needs a terminal; without one, add --yes" in err
    code, out, err = run(*where, "--force", "--yes")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Aborted."
    assert run("find-hanging", "--topic", hanging, "--max-transaction-timeout", "0")[0] == 0
    code, out, err = run(*where, "--force", "--yes")
    assert code == 1
    assert "has no such open transaction" in err


@pytest.mark.slow
def test_abort_accepts_the_arguments_of_apaches_tool(hanging: str, json_of: JsonOf) -> None:
    producer = ("--producer-id", str(PRODUCER_ID), "--producer-epoch", "0", "--coordinator-epoch", "0")
    code, found = json_of("abort", "--topic", hanging, "--partition", "0", *producer, "--force", "--yes")
    assert (code, found["aborted"]["reason"], found["aborted"]["producer_id"]) == (0, "UNKNOWN_PRODUCER", PRODUCER_ID)


def test_abort_with_an_incomplete_producer_is_refused(hanging: str, run: Run) -> None:
    code, _, err = run("abort", "--topic", hanging, "--partition", "0", "--producer-id", "1")
    assert code == 2
    assert "--producer-epoch" in err


def test_abort_refuses_a_transaction_that_does_not_hang(
    trusting_broker: DevCluster, topic: str, run: Run, new_name: NewName
) -> None:
    producer = left_open(trusting_broker.bootstrap_servers, new_name("id"), topic)
    code, _, err = run("abort", "--topic", topic, "--partition", "0", "--start-offset", "0", "--yes", "--force")
    assert code == 1
    assert "does not hang: its coordinator will end it" in err
    producer.commit_transaction(LIMIT)
    assert committed_count(trusting_broker, topic) == 1


@pytest.mark.slow
@every_database
def test_abort_refuses_a_transaction_committed_in_the_database(
    trusting_broker: DevCluster, crashed: Crash, topic: str, url: str, run: Run
) -> None:
    """A batch of the prepared transaction's producer on another partition: it hangs, and its records are the database's."""
    left = crashed("after_db_commit")
    prepared = left.row.prepared_state
    assert prepared is not None
    now = int(time.time() * 1000)
    write_behind_the_coordinator(trusting_broker.bootstrap_servers, topic, prepared.producer_id, prepared.epoch, now)
    where = ("abort", "--topic", topic, "--partition", "0", "--start-offset", "0", "--yes", "--url", url)
    code, _, err = run(*where)
    assert code == 1
    assert "The database has committed the transaction" in err
    assert f"dualwrite recover --id {left.name}" in err
    assert run("find-hanging", "--topic", topic, "--max-transaction-timeout", "0")[0] == 1


# --- force-terminate --------------------------------------------------------------------------------------------------


def test_force_terminate(trusting_broker: DevCluster, topic: str, run: Run, json_of: JsonOf, new_name: NewName) -> None:
    name = new_name("id")
    producer = left_open(trusting_broker.bootstrap_servers, name, topic)
    code, out, err = run("force-terminate", name)
    assert code == 2
    assert "Ongoing" in out
    assert f"Abort the transaction of {name} (producer id" in err
    code, out, err = run("force-terminate", name, "--yes")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Aborted."
    wait_for_markers(trusting_broker.bootstrap_servers)
    assert state_of(json_of, name) == "CompleteAbort"
    code, found = json_of("force-terminate", "--transactionalId", name, "--yes")
    assert run("forceTerminateTransaction", "--transactionalId", name, "--yes")[0] == 0
    assert (code, found["outcomes"]) == (0, [])
    assert committed_count(trusting_broker, topic) == 0
    del producer


def test_force_terminate_needs_one_id(run: Run) -> None:
    assert run("force-terminate")[0] == 2
    assert run("force-terminate", "a", "--transactional-id", "b")[0] == 2


def test_force_terminate_refuses_a_committed_transaction(
    trusting_broker: DevCluster, crashed: Crash, url: str, run: Run, json_of: JsonOf
) -> None:
    left = crashed("after_db_commit")
    for given in (left.name, left.kafka_id):
        code, _, err = run("force-terminate", given, "--yes", "--url", url)
        assert code == 1
        assert "the database committed the transaction, and Kafka has it prepared" in err
        assert f"dualwrite recover --id {left.name}" in err
    assert state_of(json_of, left.kafka_id) == "Ongoing"
    code, _, err = run("force-terminate", left.kafka_id, "--yes")
    assert code == 1
    assert "its database was not given" in err
    assert main(["recover", "--yes", "--url", url]) == 0
    assert committed_count(trusting_broker, left.topic) == 1


@every_database
def test_force_terminate_claims_an_id_in_the_database(
    trusting_broker: DevCluster, crashed: Crash, url: str, run: Run, json_of: JsonOf
) -> None:
    left = crashed("after_prepare")
    code, found = json_of("force-terminate", left.kafka_id, "--yes", "--url", url)
    (outcome,) = found["outcomes"]
    assert (code, outcome["transactional_id"], outcome["outcome"]) == (0, left.name, "ABORTED")
    wait_for_markers(trusting_broker.bootstrap_servers)
    assert state_of(json_of, left.kafka_id) == "CompleteAbort"
    assert committed_count(trusting_broker, left.topic) == 0


def test_force_terminate_without_a_database(
    trusting_broker: DevCluster, crashed: Crash, run: Run, json_of: JsonOf, tmp_path: Path
) -> None:
    left = crashed("after_prepare")
    other = f"sqlite:///{tmp_path}/other.db"
    migration.upgrade(other)
    code, _, err = run("force-terminate", left.kafka_id, "--yes", "--url", other)
    assert code == 1
    assert "--without-database" in err
    code, _, err = run("force-terminate", left.kafka_id, "--yes", "--url", other, "--without-database")
    assert (code, err) == (0, "")
    wait_for_markers(trusting_broker.bootstrap_servers)
    assert state_of(json_of, left.kafka_id) == "CompleteAbort"
    assert committed_count(trusting_broker, left.topic) == 0


# --- complete ---------------------------------------------------------------------------------------------------------


@every_database
@pytest.mark.parametrize(
    ("point", "outcome", "messages"), [("after_db_commit", "COMMITTED", 1), ("after_prepare", "ABORTED", 0)]
)
def test_complete(
    trusting_broker: DevCluster, crashed: Crash, url: str, run: Run, json_of: JsonOf, point: str, outcome: str, messages: int
) -> None:
    left = crashed(point)
    code, out, err = run("complete", left.kafka_id, "--url", url)
    assert code == 2
    assert "In the database:" in out
    assert f"Claim {left.name}" in err
    code, found = json_of("complete", left.kafka_id, "--url", url, "--yes")
    (done,) = found["outcomes"]
    assert (code, done["transactional_id"], done["outcome"]) == (0, left.name, outcome)
    assert committed_count(trusting_broker, left.topic) == messages
    code, out, err = run("complete", left.name, "--url", url, "--yes")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "It has no open transaction: nothing to do."


def test_complete_refuses_an_id_unknown_to_the_database(
    trusting_broker: DevCluster, topic: str, url: str, run: Run, new_name: NewName
) -> None:
    name = new_name("id")
    producer = left_open(trusting_broker.bootstrap_servers, name, topic)
    code, _, err = run("complete", name, "--url", url, "--yes")
    assert code == 1
    assert "The database has no such id" in err
    assert run("complete", name)[0] == 2
    del producer


def test_an_unreachable_database(
    trusting_broker: DevCluster, topic: str, run: Run, json_of: JsonOf, new_name: NewName, tmp_path: Path
) -> None:
    name = new_name("id")
    producer = left_open(trusting_broker.bootstrap_servers, name, topic)
    for repair in ("complete", "force-terminate"):
        code, _, err = run(repair, name, "--url", f"sqlite:///{tmp_path}/empty.db", "--yes")
        assert code == 2
        assert "dualwrite db upgrade" in err
    assert state_of(json_of, name) == "Ongoing"
    del producer
