"""`dualwrite recover`, `status` and `forget` on a real broker and SQLite."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import dualwrite
from dualwrite.cli import recover
from dualwrite.cli.options import Target
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError, FencedError
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.stores.registry import store_from_url
from dualwrite.testing import failpoints
from fixtures.command import output_of
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, ended
from fixtures.terminal import Terminal

LOST = LostTransaction(LostKind.LOST, PreparedTxnState(7, 5, 1000), 0, datetime(2026, 1, 1, tzinfo=UTC))

_MANY = 40


@dataclass
class Scene:
    """A database with the table, a broker, and an environment that names both."""

    url: str
    broker: DevCluster

    def crash(self, transactional_id: str, topic: str, failpoint: str, transactions: int = 1) -> None:
        """Run a writer in its own process; it exits at the failpoint, in its last transaction."""
        arguments = [transactional_id, topic, str(transactions)]
        with ForkedProcess("cli.crashing_writer", arguments, failpoints=f"{failpoint}#{transactions}=exit") as process:
            assert ended(process) == failpoints.EXIT_CODE

    def lose(self, transactional_id: str) -> None:
        """Make a row with a lost transaction, and nothing else to recover."""
        with store_from_url(self.url) as store:
            claim = store.claim(transactional_id, "test", timeout=LIMIT)
            store.record_resolution(claim, Resolution(lost=LOST, resolved_generation=0))


@pytest.fixture
def scene(broker: DevCluster, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("DUALWRITE_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    monkeypatch.setenv("DUALWRITE_LANES", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal
    return Scene(sqlite_url, broker)


@pytest.fixture
def three_lanes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scene's writers use three lanes instead of one."""
    monkeypatch.setenv("DUALWRITE_LANES", "3")


@pytest.fixture
def live_writer(scene: Scene) -> Iterator[dualwrite.DualWriter]:
    with dualwrite.connect(transactional_id="live") as writer:
        yield writer


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code, out, _ = output_of(capsys, *arguments, "--json")
    return code, json.loads(out)


# --- recover ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failpoint", "outcome", "messages"),
    [("after_db_commit", "COMMITTED", [b"from the crashed writer"]), ("after_prepare", "ABORTED", [])],
)
def test_transactions_of_a_crashed_writer_are_resolved_and_reported(
    scene: Scene,
    capsys: pytest.CaptureFixture[str],
    new_name: Callable[[str], str],
    committed: Callable[[str], list[bytes | None]],
    failpoint: str,
    outcome: str,
    messages: list[bytes],
) -> None:
    topic, name = new_name("topic"), new_name("id")
    scene.crash(name, topic, failpoint)
    code, out, _ = output_of(capsys, "recover", "--yes")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith(name)]
    assert line.split()[1:3] == ["1", outcome]
    assert committed(topic) == messages
    code, out, _ = output_of(capsys, "recover")
    assert (code, out) == (0, "Nothing to recover.\n")


def test_the_id_of_a_live_writer_is_taken_only_after_confirmation(
    scene: Scene, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str], new_name: Callable[[str], str]
) -> None:
    code, out, err = output_of(capsys, "recover")
    assert code == 2
    assert out == ""
    assert "live" in err
    assert "FencedError" in err
    assert "--yes" in err
    with live_writer.transaction() as tx:
        tx.send(new_name("topic"), b"still mine")
    assert output_of(capsys, "recover", "--yes")[0] == 0
    with pytest.raises(FencedError), live_writer.transaction():
        pytest.fail("the block was entered")
    live_writer.reopen()
    with live_writer.transaction() as tx:
        tx.send(new_name("topic"), b"mine again")


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_on_a_terminal_the_user_is_asked(
    scene: Scene,
    live_writer: dualwrite.DualWriter,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
) -> None:
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]  # an interactive terminal
    monkeypatch.setattr(sys, "stdin", terminal)
    found, _, err = output_of(capsys, "recover", "--id", "live")
    assert found == code
    assert "Recovery claims 1 transactional id: live." in err


