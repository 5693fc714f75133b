"""`dualwrite recover`, `status` and `forget` on a real broker and SQLite."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import dualwrite
from cli.conftest import NOBODY, Scene
from dualwrite.cli import recover
from dualwrite.cli.options import Target
from dualwrite.errors import BrokerUnavailableError, FencedError
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.stores.registry import store_from_url
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, ended
from fixtures.tables import table
from fixtures.terminal import Terminal

LOST = LostTransaction(LostKind.LOST, PreparedTxnState(7, 5, 1000), 0, datetime(2026, 1, 1, tzinfo=UTC))
NOTHING = "Nothing to recover.\n"

_MANY = 40


@pytest.fixture
def scene(recovery_scene: Scene) -> Scene:
    return recovery_scene


@pytest.fixture
def three_lanes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers use three lanes instead of one."""
    monkeypatch.setenv("DUALWRITE_LANES", "3")


@pytest.fixture
def live_writer(scene: Scene) -> Iterator[dualwrite.DualWriter]:
    with dualwrite.connect(transactional_id="live") as writer:
        yield writer


def lose(scene: Scene, *transactional_ids: str, lost: LostTransaction = LOST) -> None:
    """Make rows with a lost transaction, and nothing else to recover."""
    with store_from_url(scene.url) as store:
        for name in transactional_ids:
            claim = store.claim(name, "test", timeout=LIMIT)
            store.record_resolution(claim, Resolution(lost=lost, resolved_generation=0))


def write(scene: Scene, writer: dualwrite.DualWriter) -> None:
    with writer.transaction() as tx:
        tx.send(scene.new_name("topic"), b"mine")


