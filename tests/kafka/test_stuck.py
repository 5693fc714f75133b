"""What holds consumers back, on real brokers: partitions, transactions, and the groups that wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from kafka.protocol.consumer import ConsumerProtocolAssignment
from kafka.protocol.producer import TxnOffsetCommitRequest

from dualwrite.admin import Reason, StuckPartition, StuckSearch, TransactionAdmin, WaitingGroup
from dualwrite.admin.facts import BrokerProblem
from dualwrite.admin.groups import (
    CONSUMER,
    GROUP_OFFSETS_TOPIC,
    STREAMS,
    GroupListing,
    assigned_partitions,
    list_groups,
    partition_of_group,
)
from dualwrite.admin.requests import Brokers, ClusterView
from dualwrite.deadline import Deadline
from dualwrite.errors import UnknownGroupError
from dualwrite.kafka.client.brokers import GROUP, Network
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.messages_generated import ListOffsetsResponse
from fixtures.foreign import foreign
from fixtures.pace import LIMIT, until, until_received
from fixtures.producing import producing
from fixtures.raw_producer import RAW_ID, answered
from fixtures.tables import table
from fixtures.transactions import HOUR_MS, Transactions


@contextmanager
def consuming(servers: str, group: str, topic: str, messages: int, protocol: str = "classic") -> Iterator[Consumer]:
    """A member of a group that has the topic, has read and committed so many messages, and stays."""
    settings = {
        "bootstrap.servers": servers,
        "group.id": group,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "group.protocol": protocol,
    }
    with closing(Consumer(settings)) as consumer:
        consumer.subscribe([topic])
        for _ in range(messages):
            (message,) = until_received(lambda: consumer.consume(1, 0.1), "a message")
            assert message.error() is None
        if messages:
            consumer.commit(asynchronous=False)
        until(lambda: consumer.poll(0.1) or consumer.assignment(), "the partitions are assigned")
        yield consumer


def only(search: StuckSearch) -> StuckPartition:
    (found,) = search.partitions
    return found


def age_of(found: StuckPartition) -> int | None:
    return found.holder.age_ms(int(time.time() * 1000))


def test_nothing_is_stuck_without_an_open_transaction(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    with producing(scene.servers) as produce:
        for _ in range(3):
            produce(topic, b"v")
    scene.write(topic)
    found = admin.stuck(topic=topic)
    assert (found.partitions, found.searched, found.complete) == ((), 1, True)


@table("code", [ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.KAFKA_STORAGE_ERROR])
def test_a_leader_that_does_not_know_its_offsets_yet_is_asked_again(
    admin: TransactionAdmin, topic: str, code: ErrorCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is put into the first response: no broker returns it when a test wants it to."""
    codes = [code]
    ask = Brokers.request

    def first_refused(self: Brokers, *arguments: Any) -> Any:
        found = ask(self, *arguments)
        if codes and any(isinstance(response, ListOffsetsResponse) for response in found.values()):
            refused = SimpleNamespace(partition_index=0, error_code=codes.pop())
            return dict.fromkeys(found, SimpleNamespace(topics=[SimpleNamespace(name=topic, partitions=[refused])]))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Brokers, "request", first_refused)
        found = admin.stuck(topic=topic)
    assert (codes, found.unreadable, found.complete) == ([], (), True)


