"""Rows that can't be sent: they don't stop the others, and are replayed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from relay_scene import RelayScene

from dualwrite import (
    ClusterMismatchError,
    DeliveryError,
    InvalidMessageError,
    MessageTooLargeError,
    StateTableMissingError,
    UnknownTopicError,
)
from dualwrite.devcluster import DevCluster
from dualwrite.observability import DeadLettered, Event, RowsRelayed, observing
from dualwrite.relay import GENERIC, BatchOptions
from dualwrite.testing import failpoints
from fixtures.broker import make_topic, read_values, started, wait_for_markers
from fixtures.command import output_of

LARGE = bytes(2_000_000)


def insert_bad(scene: RelayScene) -> None:
    """A topic that is none, headers that are none, and a message that is too large for the producer."""
    with scene.engine.begin() as connection:
        scene.insert_on(connection, [-1], topic="no topic!")
        scene.insert_on(connection, [-2], headers="3")
        scene.insert_on(connection, [-3], value=LARGE)


@pytest.mark.parametrize("rows", [1000, 4])
def test_rows_that_cannot_be_sent_go_to_the_dead_letters_and_the_others_on(scene: RelayScene, rows: int) -> None:
    first = scene.insert(13)
    insert_bad(scene)
    last = scene.insert(13)
    events: list[Event] = []
    with scene.relay(batch=BatchOptions(rows=rows)) as relay, observing(events.append):
        relay.run(until_empty=True)
        dead = relay.dead_letters.oldest()
        assert (relay.published, relay.dead, relay.status().dead) == (26, 3, 3)
    scene.check([*first, *last])
    assert [(each.source_id, each.error_kind, each.topic) for each in dead] == [
        ("14", "InvalidMessageError", None),
        ("15", "InvalidMessageError", None),
        ("16", "MessageTooLargeError", scene.topic),
    ]
    assert (dead[2].row["value"], dead[2].row["id"], dead[2].attempts) == (LARGE, 16, 3)
    assert sum(event.rows for event in events if isinstance(event, RowsRelayed)) == 26
    assert len([event for event in events if isinstance(event, DeadLettered)]) == 3


def test_what_only_the_broker_refuses_is_found_by_trying_fewer_rows(
    on_postgres: RelayScene, new_name: Callable[[str], str]
) -> None:
    """A compacted topic accepts no message without a key (INVALID_RECORD): the broker says that about a whole batch."""
    scene, compacted = on_postgres, new_name("compacted")
    make_topic(scene.broker, compacted, **{"cleanup.policy": "compact"})
    with scene.engine.begin() as connection:
        scene.insert_on(connection, range(20), topic=compacted)
        connection.execute(sa.text("UPDATE outbox SET key = NULL WHERE id IN (5, 6, 17)"))
    with scene.relay() as relay:
        relay.run(until_empty=True)
        assert [each.source_id for each in relay.dead_letters.oldest()] == ["5", "6", "17"]
        assert {each.error_kind for each in relay.dead_letters.oldest()} == {"MessageRefusedError"}
    wait_for_markers(scene.servers)
    expected = [b"%d" % number for number in range(20) if number not in (4, 5, 16)]
    assert read_values(scene.servers, compacted) == expected


@pytest.mark.soak
@pytest.mark.slow  # the producer waits 5 s for a topic
def test_rows_of_a_topic_that_does_not_exist_are_replayed_once_it_does(
    on_sqlite: RelayScene, new_name: Callable[[str], str]
) -> None:
    missing = new_name("missing")
    with started(config={"auto.create.topics.enable": "false"}) as broker:
        scene = RelayScene(on_sqlite.url, broker, new_name, create=False)
        first = scene.insert(5)
        with scene.engine.begin() as connection:
            scene.insert_on(connection, range(-3, 0), topic=missing)
        last = scene.insert(5)
        with scene.relay() as relay:
            relay.run(until_empty=True)
            scene.check([*first, *last])
            dead = [each.id for each in relay.dead_letters.oldest()]
            assert (len(dead), relay.dead_letters.oldest()[0].error_kind) == (3, "UnknownTopicError")
            with pytest.raises(UnknownTopicError):
                relay.replay(dead)
            assert relay.dead_letters.count() == 3
            make_topic(broker, missing)
            assert relay.replay(dead[:2]) == 2
            assert relay.replay(dead) == 1
            assert relay.replay(dead) == 0
        wait_for_markers(broker.bootstrap_servers)
        assert read_values(broker.bootstrap_servers, missing) == [b"%d" % number for number in range(-3, 0)]
        scene.engine.dispose()


def test_a_corrected_layout_replays_what_was_not_valid(on_sqlite: RelayScene) -> None:
    scene = on_sqlite
    with scene.engine.begin() as connection:
        scene.insert_on(connection, [0], topic="no topic!")
    with scene.relay() as relay:
        relay.run(until_empty=True)
        (dead,) = relay.dead_letters.oldest()
        with pytest.raises(InvalidMessageError):
            relay.replay([dead.id])
    with scene.relay(layout=replace(GENERIC, topic=scene.topic)) as relay:
        assert relay.replay([dead.id]) == 1
    scene.check([0])


@pytest.mark.slow
def test_relays_of_a_name_publish_on_one_cluster(on_sqlite: RelayScene, other_broker: DevCluster) -> None:
    """A relay with another cluster's address gets a new id for its shard, and for a replay: nothing is published there."""
    scene = on_sqlite
    with scene.engine.begin() as connection:
        scene.insert_on(connection, [-1], topic="no topic!")
    with scene.relay() as relay:
        assert relay.run_once() == 1
        (dead,) = relay.dead_letters.oldest()
        numbers = scene.insert(20)
        right, scene.servers = scene.servers, other_broker.bootstrap_servers
        with scene.relay(shards=2, shard_by="id", layout=replace(GENERIC, topic=scene.topic)) as wrong:
            with pytest.raises(ClusterMismatchError):
                wrong.run_once()
            with pytest.raises(ClusterMismatchError):
                wrong.replay([dead.id])
        scene.servers = right
        assert (scene.waiting(), relay.dead_letters.count()) == (20, 1)
        assert relay.run_once() == 20
    scene.check(numbers)


