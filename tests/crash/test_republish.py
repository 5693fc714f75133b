"""Transactions that the database has committed and Kafka has aborted are published again, exactly once and in order.

They are lost here by an abort at the coordinator, as an operator's; `test_timeout.py` has those that time out.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

import dualwrite
from crash.cases import PRODUCERS, REPUBLISH_POINTS, crash_writer
from crash.databases import Databases, copied_file
from crash.proxied import CUTS, through_a_proxy
from crash.retention import delete_records
from crash.scene import Scene, Worker
from dualwrite.cli import main
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recipe.republish import HEADER
from dualwrite.state import Fate, TransactionStatus
from dualwrite.stores.rows import LostKind, Resolution
from dualwrite.testing import failpoints
from dualwrite.testing.proxy import Link
from dualwrite.testing.topics import read_committed
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned

BEFORE_COMMIT = REPUBLISH_POINTS[: REPUBLISH_POINTS.index("republish_after_record")]
PUBLISHERS = ("opens", "recovers")
"""A writer that opens and then writes event 3, or a recoverer."""
mostly_native = pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]), indirect=True)
"""For what the store or a command decides."""
each_step = pytest.mark.parametrize(
    ("producer", "point", "publisher"),
    thinned(
        product(PRODUCERS, REPUBLISH_POINTS, PUBLISHERS),
        kept=[  # each pair
            (PRODUCERS[(row + column) % 2], point, publisher)
            for row, point in enumerate(REPUBLISH_POINTS)
            for column, publisher in enumerate(PUBLISHERS)
        ],
    ),
    indirect=["producer"],
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_lane")]


@pytest.fixture
def scene(databases: Databases, broker: DevCluster, producer: str) -> Scene:
    del producer
    return databases.scene("postgresql", broker)


def abort(scene: Scene) -> None:
    """Abort the open transaction of the newest generation, as an operator could."""
    with scene.coordinator() as coordinator:
        kafka_id = scene.kafka_id(scene.row().generation)
        found = coordinator.describe(kafka_id)
        assert found is not None
        assert found.status is TransactionStatus.ONGOING
        answer = coordinator.end_transaction(kafka_id, producer_id=found.producer_id, epoch=found.epoch, commit=False)
        assert answer.proven

        def is_aborted() -> bool:
            described = coordinator.describe(kafka_id)
            return described is not None and described.status is TransactionStatus.COMPLETE_ABORT

        until(is_aborted, "it is aborted", pause=0.01)


def lose(scene: Scene) -> None:
    """Write event 1; lose event 2."""
    crash_writer(scene, "after_db_commit")
    abort(scene)
    assert (scene.rows(), scene.messages()) == ([1, 2], [1])


def acknowledge(scene: Scene) -> None:
    with dualwrite.store_from_url(scene.url) as store:
        assert len(store.acknowledge(scene.transactional_id)) == 1


def with_entry(scene: Scene, **changes: Any) -> None:
    """Find what was lost, publish nothing, and change its entry."""
    scene.connect(on_lost="report").close()
    with dualwrite.store_from_url(scene.url) as store:
        claim = store.claim(scene.transactional_id, "test", timeout=LIMIT)
        (entry,) = store.read_claimed(claim).lost
        store.record_resolution(claim, Resolution(resolved_entry=entry, lost=replace(entry, **changes)))


def publishing(scene: Scene, publisher: str, failpoint: str = "") -> Worker:
    return scene.write(3, 1, failpoint) if publisher == "opens" else scene.recovery(failpoint)


def in_order(scene: Scene) -> list[int]:
    """The numbers in the order of the log; the messages of an id have one key, and so one partition."""
    return [int(message.value or b"-1") for message in read_committed(scene.settings, scene.topic)]


def create_topic(scene: Scene, *, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    kept = {"retention.ms": "-1"}  # messages of 1970 as well
    admin.create_topics([NewTopic(scene.topic, partitions, config=kept)])[scene.topic].result(LIMIT)


def read_all(scene: Scene) -> dict[int, list[tuple[Any, ...]]]:
    """Key, value, headers and timestamp of each committed message, by partition."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    with closing(Consumer({**scene.settings, "group.id": "reads", "isolation.level": "read_committed"})) as consumer:
        count = len(read_committed(scene.settings, scene.topic))
        ends = [TopicPartition(scene.topic, number, OFFSET_BEGINNING) for number in range(3)]
        consumer.assign(ends)
        left = Deadline.after(LIMIT)
        while sum(map(len, found.values())) < count and not left.expired:
            for message in consumer.consume(10_000, 0.1):
                assert message.error() is None
                what = (message.key(), message.value(), message.headers(), message.timestamp())
                found.setdefault(message.partition(), []).append(what)
    assert sum(map(len, found.values())) == count
    return found


