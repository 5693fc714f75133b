"""`dualwrite offsets` on a real broker and database."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing

import pytest
from confluent_kafka import Consumer, TopicPartition

from dualwrite.cli import main
from dualwrite.devcluster import DevCluster
from dualwrite.errors import PositionMovedError
from dualwrite.kafka.inspect import topic_ids
from dualwrite.kafka.librdkafka.topic_admin import admin_client
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql.sql_keeping import SqlPositions
from fixtures.broker import make_topic
from fixtures.command import output_of
from fixtures.open_transactions import left_open
from fixtures.pace import LIMIT, until
from fixtures.producing import producing

NewName = Callable[[str], str]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(sqlite_url: str) -> str:
    return sqlite_url


@pytest.fixture
def topic(broker: DevCluster, new_name: NewName) -> str:
    """Two partitions with five messages each."""
    name = new_name("topic")
    make_topic(broker, name, 2)
    with producing(broker.bootstrap_servers) as produce:
        for number in range(10):
            produce(name, b"v", partition=number % 2)
    return name


@pytest.fixture
def run(url: str, broker: DevCluster, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_it(*arguments: str, kafka: bool = True) -> tuple[int, str, str]:
        more = ("--kafka", broker.bootstrap_servers) if kafka else ()
        return output_of(capsys, "offsets", *arguments, "--url", url, *more)

    return run_it


@pytest.fixture
def stored(url: str, topic: str, broker: DevCluster) -> str:
    """The group `billing` has read three messages of partition 0."""
    identity = topic_ids(broker.bootstrap_servers, [topic])[topic]
    with store_from_url(url) as store:
        assert store.positions is not None
        store.positions.reset("billing", [Move(None, Position(topic, 0, 3, identity))])
    return topic


def positions(url: str, group: str = "billing") -> dict[int, int]:
    with store_from_url(url) as store:
        assert store.positions is not None
        return {key[1]: position.offset for key, position in store.positions.read(group).items()}


def test_list(stored: str, run: Run) -> None:
    code, out, err = run("list")
    assert (code, err) == (0, "")
    headings, row = out.splitlines()
    assert headings.split()[:4] == ["group", "topic", "partition", "position"]
    assert row.split()[:6] == ["billing", stored, "0", "3", "2", "0"]
    code, out, _ = run("list", "--json", "--group", "billing")
    document = json.loads(out)
    (one,) = document["positions"]
    assert (document["version"], document["command"], document["error"]) == (1, "offsets list", None)
    assert (one["offset"], one["last_stable_offset"], one["behind"], one["replaced"]) == (3, 5, 2, False)
    assert (one["high_watermark"], one["held_back"]) == (5, 0)
    assert run("list", "--prefix", "other") == (0, "No consumer group has positions here.\n", "")
    code, out, _ = run("list", kafka=False)
    assert (code, out.splitlines()[1].split()[:4]) == (0, ["billing", stored, "0", "3"])


def test_status(stored: str, url: str, broker: DevCluster, capsys: pytest.CaptureFixture[str]) -> None:
    def status(*more: str) -> tuple[int, str]:
        capsys.readouterr()
        return main(["status", "--url", url, *more]), capsys.readouterr().out

    code, out = status("--kafka", broker.bootstrap_servers)
    headings, row = out.splitlines()[-2:]
    assert headings.split() == ["consumer", "group", "topics", "partitions", "behind", "held", "back", "updated"]
    assert (code, row.split()[:5]) == (0, ["billing", stored, "1", "2", "0"])
    producer = left_open(broker.bootstrap_servers, stored, stored, messages=4)
    (one,) = json.loads(status("--json", "--kafka", broker.bootstrap_servers)[1])["groups"]
    assert (one["behind"], one["held_back"]) == (2, 4), "those behind the open transaction are counted, too"
    producer.abort_transaction(LIMIT)
    (one,) = json.loads(status("--json")[1])["groups"]
    assert (one["group"], one["topics"], one["partitions"], one["behind"]) == ("billing", [stored], 1, None)
    assert json.loads(status("--json", "--prefix", "other")[1])["groups"] == []


def test_list_shows_a_recreated_topic(stored: str, run: Run, broker: DevCluster) -> None:
    admin = admin_client({"bootstrap.servers": broker.bootstrap_servers}, LIMIT)
    admin.delete_topics([stored])[stored].result(LIMIT)
    until(lambda: stored not in admin.list_topics(timeout=LIMIT).topics, "the topic is gone")
    make_topic(broker, stored, 2)
    until(lambda: "the topic was recreated" in run("list")[1], "the new topic is known")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--to", "earliest"), {0: 0, 1: 0}),
        (("--to", "latest"), {0: 5, 1: 5}),
        (("--to", "2", "--partition", "0"), {0: 2}),
    ],
)
def test_reset(stored: str, run: Run, url: str, arguments: tuple[str, ...], expected: dict[int, int]) -> None:
    where = ("reset", "--group", "billing", "--topic", stored, *arguments)
    code, out, err = run(*where)
    assert code == 2
    assert "Confirming needs a terminal; without one, add --yes" in err
    assert positions(url) == {0: 3}
    code, out, err = run(*where, "--yes")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Moved."
    assert positions(url) == expected
    code, out, _ = run(*where, "--yes", "--json")
    assert {one["partition"]: one["offset"] for one in json.loads(out)["positions"]} == expected


def test_resets_that_are_refused(stored: str, run: Run, url: str, new_name: NewName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", raising=False)
    where = ("reset", "--group", "billing", "--yes", "--topic")
    for to in ("6", "yesterday", "-1"):
        assert run(*where, stored, "--to", to)[0] == 2
    code, _, err = run(*where, new_name("missing"), "--to", "earliest")
    assert (code, "There is no topic" in err) == (1, True)
    code, _, err = run(*where, stored, "--to", "earliest", kafka=False)
    assert (code, "--kafka" in err) == (2, True)
    assert positions(url) == {0: 3}


def test_reset_of_positions_that_move_concurrently(stored: str, run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group consumes: it commits between the command's look and its write, a few times."""
    reset, moves = SqlPositions.reset, iter([4, 5])

    def later(positions: SqlPositions, group: str, wanted: list[Move]) -> None:
        for offset in moves:
            found = positions.read(group)[stored, 0]
            reset(positions, group, [Move(found, Position(stored, 0, offset, found.topic_id))])
            break
        reset(positions, group, wanted)

    monkeypatch.setattr(SqlPositions, "reset", later)
    code, out, err = run("reset", "--group", "billing", "--topic", stored, "--to", "earliest", "--yes")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Moved."
    assert positions(url) == {0: 0, 1: 0}


