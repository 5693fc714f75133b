"""Ending transactions of real brokers: hanging ones by a marker, others by compare-and-set; and which are refused."""

from __future__ import annotations

from collections.abc import Iterator
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
from fixtures.pace import LIMIT
from fixtures.tables import table
from fixtures.tiers import thinned
from fixtures.transactions import PRODUCER_ID, NewName, Transactions

VERSIONS = ["4.2.2", "3.9.1"]


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


def found(examined: Examined | None) -> Examined:
    assert examined is not None
    return examined


# --- abort ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_each_release
def test_a_hanging_transaction_is_aborted_and_consumers_continue(
    scene: Transactions, admin: TransactionAdmin, topic: str
) -> None:
    scene.hang(topic)
    scene.write(topic)
    assert read_values(scene.servers, topic) == []
    (hanging,) = admin.find_hanging(topic=topic, max_transaction_timeout=0).hanging
    examined = found(admin.examine(topic, 0, start_offset=0))
    assert (examined.verdict, examined.hangs, examined.was_committed) == (hanging, True, False)
    with pytest.raises(RepairRefusedError, match="no coordinator knows its producer id"):
        admin.abort(examined)
    admin.abort(examined, force=True)
    assert read_values(scene.servers, topic) == [b"v"]
    assert admin.find_hanging(topic=topic, max_transaction_timeout=0).open == 0
    assert admin.examine(topic, 0, start_offset=0) is None
    with pytest.raises(TransactionChangedError, match="has ended in the meantime"):
        admin.abort(examined, force=True)


