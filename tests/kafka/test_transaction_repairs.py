"""Ending transactions of real brokers: hanging ones by a marker, others by compare-and-set; and which are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from dualwrite.admin import Examined, HangingTransaction, OpenTransaction, Reason, TransactionAdmin
from dualwrite.admin.facts import ActiveProducer
from dualwrite.devcluster import DevCluster
from dualwrite.errors import RepairRefusedError, TransactionChangedError, UnknownTopicError
from dualwrite.kafka import probe
from dualwrite.kafka.base import EndTxnResult
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.messages_generated import WriteTxnMarkersRequest
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import TransactionDescription, TransactionStatus
from fixtures.broker import TRUSTING, read_values, started, wait_for_markers
from fixtures.open_transactions import left_open
from fixtures.pace import LIMIT
from fixtures.raw_producer import write_behind_the_coordinator
from fixtures.tables import table
from fixtures.tiers import thinned

NewName = Callable[[str], str]
VERSIONS = ["4.2.2", "3.9.1"]
PRODUCER_ID = 4_000_000


on_each_release = pytest.mark.parametrize("trusting", VERSIONS, indirect=True)
"""For tests of requests that the releases treat differently; the other ones run on the older release with `-m soak`."""


@pytest.fixture(scope="module", params=thinned(VERSIONS, kept=VERSIONS[:1], quick=VERSIONS[:1]))
def trusting(request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """Of each release; the older one has no EndTxn v5."""
    with started(kafka_version=request.param, config=TRUSTING) as cluster:
        yield cluster


@pytest.fixture
def coordinator(servers: str) -> Iterator[WireTransactionCoordinator]:
    with closing(WireTransactionCoordinator(KafkaConfig.of(servers), timeout=LIMIT)) as made:
        yield made


def hang(servers: str, topic: str, producer_id: int = PRODUCER_ID, epoch: int = 0) -> int:
    return write_behind_the_coordinator(servers, topic, producer_id, epoch, int(time.time() * 1000))


def found(examined: Examined | None) -> Examined:
    assert examined is not None
    return examined


# --- abort ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_each_release
def test_a_hanging_transaction_is_aborted_and_consumers_continue(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    offset = hang(servers, topic)
    left_open(servers, new_name("id"), topic).commit_transaction(LIMIT)
    assert read_values(servers, topic) == []
    (hanging,) = admin.find_hanging(topic=topic, max_transaction_timeout=0).hanging
    examined = found(admin.examine(topic, 0, start_offset=offset))
    assert (examined.verdict, examined.hangs, examined.was_committed) == (hanging, True, False)
    with pytest.raises(RepairRefusedError, match="no coordinator knows its producer id"):
        admin.abort(examined)
    admin.abort(examined, force=True)
    assert read_values(servers, topic) == [b"v"]
    assert admin.find_hanging(topic=topic, max_transaction_timeout=0).open == 0
    assert admin.examine(topic, 0, start_offset=offset) is None
    with pytest.raises(TransactionChangedError, match="has ended in the meantime"):
        admin.abort(examined, force=True)


@pytest.mark.slow
def test_a_hanging_transaction_can_be_named_by_its_producer(servers: str, admin: TransactionAdmin, topic: str) -> None:
    hang(servers, topic, epoch=3)
    assert admin.examine(topic, 0, producer_id=PRODUCER_ID, epoch=2) is None
    assert admin.examine(topic, 0, producer_id=PRODUCER_ID + 1, epoch=3) is None
    admin.abort(found(admin.examine(topic, 0, producer_id=PRODUCER_ID, epoch=3)), coordinator_epoch=0, force=True)
    assert admin.find_hanging(topic=topic, max_transaction_timeout=0).open == 0


@pytest.mark.slow
@pytest.mark.parametrize(("is_lost", "sent"), [("the response", 1), ("the request", 2)])
def test_a_marker_is_sent_again_only_if_the_transaction_is_still_open(
    servers: str, admin: TransactionAdmin, topic: str, monkeypatch: pytest.MonkeyPatch, is_lost: str, sent: int
) -> None:
    """It names only the producer, whose next transaction in the partition may have the same epoch."""
    hang(servers, topic)
    examined = found(admin.examine(topic, 0))
    original, calls = Connection.call, []

    def lossy(connection: Connection, request: Any, *more: Any) -> Any:
        if not isinstance(request, WriteTxnMarkersRequest):
            return original(connection, request, *more)
        calls.append(request)
        if len(calls) > 1:
            return original(connection, request, *more)
        if is_lost == "the response":
            original(connection, request, *more)
        raise ConnectionLostError(connection.address, "the connection was closed")

    monkeypatch.setattr(Connection, "call", lossy)
    admin.abort(examined, force=True)
    assert len(calls) == sent
    assert admin.examine(topic, 0) is None


@pytest.mark.slow
def test_a_marker_of_an_older_coordinator_is_refused(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName, coordinator: WireTransactionCoordinator
) -> None:
    """The partition has a marker of this producer, so it knows its coordinator's epoch."""
    name = new_name("id")
    left_open(servers, name, topic).commit_transaction(LIMIT)
    wait_for_markers(servers)
    described = coordinator.describe(name)
    assert described is not None
    hang(servers, topic, described.producer_id, described.epoch + 1)
    examined = found(admin.examine(topic, 0, producer_id=described.producer_id))
    with pytest.raises(TransactionChangedError, match="newer coordinator epoch"):
        admin.abort(examined, coordinator_epoch=-1, force=True)
    assert admin.examine(topic, 0, producer_id=described.producer_id) is not None


