"""What `abort`, `force-terminate` and `complete` refuse to do, and that they do only what they have shown, on a real broker."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer

import dualwrite
from cli.conftest import Crashed, Scene
from cli.test_repair_commands import DECIDED, NOTHING, place
from crash.retention import delete_records_at
from dualwrite import migration
from dualwrite.admin import DescribedTransaction, TransactionAdmin
from dualwrite.errors import TransactionChangedError
from dualwrite.opening import open_recoverer
from dualwrite.recovery.plan import GenerationPlan, KafkaCheck
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.recovery.report import IdReport, RecoveryReport
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostKind, LostTransaction, Resolution, StateRow
from dualwrite.stores.registry import store_from_url
from fixtures.broker import wait_for_markers
from fixtures.pace import LIMIT
from fixtures.transactions import PRODUCER_ID

AtThePrompt = Callable[[Callable[[], Any]], list[str]]


@pytest.fixture
def other_url(tmp_path: Path) -> str:
    """Another database, with none of the ids."""
    made = f"sqlite:///{tmp_path}/other.db"
    migration.upgrade(made)
    return made


@pytest.fixture
def at_the_prompt(monkeypatch: pytest.MonkeyPatch) -> AtThePrompt:
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


def described(scene: Scene, name: str) -> TransactionDescription:
    with TransactionAdmin(scene.servers) as admin:
        (found,) = admin.describe([name])
    assert found.description is not None
    return found.description


def lose(url: str, name: str, lost: PreparedTxnState) -> None:
    """Make a row with a lost transaction."""
    with store_from_url(url) as store:
        claim = store.claim(name, "test", timeout=LIMIT)
        entry = LostTransaction(LostKind.LOST, lost, 0, datetime(2026, 1, 1, tzinfo=UTC))
        store.record_resolution(claim, Resolution(lost=entry, resolved_generation=0))


# --- what is acted on was shown ---------------------------------------------------------------------------------------


def test_complete_shows_and_names_every_lane(scene: Scene) -> None:
    left = scene.crash("after_db_commit", transactions=2, lanes=3)
    code, out, err = scene.run("complete", left.name, *scene.at)
    assert code == 2
    assert f"Claim {left.name}, {left.name}~1, {left.name}~2, and end the open transactions as shown?" in err
    for shown in out.split("In the database:"):
        assert all(f"{left.name}{lane}#" in shown for lane in ("", "~1", "~2"))
    code, found = scene.json("complete", left.name, *scene.at, "--yes")
    assert code == 0
    assert [(one["transactional_id"], one["outcome"]) for one in found["outcomes"]] == [
        (left.name, "ALREADY_COMMITTED"),
        (f"{left.name}~1", "COMMITTED"),
        (f"{left.name}~2", "NOTHING"),
    ]
    assert scene.committed(left.topic) == 2


def test_force_terminate_refuses_an_id_committed_on_any_lane(scene: Scene) -> None:
    left = scene.crash("after_db_commit", transactions=2, lanes=3)
    scene.refused(0, "complete", left.kafka_id, *scene.at, "--yes")  # lane 0 alone
    err = scene.refused(1, "force-terminate", left.name, "--yes", *scene.at)
    assert DECIDED in err
    assert f"dualwrite recover --id {left.name}~1`" in err
    scene.refused(0, "complete", left.name, *scene.at, "--yes")
    assert scene.committed(left.topic) == 2


def test_an_open_lane_is_found_if_lane_0_is_resolved(scene: Scene) -> None:
    left = scene.crash("after_prepare", transactions=2, lanes=3)
    assert scene.json("complete", left.kafka_id, *scene.at, "--yes")[1]["outcomes"][0]["transactional_id"] == left.name
    assert f"Claim {left.name}~1, {left.name}~2," in scene.refused(2, "force-terminate", left.name, *scene.at)
    code, found = scene.json("force-terminate", left.name, *scene.at, "--yes")
    assert (code, found["outcomes"][0]["outcome"]) == (0, "ABORTED")
    assert scene.run("complete", left.name, *scene.at, "--yes")[1].splitlines()[-1] == NOTHING


def test_a_committed_lane_does_not_prevent_the_abort_of_another(scene: Scene) -> None:
    left = scene.crash("after_prepare", transactions=2, lanes=3)
    code, found = scene.json("force-terminate", left.name, *scene.at, "--yes")
    assert code == 0
    assert [one["outcome"] for one in found["outcomes"]] == ["ALREADY_COMMITTED", "ABORTED", "NOTHING"]
    assert scene.committed(left.topic) == 1


# --- only if it still is as it was shown ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["complete", "force-terminate"])
def test_a_writer_that_reopens_during_the_prompt_continues(scene: Scene, at_the_prompt: AtThePrompt, command: str) -> None:
    left = scene.crash("after_prepare")
    again: list[dualwrite.DualWriter] = []
    asked = at_the_prompt(lambda: again.append(dualwrite.connect(scene.url, transactional_id=left.name)))
    code, out, err = scene.run(command, left.name, *scene.at)
    assert (code, len(asked), "NOT RECOVERED" in out) == (1, 1, True)
    assert "The id is not as it was shown" in err
    with closing(again[0]) as writer, writer.transaction() as tx:
        tx.send(left.topic, "goes on")
    assert scene.committed(left.topic) == 1


@pytest.mark.slow
def test_another_transaction_than_the_one_shown_is_not_ended(scene: Scene, at_the_prompt: AtThePrompt) -> None:
    """The row is as it was: the same owner has gone on."""
    left = scene.crash("after_prepare")
    at_the_prompt(lambda: scene.open(left.kafka_id, left.topic))
    assert "has another transaction open" in scene.refused(1, "force-terminate", left.name, *scene.at)
    scene.producers[0].commit_transaction(LIMIT)
    assert scene.committed(left.topic) == 1


def test_a_claim_between_the_last_check_and_the_claim_of_the_command_wins(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = scene.crash("after_prepare")
    original = KafkaCheck.at
    with open_recoverer(scene.url) as recoverer:
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


def test_an_idle_writer_is_not_fenced(scene: Scene) -> None:
    topic = scene.topic()
    with dualwrite.connect(scene.url, transactional_id=scene.new_name("id")) as writer:
        code, out, _ = scene.run("force-terminate", writer.transactional_id, *scene.at, "--yes")
        assert (code, out.splitlines()[-1]) == (0, NOTHING)
        with writer.transaction() as tx:
            tx.send(topic, "goes on")
    assert scene.committed(topic) == 1


# --- an id of dualwrite's needs its database --------------------------------------------------------------------------


def strayed(scene: Scene) -> tuple[Crashed, str]:
    """A prepared transaction of a writer, and a topic with a batch of its producer that its coordinator does not know."""
    left = scene.crash("after_prepare")
    found = described(scene, left.kafka_id)
    return left, scene.hang(producer_id=found.producer_id, epoch=found.epoch, age_ms=0)


@pytest.mark.slow
def test_abort_asks_for_the_database_of_an_id(scene: Scene, other_url: str) -> None:
    left, topic = strayed(scene)
    where = place(topic, "--yes", "--force")
    assert f"its database was not given. [transactional id {left.kafka_id!r}]" in scene.refused(1, *where)
    assert "the given database does not know it" in scene.refused(1, *where, "--url", other_url)
    scene.refused(0, *where, *scene.at)


@pytest.mark.slow
def test_abort_without_a_database(scene: Scene, tmp_path: Path) -> None:
    _, topic = strayed(scene)
    where = place(topic, "--yes", "--without-database")
    passed = "may have been committed: its coordinator has a later transaction, or one of the same epoch"
    assert passed in scene.refused(1, *where)
    missing = ("--force", "--url", f"sqlite:///{tmp_path}/missing.db")
    assert "dualwrite db upgrade" in scene.refused(2, *place(topic, "--yes"), *missing)
    scene.refused(0, *where, *missing)


def test_an_unreachable_database_is_waived(scene: Scene, tmp_path: Path) -> None:
    left = scene.crash("after_prepare")
    terminate = ("force-terminate", left.kafka_id, "--yes", "--url", f"sqlite:///{tmp_path}/missing/app.db")
    scene.refused(2, *terminate)
    code, out, _ = scene.run(*terminate, "--without-database")
    assert (code, out.splitlines()[-1]) == (0, "Aborted.")
    assert scene.state(left.kafka_id) != "Ongoing"


def test_the_prompt_warns_that_no_database_was_checked(scene: Scene, other_url: str) -> None:
    name, warning = scene.open(), "No dualwrite database was checked (--url)"
    assert warning in scene.refused(2, "force-terminate", name)
    assert warning not in scene.refused(2, "force-terminate", name, "--url", other_url)


# --- what the database does not know ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("later", "why"), [(5, "does not know generation"), (0, "has resolved generation")])
def test_a_transaction_open_on_a_generation_unknown_to_the_database(scene: Scene, later: int, why: str) -> None:
    left = scene.crash("after_prepare")
    scene.refused(0, "complete", left.name, *scene.at, "--yes")
    kafka_id = scene.open(left.row.kafka_id(left.row.generation + later), scene.topic())
    for command in ("complete", "force-terminate"):
        code, out, err = scene.run(command, kafka_id, *scene.at, "--yes")
        assert (code, "Ongoing" in out, NOTHING in out) == (1, True, False)
        assert why in err
        assert "--without-database" in err
    code, out, err = scene.run("force-terminate", kafka_id, *scene.at, "--without-database", "--yes")
    assert (code, err, out.splitlines()[-1]) == (0, "", "Aborted.")
    assert scene.state(kafka_id) != "Ongoing"


def test_what_was_ended_is_shown_if_a_later_id_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    left = scene.crash("after_prepare", transactions=2, lanes=2)
    scene.refused(0, "complete", left.kafka_id, *scene.at, "--yes")  # lane 0 alone
    scene.open(left.kafka_id, scene.topic())

    def refuse(*_: object, **__: object) -> None:
        raise TransactionChangedError("The id is not as it was shown.", transactional_id=left.kafka_id)

    monkeypatch.setattr(TransactionAdmin, "force_terminate", refuse)
    code, found = scene.json("force-terminate", left.name, *scene.at, "--without-database", "--yes")
    assert code == 1
    assert [(one["transactional_id"], one["outcome"]) for one in found["outcomes"]] == [
        (f"{left.name}~1", "ABORTED"),
        (left.kafka_id, None),
    ]
    assert "not as it was shown" in found["outcomes"][1]["error"]


@pytest.mark.slow
def test_a_transaction_committed_in_the_database_is_not_aborted_under_another_id(scene: Scene) -> None:
    """A row that names the transaction wins, whatever the id looks like."""
    name = scene.open()
    found = described(scene, name)
    lose(scene.url, scene.new_name("row"), PreparedTxnState(found.producer_id, found.epoch))
    err = scene.refused(1, "force-terminate", name, *scene.at, "--yes", "--without-database")
    assert "The database has committed the transaction" in err


@pytest.mark.slow
def test_abort_checks_the_database_again(scene: Scene, at_the_prompt: AtThePrompt) -> None:
    """After the question."""
    asked = at_the_prompt(lambda: lose(scene.url, scene.new_name("row"), PreparedTxnState(PRODUCER_ID, 0)))
    assert "The database has committed the transaction" in scene.refused(1, *place(scene.hang(), "--force", *scene.at))
    assert "it may have been committed" in asked[0]


# --- exit codes and next steps ----------------------------------------------------------------------------------------


def test_lost_transactions_are_found(scene: Scene) -> None:
    name = scene.new_name("id")
    lose(scene.url, name, PreparedTxnState(7, 5))
    code, found = scene.json("complete", name, *scene.at, "--yes")
    assert (code, found["outcomes"]) == (1, [])
    (lost,) = found["unacknowledged"]
    assert (lost["transactional_id"], lost["kind"], lost["state"]) == (name, "LOST", "7:5")
    code, out, _ = scene.run("complete", name, *scene.at, "--yes")
    assert (code, "Lost or unverified, not acknowledged:" in out) == (1, True)


@pytest.mark.usefixtures("losses_stay")
def test_a_lost_outcome_is_found(scene: Scene) -> None:
    left = scene.crash("after_db_commit")
    seen = described(scene, left.kafka_id)
    with TransactionAdmin(scene.servers) as admin:
        admin.force_terminate(left.kafka_id, producer_id=seen.producer_id, epoch=seen.epoch)
    assert scene.state(left.kafka_id) != "Ongoing"
    code, found = scene.json("complete", left.name, *scene.at, "--yes")
    assert (code, [one["outcome"] for one in found["outcomes"]]) == (1, ["LOST"])
    assert [one["kind"] for one in found["unacknowledged"]] == ["LOST"]


@pytest.mark.usefixtures("losses_stay")
def test_status_says_whether_the_messages_of_a_lost_transaction_can_be_published_again(scene: Scene) -> None:
    left = scene.crash("after_db_commit")
    seen = described(scene, left.kafka_id)
    with TransactionAdmin(scene.servers) as admin:
        admin.force_terminate(left.kafka_id, producer_id=seen.producer_id, epoch=seen.epoch)
    scene.json("complete", left.name, *scene.at, "--yes")
    wait_for_markers(scene.servers)
    in_log = scene.document("status", "--prefix", left.name, *scene.at)[1]["to_do"]
    delete_records_at(scene.servers, left.topic)
    out = scene.call("status", "--prefix", left.name, *scene.at)[1]
    deleted = scene.document("status", "--prefix", left.name, *scene.at)[1]["to_do"]
    assert [[each["need"] for each in found] for found in (in_log, deleted)] == [["publish"], ["gone"]]
    assert "1 transaction lost for good, to acknowledge" in out


def test_a_successor_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    left = scene.crash("after_prepare")
    report = RecoveryReport((IdReport(left.name, taken_over_by="writer there"),))
    monkeypatch.setattr(Recoverer, "carry_out", lambda *_: report)
    code, found = scene.json("complete", left.name, *scene.at, "--yes")
    (outcome,) = found["outcomes"]
    assert (code, outcome["outcome"], outcome["taken_over_by"]) == (1, None, "writer there")


def test_an_unknown_id(scene: Scene) -> None:
    name = scene.new_name("typo")
    for database in ((), scene.at):
        err = scene.refused(1, "force-terminate", name, "--yes", *database)
        assert "The coordinator does not know this transactional id" in err
        assert "dualwrite transactions list" in err
    assert "`dualwrite status` lists the ids of the database" in scene.refused(1, "complete", name, "--yes", *scene.at)


def test_a_transaction_that_is_being_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    description = TransactionDescription(TransactionStatus.PREPARE_COMMIT, 1, 2, 60_000, 1_000, frozenset({("orders", 0)}))
    monkeypatch.setattr(
        TransactionAdmin, "describe", lambda _, names: [DescribedTransaction(name, 1, description) for name in names]
    )
    err = scene.refused(1, "force-terminate", "id", "--yes")
    assert "its coordinator is ending it: PrepareCommit" in err
    assert "dualwrite transactions describe" in err