def assert_fenced(writer: dualwrite.DualWriter) -> None:
    with pytest.raises(FencedError), writer.transaction():
        pytest.fail("the block was entered")


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A terminal at which the questions are answered so."""
    terminal = io.StringIO(text)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)


def ids_of(entries: Any) -> list[str]:
    return [one["transactional_id"] for one in entries]


def outcomes_of(report: Any) -> list[list[str]]:
    return [[found["outcome"] for found in one["outcomes"]] for one in report["ids"]]


# --- recover ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failpoint", "outcome", "messages"),
    [("after_db_commit", "COMMITTED", [b"from the crashed writer"]), ("after_prepare", "ABORTED", [])],
)
def test_transactions_of_a_crashed_writer_are_resolved_and_reported(
    scene: Scene, committed: Callable[[str], list[bytes | None]], failpoint: str, outcome: str, messages: list[bytes]
) -> None:
    left = scene.crash(failpoint)
    code, out, _ = scene.call("recover", "--yes")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith(left.name)]
    assert line.split()[1:3] == ["1", outcome]
    assert committed(left.topic) == messages
    assert scene.call("recover")[:2] == (0, NOTHING)


def test_the_id_of_a_live_writer_is_taken_only_after_confirmation(scene: Scene, live_writer: dualwrite.DualWriter) -> None:
    code, out, err = scene.call("recover")
    assert (code, out) == (2, "")
    assert all(words in err for words in ("live", "FencedError", "--yes"))
    write(scene, live_writer)
    scene.ends(0, "recover", "--yes")
    assert_fenced(live_writer)
    live_writer.reopen()
    write(scene, live_writer)


@table(("typed", "code"), [("n\n", 1), ("\n", 1), ("y\n", 0)])
def test_on_a_terminal_the_user_is_asked(
    scene: Scene, live_writer: dualwrite.DualWriter, monkeypatch: pytest.MonkeyPatch, typed: str, code: int
) -> None:
    answer(monkeypatch, typed)
    assert "Recovery claims 1 transactional id: live." in scene.ends(code, "recover", "--id", "live")


def test_a_prefix_and_ids_select_what_is_recovered(scene: Scene, live_writer: dualwrite.DualWriter) -> None:
    assert scene.call("recover", "--prefix", "other")[:2] == (0, NOTHING)
    code, report = scene.document("recover", "--prefix", "li", "--yes")
    assert (code, ids_of(report["ids"]), outcomes_of(report)) == (0, ["live"], [["NOTHING"]])
    assert "not both" in scene.ends(2, "recover", "--prefix", "li", "--id", "live")
    assert "not both" in scene.ends(2, "offsets", "list", "--group", "billing", "--prefix", "b")


@table("command", ["recover", "recover --dry-run", "db move-cluster", "status", "offsets list"])
def test_an_empty_prefix_is_refused(scene: Scene, command: str) -> None:
    """An unset variable of a shell must not mean all ids."""
    code, out, err = scene.call(*command.split(), "--prefix", "")
    assert (code, out) == (2, "")
    assert "must not be empty" in err


def test_an_unknown_id_is_reported_and_the_others_are_recovered(scene: Scene, live_writer: dualwrite.DualWriter) -> None:
    code, out, err = scene.call("recover", "--id", "nobody", "--id", "live", "--yes")
    assert (code, "NOT RECOVERED" in out) == (1, True)
    assert "no such transactional id" in err
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("live")] == [["live", "1", "NOTHING"]]


def test_a_lost_transaction_is_reported_until_acknowledged(scene: Scene) -> None:
    lose(scene, "orders")
    for _ in range(2):
        code, out, _ = scene.call("recover")
        assert (code, "LOST" in out, "7:5 of 1970-01-01T00:00:01Z" in out) == (3, True, True)
    code, report = scene.document("recover")
    lost = {
        "transactional_id": "orders",
        "kind": "LOST",
        "state": "7:5@1000",
        "generation": 0,
        "recorded_at": "2026-01-01T00:00:00+00:00",
        "delivery": None,
        "transactions": 1,
    }
    assert (code, report["unacknowledged"], report["acknowledged"]) == (3, [lost], [])
    assert "Acknowledge 1 transaction," in scene.ends(2, "recover", "--acknowledge")
    code, report = scene.document("recover", "--acknowledge", "--yes")
    assert (code, report["unacknowledged"], report["acknowledged"]) == (0, [], [lost])
    scene.ends(0, "recover")


def test_json_is_printed_even_if_the_acknowledgement_is_not_confirmed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.crash("after_db_commit", "crashed")
    lose(scene, "orders")
    answer(monkeypatch, "y\nn\n")
    code, report = scene.document("recover", "--acknowledge")
    assert (code, outcomes_of(report)) == (1, [["COMMITTED"], []])
    assert (ids_of(report["unacknowledged"]), report["acknowledged"]) == (["orders"], [])


@pytest.mark.parametrize("as_json", [False, True], ids=["as text", "as JSON"])
def test_a_loss_recorded_while_the_question_is_asked_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    lose(scene, "orders")

    def confirm_later(question: str, *, yes: bool) -> None:
        assert "Acknowledge 1 transaction," in question
        lose(scene, "orders", lost=replace(LOST, state=PreparedTxnState(8, 1, 2000)))

    monkeypatch.setattr(recover, "confirm", confirm_later)
    code, out, _ = scene.call("recover", "--acknowledge", *(["--json"] if as_json else []))
    assert code == 3
    if as_json:
        report = json.loads(out)
        states = [[entry["state"] for entry in report[key]] for key in ("acknowledged", "unacknowledged")]
        assert states == [["7:5@1000"], ["8:1@2000"]]
    else:
        assert ["8:1 of 1970-01-01T00:00:02Z" in part for part in out.split("in the meantime")] == [False, True]
    with store_from_url(scene.url) as store:
        row = store.read("orders")
    assert row is not None
    assert [str(entry.state) for entry in row.lost] == ["8:1@2000"]


def test_an_id_is_recovered_with_its_lanes(scene: Scene, committed: Callable[[str], list[bytes | None]]) -> None:
    first = scene.crash("after_db_commit", "orders", transactions=2, lanes=3)
    scene.crash("after_prepare", "orders2", lanes=3)
    lanes = ["orders", "orders~1", "orders~2"]
    assert "Recovery claims 1 transactional id: orders (lanes 0, 1, 2)." in scene.ends(2, "recover", "--id", "orders")
    code, report = scene.document("recover", "--id", "orders", "--yes")
    assert (code, ids_of(report["ids"])) == (0, lanes)
    assert outcomes_of(report) == [["ALREADY_COMMITTED"], ["COMMITTED"], ["NOTHING"]]
    assert committed(first.topic) == [b"from the crashed writer"] * 2
    assert "Recovery claims 1 transactional id: orders2 (lanes 0, 1, 2)." in scene.ends(2, "recover", "--prefix", "orders")
    code, report = scene.document("recover", "--prefix", "orders", "--yes")
    assert (code, ids_of(report["ids"])) == (0, [*lanes, "orders2", "orders2~1", "orders2~2"])
    assert scene.call("recover")[:2] == (0, NOTHING)


def test_one_lane_can_be_recovered(scene: Scene, three_lanes: None, live_writer: dualwrite.DualWriter) -> None:
    assert "live (lane 1)" in scene.ends(2, "recover", "--id", "live~1")
    code, report = scene.document("recover", "--id", "live~1", "--id", "live~1", "--yes")
    assert (code, ids_of(report["ids"])) == (0, ["live~1"])
    with live_writer.transaction():
        pass
    assert_fenced(live_writer)


def test_a_lost_transaction_of_a_lane_is_acknowledged_by_the_id_of_lane_or_writer(scene: Scene) -> None:
    lose(scene, "orders", "orders~1", "orders~2")
    code, report = scene.document("recover", "--id", "orders~1", "--acknowledge", "--yes")
    assert (code, ids_of(report["acknowledged"])) == (0, ["orders~1"])
    code, report = scene.document("recover", "--id", "orders")
    assert (code, ids_of(report["unacknowledged"])) == (3, ["orders", "orders~2"])
    code, report = scene.document("recover", "--id", "orders", "--acknowledge", "--yes")
    assert (code, ids_of(report["acknowledged"])) == (0, ["orders", "orders~2"])


def test_an_invalid_kafka_setting_is_refused(scene: Scene) -> None:
    assert "key=value" in scene.ends(2, "recover", "--kafka-config", "nonsense")
    assert "security.protocol" in scene.ends(1, "recover", "--kafka-config", "security.protocol=TLS")


def test_without_a_database_the_error_says_how_to_give_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALWRITE_DATABASE_URL")
    for command in (["recover"], ["status"], ["forget", "--id", "x", "--yes"]):
        err = scene.ends(2, *command)
        assert "--url" in err
        assert "DUALWRITE_DATABASE_URL" in err


@pytest.mark.slow
def test_recover_shows_its_progress(scene: Scene) -> None:
    """In a terminal; a file or a pipe gets none of it."""
    with store_from_url(scene.url) as store:
        for number in range(_MANY):
            store.acquire_generation(store.claim(f"many-{number:02}", "tests", timeout=LIMIT), ProducerKind.NATIVE_TWO_PHASE)
    terminal = Terminal("recover", "--yes", "--prefix", "many-")
    try:
        terminal.wait_for("transactional id")
        assert terminal.shows("Recovering")
        assert terminal.shows(f"{_MANY}/{_MANY}")
        assert ended(terminal.process) == 0
    finally:
        terminal.close()


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_shows_the_row_and_the_state_in_kafka(scene: Scene, live_writer: dualwrite.DualWriter) -> None:
    write(scene, live_writer)
    lose(scene, "orders")
    code, status = scene.document("status")
    assert (code, status["version"], status["command"], status["error"]) == (3, 1, "status", None)
    (to_do,) = status["to_do"]
    assert (to_do["need"], to_do["next_command"]) == ("gone", "dualwrite recover --id orders --acknowledge"), "no delivery"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS")
        (to_do,) = scene.document("status")[1]["to_do"]
    assert (to_do["need"], to_do["next_command"]) == ("publish", "dualwrite recover --id orders --republish"), "not known"
    live, orders = status["ids"]
    assert (live["transactional_id"], live["generation"], live["resolved_generation"]) == ("live", 1, 0)
    assert live["owner"].startswith("writer ")
    (in_kafka,) = live["kafka"]
    assert live["prepared_state"].startswith(f"{in_kafka['producer_id']}:")
    kafka_id = live["kafka_transactional_id"]
    assert re.fullmatch(r"live#[0-9a-f]{12}\.1", kafka_id)
    assert in_kafka["kafka_transactional_id"] == kafka_id
    assert in_kafka["status"] in ("PrepareCommit", "CompleteCommit")
    assert ([entry["kind"] for entry in orders["lost"]], orders["kafka"][0]["status"]) == (["LOST"], None)
    code, out, _ = scene.call("status", "--prefix", "live", "--wide")
    assert (code, f"{kafka_id}: " in out, live["prepared_state"] in out, "orders" in out) == (0, True, True, False)
    code, out, _ = scene.call("status", "--prefix", "live")
    first, headings, row = out.splitlines()
    assert (code, first) == (0, "1 id in use, nothing to recover.")
    assert headings.split() == ["transactional", "id", "transaction", "used", "by"]
    assert re.fullmatch(r"live +none open +writer \S+ .*", row.rstrip())
    write(scene, live_writer)  # status claimed nothing


def test_status_shows_lanes_below_their_id(scene: Scene, three_lanes: None, live_writer: dualwrite.DualWriter) -> None:
    # "live-2" sorts between "live" and "live~1"; "gone~1" has no lane 0
    lose(scene, "live-2", "gone~1", "live-10")
    code, status = scene.document("status")
    assert (code, ids_of(status["ids"])) == (3, ["gone~1", "live", "live-2", "live-10"])
    assert [ids_of(one["lanes"]) for one in status["ids"]] == [[], ["live~1", "live~2"], [], []]
    live = status["ids"][1]
    store_id = live["kafka_transactional_id"].partition("#")[2].partition(".")[0]
    kafka_ids = [lane["kafka"][0]["kafka_transactional_id"] for lane in live["lanes"]]
    assert kafka_ids == [f"live~1#{store_id}.1", f"live~2#{store_id}.1"]
    lines = scene.call("status", "--wide")[1].splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["gone~1", "live", "~1", "~2", "live-2", "live-10"]
    assert f"{kafka_ids[1]}: " in lines[5]
    lines = scene.call("status")[1].splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["gone~1", "live", "live-2", "live-10"], "idle lanes are not shown"


def test_status_does_not_ask_a_cluster_about_ids_of_another(scene: Scene, live_writer: dualwrite.DualWriter) -> None:
    """It is not said that Kafka does not know them."""
    with store_from_url(scene.url) as store:
        claim = store.claim("elsewhere", "test", timeout=LIMIT)
        store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="another-cluster")
    code, out, err = scene.call("status")
    assert code == 1
    assert re.search(r"^elsewhere +on Kafka cluster another-cluster ", out, re.MULTILINE)
    assert re.search(r"^live .* live#[0-9a-f]{12}\.1: Empty", scene.call("status", "--wide")[1], re.MULTILINE)
    assert re.search(r"^Not on this Kafka cluster \(.+\): elsewhere\.", err, re.MULTILINE)
    code, status = scene.document("status")
    assert code == 1
    assert [(one["transactional_id"], one["kafka"] is None) for one in status["ids"]] == [("elsewhere", True), ("live", False)]
    scene.ends(0, "status", "--prefix", "live")


def test_status_needs_no_kafka(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = scene.call("status", "--prefix", "nobody", "--kafka", NOBODY)  # without ids, Kafka is not asked
    assert (code, "There is no transactional id" in out) == (0, True)
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS")
    code, out, _ = scene.call("status")
    assert (code, "no transactional id in sqlite" in out) == (0, True)
    lose(scene, "orders")
    code, out, _ = scene.call("status", "--prefix", "nope")
    assert code == 0
    assert re.fullmatch(r"There is no transactional id that begins with 'nope' in sqlite.*, but 1 other id\.\n", out)
    code, status = scene.document("status")
    assert (code, status["ids"][0]["kafka"]) == (3, None)


def test_status_shows_the_rows_while_kafka_is_unreachable(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_TIMEOUT_KAFKA", "0.5")
    lose(scene, "orders")
    code, out, err = scene.call("status", "--kafka", NOBODY)
    assert (code, "orders" in out, NOBODY in err) == (1, True, True)


def test_status_shows_what_it_has_read_while_a_broker_is_failing(
    scene: Scene, live_writer: dualwrite.DualWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator may answer while another broker, which must list its transactions, is down."""

    def fail(*_: object, **__: object) -> None:
        raise BrokerUnavailableError("Broker 2 does not answer.")

    monkeypatch.setattr(WireTransactionCoordinator, "list_transactions", fail)
    code, out, err = scene.call("status", "--wide")
    assert code == 1
    assert re.search(r"^live .* live#[0-9a-f]{12}\.1: ", out, re.MULTILINE)
    assert "Could not be read from Kafka: transactions of other databases.\n" in err
    assert "Broker 2" in err
    code, status = scene.document("status")
    assert (code, status["of_other_databases"], status["error"]["kind"]) == (1, None, "BrokerUnavailableError")
    assert status["ids"][0]["kafka"][0]["status"] == "Empty"


