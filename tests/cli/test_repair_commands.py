"""`dualwrite transactions of | abort | force-terminate | complete` on a real broker, with and without a database."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cli.conftest import Scene
from crash.databases import DATABASES
from dualwrite.cli import main
from fixtures.broker import wait_for_markers
from fixtures.pace import LIMIT
from fixtures.tiers import thinned
from fixtures.transactions import PRODUCER_ID

DECIDED = "the database committed the transaction, and Kafka has it prepared"
NOTHING = "It has no open transaction: nothing to do."

kinds = pytest.mark.parametrize(
    "url", thinned(DATABASES, kept=["sqlite", "postgresql", "zookeeper"], quick=["sqlite"]), indirect=True
)


def every_database(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test with the scene's database of each kind."""
    return pytest.mark.usefixtures("url")(kinds(test))


def place(topic: str, *more: str) -> tuple[str, ...]:
    """The command that aborts the transaction at the beginning of a topic."""
    return "abort", "--topic", topic, "--partition", "0", "--start-offset", "0", *more


# --- of ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_transaction_of_a_record(scene: Scene) -> None:
    name = scene.open()
    record = ("of", "--topic", name, "--partition", "0", "--offset", "0")
    code, found = scene.json(*record)
    assert (code, found["record"]["ending"], found["record"]["transactional_id"]) == (1, "OPEN", name)
    scene.producers[0].commit_transaction(LIMIT)
    wait_for_markers(scene.servers)
    code, found = scene.json(*record)
    assert (code, found["record"]["ending"], found["record"]["now"]["state"]) == (0, "COMMITTED", "CompleteCommit")
    assert f"There is no record {name}-0 at 2" in scene.refused(2, *record[:-1], "2")


def test_the_transaction_of_a_record_with_the_database(scene: Scene) -> None:
    left = scene.crash("after_db_commit")
    record = ("of", "--topic", left.topic, "--partition", "0", "--offset", "0", *scene.at)
    code, found = scene.json(*record)
    assert (code, found["record"]["transactional_id"], found["record"]["database"]["decision"]) == (1, left.kafka_id, "commit")
    assert DECIDED in scene.run(*record)[1]


# --- abort ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_abort(scene: Scene) -> None:
    topic = scene.hang()
    assert "an ACL that denies Describe hides its transactional id" in scene.refused(1, *place(topic, "--yes"))
    code, out, err = scene.run(*place(topic, "--force"))
    assert (code, "no coordinator knows its producer id" in out) == (2, True)
    assert "Confirming needs a terminal; without one, add --yes" in err
    code, out, err = scene.run(*place(topic, "--force", "--yes"))
    assert (code, err, out.splitlines()[-1]) == (0, "", "Aborted.")
    assert scene.run("find-hanging", "--topic", topic, "--max-transaction-timeout", "0")[0] == 0
    assert "has no such open transaction" in scene.refused(1, *place(topic, "--force", "--yes"))


@pytest.mark.slow
def test_abort_accepts_the_arguments_of_apaches_tool(scene: Scene) -> None:
    where = ("abort", "--topic", scene.hang(), "--partition", "0", "--producer-id", str(PRODUCER_ID))
    assert "--producer-epoch" in scene.refused(2, *where)
    code, found = scene.json(*where, "--producer-epoch", "0", "--coordinator-epoch", "0", "--force", "--yes")
    assert (code, found["aborted"]["reason"], found["aborted"]["producer_id"]) == (0, "UNKNOWN_PRODUCER", PRODUCER_ID)


def test_abort_refuses_a_transaction_that_does_not_hang(scene: Scene) -> None:
    topic = scene.open()
    assert "does not hang: its coordinator will end it" in scene.refused(1, *place(topic, "--yes", "--force"))
    scene.producers[0].commit_transaction(LIMIT)
    assert scene.committed(topic) == 1


