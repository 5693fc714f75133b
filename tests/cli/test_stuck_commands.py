"""`dualwrite stuck` on a real broker, and `dualwrite watch` in a real terminal."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from rich.console import Console
from rich.table import Table

from cli.conftest import Crashed, JsonOf, NewName, Run
from dualwrite.admin import ActiveProducer, Holder, OpenTransaction, PartitionEnd, StuckPartition, StuckSearch, WaitingGroup
from dualwrite.cli import watch
from dualwrite.cli.stuck import Look, stuck_table
from dualwrite.devcluster import DevCluster
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.registry import store_from_url
from fixtures.broker import make_topic
from fixtures.open_transactions import left_open
from fixtures.pace import ended, limit, until
from fixtures.raw_producer import write_behind_the_coordinator
from fixtures.terminal import Terminal


@pytest.fixture
def opened(trusting_broker: DevCluster, new_name: NewName) -> Iterator[str]:
    """A topic with an open transaction of the id of the same name."""
    name = new_name("open")
    make_topic(trusting_broker, name)
    producer = left_open(trusting_broker.bootstrap_servers, name, name, messages=3)
    yield name
    del producer


# --- stuck ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stuck(opened: str, called: Run, called_json: JsonOf) -> None:
    code, out, err = called("stuck", "--topic", opened, "--longer-than", "0", "--wide")
    assert (code, err) == (1, "")
    *table, last = out.splitlines()
    assert last == f"Next: dualwrite transactions describe {opened}"  # no id of dualwrite
    headings, row = (line.split() for line in table)
    shown = dict(zip(headings, row, strict=False))
    assert (shown["Topic"], shown["LastStableOffset"], shown["HighWatermark"], shown["Records"]) == (opened, "0", "3", "3")
    assert (shown["TransactionalId"], shown["State"]) == (opened, "Ongoing")
    code, found = called_json("stuck", "--topic", opened, "--longer-than", "0")
    (one,) = found["stuck"]
    assert (code, one["transactional_id"], one["records_behind"], one["groups"]) == (1, opened, 3, [])
    code, out, err = called("stuck", "--topic", opened, "--longer-than", "600")
    assert (code, out, err) == (0, "No consumer waits in 1 partition for a transaction older than 600 s.\n", "")


@pytest.mark.slow
def test_stuck_on_a_hanging_transaction(
    trusting_broker: DevCluster, called: Run, called_json: JsonOf, new_name: NewName
) -> None:
    topic = new_name("hanging")
    make_topic(trusting_broker, topic)
    write_behind_the_coordinator(trusting_broker.bootstrap_servers, topic, 4_000_000, 0, int(time.time() * 1000) - 60_000)
    out = called("stuck", "--topic", topic)[1]
    assert "hangs: no coordinator knows its producer id" in out
    abort = f"dualwrite transactions abort --topic {topic} --partition 0 --start-offset 0"
    assert out.endswith(f"Next: {abort}\n")
    _, found = called_json("stuck", "--topic", topic)
    assert [one["next_command"] for one in found["stuck"]] == [abort]
    assert [one["reason"] for one in found["stuck"]] == ["UNKNOWN_PRODUCER"]


def test_stuck_with_the_database(called: Run, called_json: JsonOf, crashed: Callable[[str], Crashed], url: str) -> None:
    left = crashed("after_db_commit")
    arguments = ("stuck", "--topic", left.topic, "--longer-than", "0", "--url", url)
    out = called(*arguments)[1]
    assert "commit: the database committed the transaction, and Kafka has it prepared" in out
    assert out.endswith(f"\nNext, if its writer is gone: dualwrite transactions complete '{left.kafka_id}' --url {url}\n")
    assert "\nNext: dualwrite stuck --url URL\n" in called("stuck", "--topic", left.topic, "--longer-than", "0")[1]
    _, found = called_json(*arguments)
    assert (found["stuck"][0]["transactional_id"], found["stuck"][0]["database"]["decision"]) == (left.kafka_id, "commit")


def test_stuck_shows_a_groups_position_in_the_database(
    opened: str, called: Run, called_json: JsonOf, url: str, new_name: NewName
) -> None:
    group = new_name("billing")
    with store_from_url(url) as store:
        assert store.positions is not None
        store.positions.reset(group, [Move(None, Position(opened, 0, 0))])
    arguments = ("stuck", "--group", group, "--longer-than", "0")
    assert "There is no consumer group" in called(*arguments)[2], "it has committed nothing to Kafka"
    code, out, err = called(*arguments, "--url", url)
    assert (code, err) == (1, "")
    assert f"{group} (at 0 in the database)" in out
    _, found = called_json(*arguments, "--url", url)
    assert [one["groups"] for one in found["stuck"]] == [
        [{"group_id": group, "offset": 0, "is_stored": True, "has_no_position": False}]
    ]


def test_stuck_without_the_database(
    opened: str, called: Run, called_json: JsonOf, trusting_broker: DevCluster, new_name: NewName
) -> None:
    """What Kafka says is shown, and that the positions in the database are missing."""
    group = new_name("billing")
    away = ("--longer-than", "0", "--url", "postgresql+psycopg://nobody@127.0.0.1:1/app")
    code, out, err = called("stuck", "--group", group, *away)
    assert (code, out) == (2, "")
    assert "127.0.0.1" in err, "not that there is no such group, which is not known"
    consumer = Consumer({"bootstrap.servers": trusting_broker.bootstrap_servers, "group.id": group})
    with closing(consumer):
        consumer.subscribe([opened])
        until(lambda: consumer.poll(0.1) or consumer.assignment(), "the partitions are assigned")
        code, out, err = called("stuck", "--topic", opened, *away)
        assert (code, opened in out) == (1, True)
        assert "The positions of groups in the database are missing" in err
        assert not called_json("stuck", "--topic", opened, *away)[1]["complete"]


def test_stuck_in_a_missing_topic(called: Run, called_json: JsonOf, new_name: NewName) -> None:
    topic = new_name("missing")
    code, found = called_json("stuck", "--topic", topic)
    assert (code, found["complete"], found["unreadable"][0]["topic"]) == (1, False, topic)
    assert f"There is no topic '{topic}'" in called("stuck", "--topic", topic)[2]


# --- watch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(environment: None, opened: str) -> Iterator[Terminal]:
    terminal = Terminal("watch", "--topic", opened, "--longer-than", "0", "--interval", "0.1")
    try:
        terminal.wait_for(opened)
        yield terminal
    finally:
        terminal.close()


@pytest.mark.slow
def test_watch_shows_stuck_partitions_and_accepts_keys(watched: Terminal) -> None:
    assert watched.shows("1 partition of 1 stuck")
    assert watched.shows("by duration")
    watched.press("s")
    watched.wait_for("by records")
    watched.press("r")
    watched.press("q")
    assert ended(watched.process) == 0
    assert watched.is_restored


@pytest.mark.slow
def test_a_narrow_terminal_gets_the_columns_that_matter(environment: None, opened: str) -> None:
    terminal = Terminal("stuck", "--topic", opened, "--longer-than", "0", columns=90)
    try:
        terminal.wait_for("Groups")
        assert ended(terminal.process) == 1
        assert terminal.shows("TransactionalId")
        assert not terminal.shows("HighWatermark")
        assert opened in terminal.screen.split(), "an id is neither folded nor cut off"
    finally:
        terminal.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_watch_leaves_cleanly(watched: Terminal, number: signal.Signals, code: int) -> None:
    watched.process.send_signal(number)
    assert ended(watched.process) == code
    assert watched.is_restored


@pytest.mark.slow
def test_watch_keeps_the_last_answer_without_kafka(trusting_broker: DevCluster, environment: None, opened: str) -> None:
    terminal = Terminal("watch", "--topic", opened, "--longer-than", "0", "--interval", "0.1", "--timeout", str(limit(3)))
    try:
        terminal.wait_for(opened)
        trusting_broker.pause()
        try:
            terminal.wait_for("No newer result")
            terminal.press("s")
            terminal.wait_for(opened)
        finally:
            trusting_broker.resume()
        until(lambda: terminal.press("s") or terminal.shows("") or "No newer result" not in terminal.screen, terminal)
        terminal.press("q")
        assert ended(terminal.process) == 0
    finally:
        terminal.close()


@pytest.mark.slow
def test_watch_can_be_left_while_kafka_does_not_answer(watched: Terminal, trusting_broker: DevCluster) -> None:
    """Its connections are in use by a request without an answer."""
    trusting_broker.pause()
    try:
        time.sleep(0.3)  # a look is under way, every 0.1 s
        watched.press("q")
        assert ended(watched.process) == 0
        assert watched.is_restored
        assert "Traceback" not in watched.screen
    finally:
        trusting_broker.resume()


@pytest.mark.slow
def test_watch_can_be_paused(watched: Terminal) -> None:
    """Ctrl-Z: the terminal is restored meanwhile."""
    watched.process.send_signal(signal.SIGTSTP)
    state = Path(f"/proc/{watched.process.pid}/stat")
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the process has stopped")
    assert watched.is_restored
    watched.screen = ""
    watched.process.send_signal(signal.SIGCONT)
    watched.wait_for("1 partition of 1 stuck")
    watched.press("q")
    assert ended(watched.process) == 0
    assert watched.is_restored


@pytest.mark.slow
def test_watch_with_the_database(crashed: Callable[[str], Crashed], url: str) -> None:
    left = crashed("after_db_commit")
    arguments = ("watch", "--topic", left.topic, "--longer-than", "0", "--url", url, "--interval", "0.1")
    terminal = Terminal(*arguments, columns=300)
    try:
        terminal.wait_for("commit: the database committed the transaction, and Kafka has it prepared")
        terminal.press("q")
        assert ended(terminal.process) == 0
    finally:
        terminal.close()


@pytest.mark.slow
def test_watch_counts_the_rows_that_do_not_fit(environment: None, trusting_broker: DevCluster, new_name: NewName) -> None:
    topic = new_name("rows")
    make_topic(trusting_broker, topic, 6)
    servers = trusting_broker.bootstrap_servers
    producers = [left_open(servers, f"{topic}-{n}", topic, partition=n, messages=n + 1) for n in range(6)]
    terminal = Terminal("watch", "--topic", topic, "--longer-than", "0", "--sort", "records", columns=200, rows=8)
    try:
        terminal.wait_for("6 partitions of 6 stuck")
        terminal.wait_for("3 more")
        assert terminal.shows(f"{topic}-5"), "the most records come first"
        assert not terminal.shows(f"{topic}-2")
        terminal.press("r")
        terminal.wait_for(f"{topic}-0")
        assert terminal.shows("3 more")
        terminal.press("q")
        assert ended(terminal.process) == 0
    finally:
        terminal.close()
        del producers


def test_an_error_of_any_kind_is_shown() -> None:
    """The screen does not stay with old data as if it were new."""
    seen = watch._Seen(Look(StuckSearch((), 0), {}), time.time())
    answers = iter([seen])

    def look() -> watch._Seen:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("a defect") from None

    with watch._Poller(look, 0.01) as poller:
        until(lambda: poller.seen.error is not None, "the error")
        console = Console(file=io.StringIO(), width=120)
        console.print(watch._Screen(console, poller, "duration")._drawn())
    assert "No newer result: RuntimeError: a defect" in console.file.getvalue()


def partition(number: int, records: int, seconds: int, name: str, groups: int) -> StuckPartition:
    producer = ActiveProducer(number, 0, 0, 1_000_000 - seconds * 1000, None, 0)
    end = PartitionEnd(f"topic-{9 - number}", number, 1, 0, records)
    waiting = tuple(WaitingGroup(f"group-{at}", 0) for at in range(groups))
    return StuckPartition(end, Holder(OpenTransaction(end.topic, number, 1, producer), name), waiting)


def numbers_of(found: list[StuckPartition], **shown: Any) -> list[int]:
    """The partitions' numbers, in the order of the table's rows."""
    table = stuck_table(Look(StuckSearch(tuple(found), len(found)), {}).records(1_000_000), **shown)
    assert isinstance(table, Table)
    return [int(str(cell)) for cell in table.columns[1].cells]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("duration", [2, 0, 1]), ("records", [1, 2, 0]), ("topic", [2, 1, 0]), ("id", [1, 0, 2]), ("groups", [0, 2, 1])],
)
def test_the_sort_orders(order: str, expected: list[int]) -> None:
    rows = [partition(0, 1, 20, "b", 3), partition(1, 9, 10, "a", 0), partition(2, 5, 30, "c", 1)]
    for backwards in (False, True):
        numbers = expected[::-1] if backwards else expected
        assert numbers_of(rows, order=order, backwards=backwards) == numbers
        assert numbers_of(rows, order=order, backwards=backwards, rows=2) == numbers[:2]


def test_an_unknown_duration_is_sorted_first() -> None:
    """As of a timestamp in the future: it must not be the first that a full screen leaves out."""
    rows = [partition(0, 1, 20, "b", 0), partition(1, 1, -3600, "future", 0)]
    assert numbers_of(rows, rows=1) == [1]


def test_watch_needs_a_terminal(called: Run) -> None:
    code, _, err = called("watch")
    assert code == 2
    assert "dualwrite stuck --json" in err


def test_watch_refuses_an_unknown_order(called: Run) -> None:
    code, _, err = called("watch", "--sort", "colour")
    assert code == 2
    assert "duration, records, topic, id, groups" in " ".join(err.replace("│", " ").split())