def assert_published(scene: Scene) -> None:
    """Recover in two processes; then both sides have events 1 and 2, in this order, and a writer continues.

    If one takes the id over from the other one, it publishes what is left.
    """
    for report in scene.recover_twice_at_once():
        assert report["error"] is None, report
        assert report["taken_over_by"] or not report["unacknowledged"], report
    assert scene.agree() == [1, 2]
    scene.assert_resolved()
    scene.write_here(3)
    assert in_order(scene) == [1, 2, 3]


def test_a_writer_that_opens_publishes_before_its_first_transaction(scene: Scene) -> None:
    lose(scene)
    with scene.connect() as writer:
        assert writer.recovery_report.ok
        assert [found.outcome.value for found in writer.recovery_report] == ["LOST", "PUBLISHED_AGAIN"]
        assert in_order(scene) == [1, 2]
        scene.event(writer, 3)
    assert in_order(scene) == [1, 2, 3]
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


def test_a_writer_whose_commit_comes_too_late_publishes_before_it_returns(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.event(writer, 1)
        with failpoints.armed("before_kafka_commit", lambda: abort(scene)):
            scene.event(writer, 2)
        assert in_order(scene) == [1, 2]
        scene.event(writer, 3)
    assert in_order(scene) == [1, 2, 3]
    scene.assert_resolved()


def test_what_a_writer_could_not_publish_at_once_is_published_before_its_next_transaction(scene: Scene) -> None:
    """Meanwhile the caller has learned that they are not published yet."""

    def fail() -> None:
        raise dualwrite.BrokerUnavailableError("simulated", transactional_id=scene.transactional_id)

    with scene.connect() as writer:
        scene.event(writer, 1)
        with (
            failpoints.armed("before_kafka_commit", lambda: abort(scene)),
            failpoints.armed("republish_after_check", failpoints.only_at(1, fail)),
            pytest.raises(dualwrite.InDoubtTransactionError, match="not published again yet") as caught,
        ):
            scene.event(writer, 2)
        assert caught.value.database_committed
        assert in_order(scene) == [1]
        scene.event(writer, 3)
    assert in_order(scene) == [1, 2, 3]
    scene.assert_resolved()


def test_no_transaction_overtakes_messages_that_were_not_published_again_in_time(
    scene: Scene, producer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: the machine is suspended while they are sent, in the first two attempts."""
    monkeypatch.setenv("DUALWRITE_TWO_PHASE", "false" if producer == "native" else "")
    clock_gettime, hours = time.clock_gettime, count()

    def suspended() -> None:
        monkeypatch.setattr(time, "clock_gettime", lambda clock: clock_gettime(clock) + 3600 * next(hours))

    def awake() -> None:
        monkeypatch.setattr(time, "clock_gettime", clock_gettime)

    attempts = iter((suspended, suspended, awake))

    def attempt() -> None:
        next(attempts)()

    with scene.connect() as writer, failpoints.armed("republish_after_check", attempt):
        scene.event(writer, 1)
        with (
            failpoints.armed("before_kafka_commit", failpoints.only_at(1, lambda: abort(scene))),
            pytest.raises(dualwrite.InDoubtTransactionError, match="not published again yet"),
        ):
            scene.event(writer, 2)
        with pytest.raises(dualwrite.BrokerUnavailableError, match=r"published again within transaction\.timeout\.ms"):
            scene.event(writer, 3)
        assert (scene.rows(), in_order(scene)) == ([1, 2], [1])
        scene.event(writer, 3)
    assert in_order(scene) == [1, 2, 3]
    scene.assert_resolved()


@mostly_native
def test_a_writer_whose_lost_transaction_was_acknowledged_does_not_report_it_as_committed(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.event(writer, 1)
        with (
            failpoints.armed("before_kafka_commit", lambda: abort(scene)),
            failpoints.armed("republish_after_prepare", lambda: acknowledge(scene)),
            pytest.raises(dualwrite.LostTransactionError),
        ):
            scene.event(writer, 2)
        scene.event(writer, 3)
    assert in_order(scene) == [1, 3]
    scene.assert_resolved()


def test_two_recoveries_publish_once(scene: Scene) -> None:
    lose(scene)
    assert_published(scene)


@each_step
def test_the_next_one_completes_what_a_publisher_that_died_has_begun(scene: Scene, point: str, publisher: str) -> None:
    lose(scene)
    publishing(scene, publisher, f"{point}=kill").killed()
    assert_published(scene)


@each_step
def test_a_publisher_that_is_paused_and_replaced_publishes_nothing_more(scene: Scene, point: str, publisher: str) -> None:
    lose(scene)
    paused = publishing(scene, publisher, f"{point}=stop")
    paused.wait_until_stopped()
    scene.write_here(4)
    paused.resume()
    paused.end()
    assert "done" not in " ".join(paused.lines), paused.lines
    assert in_order(scene) == [1, 2, 4]
    scene.assert_resolved()
    assert scene.agree() == [1, 2, 4]


@pytest.mark.parametrize("publisher", PUBLISHERS)
def test_the_new_transaction_may_be_lost_as_well(scene: Scene, publisher: str) -> None:
    lose(scene)
    for _ in range(2):
        publishing(scene, publisher, "republish_after_record=kill").killed()
        abort(scene)
        assert scene.messages() == [1]
    assert_published(scene)


def test_a_copy_that_is_lost_keeps_its_place(scene: Scene) -> None:
    """Two transactions were lost; the first is published again, and lost again."""
    lose(scene)
    scene.connect(on_lost="report").close()
    scene.write(3, 1, "after_db_commit=kill", DUALWRITE_ON_LOST="report").killed()
    abort(scene)
    scene.connect(on_lost="report").close()
    scene.recovery("republish_after_record=kill").killed()
    abort(scene)
    assert scene.recover()["unacknowledged"] == []
    assert in_order(scene) == [1, 2, 3]
    assert scene.agree() == [1, 2, 3]


@mostly_native
def test_an_unverified_transaction_is_not_published_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the log can't be read when recovery asks for the proof, and can be read right after that."""
    lose(scene)
    with_entry(scene, kind=LostKind.UNVERIFIED)
    monkeypatch.setattr(WireTransactionCoordinator, "fate", lambda *_, **__: Fate.GONE)
    report = scene.recover()
    assert [kind for kind, _ in report["unacknowledged"]] == ["UNVERIFIED"]
    with pytest.raises(dualwrite.UnverifiedTransactionError):
        scene.connect()
    assert scene.messages() == [1]


@mostly_native
@pytest.mark.parametrize("cluster_id", ["another", ""])
def test_what_was_lost_on_another_cluster_is_not_published(scene: Scene, cluster_id: str) -> None:
    lose(scene)
    with_entry(scene, cluster_id=cluster_id)
    with pytest.raises(dualwrite.LostTransactionError, match="on another Kafka cluster"):
        scene.connect()
    assert scene.messages() == [1]


@mostly_native
def test_a_copied_database_publishes_nothing_of_its_original(
    databases: Databases, broker: DevCluster, producer: str, tmp_path: Path
) -> None:
    del producer
    original = databases.scene("sqlite", broker)
    lose(original)
    original.connect(on_lost="report").close()
    copy = copied_file(original, tmp_path / "copy.db")
    assert main(["db", "new-store-id", "--url", copy.url, "--yes"]) == 0
    copy.write_here(3)
    assert copy.messages() == [1, 3]
    original.recover()
    copy.assert_resolved()
    assert original.messages() == [1, 2, 3]


@mostly_native
@pytest.mark.parametrize("cut", ["cut before it arrives", "cut when it was answered"])
def test_a_record_without_an_answer_is_not_followed_by_an_abort(
    databases: Databases, broker: DevCluster, producer: str, cut: str
) -> None:
    """The store repeats the record; the first one has removed the entry, if it was executed."""
    del producer
    with through_a_proxy(databases, "postgresql", broker) as proxied:
        scene = proxied.scene
        lose(scene)
        met = []

        def break_connection(link: Link) -> None:
            met.append(link)
            link.cut()

        def hook() -> None:
            proxied.proxy.on_client_bytes(proxied.commit, break_connection, when=CUTS[cut].when)

        with failpoints.armed("republish_after_prepare", hook), proxied.connect() as writer:
            assert met
            scene.event(writer, 3)
        assert in_order(scene) == [1, 2, 3]
        scene.assert_resolved()


@pytest.mark.parametrize("point", BEFORE_COMMIT)
def test_what_is_acknowledged_meanwhile_is_not_published(scene: Scene, point: str) -> None:
    lose(scene)
    with failpoints.armed(point, lambda: acknowledge(scene)), scene.connect() as writer:
        assert writer.recovery_report.ok
        assert "PUBLISHED_AGAIN" not in [found.outcome.value for found in writer.recovery_report]
        scene.event(writer, 3)
    assert in_order(scene) == [1, 3]
    assert scene.unfinished() == []
    scene.assert_resolved()


@mostly_native
def test_messages_that_retention_has_deleted_stay_lost_with_the_reason(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(scene)
    with scene.connect(on_lost="report") as writer:
        scene.event(writer, 3)  # behind the lost message, so that the log can be cut between them
    delete_records(scene, scene.topic)
    report = dualwrite.recover(scene.url, kafka=scene.settings, ids=[scene.transactional_id])
    ((kept,),) = (one.not_published for one in report.ids)
    assert "deleted" in " ".join(kept.reasons)
    with pytest.raises(dualwrite.LostTransactionError, match="can't be published again"):
        scene.connect()
    assert scene.rows() == [1, 2, 3]
    where = ["--url", scene.url, "--kafka", scene.bootstrap, "--id", scene.transactional_id]
    assert main(["recover", *where, "--republish", "--dry-run"]) == 3
    assert "can't be published again" in capsys.readouterr().out
    assert main(["recover", *where, "--yes", "--acknowledge"]) == 0
    scene.write_here(4)


@mostly_native
def test_the_command_shows_what_it_would_publish_and_publishes_it(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    lose(scene)
    where = ["--url", scene.url, "--kafka", scene.bootstrap, "--id", scene.transactional_id]
    assert main(["recover", *where, "--dry-run"]) == 3
    capsys.readouterr()
    assert main(["recover", *where, "--republish", "--dry-run"]) == 0
    assert f"1 to {scene.topic}-0 (from offset 2)" in capsys.readouterr().out
    assert scene.messages() == [1]
    assert main(["recover", *where, "--yes", "--republish"]) == 0
    assert "PUBLISHED_AGAIN" in capsys.readouterr().out
    assert_published(scene)


def test_a_message_is_published_again_as_it_was(scene: Scene) -> None:
    """The same messages in a transaction that commits, and in one that is lost; 50,000 of them, in several partitions."""
    headers = [("a", b"1"), ("a", None), ("empty", b"")]

    def write(number: int) -> None:
        with scene.connect() as writer, writer.transaction() as tx:
            scene.events.write(tx.db, scene.transactional_id, number)
            tx.send(scene.topic, None, key=b"\xff", headers=headers, timestamp=1_000)
            tx.send(scene.topic, b"\0", partition=1, timestamp=2_000)
            tx.send_many(scene.topic, map(str, range(50_000)), keys=map(str, range(50_000)), timestamp=3_000)

    create_topic(scene, partitions=3)
    write(1)
    before = read_all(scene)
    with failpoints.armed("before_kafka_commit", lambda: abort(scene)):
        write(2)
    after = read_all(scene)
    for partition, messages in before.items():
        assert after[partition] == [*messages, *messages]


@pytest.mark.parametrize("moves_on", [False, True])
def test_a_group_continues_after_what_was_published_again(scene: Scene, moves_on: bool) -> None:
    """Offsets in the lost transaction are committed again, unless the group has gone further by itself."""
    source = f"source-{scene.transactional_id}"
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    for number in range(5):
        producer.produce(source, str(number))
    producer.flush(LIMIT)
    group = {**scene.settings, "group.id": scene.transactional_id, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    here = TopicPartition(source, 0)

    def meanwhile() -> None:
        abort(scene)
        if moves_on:
            consumer.commit(offsets=[TopicPartition(source, 0, 4)], asynchronous=False)

    with closing(Consumer(group)) as consumer, scene.connect() as writer:
        consumer.assign([TopicPartition(source, 0, OFFSET_BEGINNING)])
        assert [consumer.poll(LIMIT) is not None for _ in range(3)] == [True] * 3
        with failpoints.armed("before_kafka_commit", meanwhile), writer.transaction() as tx:
            scene.events.write(tx.db, scene.transactional_id, 1)
            tx.send(scene.topic, "1", key=scene.transactional_id)
            tx.send_offsets(consumer)
        assert scene.agree() == [1]
        (found,) = consumer.committed([here], LIMIT)
        assert found.offset == (4 if moves_on else 3)


@mostly_native
def test_a_header_names_the_lost_transaction_if_that_is_wanted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_MARK_REPUBLISHED", "true")
    lose(scene)
    state = scene.row().prepared_state
    scene.recover()
    first, again = read_committed(scene.settings, scene.topic)
    assert first.headers == ()
    assert again.headers == ((HEADER, str(state).encode()),)


def test_what_kafka_refuses_stays_lost_and_nothing_stays_open(scene: Scene) -> None:
    """The topic takes no message of this size any more."""
    lose(scene)
    admin = AdminClient({"bootstrap.servers": scene.bootstrap})
    smaller = [ConfigEntry("max.message.bytes", "80", incremental_operation=AlterConfigOpType.SET)]
    resource = ConfigResource(ConfigResource.Type.TOPIC, scene.topic, incremental_configs=smaller)
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(LIMIT)
    report = scene.recover()
    assert (report["outcomes"], report["error"]) == (["LOST"], None)
    assert [kind for kind, _ in report["unacknowledged"]] == ["LOST"]
    assert scene.unfinished() == []
    assert scene.row().unresolved_generations == range(scene.row().generation + 1, scene.row().generation + 1)


@pytest.mark.parametrize("point", BEFORE_COMMIT)
def test_what_a_successor_has_published_is_not_reported_as_lost(scene: Scene, point: str) -> None:
    with scene.connect() as writer:
        scene.event(writer, 1)
        with (
            failpoints.armed("before_kafka_commit", lambda: abort(scene)),
            failpoints.armed(point, failpoints.only_at(1, lambda: scene.write_here(3))),
            pytest.raises(dualwrite.InDoubtTransactionError),
        ):
            scene.event(writer, 2)
    assert in_order(scene) == [1, 2, 3]