def test_status_names_the_command_to_run_next(scene: Scene) -> None:
    scene.crash("after_db_commit", "shop.10")
    scene.crash("after_prepare", "shop.2")
    dualwrite.connect(transactional_id="closed").close()
    typed = ("--url", scene.url, "--kafka", scene.servers)
    scene.ends(0, "status", *typed, "--longer-than", "3600")  # they may be somebody's work
    code, out, _ = scene.call("status", *typed, "--longer-than", "0")
    command = f"dualwrite recover --id shop.2 --id shop.10 --url {scene.url} --kafka {scene.servers}"
    lines = out.splitlines()
    assert (code, lines[0]) == (3, f"2 transactions wait: {command}")
    assert [line.split()[0] for line in lines[2:4]] == ["shop.2", "shop.10"]
    assert "open since 20" in lines[2]
    assert lines[4] == "1 resolved id that nobody uses: see --all."
    assert "closed" in scene.call("status", "--all")[1]
    assert len(scene.call("status", "--problems", "--longer-than", "0")[1].splitlines()) == 4
    scene.ends(0, *command.split()[1:], "--yes")
    scene.ends(0, "status", "--longer-than", "0")


def test_a_password_that_was_typed_is_not_shown_again() -> None:
    secrets = ["sasl.password=secret", "ssl.ca.location=ca"]
    given = Target(url="postgresql://me:secret@db/shop", kafka="b:9092", kafka_config=secrets)
    assert given.command("recover", "--id", "a b") == (
        "dualwrite recover --id 'a b' --url 'postgresql://me:***@db/shop' --kafka b:9092 "
        "--kafka-config 'sasl.password=***' --kafka-config ssl.ca.location=ca"
    )


