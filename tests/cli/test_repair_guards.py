"""What `abort`, `force-terminate` and `complete` refuse to do, and that they do only what they have shown, on a real broker."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from confluent_kafka import Producer

import dualwrite
from cli.conftest import Crash, Crashed, JsonOf, NewName, Run, committed_count, state_of
from dualwrite import migration
from dualwrite.admin import DescribedTransaction, TransactionAdmin
from dualwrite.api import open_recoverer
from dualwrite.devcluster import DevCluster
from dualwrite.errors import TransactionChangedError
from dualwrite.recovery.plan import GenerationPlan, KafkaCheck
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.recovery.report import IdReport, RecoveryReport
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostKind, LostTransaction, Resolution, StateRow
from dualwrite.stores.registry import store_from_url
from fixtures.broker import wait_for_markers
from fixtures.open_transactions import left_open
from fixtures.pace import LIMIT
from fixtures.raw_producer import write_behind_the_coordinator

PRODUCER_ID = 5_000_000


@pytest.fixture
def other_url(tmp_path: Path) -> str:
    """Another database, with none of the ids."""
    made = f"sqlite:///{tmp_path}/other.db"
    migration.upgrade(made)
    return made


@pytest.fixture
def at_the_prompt(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], list[str]]:
    """Has something happen before the answer to a command's question, which is yes; returns the questions."""
    asked: list[str] = []

    def prepare(happens: Callable[[], Any]) -> list[str]:
        def confirm(question: str, **_: object) -> bool:
            asked.append(question)
            happens()
            return True

        terminal = io.StringIO()
        terminal.isatty = lambda: True  # type: ignore[method-assign]  # an interactive terminal
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(typer, "confirm", confirm)
        return asked

    return prepare


# --- what is acted on was shown ---------------------------------------------------------------------------------------


def test_complete_shows_and_names_every_lane(
    trusting_broker: DevCluster, crashed: Crash, url: str, run: Run, json_of: JsonOf
) -> None:
    left = crashed("after_db_commit", transactions=2, lanes=3)
    code, out, err = run("complete", left.name, "--url", url)
    assert code == 2
    assert f"Claim {left.name}, {left.name}~1, {left.name}~2, and end the open transactions as shown?" in err
    kafka, database = out.split("In the database:")
    for lane in ("", "~1", "~2"):
        assert f"{left.name}{lane}#" in kafka
        assert f"{left.name}{lane}#" in database
    code, found = json_of("complete", left.name, "--url", url, "--yes")
    assert code == 0
    assert [(one["transactional_id"], one["outcome"]) for one in found["outcomes"]] == [
        (left.name, "ALREADY_COMMITTED"),
        (f"{left.name}~1", "COMMITTED"),
        (f"{left.name}~2", "NOTHING"),
    ]
    assert committed_count(trusting_broker, left.topic) == 2


def test_force_terminate_refuses_an_id_committed_on_any_lane(
    trusting_broker: DevCluster, crashed: Crash, url: str, run: Run
) -> None:
    left = crashed("after_db_commit", transactions=2, lanes=3)
    assert run("complete", left.kafka_id, "--url", url, "--yes")[0] == 0  # lane 0 alone
    code, _, err = run("force-terminate", left.name, "--yes", "--url", url)
    assert code == 1
    assert "the database committed the transaction, and Kafka has it prepared" in err
    assert f"dualwrite recover --id {left.name}~1`" in err
    assert run("complete", left.name, "--url", url, "--yes")[0] == 0
    assert committed_count(trusting_broker, left.topic) == 2


