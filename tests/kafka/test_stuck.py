"""What holds consumers back, on real brokers: partitions, transactions, and the groups that wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from kafka.protocol.consumer import ConsumerProtocolAssignment
from kafka.protocol.producer import TxnOffsetCommitRequest

from dualwrite.admin import Reason, StuckPartition, StuckSearch, TransactionAdmin, WaitingGroup, partitions, waiting
from dualwrite.admin.facts import ActiveProducer, BrokerProblem, DescribedTransaction, OpenTransaction, TransactionListing
from dualwrite.admin.groups import (
    CONSUMER,
    GROUP_OFFSETS_TOPIC,
    STREAMS,
    GroupListing,
    assigned_partitions,
    list_groups,
    partition_of_group,
)
from dualwrite.admin.hanging import CoordinatorSide
from dualwrite.admin.requests import Brokers, ClusterView, Key
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError, UnknownGroupError
from dualwrite.kafka.client.brokers import GROUP, Network
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.state import TransactionDescription, TransactionStatus
from fixtures.broker import wait_for_markers
from fixtures.foreign import foreign
from fixtures.open_transactions import left_open
from fixtures.pace import LIMIT, until, until_received
from fixtures.producing import producing
from fixtures.raw_producer import RAW_ID, answered, write_behind_the_coordinator

NewName = Callable[[str], str]
HOUR_MS = 3_600_000


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


def test_nothing_is_stuck_without_an_open_transaction(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    with producing(servers) as produce:
        for _ in range(3):
            produce(topic, b"v")
    left_open(servers, new_name("id"), topic).commit_transaction(LIMIT)
    wait_for_markers(servers)
    found = admin.stuck(topic=topic)
    assert (found.partitions, found.searched, found.complete) == ((), 1, True)


@pytest.mark.parametrize("code", [ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.KAFKA_STORAGE_ERROR])
def test_a_leader_that_does_not_know_its_offsets_yet_is_asked_again(
    admin: TransactionAdmin, topic: str, code: ErrorCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is put into the first response: no broker returns it when a test wants it to."""
    codes = [code]
    responses = partitions._Offsets.responses

    def first_refused(self: Any, response: Any) -> Iterator[tuple[Key, int, Any]]:
        for key, real, offset in responses(self, response):
            yield key, codes.pop() if codes else real, offset

    monkeypatch.setattr(partitions._Offsets, "responses", first_refused)
    found = admin.stuck(topic=topic)
    assert (codes, found.unreadable, found.complete) == ([], (), True)