def test_a_missing_table_is_an_error_that_names_the_command(scene: Scene, tmp_path: Path) -> None:
    assert "dualwrite db upgrade --url" in scene.ends(1, "status", "--url", f"sqlite:///{tmp_path}/empty.db")


# --- db new-store-id --------------------------------------------------------------------------------------------------


def test_the_question_before_a_new_store_id_says_whether_the_database_looks_like_a_copy(scene: Scene, tmp_path: Path) -> None:
    new = ("db", "new-store-id")
    assert "has no store id yet" in scene.ends(2, *new)
    dualwrite.connect(transactional_id="orders").close()
    assert "looks like the original" in scene.ends(2, *new)
    copy = tmp_path / "copy.db"
    original = scene.url.removeprefix("sqlite:///")
    copy.write_bytes(Path(original).read_bytes())
    assert "is a copy or has moved" in scene.ends(2, *new, "--url", f"sqlite:///{copy}")
    copy.rename(original)
    assert "only some of its identifying marks" in scene.ends(2, *new)


# --- forget -----------------------------------------------------------------------------------------------------------


def test_a_resolved_id_can_be_forgotten(scene: Scene) -> None:
    dualwrite.connect(transactional_id="old").close()
    assert "Forget old?" in scene.ends(2, "forget", "--id", "old")
    assert scene.call("forget", "--id", "old", "--yes")[:2] == (0, "old is forgotten; its fencing token is kept.\n")
    assert "no transactional id" in scene.call("status")[1]
    scene.ends(2, "forget", "--yes")  # without an id