def test_an_open_lane_is_found_if_lane_0_is_resolved(crashed: Crash, url: str, run: Run, json_of: JsonOf) -> None:
    left = crashed("after_prepare", transactions=2, lanes=3)
    kafka_id = left.kafka_id
    assert json_of("complete", kafka_id, "--url", url, "--yes")[1]["outcomes"][0]["transactional_id"] == left.name
    code, _, err = run("force-terminate", left.name, "--url", url)
    assert code == 2
    assert f"Claim {left.name}~1, {left.name}~2," in err
    code, found = json_of("force-terminate", left.name, "--url", url, "--yes")
    assert (code, found["outcomes"][0]["outcome"]) == (0, "ABORTED")
    assert run("complete", left.name, "--url", url, "--yes")[1].splitlines()[-1] == "It has no open transaction: nothing to do."


def test_a_committed_lane_does_not_prevent_the_abort_of_another(
    trusting_broker: DevCluster, crashed: Crash, url: str, run: Run, json_of: JsonOf
) -> None:
    left = crashed("after_prepare", transactions=2, lanes=3)
    code, found = json_of("force-terminate", left.name, "--url", url, "--yes")
    assert code == 0
    assert [one["outcome"] for one in found["outcomes"]] == ["ALREADY_COMMITTED", "ABORTED", "NOTHING"]
    assert committed_count(trusting_broker, left.topic) == 1


# --- only if it still is as it was shown ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["complete", "force-terminate"])
def test_a_writer_that_reopens_during_the_prompt_continues(
    trusting_broker: DevCluster,
    crashed: Crash,
    url: str,
    run: Run,
    at_the_prompt: Callable[[Callable[[], Any]], list[str]],
    command: str,
) -> None:
    left = crashed("after_prepare")
    again: list[dualwrite.DualWriter] = []

    def reopen() -> None:
        again.append(dualwrite.connect(url, transactional_id=left.name))

    asked = at_the_prompt(reopen)
    code, out, err = run(command, left.name, "--url", url)
    assert code == 1
    assert len(asked) == 1
    assert "NOT RECOVERED" in out
    assert "The id is not as it was shown" in err
    with closing(again[0]) as writer, writer.transaction() as tx:
        tx.send(left.topic, "goes on")
    assert committed_count(trusting_broker, left.topic) == 1


@pytest.mark.slow
def test_another_transaction_than_the_one_shown_is_not_ended(
    trusting_broker: DevCluster,
    crashed: Crash,
    url: str,
    run: Run,
    json_of: JsonOf,
    at_the_prompt: Callable[[Callable[[], Any]], list[str]],
) -> None:
    """The row is as it was: the same owner has gone on."""
    left = crashed("after_prepare")
    later: list[Producer] = []
    at_the_prompt(lambda: later.append(left_open(trusting_broker.bootstrap_servers, left.kafka_id, left.topic)))
    code, _, err = run("force-terminate", left.name, "--url", url)
    assert code == 1
    assert "has another transaction open" in err
    later[0].commit_transaction(LIMIT)
    assert committed_count(trusting_broker, left.topic) == 1