def test_reset_gives_up_on_positions_that_keep_moving(stored: str, run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def later(positions: SqlPositions, group: str, wanted: list[Move]) -> None:
        raise PositionMovedError("moved")

    monkeypatch.setattr(SqlPositions, "reset", later)
    code, _, err = run("reset", "--group", "billing", "--topic", stored, "--to", "earliest", "--yes")
    assert code == 1
    assert "stop the group's processors" in err
    assert positions(url) == {0: 3}


def offsets_at_kafka(broker: DevCluster, topic: str) -> dict[int, int]:
    with closing(Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "billing"})) as consumer:
        found = consumer.committed([TopicPartition(topic, number) for number in range(2)], LIMIT)
    return {one.partition: one.offset for one in found if one.offset >= 0}


def test_forget_commits_the_positions_to_kafka(stored: str, run: Run, url: str, broker: DevCluster) -> None:
    code, _, err = run("forget", "--group", "billing")
    assert code == 2
    assert "Forget 1 position" in err
    assert run("forget", "--group", "billing", "--yes") == (0, "Forgot 1 position.\n", "")
    assert positions(url) == {}
    assert offsets_at_kafka(broker, stored) == {0: 3}
    assert run("forget", "--group", "billing", "--yes") == (0, "The group 'billing' has no positions.\n", "")


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_forget_refuses_while_the_group_consumes(stored: str, run: Run, url: str, broker: DevCluster, protocol: str) -> None:
    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": "billing", "group.protocol": protocol}
    with closing(Consumer({**settings, "enable.auto.commit": False})) as consumer:
        consumer.subscribe([stored])
        until(lambda: consumer.poll(0.1) or consumer.assignment(), "it is a member")
        code, _, err = run("forget", "--group", "billing", "--yes")
        assert code == 2
        assert "The group 'billing' is consuming, with 1 member(s)" in err
        assert positions(url) == {0: 3}
        assert run("forget", "--group", "billing", "--yes", "--force", kafka=False)[0] == 0
    assert positions(url) == {}
    assert offsets_at_kafka(broker, stored) == {}


def test_forget_refuses_if_kafka_is_ahead(stored: str, run: Run, url: str, broker: DevCluster) -> None:
    """Setting the offset back would process messages again that a consumer with offsets at Kafka has already read."""
    with closing(Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "billing"})) as consumer:
        consumer.commit(offsets=[TopicPartition(stored, 0, 4)], asynchronous=False)
    code, _, err = run("forget", "--group", "billing", "--yes")
    assert code == 2
    assert f"ahead of its position on {stored}-0: 4 and 3" in err
    assert (positions(url), offsets_at_kafka(broker, stored)) == ({0: 3}, {0: 4})


def test_forget_needs_kafka(stored: str, run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", raising=False)
    code, _, err = run("forget", "--group", "billing", "--yes", kafka=False)
    assert code == 2
    assert "--force" in err
    assert positions(url) == {0: 3}


def test_forget_skips_a_recreated_topic(run: Run, url: str, topic: str, broker: DevCluster) -> None:
    """Its positions mean messages of the topic before."""
    with store_from_url(url) as store:
        assert store.positions is not None
        store.positions.reset("billing", [Move(None, Position(topic, 0, 3, "another"))])
    assert run("forget", "--group", "billing", "--yes") == (0, "Forgot 1 position.\n", "")
    assert offsets_at_kafka(broker, topic) == {}