def test_an_unresolved_id_is_not_forgotten(scene: Scene, live_writer: dualwrite.DualWriter) -> None:
    assert "live" in scene.ends(1, "forget", "--id", "live", "--yes")
    assert ids_of(scene.document("status")[1]["ids"]) == ["live"]


def test_an_unknown_id_is_not_reported_forgotten(scene: Scene) -> None:
    code, out, err = scene.call("forget", "--id", "nosuch", "--yes")
    assert (code, out) == (1, "")
    assert "no such transactional id" in err
    dualwrite.connect(transactional_id="old").close()
    for _ in range(2):  # forgetting is idempotent
        scene.ends(0, "forget", "--id", "old", "--yes")


def test_a_next_step_can_be_pasted_into_a_shell(scene: Scene) -> None:
    lose(scene, "my orders")
    command = "dualwrite recover --id 'my orders'"
    assert command in scene.ends(1, "forget", "--id", "my orders", "--yes")
    with pytest.raises(dualwrite.LostTransactionError, match=command):
        dualwrite.connect(transactional_id="my orders")


def test_an_id_is_forgotten_with_its_lanes(scene: Scene, three_lanes: None) -> None:
    for name in ("old", "old2"):
        dualwrite.connect(transactional_id=name).close()
    said = "old is forgotten with its 3 lanes; their fencing tokens are kept.\n"
    assert scene.call("forget", "--id", "old", "--yes")[:2] == (0, said)
    assert ids_of(scene.document("status")[1]["ids"]) == ["old2"]
    with store_from_url(scene.url) as store:
        tombstones = [store.read(name) for name in ("old", "old~1", "old~2")]
    assert [(row.forgotten, row.fence) for row in tombstones if row is not None] == [(True, 2)] * 3
    with dualwrite.connect(transactional_id="old") as writer, writer.transaction():
        pass