def test_a_prefix_and_ids_select_what_is_recovered(
    scene: Scene, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output_of(capsys, "recover", "--prefix", "other")[:2] == (0, "Nothing to recover.\n")
    code, report = json_of(capsys, "recover", "--prefix", "li", "--yes")
    assert code == 0
    assert [one["transactional_id"] for one in report["ids"]] == ["live"]
    assert [found["outcome"] for found in report["ids"][0]["outcomes"]] == ["NOTHING"]
    code, _, err = output_of(capsys, "recover", "--prefix", "li", "--id", "live")
    assert code == 2
    assert "not both" in err


@pytest.mark.parametrize("command", ["recover", "recover --dry-run", "db move-cluster", "status", "offsets list"])
def test_an_empty_prefix_is_refused(scene: Scene, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """An unset variable of a shell must not mean all ids."""
    code, out, err = output_of(capsys, *command.split(), "--prefix", "")
    assert (code, out) == (2, "")
    assert "must not be empty" in err


def test_without_ids_kafka_is_not_asked(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output_of(capsys, "status", "--prefix", "nobody", "--kafka", "127.0.0.1:1")
    assert code == 0
    assert "There is no transactional id" in out


def test_a_group_and_a_prefix_exclude_each_other(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output_of(capsys, "offsets", "list", "--group", "billing", "--prefix", "b")
    assert code == 2
    assert "not both" in err


def test_an_unknown_id_is_reported_and_the_others_are_recovered(
    scene: Scene, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = output_of(capsys, "recover", "--id", "nobody", "--id", "live", "--yes")
    assert code == 1
    assert "NOT RECOVERED" in out
    assert "no such transactional id" in err
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("live")] == [["live", "1", "NOTHING"]]


def test_a_lost_transaction_is_reported_until_acknowledged(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.lose("orders")
    for _ in range(2):
        code, out, _ = output_of(capsys, "recover")
        assert code == 3
        assert "7:5 of 1970-01-01T00:00:01Z" in out
        assert "LOST" in out
    code, _, err = output_of(capsys, "recover", "--acknowledge")
    assert code == 2
    assert "Acknowledge 1 transaction," in err
    code, report = json_of(capsys, "recover", "--acknowledge", "--yes")
    assert code == 0
    assert report["unacknowledged"] == []
    assert [(entry["transactional_id"], entry["kind"], entry["state"]) for entry in report["acknowledged"]] == [
        ("orders", "LOST", "7:5@1000")
    ]
    assert output_of(capsys, "recover")[0] == 0


def test_json_is_printed_even_if_the_acknowledgement_is_not_confirmed(
    scene: Scene, capsys: pytest.CaptureFixture[str], new_name: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.crash("crashed", new_name("topic"), "after_db_commit")
    scene.lose("orders")
    terminal = io.StringIO("y\nn\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]  # an interactive terminal
    monkeypatch.setattr(sys, "stdin", terminal)
    code, report = json_of(capsys, "recover", "--acknowledge")
    assert code == 1
    assert [found["outcome"] for one in report["ids"] for found in one["outcomes"]] == ["COMMITTED"]
    assert [entry["transactional_id"] for entry in report["unacknowledged"]] == ["orders"]
    assert report["acknowledged"] == []


@pytest.mark.parametrize("as_json", [False, True], ids=["as text", "as JSON"])
def test_a_loss_recorded_while_the_question_is_asked_stays(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    scene.lose("orders")

    def confirm_later(question: str, *, yes: bool) -> None:
        assert "Acknowledge 1 transaction," in question
        with store_from_url(scene.url) as store:
            claim = store.claim("orders", "tests", timeout=LIMIT)
            store.record_resolution(claim, Resolution(lost=replace(LOST, state=PreparedTxnState(8, 1, 2000))))

    monkeypatch.setattr(recover, "confirm", confirm_later)
    code, out, _ = output_of(capsys, "recover", "--acknowledge", *(["--json"] if as_json else []))
    assert code == 3
    acknowledged, left = ("acknowledged", "unacknowledged") if as_json else ("Acknowledged:", "in the meantime")
    if as_json:
        report = json.loads(out)
        assert [[entry["state"] for entry in report[key]] for key in (acknowledged, left)] == [["7:5@1000"], ["8:1@2000"]]
    else:
        assert "8:1 of 1970-01-01T00:00:02Z" in out.split(left)[1]
        assert "8:1 of 1970-01-01T00:00:02Z" not in out.split(left)[0]
    with store_from_url(scene.url) as store:
        row = store.read("orders")
    assert row is not None
    assert [str(entry.state) for entry in row.lost] == ["8:1@2000"]


def test_json_shows_unacknowledged_transactions(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.lose("orders")
    code, report = json_of(capsys, "recover")
    assert code == 3
    assert report["unacknowledged"] == [
        {
            "transactional_id": "orders",
            "kind": "LOST",
            "state": "7:5@1000",
            "generation": 0,
            "recorded_at": "2026-01-01T00:00:00+00:00",
            "delivery": None,
        }
    ]
    assert report["acknowledged"] == []


def test_an_unreachable_broker_is_reported_for_the_id(
    scene: Scene, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_TIMEOUT_KAFKA", "0.5")
    code, out, err = output_of(capsys, "recover", "--kafka", "127.0.0.1:1", "--yes")
    assert code == 1
    assert "NOT RECOVERED" in out
    assert "127.0.0.1:1" in err


def test_an_id_is_recovered_with_its_lanes(
    scene: Scene,
    three_lanes: None,
    capsys: pytest.CaptureFixture[str],
    new_name: Callable[[str], str],
    committed: Callable[[str], list[bytes | None]],
) -> None:
    topic = new_name("topic")
    scene.crash("orders", topic, "after_db_commit", transactions=2)
    scene.crash("orders2", topic, "after_prepare")
    _, _, err = output_of(capsys, "recover", "--id", "orders")
    assert "Recovery claims 1 transactional id: orders (lanes 0, 1, 2)." in err
    code, report = json_of(capsys, "recover", "--id", "orders", "--yes")
    assert code == 0
    assert [one["transactional_id"] for one in report["ids"]] == ["orders", "orders~1", "orders~2"]
    assert [[found["outcome"] for found in one["outcomes"]] for one in report["ids"]] == [
        ["ALREADY_COMMITTED"],
        ["COMMITTED"],
        ["NOTHING"],
    ]
    assert committed(topic) == [b"from the crashed writer"] * 2
    _, _, err = output_of(capsys, "recover", "--prefix", "orders")
    assert "Recovery claims 1 transactional id: orders2 (lanes 0, 1, 2)." in err
    code, report = json_of(capsys, "recover", "--prefix", "orders", "--yes")
    assert code == 0
    assert [one["transactional_id"] for one in report["ids"]] == [
        name for base in ("orders", "orders2") for name in (base, f"{base}~1", f"{base}~2")
    ]
    assert output_of(capsys, "recover")[:2] == (0, "Nothing to recover.\n")


def test_one_lane_can_be_recovered(
    scene: Scene, three_lanes: None, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = output_of(capsys, "recover", "--id", "live~1")
    assert "live (lane 1)" in err
    code, report = json_of(capsys, "recover", "--id", "live~1", "--id", "live~1", "--yes")
    assert code == 0
    assert [one["transactional_id"] for one in report["ids"]] == ["live~1"]
    with live_writer.transaction():
        pass
    with pytest.raises(FencedError), live_writer.transaction():
        pytest.fail("the block was entered")


def test_a_lost_transaction_of_a_lane_is_acknowledged_by_the_id_of_lane_or_writer(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("orders", "orders~1", "orders~2"):
        scene.lose(name)
    code, report = json_of(capsys, "recover", "--id", "orders~1", "--acknowledge", "--yes")
    assert code == 0
    assert [entry["transactional_id"] for entry in report["acknowledged"]] == ["orders~1"]
    code, report = json_of(capsys, "recover", "--id", "orders")
    assert code == 3
    assert [entry["transactional_id"] for entry in report["unacknowledged"]] == ["orders", "orders~2"]
    code, report = json_of(capsys, "recover", "--id", "orders", "--acknowledge", "--yes")
    assert code == 0
    assert [entry["transactional_id"] for entry in report["acknowledged"]] == ["orders", "orders~2"]


def test_an_invalid_kafka_setting_is_refused(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output_of(capsys, "recover", "--kafka-config", "nonsense")
    assert code == 2
    assert "key=value" in err
    code, _, err = output_of(capsys, "recover", "--kafka-config", "security.protocol=TLS")
    assert code == 1
    assert "security.protocol" in err


def test_without_a_database_the_error_says_how_to_give_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DUALWRITE_DATABASE_URL", raising=False)
    for command in (["recover"], ["status"], ["forget", "--id", "x", "--yes"]):
        code, _, err = output_of(capsys, *command)
        assert code == 2
        assert "--url" in err
        assert "DUALWRITE_DATABASE_URL" in err


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_shows_the_row_and_the_state_in_kafka(
    scene: Scene, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str], new_name: Callable[[str], str]
) -> None:
    with live_writer.transaction() as tx:
        tx.send(new_name("topic"), b"v")
    scene.lose("orders")
    code, status = json_of(capsys, "status")
    rows = status["ids"]
    assert (code, status["version"], status["command"], status["error"]) == (3, 1, "status", None)
    (to_do,) = status["to_do"]
    assert (to_do["need"], to_do["next_command"]) == ("acknowledge", "dualwrite recover --id orders --acknowledge")
    live, orders = rows
    assert (live["transactional_id"], live["generation"], live["resolved_generation"]) == ("live", 1, 0)
    assert live["owner"].startswith("writer ")
    assert live["prepared_state"].startswith(f"{live['kafka'][0]['producer_id']}:")
    kafka_id = live["kafka_transactional_id"]
    assert re.fullmatch(r"live#[0-9a-f]{12}\.1", kafka_id)
    assert live["kafka"][0]["kafka_transactional_id"] == kafka_id
    assert live["kafka"][0]["status"] in ("PrepareCommit", "CompleteCommit")
    assert [entry["kind"] for entry in orders["lost"]] == ["LOST"]
    assert orders["kafka"][0]["status"] is None
    code, out, _ = output_of(capsys, "status", "--prefix", "live", "--wide")
    assert code == 0
    assert f"{kafka_id}: " in out
    assert live["prepared_state"] in out
    assert "orders" not in out
    code, out, _ = output_of(capsys, "status", "--prefix", "live")
    first, headings, row = out.splitlines()
    assert (code, first) == (0, "1 id in use, nothing to recover.")
    assert headings.split() == ["transactional", "id", "transaction", "used", "by"]
    assert re.fullmatch(r"live +none open +writer \S+ .*", row.rstrip())
    with live_writer.transaction() as tx:  # status claimed nothing
        tx.send(new_name("topic"), b"v")


def test_status_shows_lanes_below_their_id(
    scene: Scene, three_lanes: None, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.lose("live-2")  # sorts between "live" and "live~1"
    scene.lose("gone~1")  # there is no lane 0 for it
    scene.lose("live-10")
    code, status = json_of(capsys, "status")
    found = [one for one in status["ids"] if one["transactional_id"] != "live-10"]
    assert code == 3
    assert [one["transactional_id"] for one in status["ids"]][-2:] == ["live-2", "live-10"]
    assert [one["transactional_id"] for one in found] == ["gone~1", "live", "live-2"]
    assert [[lane["transactional_id"] for lane in one["lanes"]] for one in found] == [[], ["live~1", "live~2"], []]
    store_id = found[1]["kafka_transactional_id"].partition("#")[2].partition(".")[0]
    kafka_ids = [lane["kafka"][0]["kafka_transactional_id"] for lane in found[1]["lanes"]]
    assert kafka_ids == [f"live~1#{store_id}.1", f"live~2#{store_id}.1"]
    lines = output_of(capsys, "status", "--wide")[1].splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["gone~1", "live", "~1", "~2", "live-2", "live-10"]
    assert f"{kafka_ids[1]}: " in lines[5]
    lines = output_of(capsys, "status")[1].splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["gone~1", "live", "live-2", "live-10"], "idle lanes are not shown"


def test_status_does_not_ask_a_cluster_about_ids_of_another(
    scene: Scene, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not said that Kafka does not know them."""
    with store_from_url(scene.url) as store:
        claim = store.claim("elsewhere", "test", timeout=LIMIT)
        store.acquire_generation(claim, ProducerKind.NATIVE, cluster_id="another-cluster")
    code, out, err = output_of(capsys, "status")
    assert code == 1
    assert re.search(r"^elsewhere +on Kafka cluster another-cluster ", out, re.MULTILINE)
    assert re.search(r"^live .* live#[0-9a-f]{12}\.1: Empty", output_of(capsys, "status", "--wide")[1], re.MULTILINE)
    assert re.search(r"^Not on this Kafka cluster \(.+\): elsewhere\.", err, re.MULTILINE)
    code, status = json_of(capsys, "status")
    assert code == 1
    assert [(one["transactional_id"], one["kafka"] is None) for one in status["ids"]] == [("elsewhere", True), ("live", False)]
    assert output_of(capsys, "status", "--prefix", "live")[0] == 0


def test_status_needs_no_kafka(scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS")
    code, out, _ = output_of(capsys, "status")
    assert code == 0
    assert "no transactional id in sqlite" in out
    scene.lose("orders")
    code, out, _ = output_of(capsys, "status", "--prefix", "nope")
    assert code == 0
    assert re.fullmatch(r"There is no transactional id that begins with 'nope' in sqlite.*, but 1 other id\.\n", out)
    code, status = json_of(capsys, "status")
    rows = status["ids"]
    assert code == 3
    assert rows[0]["kafka"] is None


def test_status_shows_the_rows_while_kafka_is_unreachable(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_TIMEOUT_KAFKA", "0.5")
    scene.lose("orders")
    code, out, err = output_of(capsys, "status", "--kafka", "127.0.0.1:1")
    assert code == 1
    assert "orders" in out
    assert "127.0.0.1:1" in err


def test_status_shows_what_it_has_read_while_a_broker_is_failing(
    scene: Scene, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator may answer while another broker, which must list its transactions, is down."""

    def fail(*_: object, **__: object) -> None:
        raise BrokerUnavailableError("Broker 2 does not answer.")

    monkeypatch.setattr(WireTransactionCoordinator, "list_transactions", fail)
    code, out, err = output_of(capsys, "status", "--wide")
    assert code == 1
    assert re.search(r"^live .* live#[0-9a-f]{12}\.1: ", out, re.MULTILINE)
    assert "Could not be read from Kafka: transactions of other databases.\n" in err
    assert "Broker 2" in err
    code, status = json_of(capsys, "status")
    assert (code, status["of_other_databases"], status["error"]["kind"]) == (1, None, "BrokerUnavailableError")
    assert status["ids"][0]["kafka"][0]["status"] == "Empty"


def test_status_names_the_command_to_run_next(
    scene: Scene, capsys: pytest.CaptureFixture[str], new_name: Callable[[str], str]
) -> None:
    scene.crash("shop.10", new_name("topic"), "after_db_commit")
    scene.crash("shop.2", new_name("topic"), "after_prepare")
    with dualwrite.connect(transactional_id="closed"):
        pass
    typed = ("--url", scene.url, "--kafka", scene.broker.bootstrap_servers)
    assert output_of(capsys, "status", *typed, "--longer-than", "3600")[0] == 0, "they may be somebody's work"
    code, out, _ = output_of(capsys, "status", *typed, "--longer-than", "0")
    command = f"dualwrite recover --id shop.2 --id shop.10 --url {scene.url} --kafka {scene.broker.bootstrap_servers}"
    lines = out.splitlines()
    assert (code, lines[0]) == (3, f"2 transactions wait: {command}")
    assert [line.split()[0] for line in lines[2:4]] == ["shop.2", "shop.10"]
    assert "open since 20" in lines[2]
    assert lines[4] == "1 resolved id that nobody uses: see --all."
    assert "closed" in output_of(capsys, "status", "--all")[1]
    assert len(output_of(capsys, "status", "--problems", "--longer-than", "0")[1].splitlines()) == 4
    code, _, _ = output_of(capsys, *command.split()[1:], "--yes")
    assert (code, output_of(capsys, "status", "--longer-than", "0")[0]) == (0, 0)


def test_a_password_that_was_typed_is_not_shown_again() -> None:
    secrets = ["sasl.password=secret", "ssl.ca.location=ca"]
    given = Target(url="postgresql://me:secret@db/shop", kafka="b:9092", kafka_config=secrets)
    assert given.command("recover", "--id", "a b") == (
        "dualwrite recover --id 'a b' --url 'postgresql://me:***@db/shop' --kafka b:9092 "
        "--kafka-config 'sasl.password=***' --kafka-config ssl.ca.location=ca"
    )


def test_a_missing_table_is_an_error_that_names_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = output_of(capsys, "status", "--url", f"sqlite:///{tmp_path}/empty.db")
    assert code == 1
    assert "dualwrite db upgrade --url" in err


# --- db new-store-id --------------------------------------------------------------------------------------------------


def test_the_question_before_a_new_store_id_says_whether_the_database_looks_like_a_copy(
    scene: Scene, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "has no store id yet" in output_of(capsys, "db", "new-store-id")[2]
    dualwrite.connect(transactional_id="orders").close()
    assert "looks like the original" in output_of(capsys, "db", "new-store-id")[2]
    copy = tmp_path / "copy.db"
    original = scene.url.removeprefix("sqlite:///")
    copy.write_bytes(Path(original).read_bytes())
    code, _, err = output_of(capsys, "db", "new-store-id", "--url", f"sqlite:///{copy}")
    assert code == 2
    assert "is a copy or has moved" in err
    copy.rename(original)
    assert "only some of its identifying marks" in output_of(capsys, "db", "new-store-id")[2]


# --- forget -----------------------------------------------------------------------------------------------------------


def test_a_resolved_id_can_be_forgotten(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    with dualwrite.connect(transactional_id="old"):
        pass
    code, _, err = output_of(capsys, "forget", "--id", "old")
    assert code == 2
    assert "Forget old?" in err
    code, out, _ = output_of(capsys, "forget", "--id", "old", "--yes")
    assert (code, out) == (0, "old is forgotten; its fencing token is kept.\n")
    assert "no transactional id" in output_of(capsys, "status")[1]


def test_an_unresolved_id_is_not_forgotten(
    scene: Scene, live_writer: dualwrite.DualWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = output_of(capsys, "forget", "--id", "live", "--yes")
    assert code == 1
    assert "live" in err
    assert json_of(capsys, "status")[1]["ids"][0]["transactional_id"] == "live"


def test_an_unknown_id_is_not_reported_forgotten(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output_of(capsys, "forget", "--id", "nosuch", "--yes")
    assert (code, out) == (1, "")
    assert "no such transactional id" in err
    dualwrite.connect(transactional_id="old").close()
    for _ in range(2):  # forgetting is idempotent
        assert output_of(capsys, "forget", "--id", "old", "--yes")[0] == 0


def test_a_next_step_can_be_pasted_into_a_shell(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.lose("my orders")
    command = "dualwrite recover --id 'my orders' --acknowledge"
    assert command in output_of(capsys, "forget", "--id", "my orders", "--yes")[2]
    with pytest.raises(dualwrite.LostTransactionError, match=command):
        dualwrite.connect(transactional_id="my orders")


def test_forget_needs_an_id(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "forget", "--yes")[0] == 2


def test_an_id_is_forgotten_with_its_lanes(scene: Scene, three_lanes: None, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("old", "old2"):
        dualwrite.connect(transactional_id=name).close()
    code, out, _ = output_of(capsys, "forget", "--id", "old", "--yes")
    assert (code, out) == (0, "old is forgotten with its 3 lanes; their fencing tokens are kept.\n")
    assert [one["transactional_id"] for one in json_of(capsys, "status")[1]["ids"]] == ["old2"]
    with store_from_url(scene.url) as store:
        tombstones = [store.read(name) for name in ("old", "old~1", "old~2")]
    assert [(row.forgotten, row.fence) for row in tombstones if row is not None] == [(True, 2)] * 3
    with dualwrite.connect(transactional_id="old") as writer, writer.transaction():
        pass


def test_an_id_with_an_unresolved_lane_is_not_partly_forgotten(
    scene: Scene, three_lanes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    dualwrite.connect(transactional_id="old").close()
    scene.lose("old~1")
    code, _, err = output_of(capsys, "forget", "--id", "old", "--yes")
    assert code == 1
    assert "lane 'old~1'" in err
    assert "dualwrite recover --id old~1 --acknowledge" in err
    assert len(json_of(capsys, "status")[1]["ids"][0]["lanes"]) == 2
    assert output_of(capsys, "recover", "--id", "old~1", "--acknowledge", "--yes")[0] == 0
    assert output_of(capsys, "forget", "--id", "old", "--yes")[0] == 0


def test_an_id_that_is_being_opened_is_not_forgotten(
    scene: Scene, three_lanes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The claim has acquired its generations, on which a transaction may be open soon."""
    dualwrite.connect(transactional_id="old").close()

    def forget() -> None:
        code, _, err = output_of(capsys, "forget", "--id", "old", "--yes")
        assert code == 1
        assert "generations 1 to 1 are not resolved" in " ".join(err.split())

    with failpoints.armed("before_take_over", failpoints.only_at(1, forget)):
        dualwrite.connect(transactional_id="old").close()


def test_a_writer_whose_id_was_claimed_and_forgotten_while_it_was_opening_is_fenced(
    scene: Scene, three_lanes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    dualwrite.connect(transactional_id="old").close()

    def forget() -> None:
        assert output_of(capsys, "recover", "--id", "old", "--yes")[0] == 0
        assert output_of(capsys, "forget", "--id", "old", "--yes")[0] == 0

    with failpoints.armed("before_take_over", failpoints.only_at(1, forget)), pytest.raises(FencedError):
        dualwrite.connect(transactional_id="old")


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