def test_a_claim_between_the_last_check_and_the_claim_of_the_command_wins(
    crashed: Crash, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = crashed("after_prepare")
    original = KafkaCheck.at
    with open_recoverer(url) as recoverer:
        (plan,) = recoverer.plan_lanes([left.name]).ids

        def at(look: KafkaCheck, row: StateRow) -> tuple[GenerationPlan, ...]:
            found = original(look, row)
            recoverer.store.claim(left.name, "somebody else", timeout=LIMIT)
            return found

        monkeypatch.setattr(KafkaCheck, "at", at)
        (one,) = recoverer.carry_out([plan]).ids
        monkeypatch.undo()
        row = recoverer.store.read(left.name)
    assert isinstance(one.error, TransactionChangedError)
    assert "'somebody else' has claimed it since" in str(one.error)
    assert row is not None
    assert row.owner == "somebody else"


def test_an_idle_writer_is_not_fenced(
    trusting_broker: DevCluster, environment: None, url: str, topic: str, run: Run, new_name: NewName
) -> None:
    with dualwrite.connect(url, transactional_id=new_name("id")) as writer:
        code, out, _ = run("force-terminate", writer.transactional_id, "--url", url, "--yes")
        assert (code, out.splitlines()[-1]) == (0, "It has no open transaction: nothing to do.")
        with writer.transaction() as tx:
            tx.send(topic, "goes on")
    assert committed_count(trusting_broker, topic) == 1


# --- an id of dualwrite's needs its database --------------------------------------------------------------------------


@pytest.fixture
def strayed(trusting_broker: DevCluster, crashed: Crash, topic: str) -> Crashed:
    """A prepared transaction of a writer, and a batch of its producer in another topic that its coordinator does not know."""
    left = crashed("after_prepare")
    with TransactionAdmin(trusting_broker.bootstrap_servers) as admin:
        (found,) = admin.describe([left.kafka_id])
    assert found.description is not None
    servers, now = trusting_broker.bootstrap_servers, int(time.time() * 1000)
    write_behind_the_coordinator(servers, topic, found.description.producer_id, found.description.epoch, now)
    return left


@pytest.mark.slow
def test_abort_asks_for_the_database_of_an_id(strayed: Crashed, topic: str, url: str, other_url: str, run: Run) -> None:
    where = ("abort", "--topic", topic, "--partition", "0", "--start-offset", "0", "--yes", "--force")
    code, _, err = run(*where)
    assert code == 1
    assert f"its database was not given. [transactional id {strayed.kafka_id!r}]" in err
    code, _, err = run(*where, "--url", other_url)
    assert code == 1
    assert "the given database does not know it" in err
    assert run(*where, "--url", url)[0] == 0


@pytest.mark.slow
def test_abort_without_a_database(strayed: Crashed, topic: str, other_url: str, run: Run, tmp_path: Path) -> None:
    where = ("abort", "--topic", topic, "--partition", "0", "--start-offset", "0", "--yes", "--without-database")
    code, _, err = run(*where)
    assert code == 1
    assert "may have been committed: its coordinator has a later transaction, or one of the same epoch" in err
    missing = f"sqlite:///{tmp_path}/missing.db"
    code, _, err = run(*where[:-1], "--force", "--url", missing)
    assert code == 2
    assert "dualwrite db upgrade" in err
    assert run(*where, "--force", "--url", missing)[0] == 0


def test_a_database_that_has_committed_is_not_waived(
    trusting_broker: DevCluster, crashed: Crash, url: str, run: Run, json_of: JsonOf
) -> None:
    left = crashed("after_db_commit")
    code, _, err = run("force-terminate", left.kafka_id, "--yes", "--url", url, "--without-database")
    assert code == 1
    assert "the database committed the transaction, and Kafka has it prepared" in err
    assert state_of(json_of, left.kafka_id) == "Ongoing"
    assert run("complete", left.kafka_id, "--yes", "--url", url)[0] == 0
    assert committed_count(trusting_broker, left.topic) == 1


def test_an_unreachable_database_is_waived(crashed: Crash, run: Run, json_of: JsonOf, tmp_path: Path) -> None:
    left = crashed("after_prepare")
    unreachable = ("--url", f"sqlite:///{tmp_path}/missing/app.db")
    assert run("force-terminate", left.kafka_id, "--yes", *unreachable)[0] == 2
    code, out, _ = run("force-terminate", left.kafka_id, "--yes", *unreachable, "--without-database")
    assert (code, out.splitlines()[-1]) == (0, "Aborted.")
    assert state_of(json_of, left.kafka_id) != "Ongoing"


def test_the_prompt_warns_that_no_database_was_checked(
    trusting_broker: DevCluster, topic: str, run: Run, other_url: str, new_name: NewName
) -> None:
    name = new_name("id")
    producer = left_open(trusting_broker.bootstrap_servers, name, topic)
    warning = "No dualwrite database was checked (--url)"
    assert warning in run("force-terminate", name)[2]
    assert warning not in run("force-terminate", name, "--url", other_url)[2]
    del producer


# --- what the database does not know ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("later", "why"), [(5, "does not know generation"), (0, "has resolved generation")])
def test_a_transaction_open_on_a_generation_unknown_to_the_database(
    trusting_broker: DevCluster, crashed: Crash, url: str, run: Run, json_of: JsonOf, topic: str, later: int, why: str
) -> None:
    left = crashed("after_prepare")
    assert run("complete", left.name, "--url", url, "--yes")[0] == 0
    kafka_id = left.row.kafka_id(left.row.generation + later)
    producer = left_open(trusting_broker.bootstrap_servers, kafka_id, topic)
    for command in ("complete", "force-terminate"):
        code, out, err = run(command, kafka_id, "--url", url, "--yes")
        assert code == 1
        assert "Ongoing" in out
        assert why in err
        assert "It has no open transaction" not in out
        assert "--without-database" in err
    code, out, err = run("force-terminate", kafka_id, "--url", url, "--without-database", "--yes")
    assert (code, err, out.splitlines()[-1]) == (0, "", "Aborted.")
    assert state_of(json_of, kafka_id) != "Ongoing"
    del producer


def test_what_was_ended_is_shown_if_a_later_id_is_refused(
    trusting_broker: DevCluster,
    crashed: Crash,
    url: str,
    called_json: JsonOf,
    run: Run,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = crashed("after_prepare", transactions=2, lanes=2)
    assert run("complete", left.kafka_id, "--url", url, "--yes")[0] == 0  # lane 0 alone
    producer = left_open(trusting_broker.bootstrap_servers, left.kafka_id, topic)

    def refuse(*_: object, **__: object) -> None:
        raise TransactionChangedError("The id is not as it was shown.", transactional_id=left.kafka_id)

    monkeypatch.setattr(TransactionAdmin, "force_terminate", refuse)
    code, found = called_json("transactions", "force-terminate", left.name, "--url", url, "--without-database", "--yes")
    assert code == 1
    assert [(one["transactional_id"], one["outcome"]) for one in found["outcomes"]] == [
        (f"{left.name}~1", "ABORTED"),
        (left.kafka_id, None),
    ]
    assert "not as it was shown" in found["outcomes"][1]["error"]
    del producer


@pytest.mark.slow
def test_a_transaction_committed_in_the_database_is_not_aborted_under_another_id(
    trusting_broker: DevCluster, topic: str, url: str, run: Run, new_name: NewName
) -> None:
    """A row that names the transaction wins, whatever the id looks like."""
    name = new_name("id")
    producer = left_open(trusting_broker.bootstrap_servers, name, topic)
    with TransactionAdmin(trusting_broker.bootstrap_servers) as admin:
        (found,) = admin.describe([name])
    assert found.description is not None
    lose(url, new_name("row"), PreparedTxnState(found.description.producer_id, found.description.epoch))
    code, _, err = run("force-terminate", name, "--url", url, "--yes", "--without-database")
    assert code == 1
    assert "The database has committed the transaction" in err
    del producer


def lose(url: str, name: str, lost: PreparedTxnState) -> None:
    """Make a row with a lost transaction."""
    with store_from_url(url) as store:
        claim = store.claim(name, "test", timeout=LIMIT)
        entry = LostTransaction(LostKind.LOST, lost, 0, datetime(2026, 1, 1, tzinfo=UTC))
        store.record_resolution(claim, Resolution(lost=entry, resolved_generation=0))


# --- everything again after the question ------------------------------------------------------------------------------


@pytest.mark.slow
def test_abort_checks_the_database_again(
    trusting_broker: DevCluster,
    topic: str,
    url: str,
    run: Run,
    new_name: NewName,
    at_the_prompt: Callable[[Callable[[], Any]], list[str]],
) -> None:
    write_behind_the_coordinator(trusting_broker.bootstrap_servers, topic, PRODUCER_ID, 0, int(time.time() * 1000))
    asked = at_the_prompt(lambda: lose(url, new_name("row"), PreparedTxnState(PRODUCER_ID, 0)))
    code, _, err = run("abort", "--topic", topic, "--partition", "0", "--start-offset", "0", "--force", "--url", url)
    assert code == 1
    assert "The database has committed the transaction" in err
    assert "it may have been committed" in asked[0]


# --- exit codes and next steps ----------------------------------------------------------------------------------------


def test_lost_transactions_are_found(url: str, json_of: JsonOf, run: Run, environment: None, new_name: NewName) -> None:
    name = new_name("id")
    lose(url, name, PreparedTxnState(7, 5))
    code, found = json_of("complete", name, "--url", url, "--yes")
    assert (code, found["outcomes"]) == (1, [])
    (lost,) = found["unacknowledged"]
    assert (lost["transactional_id"], lost["kind"], lost["state"]) == (name, "LOST", "7:5")
    code, out, _ = run("complete", name, "--url", url, "--yes")
    assert code == 1
    assert "Lost or unverified, not acknowledged:" in out


def test_a_lost_outcome_is_found(trusting_broker: DevCluster, crashed: Crash, url: str, run: Run, json_of: JsonOf) -> None:
    left = crashed("after_db_commit")
    with TransactionAdmin(trusting_broker.bootstrap_servers) as admin:
        (found,) = admin.describe([left.kafka_id])
        assert found.description is not None
        admin.force_terminate(left.kafka_id, producer_id=found.description.producer_id, epoch=found.description.epoch)
    wait_for_markers(trusting_broker.bootstrap_servers)
    code, found_json = json_of("complete", left.name, "--url", url, "--yes")
    assert (code, [one["outcome"] for one in found_json["outcomes"]]) == (1, ["LOST"])
    assert [one["kind"] for one in found_json["unacknowledged"]] == ["LOST"]


def test_a_successor_is_named(crashed: Crash, url: str, json_of: JsonOf, monkeypatch: pytest.MonkeyPatch) -> None:
    left = crashed("after_prepare")
    report = RecoveryReport((IdReport(left.name, taken_over_by="writer there"),))
    monkeypatch.setattr(Recoverer, "carry_out", lambda *_: report)
    code, found = json_of("complete", left.name, "--url", url, "--yes")
    (outcome,) = found["outcomes"]
    assert (code, outcome["outcome"], outcome["taken_over_by"]) == (1, None, "writer there")


def test_an_unknown_id(run: Run, url: str, new_name: NewName) -> None:
    name = new_name("typo")
    for database in ((), ("--url", url)):
        code, _, err = run("force-terminate", name, "--yes", *database)
        assert code == 1
        assert "The coordinator does not know this transactional id" in err
        assert "dualwrite transactions list" in err
    code, _, err = run("complete", name, "--yes", "--url", url)
    assert code == 1
    assert "`dualwrite status` lists the ids of the database" in err


def test_a_transaction_that_is_being_ended(run: Run, new_name: NewName, monkeypatch: pytest.MonkeyPatch) -> None:
    description = TransactionDescription(TransactionStatus.PREPARE_COMMIT, 1, 2, 60_000, 1_000, frozenset({("orders", 0)}))
    monkeypatch.setattr(
        TransactionAdmin, "describe", lambda _, names: [DescribedTransaction(name, 1, description) for name in names]
    )
    code, _, err = run("force-terminate", new_name("id"), "--yes")
    assert code == 1
    assert "its coordinator is ending it: PrepareCommit" in err
    assert "dualwrite transactions describe" in err


def test_an_id_in_a_next_step_is_quoted(trusting_broker: DevCluster, topic: str, url: str, run: Run, new_name: NewName) -> None:
    name = f"my {new_name('id')}"
    producer = left_open(trusting_broker.bootstrap_servers, name, topic)
    code, _, err = run("complete", name, "--url", url, "--yes")
    assert code == 1
    assert f"`dualwrite transactions force-terminate '{name}'`" in err
    del producer
