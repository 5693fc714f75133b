"""`dualwrite stuck` on a real broker, and `dualwrite watch` in a real terminal."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer
from rich.console import Console
from rich.table import Table

from cli.conftest import Scene
from dualwrite.admin import ActiveProducer, Holder, OpenTransaction, PartitionEnd, StuckPartition, StuckSearch, WaitingGroup
from dualwrite.cli import watch
from dualwrite.cli.stuck import stuck_table
from dualwrite.diagnosis.stuck import Look
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.registry import store_from_url
from fixtures.broker import make_topic
from fixtures.pace import ended, limit, until
from fixtures.terminal import Terminal

COMMIT = "commit: the database committed the transaction, and Kafka has it prepared"


@pytest.fixture
def opened(scene: Scene) -> str:
    """A topic with an open transaction of the id of the same name."""
    return scene.open(messages=3)


# --- stuck ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stuck(scene: Scene, opened: str) -> None:
    code, out, err = scene.call("stuck", "--topic", opened, "--longer-than", "0", "--wide")
    assert (code, err) == (1, "")
    headings, row, last = out.splitlines()
    assert last == f"Next: dualwrite transactions describe {opened}"  # no id of dualwrite
    shown = dict(zip(headings.split(), row.split(), strict=False))
    assert (shown["Topic"], shown["LastStableOffset"], shown["HighWatermark"], shown["State"]) == (opened, "0", "3", "Ongoing")
    code, found = scene.json("stuck", "--topic", opened, "--longer-than", "0")
    (one,) = found["stuck"]
    assert (code, one["transactional_id"], one["records_behind"], one["groups"]) == (1, opened, 3, [])
    code, out, err = scene.call("stuck", "--topic", opened, "--longer-than", "600")
    assert (code, out, err) == (0, "No consumer waits in 1 partition for a transaction older than 600 s.\n", "")


@pytest.mark.slow
def test_stuck_on_a_hanging_transaction(scene: Scene) -> None:
    topic = scene.hang()
    out = scene.call("stuck", "--topic", topic)[1]
    assert "hangs: no coordinator knows its producer id" in out
    abort = f"dualwrite transactions abort --topic {topic} --partition 0 --start-offset 0"
    assert out.endswith(f"Next: {abort}\n")
    _, found = scene.json("stuck", "--topic", topic)
    assert [one["next_command"] for one in found["stuck"]] == [abort]
    assert [one["reason"] for one in found["stuck"]] == ["UNKNOWN_PRODUCER"]


def test_stuck_with_the_database(scene: Scene) -> None:
    left = scene.crash("after_db_commit")
    arguments = ("stuck", "--topic", left.topic, "--longer-than", "0", *scene.at)
    out = scene.call(*arguments)[1]
    assert COMMIT in out
    assert out.endswith(f"\nNext, if its writer is gone: dualwrite transactions complete '{left.kafka_id}' --url {scene.url}\n")
    assert "\nNext: dualwrite stuck --url URL\n" in scene.call("stuck", "--topic", left.topic, "--longer-than", "0")[1]
    _, found = scene.json(*arguments)
    assert (found["stuck"][0]["transactional_id"], found["stuck"][0]["database"]["decision"]) == (left.kafka_id, "commit")


def test_stuck_shows_a_groups_position_in_the_database(scene: Scene, opened: str) -> None:
    group = scene.new_name("billing")
    with store_from_url(scene.url) as store:
        assert store.positions is not None
        store.positions.reset(group, [Move(None, Position(opened, 0, 0))])
    arguments = ("stuck", "--group", group, "--longer-than", "0")
    assert "There is no consumer group" in scene.call(*arguments)[2], "it has committed nothing to Kafka"
    code, out, err = scene.call(*arguments, *scene.at)
    assert (code, err) == (1, "")
    assert f"{group} (at 0 in the database)" in out
    _, found = scene.json(*arguments, *scene.at)
    assert [one["groups"] for one in found["stuck"]] == [
        [{"group_id": group, "offset": 0, "is_stored": True, "has_no_position": False}]
    ]


def test_stuck_without_the_database(scene: Scene, opened: str) -> None:
    """What Kafka says is shown, and that the positions in the database are missing."""
    group = scene.new_name("billing")
    away = ("--longer-than", "0", "--url", "postgresql+psycopg://nobody@127.0.0.1:1/app")
    code, out, err = scene.call("stuck", "--group", group, *away)
    assert (code, out) == (2, "")
    assert "127.0.0.1" in err, "not that there is no such group, which is not known"
    with closing(Consumer({"bootstrap.servers": scene.servers, "group.id": group})) as consumer:
        consumer.subscribe([opened])
        until(lambda: consumer.poll(0.1) or consumer.assignment(), "the partitions are assigned")
        code, out, err = scene.call("stuck", "--topic", opened, *away)
        assert (code, opened in out) == (1, True)
        assert "The positions of groups in the database are missing" in err
        assert not scene.json("stuck", "--topic", opened, *away)[1]["complete"]


def test_stuck_in_a_missing_topic(scene: Scene) -> None:
    topic = scene.new_name("missing")
    code, found = scene.json("stuck", "--topic", topic)
    assert (code, found["complete"], found["unreadable"][0]["topic"]) == (1, False, topic)
    assert f"There is no topic '{topic}'" in scene.call("stuck", "--topic", topic)[2]


# --- watch ------------------------------------------------------------------------------------------------------------


@contextmanager
def terminal(*arguments: str, **size: int) -> Iterator[Terminal]:
    made = Terminal(*arguments, **size)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def watched(scene: Scene, opened: str) -> Iterator[Terminal]:
    with terminal("watch", "--topic", opened, "--longer-than", "0", "--interval", "0.1") as made:
        made.wait_for(opened)
        yield made


def quit_watch(watched: Terminal) -> None:
    watched.press("q")
    assert ended(watched.process) == 0
    assert watched.is_restored


@pytest.mark.slow
def test_watch_shows_stuck_partitions_and_accepts_keys(watched: Terminal) -> None:
    assert watched.shows("1 partition of 1 stuck")
    assert watched.shows("by duration")
    watched.press("s")
    watched.wait_for("by records")
    watched.press("r")
    quit_watch(watched)


@pytest.mark.slow
def test_a_narrow_terminal_gets_the_columns_that_matter(opened: str) -> None:
    with terminal("stuck", "--topic", opened, "--longer-than", "0", columns=90) as made:
        made.wait_for("Groups")
        assert ended(made.process) == 1
        assert made.shows("TransactionalId")
        assert not made.shows("HighWatermark")
        assert opened in made.screen.split(), "an id is neither folded nor cut off"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_watch_leaves_cleanly(watched: Terminal, number: signal.Signals, code: int) -> None:
    watched.process.send_signal(number)
    assert ended(watched.process) == code
    assert watched.is_restored


@pytest.mark.slow
def test_watch_keeps_the_last_answer_without_kafka(scene: Scene, opened: str) -> None:
    with terminal("watch", "--topic", opened, "--longer-than", "0", "--interval", "0.1", "--timeout", str(limit(3))) as watched:
        watched.wait_for(opened)
        scene.broker.pause()
        try:
            watched.wait_for("No newer result")
            watched.press("s")
            watched.wait_for(opened)
        finally:
            scene.broker.resume()
        until(lambda: watched.press("s") or watched.shows("") or "No newer result" not in watched.screen, watched)
        quit_watch(watched)


@pytest.mark.slow
def test_watch_can_be_left_while_kafka_does_not_answer(scene: Scene, watched: Terminal) -> None:
    """Its connections are in use by a request without an answer."""
    scene.broker.pause()
    try:
        time.sleep(0.3)  # a look is under way, every 0.1 s
        quit_watch(watched)
        assert "Traceback" not in watched.screen
    finally:
        scene.broker.resume()


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
    quit_watch(watched)


@pytest.mark.slow
def test_watch_with_the_database(scene: Scene) -> None:
    left = scene.crash("after_db_commit")
    with terminal("watch", "--topic", left.topic, "--longer-than", "0", *scene.at, columns=300) as watched:
        watched.wait_for(COMMIT)
        quit_watch(watched)


@pytest.mark.slow
def test_watch_counts_the_rows_that_do_not_fit(scene: Scene) -> None:
    topic = scene.new_name("rows")
    make_topic(scene.broker, topic, 6)
    for number in range(6):
        scene.open(f"{topic}-{number}", topic, partition=number, messages=number + 1)
    with terminal("watch", "--topic", topic, "--longer-than", "0", "--sort", "records", columns=200, rows=8) as watched:
        watched.wait_for("6 partitions of 6 stuck")
        watched.wait_for("3 more")
        assert watched.shows(f"{topic}-5"), "the most records come first"
        assert not watched.shows(f"{topic}-2")
        watched.press("r")
        watched.wait_for(f"{topic}-0")
        assert watched.shows("3 more")
        quit_watch(watched)


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


def test_watch_needs_a_terminal_and_a_known_order(scene: Scene) -> None:
    code, _, err = scene.call("watch")
    assert (code, "dualwrite stuck --json" in err) == (2, True)
    code, _, err = scene.call("watch", "--sort", "colour")
    assert (code, "duration, records, topic, id, groups" in " ".join(err.replace("│", " ").split())) == (2, True)