@pytest.mark.slow
def test_an_open_transaction_blocks_its_partition(servers: str, admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    left_open(servers, new_name("first"), topic, messages=2).commit_transaction(LIMIT)
    wait_for_markers(servers)
    began = int(time.time() * 1000)
    name = new_name("id")
    producer = left_open(servers, name, topic, messages=4)
    left_open(servers, new_name("behind"), topic).commit_transaction(LIMIT)
    wait_for_markers(servers)
    found = only(admin.stuck(topic=topic))
    assert (found.end.last_stable_offset, found.end.high_watermark, found.end.records_behind) == (3, 9, 6)
    holder = found.holder
    assert (holder.transactional_id, holder.hanging, holder.coordinator) == (name, None, 1)
    assert holder.opened.producer.transaction_start_offset == 3
    now = int(time.time() * 1000)
    age = holder.age_ms(now)
    assert age is not None
    assert 0 <= age <= now - began + 1000
    assert admin.stuck(topic=topic, longer_than=3600).partitions == ()
    producer.commit_transaction(LIMIT)
    wait_for_markers(servers)
    assert admin.stuck(topic=topic).partitions == ()


@pytest.mark.slow
def test_a_hanging_transaction_blocks_its_partition_forever(servers: str, admin: TransactionAdmin, topic: str) -> None:
    write_behind_the_coordinator(servers, topic, 4_000_000, 0, int(time.time() * 1000) - HOUR_MS)
    holder = only(admin.stuck(topic=topic, longer_than=3599)).holder
    assert (holder.transactional_id, holder.hanging) == (None, Reason.UNKNOWN_PRODUCER)


@pytest.mark.slow
def test_a_hanging_transaction_with_a_timestamp_in_the_future(servers: str, admin: TransactionAdmin, topic: str) -> None:
    write_behind_the_coordinator(servers, topic, 4_000_002, 0, int(time.time() * 1000) + HOUR_MS // 2)
    for longer_than in (0, 60):
        holder = only(admin.stuck(topic=topic, longer_than=longer_than)).holder
        assert (holder.hanging, holder.age_ms(int(time.time() * 1000))) == (Reason.UNKNOWN_PRODUCER, None)
    examined = admin.examine(topic, 0)
    assert examined is not None
    admin.abort(examined, force=True)


@pytest.mark.slow
def test_the_oldest_of_several_transactions_blocks(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    names = [new_name("id") for _ in range(3)]
    producers = [left_open(servers, name, topic) for name in names]
    for name, producer in zip(names, producers, strict=True):
        assert only(admin.stuck(topic=topic)).holder.transactional_id == name
        producer.abort_transaction(LIMIT)
        wait_for_markers(servers)


@pytest.mark.slow
def test_groups_that_wait_are_listed(servers: str, admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    left_open(servers, new_name("first"), topic, messages=2).commit_transaction(LIMIT)
    wait_for_markers(servers)
    producer = left_open(servers, new_name("id"), topic)
    waiting, gone = new_name("waiting"), new_name("gone")
    with consuming(servers, gone, topic, 1):
        pass
    with consuming(servers, waiting, topic, 2):
        found = only(admin.stuck(topic=topic))
        assert found.groups == (WaitingGroup(waiting, 2),)
        assert only(admin.stuck(group=waiting)).groups == (WaitingGroup(waiting, 2),)
    assert only(admin.stuck(topic=topic, group=gone)).groups == (WaitingGroup(gone, 1),)
    with pytest.raises(UnknownGroupError, match="may not describe it"):
        admin.stuck(group=new_name("unknown"))
    del producer


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_without_committed_offsets_that_waits(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName, protocol: str
) -> None:
    """It has no position, only members with the partition."""
    producer = left_open(servers, new_name("id"), topic)
    group = new_name("group")
    with consuming(servers, group, topic, 0, protocol):
        waiting = (WaitingGroup(group, None, has_no_position=True),)
        until(lambda: only(admin.stuck(topic=topic)).groups == waiting, lambda: admin.stuck(topic=topic))
        assert only(admin.stuck(group=group)).groups == waiting
        stored = {(topic, 0): 1}
        assert only(admin.stuck(topic=topic, stored=lambda _: stored)).groups == ()
    del producer


def test_the_first_offsets_of_a_group_are_pending(servers: str, admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    """The partition is asked for by name: it had no position before."""
    group, name = new_name("group"), new_name("id")
    with consuming(servers, group, topic, 0) as consumer:
        producer = left_open(servers, name, new_name("results"))
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 1)], consumer.consumer_group_metadata(), LIMIT)
        for search in (admin.stuck(topic=GROUP_OFFSETS_TOPIC), admin.stuck(group=group)):
            assert WaitingGroup(group, None) in only(search).groups
        producer.abort_transaction(LIMIT)


def test_groups_that_store_their_positions_elsewhere(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    """What they have committed to Kafka is for monitors, and older."""
    left_open(servers, new_name("first"), topic, messages=2).commit_transaction(LIMIT)
    wait_for_markers(servers)
    producer = left_open(servers, new_name("id"), topic)
    member, past, absent = new_name("member"), new_name("past"), new_name("absent")
    positions = {member: {(topic, 0): 3}, past: {(topic, 0): 4}, absent: {(topic, 0): 1}}

    def stored(group: str) -> dict[tuple[str, int], int]:
        return positions.get(group, {})

    with consuming(servers, member, topic, 1), consuming(servers, past, topic, 1):
        assert only(admin.stuck(topic=topic)).groups == tuple(sorted(WaitingGroup(name, 1) for name in (member, past)))
        waiting = (WaitingGroup(member, 3, is_stored=True),)
        assert only(admin.stuck(topic=topic, stored=stored)).groups == waiting
        assert only(admin.stuck(group=member, stored=stored)).groups == waiting
    assert only(admin.stuck(group=absent, stored=stored)).groups == (WaitingGroup(absent, 1, is_stored=True),)
    with pytest.raises(UnknownGroupError):
        admin.stuck(group=absent)
    del producer


def test_a_group_whose_offsets_are_pending(servers: str, admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    """KIP-447: positions that were sent in a transaction hold the group's members back."""
    group = new_name("group")
    with producing(servers) as produce:
        produce(topic, b"v")
    name = new_name("id")
    with consuming(servers, group, topic, 1) as consumer:
        producer = left_open(servers, name, new_name("results"))
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 1)], consumer.consumer_group_metadata(), LIMIT)
        for search in (admin.stuck(topic=GROUP_OFFSETS_TOPIC), admin.stuck(group=group)):
            found = only(search)
            assert (found.end.topic, found.holder.transactional_id) == (GROUP_OFFSETS_TOPIC, name)
            assert found.groups == (WaitingGroup(group, None),)
        producer.commit_transaction(LIMIT)
    wait_for_markers(servers)
    assert admin.stuck(group=group).partitions == ()


@pytest.mark.slow
def test_hanging_offsets_are_found_and_aborted(servers: str, admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    """A position that was sent without the coordinator's knowledge: the group's members wait forever."""
    group = new_name("group")
    with producing(servers) as produce:
        produce(topic, b"v")
    with consuming(servers, group, topic, 1):
        pass
    send_offset_behind_the_coordinator(servers, group, topic, 4_000_001, 0, offset=1)
    found = only(admin.stuck(group=group))
    assert (found.end.topic, found.holder.hanging, found.groups) == (
        GROUP_OFFSETS_TOPIC,
        Reason.UNKNOWN_PRODUCER,
        (WaitingGroup(group, None),),
    )
    place = (GROUP_OFFSETS_TOPIC, found.end.partition)
    search = admin.find_hanging(topic=place[0], partitions=[place[1]], max_transaction_timeout=0)
    assert [one.reason for one in search.hanging] == [Reason.UNKNOWN_PRODUCER]
    examined = admin.examine(*place, producer_id=4_000_001, epoch=0)
    assert examined is not None
    admin.abort(examined, force=True)
    assert admin.stuck(group=group).partitions == ()


@pytest.mark.slow
def test_the_whole_cluster(servers: str, admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    producer = left_open(servers, new_name("id"), topic)
    search = admin.stuck()
    assert topic in {found.end.topic for found in search.partitions}
    ages = [found.holder.age_ms(int(time.time() * 1000)) or 0 for found in search.partitions]
    assert ages == sorted(ages, reverse=True)
    del producer


def test_partitions_that_cannot_be_examined(admin: TransactionAdmin, new_name: NewName) -> None:
    name = new_name("missing")
    found = admin.stuck(topic=name)
    assert not found.complete
    assert [one.topic for one in found.unreadable] == [name]


@pytest.mark.parametrize(("group", "expected"), [("", 0), ("a", 47), ("order-service", None), ("\U0001f600", None)])
def test_the_offsets_partition_of_a_group(group: str, expected: int | None) -> None:
    """`Utils.abs(groupId.hashCode()) % partitions`: `"a".hashCode()` is 97."""
    found = partition_of_group(group, 50)
    assert 0 <= found < 50
    if expected is not None:
        assert found == expected


def test_the_hash_equals_that_of_java(servers: str, admin: TransactionAdmin) -> None:
    """Known values of `String.hashCode()`: "hello" 99162322, "polygenelubricants" -2147483648, "\\U0001f600" 1772899."""
    large = 2**31
    assert partition_of_group("hello", large) == 99_162_322
    assert partition_of_group("polygenelubricants", large) == 0
    assert partition_of_group("\U0001f600", large) == 1_772_899


def test_groups_of_every_protocol_that_reads_topics_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka Streams' own (KIP-1071) too; not share groups, nor those of Kafka Connect."""
    answer = SimpleNamespace(
        error_code=0,
        groups=[
            SimpleNamespace(group_id=kind, protocol_type=protocol, group_type=kind, group_state="Stable")
            for kind, protocol in (
                ("Classic", "consumer"),
                ("Consumer", "consumer"),
                ("Streams", "streams"),
                ("Share", "share"),
                ("Connect", "connect"),
            )
        ],
    )
    monkeypatch.setattr(Brokers, "view", lambda *_: ClusterView({1: Address("h", 1)}, (), {}))
    monkeypatch.setattr(Brokers, "request", lambda _, __, ___, conclude: {1: conclude(1, answer)})
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        found = list_groups(Brokers(network, Deadline.after(1), 1))
    assert [(one.group_id, one.kind) for one in found] == [("Classic", "classic"), ("Consumer", CONSUMER), ("Streams", STREAMS)]


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
    written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients write assignments as they like."""
    good = ConsumerProtocolAssignment(version=0, assigned_partitions=[READABLE], user_data=b"").encode()
    answer = SimpleNamespace(
        groups=[
            SimpleNamespace(
                group_id="group",
                error_code=0,
                protocol_type="consumer",
                members=[SimpleNamespace(member_assignment=one) for one in (written, good)],
            )
        ]
    )
    monkeypatch.setattr(Brokers, "view", lambda *_: ClusterView({1: Address("h", 1)}, (), {}))
    monkeypatch.setattr(Brokers, "request", lambda _, __, ___, conclude: {1: conclude(1, answer)})
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        brokers = Brokers(network, Deadline.after(1), 1)
        found = assigned_partitions(brokers, [GroupListing("group", 1, "Stable")])
    assert found == {"group": {("t", 0), ("t", 1)}}
    (error,) = brokers.hidden
    assert "The assignment of a member of group 'group' can't be read" in str(error)


COVERED = BrokerProblem(2, None, "is down", covered=True)
UNCOVERED = BrokerProblem(2, None, "is down: the positions of its consumer groups are missing")


@pytest.mark.parametrize("noted", [[COVERED, UNCOVERED], [UNCOVERED, COVERED]], ids=["covered first", "uncovered first"])
def test_a_problem_that_is_covered_hides_no_other_of_the_same_broker(noted: list[BrokerProblem]) -> None:
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        brokers = Brokers(network, Deadline.after(1), 1)
        for problem in noted:
            brokers.note(problem)
        assert brokers.problems == (UNCOVERED,)
        assert brokers.is_silent(2)


def test_a_broker_that_was_down_may_be_asked() -> None:
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        brokers = Brokers(network, Deadline.after(1), 1)
        brokers.note(COVERED)
        assert brokers.problems == (COVERED,)
        assert not brokers.is_silent(2)


@pytest.mark.parametrize("problem", [None, BrokerUnavailableError("No answer.")])
def test_a_transaction_that_can_no_longer_be_described_is_not_left_out(
    problem: BrokerUnavailableError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It seemed to hang, did not hang when it was checked again, and is then described once more."""
    one = OpenTransaction("t", 0, 1, ActiveProducer(7, 3, 0, 1_000, None, 550))
    listed = {7: TransactionListing("id", 2, 7, "Ongoing")}
    description = TransactionDescription(TransactionStatus.ONGOING, 7, 3, 60_000, 1_000, frozenset({("t", 0)}))
    again = DescribedTransaction("id", 2, None if problem else description, problem)
    sides = iter([CoordinatorSide({}, {}, all_listed=True), CoordinatorSide(listed, {"id": again}, all_listed=True)])
    monkeypatch.setattr(waiting, "coordinator_side", lambda *_: next(sides))
    monkeypatch.setattr(waiting, "hanging", lambda *_: [])
    with closing(Network(KafkaConfig.of("127.0.0.1:1"))) as network:
        (holder,) = waiting._holders(Brokers(network, Deadline.after(1), 1), [one]).values()
    assert (holder.transactional_id, holder.hanging) == ("id", Reason.NOT_DESCRIBED if problem else None)


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