@pytest.mark.slow
def test_a_hanging_transaction_can_be_named_by_its_producer(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    scene.hang(topic, epoch=3)
    assert admin.examine(topic, 0, producer_id=PRODUCER_ID, epoch=2) is None
    assert admin.examine(topic, 0, producer_id=PRODUCER_ID + 1, epoch=3) is None
    admin.abort(found(admin.examine(topic, 0, producer_id=PRODUCER_ID, epoch=3)), coordinator_epoch=0, force=True)
    assert admin.find_hanging(topic=topic, max_transaction_timeout=0).open == 0


@pytest.mark.slow
@pytest.mark.parametrize(("is_lost", "sent"), [("the response", 1), ("the request", 2)])
def test_a_marker_is_sent_again_only_if_the_transaction_is_still_open(
    scene: Transactions, admin: TransactionAdmin, topic: str, monkeypatch: pytest.MonkeyPatch, is_lost: str, sent: int
) -> None:
    """It names only the producer, whose next transaction in the partition may have the same epoch."""
    scene.hang(topic)
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
def test_a_marker_of_an_older_coordinator_is_refused(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    """The partition has a marker of this producer, so it knows its coordinator's epoch."""
    name = scene.open(topic=topic)
    scene.end()
    seen = described(admin, name)
    scene.hang(topic, seen.producer_id, seen.epoch + 1)
    examined = found(admin.examine(topic, 0, producer_id=seen.producer_id))
    with pytest.raises(TransactionChangedError, match="newer coordinator epoch"):
        admin.abort(examined, coordinator_epoch=-1, force=True)
    assert admin.examine(topic, 0, producer_id=seen.producer_id) is not None


@pytest.mark.slow
def test_a_transaction_that_its_coordinator_will_end_is_not_aborted(
    scene: Transactions, admin: TransactionAdmin, topic: str
) -> None:
    name = scene.open(topic=topic)
    examined = found(admin.examine(topic, 0))
    assert (examined.verdict, examined.transactional_id) == (None, name)
    for force in (False, True):
        with pytest.raises(RepairRefusedError, match="does not hang: its coordinator will end it") as refused:
            admin.abort(examined, force=force)
    assert "force-terminate" in str(refused.value)
    scene.end()
    assert read_values(scene.servers, topic) == [b"v"]


def test_a_missing_partition(admin: TransactionAdmin, topic: str, new_name: NewName) -> None:
    with pytest.raises(UnknownTopicError, match="There is no partition"):
        admin.examine(topic, 7)
    with pytest.raises(UnknownTopicError, match="There is no topic"):
        admin.examine(new_name("missing"), 0)


def test_a_transaction_that_no_longer_hangs_is_not_aborted(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    """It was examined long ago: `abort` examines it again."""
    scene.open(topic=topic)
    opened = found(admin.examine(topic, 0)).opened
    stale = Examined(opened, HangingTransaction(opened, Reason.UNKNOWN_PRODUCER), None)
    assert stale.refusal(force=True) is None
    with pytest.raises(RepairRefusedError, match="does not hang: its coordinator will end it"):
        admin.abort(stale, force=True)
    scene.end()
    assert read_values(scene.servers, topic) == [b"v"]


OPENED = OpenTransaction("t", 0, 1, ActiveProducer(7, 3, 0, 1_000, None, 550))


def verdict_of(
    reason: Reason, status: TransactionStatus, epoch: int, producer_id: int = 7, *, start_time_ms: int = 1_000
) -> Examined:
    description = TransactionDescription(status, producer_id, epoch, 60_000, start_time_ms)
    return Examined(OPENED, HangingTransaction(OPENED, reason, "id", 1, description), "id")


S = TransactionStatus


@table("status", [S.COMPLETE_COMMIT, S.PREPARE_COMMIT])
@table("epoch", [3, 4])
def test_a_transaction_that_its_coordinator_committed_last_needs_force(status: TransactionStatus, epoch: int) -> None:
    """Kafka 4.3.0 to 4.4.0 leave out the marker of a partition without a leader (KAFKA-20734)."""
    examined = verdict_of(Reason.WITHOUT_PARTITION, status, epoch)
    assert examined.was_committed
    assert "without writing the marker here" in str(examined.refusal())
    assert examined.refusal(force=True) is None


@table(
    ("status", "epoch", "producer_id", "start_time_ms"),
    [
        (S.ONGOING, 4, 7, 1_000),  # the next transaction
        (S.ONGOING, 3, 7, 1_000),  # the next one of a producer that keeps its epoch
        (S.COMPLETE_ABORT, 3, 7, 1_000),
        (S.COMPLETE_ABORT, 4, 7, 2_000),  # of a later transaction
        (S.COMPLETE_ABORT, 5, 7, 1_000),
        (S.COMPLETE_COMMIT, 5, 7, 1_000),
        (S.EMPTY, 4, 7, 1_000),  # of a new session
        (S.COMPLETE_COMMIT, 4, 8, 1_000),  # after the last epoch of a producer id
        (S.DEAD, 3, 7, 1_000),
    ],
)
def test_a_transaction_that_its_coordinator_has_passed_needs_force(
    status: TransactionStatus, epoch: int, producer_id: int, start_time_ms: int
) -> None:
    examined = verdict_of(Reason.OTHER_EPOCH, status, epoch, producer_id, start_time_ms=start_time_ms)
    assert (examined.was_committed, examined.may_have_been_committed) == (False, True)
    assert "may have been committed: its coordinator has a later transaction" in str(examined.refusal())
    assert examined.refusal(force=True) is None


@table(("status", "epoch"), [(S.COMPLETE_ABORT, 4), (S.PREPARE_ABORT, 4), (S.EMPTY, 3)])
def test_an_uncommitted_transaction_needs_no_force(status: TransactionStatus, epoch: int) -> None:
    examined = verdict_of(Reason.WITHOUT_PARTITION, status, epoch)
    assert not examined.may_have_been_committed
    assert examined.refusal() is None


@table("reason", [one for one in Reason if not one.is_conclusive or one in (Reason.UNKNOWN_PRODUCER, Reason.UNKNOWN_ID)])
def test_an_undecided_or_unknown_transaction_needs_force(reason: Reason) -> None:
    """It may have been committed; or its id is hidden by an ACL that denies Describe on it, and it is still open."""
    examined = Examined(OPENED, HangingTransaction(OPENED, reason), None)
    assert examined.may_have_been_committed is reason.is_conclusive
    why = "an ACL that denies Describe hides its transactional id" if reason.is_conclusive else "not certain"
    assert why in str(examined.refusal())
    assert examined.refusal(force=True) is None


# --- force-terminate --------------------------------------------------------------------------------------------------


def described(admin: TransactionAdmin, name: str) -> TransactionDescription:
    (one,) = admin.describe([name])
    assert one.description is not None
    return one.description


def test_an_open_transaction_is_aborted_and_its_producer_fenced(
    scene: Transactions, admin: TransactionAdmin, topic: str
) -> None:
    name = scene.open(topic=topic)
    seen = described(admin, name)
    admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    wait_for_markers(scene.servers)
    after = described(admin, name)
    assert after.status in (TransactionStatus.COMPLETE_ABORT, TransactionStatus.EMPTY)
    assert (after.producer_id, after.epoch) == (seen.producer_id, seen.epoch + 1)
    with pytest.raises(KafkaException) as fenced:
        scene.producers[0].commit_transaction(LIMIT)
    assert fenced.value.args[0].code() in (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.INVALID_TXN_STATE)
    assert read_values(scene.servers, topic) == []
    with pytest.raises(TransactionChangedError, match="it is in state"):
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)


@pytest.mark.slow
def test_the_transaction_of_a_successor_is_not_aborted(scene: Transactions, admin: TransactionAdmin, topic: str) -> None:
    name = scene.open(topic=topic)
    seen = described(admin, name)
    scene.open(name, topic)
    with pytest.raises(TransactionChangedError, match="the open transaction has producer id") as refused:
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    assert "nothing was done" in str(refused.value)
    scene.end()
    assert read_values(scene.servers, topic) == [b"v"]


@pytest.mark.slow
def test_a_transaction_that_changes_between_check_and_request(
    scene: Transactions, admin: TransactionAdmin, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look shows the old transaction; the request itself compares."""
    name = scene.open(topic=topic)
    seen = described(admin, name)
    scene.open(name, topic)
    monkeypatch.setattr(WireTransactionCoordinator, "describe", lambda *_, **__: seen)
    with pytest.raises(TransactionChangedError, match="Kafka returned"):
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    scene.end()
    assert read_values(scene.servers, topic) == [b"v"]


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
    scene: Transactions, admin: TransactionAdmin, topic: str, coordinator: WireTransactionCoordinator
) -> None:
    """Why it does not do as a compare-and-set: it compares the producer id only while a transaction is ongoing."""
    name = scene.open(topic=topic)
    seen = described(admin, name)
    scene.open(name, topic)
    now = described(admin, name)
    assert (now.producer_id, now.status) == (seen.producer_id, TransactionStatus.ONGOING)
    assert now.epoch > seen.epoch
    coordinator.init_producer_id(name, producer_id=seen.producer_id + 1, epoch=seen.epoch)
    assert described(admin, name) == now
    coordinator.init_producer_id(name, producer_id=seen.producer_id, epoch=seen.epoch)
    wait_for_markers(scene.servers)
    assert described(admin, name).status in (TransactionStatus.COMPLETE_ABORT, TransactionStatus.EMPTY)


@pytest.mark.slow
def test_a_successor_that_begins_between_abort_and_fencing_is_not_fenced(
    broker_v4: DevCluster, new_name: NewName, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, name, topic = broker_v4.bootstrap_servers, new_name("id"), new_name("topic")
    scene = Transactions(broker_v4, new_name)
    scene.open(name, topic)
    original = WireTransactionCoordinator.end_transaction

    def ended(self: WireTransactionCoordinator, kafka_id: str, **arguments: Any) -> EndTxnResult:
        answer = original(self, kafka_id, **arguments)
        scene.open(name, topic)
        return answer

    with TransactionAdmin(servers, timeout=LIMIT) as admin:
        seen = described(admin, name)
        monkeypatch.setattr(WireTransactionCoordinator, "end_transaction", ended)
        admin.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    scene.end()
    assert read_values(servers, topic) == [b"v"]