@pytest.mark.slow
def test_a_transaction_that_its_coordinator_will_end_is_not_aborted(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    name = new_name("id")
    producer = left_open(servers, name, topic)
    examined = found(admin.examine(topic, 0))
    assert (examined.verdict, examined.transactional_id) == (None, name)
    for force in (False, True):
        with pytest.raises(RepairRefusedError, match="does not hang: its coordinator will end it") as refused:
            admin.abort(examined, force=force)
    assert "force-terminate" in str(refused.value)
    producer.commit_transaction(LIMIT)
    assert read_values(servers, topic) == [b"v"]


def test_a_missing_partition(admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    with pytest.raises(UnknownTopicError, match="There is no partition"):
        admin.examine(topic, 7)
    with pytest.raises(UnknownTopicError, match="There is no topic"):
        admin.examine(new_name("missing"), 0)


def test_a_transaction_that_no_longer_hangs_is_not_aborted(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    """It was examined long ago: `abort` examines it again."""
    producer = left_open(servers, new_name("id"), topic)
    opened = found(admin.examine(topic, 0)).opened
    stale = Examined(opened, HangingTransaction(opened, Reason.UNKNOWN_PRODUCER), None)
    assert stale.refusal(force=True) is None
    with pytest.raises(RepairRefusedError, match="does not hang: its coordinator will end it"):
        admin.abort(stale, force=True)
    producer.commit_transaction(LIMIT)
    assert read_values(servers, topic) == [b"v"]


OPENED = OpenTransaction("t", 0, 1, ActiveProducer(7, 3, 0, 1_000, None, 550))


def verdict_of(
    reason: Reason, status: TransactionStatus, epoch: int, producer_id: int = 7, *, start_time_ms: int = 1_000
) -> Examined:
    description = TransactionDescription(status, producer_id, epoch, 60_000, start_time_ms)
    return Examined(OPENED, HangingTransaction(OPENED, reason, "id", 1, description), "id")


@pytest.mark.parametrize("status", [TransactionStatus.COMPLETE_COMMIT, TransactionStatus.PREPARE_COMMIT])
@pytest.mark.parametrize("epoch", [3, 4])
def test_a_transaction_that_its_coordinator_committed_last_needs_force(status: TransactionStatus, epoch: int) -> None:
    """Kafka 4.3.0 to 4.4.0 leave out the marker of a partition without a leader (KAFKA-20734)."""
    examined = verdict_of(Reason.WITHOUT_PARTITION, status, epoch)
    assert examined.was_committed
    assert "without writing the marker here" in str(examined.refusal())
    assert examined.refusal(force=True) is None


@table(
    ("status", "epoch", "producer_id"),
    [
        (TransactionStatus.ONGOING, 4, 7),  # the next transaction
        (TransactionStatus.ONGOING, 3, 7),  # the next one of a producer that keeps its epoch
        (TransactionStatus.COMPLETE_ABORT, 3, 7),
        (TransactionStatus.COMPLETE_ABORT, 5, 7),
        (TransactionStatus.COMPLETE_COMMIT, 5, 7),
        (TransactionStatus.EMPTY, 4, 7),  # of a new session
        (TransactionStatus.COMPLETE_COMMIT, 4, 8),  # after the last epoch of a producer id
        (TransactionStatus.DEAD, 3, 7),
    ],
)
def test_a_transaction_that_its_coordinator_has_passed_needs_force(
    status: TransactionStatus, epoch: int, producer_id: int
) -> None:
    examined = verdict_of(Reason.OTHER_EPOCH, status, epoch, producer_id)
    assert not examined.was_committed
    assert examined.may_have_been_committed
    assert "may have been committed: its coordinator has a later transaction" in str(examined.refusal())
    assert examined.refusal(force=True) is None


def test_the_abort_of_a_later_transaction_proves_nothing() -> None:
    later = verdict_of(Reason.WITHOUT_PARTITION, TransactionStatus.COMPLETE_ABORT, 4, start_time_ms=2_000)
    assert later.may_have_been_committed


@pytest.mark.parametrize(
    ("status", "epoch"),
    [
        (TransactionStatus.COMPLETE_ABORT, 4),
        (TransactionStatus.PREPARE_ABORT, 4),
        (TransactionStatus.EMPTY, 3),
    ],
)
def test_an_uncommitted_transaction_needs_no_force(status: TransactionStatus, epoch: int) -> None:
    examined = verdict_of(Reason.WITHOUT_PARTITION, status, epoch)
    assert not examined.may_have_been_committed
    assert examined.refusal() is None


@pytest.mark.parametrize("reason", [Reason.UNKNOWN_PRODUCER, Reason.UNKNOWN_ID])
def test_a_transaction_unknown_to_coordinators_needs_force(reason: Reason) -> None:
    """It may have been committed; or its id is hidden by an ACL that denies Describe on it, and it is still open."""
    examined = Examined(OPENED, HangingTransaction(OPENED, reason), None)
    assert examined.may_have_been_committed
    assert "an ACL that denies Describe hides its transactional id" in str(examined.refusal())
    assert examined.refusal(force=True) is None


@table("reason", [reason for reason in Reason if not reason.is_conclusive])
def test_an_undecided_transaction_needs_force(reason: Reason) -> None:
    examined = Examined(OPENED, HangingTransaction(OPENED, reason), None)
    assert "not certain" in str(examined.refusal())
    assert examined.refusal(force=True) is None


# --- force-terminate --------------------------------------------------------------------------------------------------


def described(admin: TransactionAdmin, name: str) -> TransactionDescription:
    (one,) = admin.describe([name])
    assert one.description is not None
    return one.description


def test_an_open_transaction_is_aborted_and_its_producer_fenced(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    name = new_name("id")
    producer = left_open(servers, name, topic)
    seen = described(admin, name)
    admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    wait_for_markers(servers)
    after = described(admin, name)
    assert after.status in (TransactionStatus.COMPLETE_ABORT, TransactionStatus.EMPTY)
    assert (after.producer_id, after.epoch) == (seen.producer_id, seen.epoch + 1)
    with pytest.raises(KafkaException) as fenced:
        producer.commit_transaction(LIMIT)
    assert fenced.value.args[0].code() in (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.INVALID_TXN_STATE)
    assert read_values(servers, topic) == []
    with pytest.raises(TransactionChangedError, match="it is in state"):
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)


@pytest.mark.slow
def test_the_transaction_of_a_successor_is_not_aborted(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName
) -> None:
    name = new_name("id")
    producer = left_open(servers, name, topic)
    seen = described(admin, name)
    successor = left_open(servers, name, topic)
    with pytest.raises(TransactionChangedError, match="the open transaction has producer id") as refused:
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    assert "nothing was done" in str(refused.value)
    successor.commit_transaction(LIMIT)
    assert read_values(servers, topic) == [b"v"]
    del producer


@pytest.mark.slow
def test_a_transaction_that_changes_between_check_and_request(
    servers: str,
    admin: TransactionAdmin,
    topic: str,
    new_name: NewName,
    coordinator: WireTransactionCoordinator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look shows the old transaction; the request itself compares."""
    name = new_name("id")
    producer = left_open(servers, name, topic)
    seen = described(admin, name)
    successor = left_open(servers, name, topic)
    monkeypatch.setattr(WireTransactionCoordinator, "describe", lambda *_, **__: seen)
    with pytest.raises(TransactionChangedError, match="Kafka returned"):
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    successor.commit_transaction(LIMIT)
    assert read_values(servers, topic) == [b"v"]
    del producer


def test_a_prepared_transaction_is_aborted(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName, coordinator: WireTransactionCoordinator
) -> None:
    if not probe(servers).two_phase:
        pytest.skip("the broker has no two-phase commit")
    name = new_name("id")
    with closing(NativeProducer(KafkaConfig.of(servers), name, coordinator, two_phase=True)) as producer:
        producer.init_transactions(timeout=LIMIT)
        producer.begin_transaction()
        producer.send(topic, b"v")
        producer.prepare_transaction(timeout=LIMIT)
        seen = described(admin, name)
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
        wait_for_markers(servers)
        assert described(admin, name).status is TransactionStatus.COMPLETE_ABORT
    assert read_values(servers, topic) == []


def test_an_unknown_id(admin: TransactionAdmin, new_name: NewName) -> None:
    with pytest.raises(TransactionChangedError, match="does not know the id"):
        admin.force_terminate(new_name("unknown"), producer_id=1, epoch=0)


@pytest.mark.slow
@on_each_release
def test_init_producer_id_with_a_stale_epoch_aborts_a_successors_transaction(
    servers: str, admin: TransactionAdmin, topic: str, new_name: NewName, coordinator: WireTransactionCoordinator
) -> None:
    """Why it does not do as a compare-and-set: it compares the producer id only while a transaction is ongoing."""
    name = new_name("id")
    producer = left_open(servers, name, topic)
    seen = described(admin, name)
    successor = left_open(servers, name, topic)
    now = described(admin, name)
    assert (now.producer_id, now.status) == (seen.producer_id, TransactionStatus.ONGOING)
    assert now.epoch > seen.epoch
    coordinator.raise_epoch(name, producer_id=seen.producer_id + 1, epoch=seen.epoch)
    assert described(admin, name) == now
    coordinator.raise_epoch(name, producer_id=seen.producer_id, epoch=seen.epoch)
    wait_for_markers(servers)
    assert described(admin, name).status in (TransactionStatus.COMPLETE_ABORT, TransactionStatus.EMPTY)
    del producer, successor


@pytest.mark.slow
def test_a_successor_that_begins_between_abort_and_fencing_is_not_fenced(
    broker_v4: DevCluster, new_name: NewName, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, name, topic = broker_v4.bootstrap_servers, new_name("id"), new_name("topic")
    producer = left_open(servers, name, topic)
    successors = []
    original = WireTransactionCoordinator.end_transaction

    def ended(self: WireTransactionCoordinator, kafka_id: str, **arguments: Any) -> EndTxnResult:
        answer = original(self, kafka_id, **arguments)
        successors.append(left_open(servers, name, topic))
        return answer

    with TransactionAdmin(servers, timeout=LIMIT) as admin:
        seen = described(admin, name)
        monkeypatch.setattr(WireTransactionCoordinator, "end_transaction", ended)
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    successors[0].commit_transaction(LIMIT)
    assert read_values(servers, topic) == [b"v"]
    del producer