def test_an_id_with_an_unresolved_lane_is_not_partly_forgotten(scene: Scene, three_lanes: None) -> None:
    dualwrite.connect(transactional_id="old").close()
    lose(scene, "old~1")
    err = scene.ends(1, "forget", "--id", "old", "--yes")
    assert "lane 'old~1'" in err
    assert "dualwrite recover --id old~1 --republish" in err
    assert len(scene.document("status")[1]["ids"][0]["lanes"]) == 2
    scene.ends(0, "recover", "--id", "old~1", "--acknowledge", "--yes")
    scene.ends(0, "forget", "--id", "old", "--yes")


def test_an_id_that_is_being_opened_is_not_forgotten(scene: Scene, three_lanes: None) -> None:
    """The claim has acquired its generations, on which a transaction may be open soon."""
    dualwrite.connect(transactional_id="old").close()

    def forget() -> None:
        err = scene.ends(1, "forget", "--id", "old", "--yes")
        assert "generations 1 to 1 are not resolved" in " ".join(err.split())

    with failpoints.armed("before_take_over", failpoints.only_at(1, forget)):
        dualwrite.connect(transactional_id="old").close()


def test_a_writer_whose_id_was_claimed_and_forgotten_while_it_was_opening_is_fenced(scene: Scene, three_lanes: None) -> None:
    dualwrite.connect(transactional_id="old").close()

    def forget() -> None:
        scene.ends(0, "recover", "--id", "old", "--yes")
        scene.ends(0, "forget", "--id", "old", "--yes")

    with failpoints.armed("before_take_over", failpoints.only_at(1, forget)), pytest.raises(FencedError):
        dualwrite.connect(transactional_id="old")
