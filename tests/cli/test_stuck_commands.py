"""`dualwrite stuck` on a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from confluent_kafka import Consumer

from cli.conftest import Scene
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.registry import store_from_url
from fixtures.pace import ended, until
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


@contextmanager
def terminal(*arguments: str, **size: int) -> Iterator[Terminal]:
    made = Terminal(*arguments, **size)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_a_narrow_terminal_gets_the_columns_that_matter(opened: str) -> None:
    with terminal("stuck", "--topic", opened, "--longer-than", "0", columns=90) as made:
        made.wait_for("Groups")
        assert ended(made.process) == 1
        assert made.shows("TransactionalId")
        assert not made.shows("HighWatermark")
        assert opened in made.screen.split(), "an id is neither folded nor cut off"