@pytest.mark.slow
@every_database
def test_abort_refuses_a_transaction_committed_in_the_database(scene: Scene) -> None:
    """A batch of the prepared transaction's producer on another partition: it hangs, and its records are the database's."""
    left = scene.crash("after_db_commit")
    prepared = left.row.prepared_state
    assert prepared is not None
    topic = scene.hang(producer_id=prepared.producer_id, epoch=prepared.epoch, age_ms=0)
    err = scene.refused(1, *place(topic, "--yes", *scene.at))
    assert "The database has committed the transaction" in err
    assert f"dualwrite recover --id {left.name}" in err
    assert scene.run("find-hanging", "--topic", topic, "--max-transaction-timeout", "0")[0] == 1


# --- force-terminate --------------------------------------------------------------------------------------------------


def test_force_terminate(scene: Scene) -> None:
    name = scene.open()
    code, out, err = scene.run("force-terminate", name)
    assert (code, "Ongoing" in out) == (2, True)
    assert f"Abort the transaction of {name} (producer id" in err
    code, out, err = scene.run("force-terminate", name, "--yes")
    assert (code, err, out.splitlines()[-1]) == (0, "", "Aborted.")
    assert scene.state(name) == "CompleteAbort"
    code, found = scene.json("force-terminate", "--transactionalId", name, "--yes")
    assert (code, found["outcomes"]) == (0, [])
    assert scene.run("forceTerminateTransaction", "--transactionalId", name, "--yes")[0] == 0
    assert scene.committed(name) == 0


def test_force_terminate_needs_one_id(scene: Scene) -> None:
    for given in ((), ("a", "--transactional-id", "b")):
        scene.refused(2, "force-terminate", *given)


def test_force_terminate_refuses_a_committed_transaction(scene: Scene) -> None:
    left = scene.crash("after_db_commit")
    for given in ((left.name,), (left.kafka_id,), (left.kafka_id, "--without-database")):
        err = scene.refused(1, "force-terminate", *given, "--yes", *scene.at)
        assert DECIDED in err
        assert f"dualwrite recover --id {left.name}" in err
    assert scene.state(left.kafka_id) == "Ongoing"
    assert "its database was not given" in scene.refused(1, "force-terminate", left.kafka_id, "--yes")
    assert main(["recover", "--yes", *scene.at]) == 0
    assert scene.committed(left.topic) == 1


@every_database
def test_force_terminate_claims_an_id_in_the_database(scene: Scene) -> None:
    left = scene.crash("after_prepare")
    code, found = scene.json("force-terminate", left.kafka_id, "--yes", *scene.at)
    (outcome,) = found["outcomes"]
    assert (code, outcome["transactional_id"], outcome["outcome"]) == (0, left.name, "ABORTED")
    assert scene.state(left.kafka_id) == "CompleteAbort"
    assert scene.committed(left.topic) == 0


# --- complete ---------------------------------------------------------------------------------------------------------


@every_database
@pytest.mark.parametrize(
    ("point", "outcome", "messages"), [("after_db_commit", "COMMITTED", 1), ("after_prepare", "ABORTED", 0)]
)
def test_complete(scene: Scene, point: str, outcome: str, messages: int) -> None:
    left = scene.crash(point)
    code, out, err = scene.run("complete", left.kafka_id, *scene.at)
    assert (code, "In the database:" in out, f"Claim {left.name}" in err) == (2, True, True)
    code, found = scene.json("complete", left.kafka_id, *scene.at, "--yes")
    (done,) = found["outcomes"]
    assert (code, done["transactional_id"], done["outcome"]) == (0, left.name, outcome)
    assert scene.committed(left.topic) == messages
    code, out, err = scene.run("complete", left.name, *scene.at, "--yes")
    assert (code, err, out.splitlines()[-1]) == (0, "", NOTHING)


def test_complete_refuses_an_id_unknown_to_the_database(scene: Scene) -> None:
    name = scene.open(f"my {scene.new_name('id')}", scene.topic())
    err = scene.refused(1, "complete", name, *scene.at, "--yes")
    assert "The database has no such id" in err
    assert f"`dualwrite transactions force-terminate '{name}'`" in err
    scene.refused(2, "complete", name)