@pytest.mark.slow
def test_an_open_transaction_blocks_its_partition(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    scene.write(topic, 2)
    began = int(time.time() * 1000)
    name = scene.open(topic=topic, messages=4)
    scene.write(topic)
    found = only(admin.stuck(topic=topic))
    assert (found.end.last_stable_offset, found.end.high_watermark, found.end.records_behind) == (3, 9, 6)
    holder = found.holder
    assert (holder.transactional_id, holder.hanging, holder.coordinator) == (name, None, 1)
    assert holder.opened.producer.transaction_start_offset == 3
    age = age_of(found)
    assert age is not None
    assert 0 <= age <= int(time.time() * 1000) - began + 1000
    assert admin.stuck(topic=topic, longer_than=3600).partitions == ()
    scene.end()
    assert admin.stuck(topic=topic).partitions == ()


@pytest.mark.slow
def test_a_hanging_transaction_with_a_timestamp_in_the_future(scene: Transactions, admin: TransactionAdmin) -> None:
    topic = scene.hang(producer_id=4_000_002, age_ms=-HOUR_MS // 2)
    for longer_than in (0, 60):
        found = only(admin.stuck(topic=topic, longer_than=longer_than))
        assert (found.holder.hanging, age_of(found)) == (Reason.UNKNOWN_PRODUCER, None)
    examined = admin.examine(topic, 0)
    assert examined is not None
    admin.abort(examined, force=True)


@pytest.mark.slow
def test_the_oldest_of_several_transactions_blocks(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    for name in [scene.open(topic=topic) for _ in range(3)]:
        assert only(admin.stuck(topic=topic)).holder.transactional_id == name
        scene.end(commit=False, at=0)


@pytest.mark.slow
def test_groups_that_wait_are_listed(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    scene.write(topic, 2)
    scene.open(topic=topic)
    waiting, gone = scene.new_name("waiting"), scene.new_name("gone")
    with consuming(scene.servers, gone, topic, 1):
        pass
    with consuming(scene.servers, waiting, topic, 2):
        for search in (admin.stuck(topic=topic), admin.stuck(group=waiting)):
            assert only(search).groups == (WaitingGroup(waiting, 2),)
    assert only(admin.stuck(topic=topic, group=gone)).groups == (WaitingGroup(gone, 1),)
    with pytest.raises(UnknownGroupError, match="may not describe it"):
        admin.stuck(group=scene.new_name("unknown"))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_without_committed_offsets_that_waits(
    scene: Transactions, admin: TransactionAdmin, topic: str, protocol: str
) -> None:
    """It has no position, only members with the partition."""
    scene.open(topic=topic)
    group = scene.new_name("group")
    with consuming(scene.servers, group, topic, 0, protocol):
        waiting = (WaitingGroup(group, None, has_no_position=True),)
        until(lambda: only(admin.stuck(topic=topic)).groups == waiting, lambda: admin.stuck(topic=topic))
        assert only(admin.stuck(group=group)).groups == waiting
        stored = {(topic, 0): 1}
        assert only(admin.stuck(topic=topic, stored=lambda _: stored)).groups == ()


def test_groups_that_store_their_positions_elsewhere(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    """What they have committed to Kafka is for monitors, and older."""
    scene.write(topic, 2)
    scene.open(topic=topic)
    member, past, absent = (scene.new_name(kind) for kind in ("member", "past", "absent"))
    positions = {member: {(topic, 0): 3}, past: {(topic, 0): 4}, absent: {(topic, 0): 1}}

    def stored(group: str) -> dict[tuple[str, int], int]:
        return positions.get(group, {})

    with consuming(scene.servers, member, topic, 1), consuming(scene.servers, past, topic, 1):
        assert only(admin.stuck(topic=topic)).groups == tuple(sorted(WaitingGroup(name, 1) for name in (member, past)))
        for search in (admin.stuck(topic=topic, stored=stored), admin.stuck(group=member, stored=stored)):
            assert only(search).groups == (WaitingGroup(member, 3, is_stored=True),)
    assert only(admin.stuck(group=absent, stored=stored)).groups == (WaitingGroup(absent, 1, is_stored=True),)
    with pytest.raises(UnknownGroupError):
        admin.stuck(group=absent)


@pytest.mark.parametrize("read", [0, 1], ids=["no position before", "with a position"])
def test_a_group_whose_offsets_are_pending(scene: Transactions, admin: TransactionAdmin, topic: str, read: int) -> None:
    """KIP-447: positions that were sent in a transaction hold the group's members back; also in a partition without one."""
    group = scene.new_name("group")
    if read:
        scene.write(topic)
    with consuming(scene.servers, group, topic, read) as consumer:
        name = scene.open()
        offsets = [TopicPartition(topic, 0, 1)]
        scene.producers[0].send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), LIMIT)
        for search in (admin.stuck(topic=GROUP_OFFSETS_TOPIC), admin.stuck(group=group)):
            (found,) = [one for one in search.partitions if one.holder.transactional_id == name]
            assert (found.end.topic, WaitingGroup(group, None) in found.groups) == (GROUP_OFFSETS_TOPIC, True)
        scene.end()
    assert name not in {one.holder.transactional_id for one in admin.stuck(group=group).partitions}


@pytest.mark.slow
def test_hanging_offsets_are_found_and_aborted(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    """A position that was sent without the coordinator's knowledge: the group's members wait forever."""
    group = scene.new_name("group")
    with producing(scene.servers) as produce:
        produce(topic, b"v")
    with consuming(scene.servers, group, topic, 1):
        pass
    send_offset_behind_the_coordinator(scene.servers, group, topic, 4_000_001, 0, offset=1)
    found = only(admin.stuck(group=group))
    assert (found.end.topic, found.holder.hanging) == (GROUP_OFFSETS_TOPIC, Reason.UNKNOWN_PRODUCER)
    assert found.groups == (WaitingGroup(group, None),)
    place = (GROUP_OFFSETS_TOPIC, found.end.partition)
    search = admin.find_hanging(topic=place[0], partitions=[place[1]], max_transaction_timeout=0)
    assert [one.reason for one in search.hanging] == [Reason.UNKNOWN_PRODUCER]
    examined = admin.examine(*place, producer_id=4_000_001, epoch=0)
    assert examined is not None
    admin.abort(examined, force=True)
    assert admin.stuck(group=group).partitions == ()


@pytest.mark.slow
def test_the_whole_cluster(scene: Transactions, admin: TransactionAdmin) -> None:
    topic = scene.open()
    search = admin.stuck()
    assert topic in {found.end.topic for found in search.partitions}
    ages = [age_of(found) or 0 for found in search.partitions]
    assert ages == sorted(ages, reverse=True)


LARGE = 2**31


@table(
    ("group", "partitions", "expected"),
    [
        ("", 50, 0),
        ("a", 50, 47),
        ("hello", LARGE, 99_162_322),
        ("polygenelubricants", LARGE, 0),
        ("\U0001f600", LARGE, 1_772_899),
    ],
)
def test_the_offsets_partition_of_a_group(group: str, partitions: int, expected: int) -> None:
    """`Utils.abs(groupId.hashCode()) % partitions`; `"a".hashCode()` is 97, that of "polygenelubricants" -2147483648."""
    assert partition_of_group(group, partitions) == expected


# --- responses that no broker gives when a test wants it to -----------------------------------------------------------


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    """Without any."""
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        yield Brokers(network, Deadline.after(1), 1)


def answering(monkeypatch: pytest.MonkeyPatch, **answer: Any) -> None:
    """One broker, with this response to every request."""
    monkeypatch.setattr(Brokers, "view", lambda *_: ClusterView({1: Address("h", 1)}, (), {}))
    monkeypatch.setattr(Brokers, "request", lambda _, __, ___, conclude: {1: conclude(1, SimpleNamespace(**answer))})


def test_groups_of_every_protocol_that_reads_topics_are_listed(brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka Streams' own (KIP-1071) too; not share groups, nor those of Kafka Connect."""
    kinds = {"Classic": "consumer", "Consumer": "consumer", "Streams": "streams", "Share": "share", "Connect": "connect"}
    groups = [
        SimpleNamespace(group_id=kind, protocol_type=protocol, group_type=kind, group_state="Stable")
        for kind, protocol in kinds.items()
    ]
    answering(monkeypatch, error_code=0, groups=groups)
    found = [(one.group_id, one.kind) for one in list_groups(brokers)]
    assert found == [("Classic", "classic"), ("Consumer", CONSUMER), ("Streams", STREAMS)]


READABLE = ConsumerProtocolAssignment.TopicPartition(topic="t", partitions=[0, 1])


@pytest.mark.parametrize(
    "written",
    [
        b"x",
        b"\x00",
        b"\xff\xff",  # version -1
        b"\x00\x00\x7f\xff\xff\xff",  # more topics than there are bytes
        b"\x00\x00" + 8 * b"\xff",  # null instead of topics
        b"\x00\x00\x00\x00\x00\x01\xff\xff\x00\x00\x00\x01\x00\x00\x00\x00\xff\xff\xff\xff",  # null as a topic's name
        b"\x00\x00\x00\x00\x00\x01\x00\x01\xff\x00\x00\x00\x01\x00\x00\x00\x00\xff\xff\xff\xff",  # a name that is not UTF-8
    ],
)
def test_an_assignment_that_cannot_be_read_is_reported_and_the_others_count(
    brokers: Brokers, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients write assignments as they like."""
    good = ConsumerProtocolAssignment(version=0, assigned_partitions=[READABLE], user_data=b"").encode()
    members = [SimpleNamespace(member_assignment=one) for one in (written, good)]
    group = SimpleNamespace(group_id="group", error_code=0, protocol_type="consumer", members=members)
    answering(monkeypatch, groups=[group])
    assert assigned_partitions(brokers, [GroupListing("group", 1, "Stable")]) == {"group": {("t", 0), ("t", 1)}}
    (error,) = brokers.hidden
    assert "The assignment of a member of group 'group' can't be read" in str(error)


COVERED = BrokerProblem(2, None, "is down", covered=True)
UNCOVERED = BrokerProblem(2, None, "is down: the positions of its consumer groups are missing")


@pytest.mark.parametrize("noted", [[COVERED, UNCOVERED], [UNCOVERED, COVERED], [COVERED]])
def test_a_problem_that_is_covered_hides_no_other_of_the_same_broker(brokers: Brokers, noted: list[BrokerProblem]) -> None:
    """And a broker that was down may be asked: it may be back."""
    for problem in noted:
        brokers.note(problem)
    worst = UNCOVERED if UNCOVERED in noted else COVERED
    assert (brokers.problems, brokers.is_silent(2)) == ((worst,), worst is UNCOVERED)


def send_offset_behind_the_coordinator(
    servers: str, group: str, topic: str, producer_id: int, epoch: int, *, offset: int
) -> None:
    """Commit a group's offset for partition 0 in a transaction. The broker must not verify transactions (KIP-890)."""
    partition = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic.TxnOffsetCommitRequestPartition
    with closing(Network(KafkaConfig.of(servers))) as network:
        answered(
            lambda: network.coordinator(group, GROUP).call(
                foreign(
                    TxnOffsetCommitRequest(
                        version=3,  # older, as of a producer that verifies nothing
                        transactional_id=RAW_ID,
                        group_id=group,
                        producer_id=producer_id,
                        producer_epoch=epoch,
                        generation_id=-1,
                        member_id="",
                        group_instance_id=None,
                        topics=[
                            TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
                                name=topic,
                                partitions=[
                                    partition(
                                        partition_index=0,
                                        committed_offset=offset,
                                        committed_leader_epoch=-1,
                                        committed_metadata="",
                                    )
                                ],
                            )
                        ],
                    )
                )
            ),
            lambda answer: int(answer.topics[0].partitions[0].error_code),
        )