def test_a_replay_that_fails_has_no_effect_and_can_be_repeated(on_sqlite: RelayScene) -> None:
    scene = on_sqlite
    with scene.engine.begin() as connection:
        scene.insert_on(connection, [0, 1], topic="no topic!")
    with scene.relay() as relay:
        relay.run(until_empty=True)
        ids = [each.id for each in relay.dead_letters.oldest()]
    with scene.relay(layout=replace(GENERIC, topic=scene.topic)) as relay:
        fails = failpoints.raises(DeliveryError("made by the test"))
        with failpoints.armed("before_db_commit", fails), pytest.raises(DeliveryError):
            relay.replay(ids)
        assert relay.dead_letters.count() == 2
        assert relay.replay(ids) == 2
    scene.check([0, 1])


@pytest.mark.parametrize("bad", ["topic", "size"])
def test_a_relay_can_stop_instead_with_the_rows_before_published(on_sqlite: RelayScene, bad: str) -> None:
    scene = on_sqlite
    first = scene.insert(7)
    with scene.engine.begin() as connection:
        scene.insert_on(connection, [-1], **({"topic": "no topic!"} if bad == "topic" else {"value": LARGE}))
    scene.insert(3)
    with scene.relay(on_poison="stop") as relay:
        for _ in range(2):
            with pytest.raises(InvalidMessageError if bad == "topic" else MessageTooLargeError):
                relay.run()
        assert (relay.published, relay.dead, scene.waiting()) == (7, 0, 4)
    scene.check(first)


def test_the_table_of_dead_letters_is_checked_at_the_start(on_sqlite: RelayScene) -> None:
    with on_sqlite.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE dualwrite_dead_letter"))
    with pytest.raises(StateTableMissingError, match="db upgrade"), on_sqlite.relay():
        pass


def test_the_commands(
    on_sqlite: RelayScene, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = on_sqlite
    own = "from dataclasses import replace\nfrom dualwrite.relay import GENERIC\n"
    (tmp_path / "own_layouts.py").write_text(f"{own}LAYOUT = replace(GENERIC, topic={scene.topic!r})\n")
    monkeypatch.chdir(tmp_path)
    layout = ("--layout", "own_layouts:LAYOUT")
    where = ("--url", scene.url, "--kafka", scene.servers, "--name", scene.name)

    def ran(*words: str, code: int = 0) -> str:
        ended, out, errors = output_of(capsys, "relay", *words, *where)
        assert ended == code, errors
        return out

    scene.insert(4)
    insert_bad(scene)
    assert json.loads(ran("status", "--json"))["waiting"] == 7
    assert json.loads(ran("run", "--until-empty", "--json"))["published"] == 4
    assert json.loads(ran("status", "--json")) | {"oldest_seconds": 0} == {
        "version": 1,
        "command": "relay status",
        "name": scene.name,
        "table": "outbox",
        "waiting": 0,
        "oldest_seconds": 0,
        "later": 0,
        "dead": 3,
        "workers": [],
        "notes": [],
    }
    letters = json.loads(ran("dead", "list", "--json"))["letters"]
    assert [each["row"] for each in letters] == ["5", "6", "7"]
    shown = json.loads(ran("dead", "show", "--letter", str(letters[0]["id"]), "--json"))["letters"]
    assert shown[0]["columns"]["topic"] == "no topic!"
    assert "InvalidMessageError" in ran("dead", "list")
    assert "Published 1 dead letter" in ran("dead", "replay", "--letter", str(letters[0]["id"]), *layout)
    assert "Deleted 2 dead letters" in ran("dead", "drop", "--all", "--yes")
    assert "Published 0 rows" in ran("run", "--once")
    ran("dead", "replay", code=2)
    assert json.loads(ran("status", *layout, "--json"))["table"] == "outbox"
    assert json.loads(ran("dead", "list", *layout, "--json"))["letters"] == []
    for other in ("other", "own_layouts:GENERIK", "own_layouts:own", "nowhere:LAYOUT"):
        ran("run", "--layout", other, code=2)
    wait_for_markers(scene.servers)
    assert sorted(int(message.value() or b"") for message in scene.messages()) == [-1, 0, 1, 2, 3]
