"""The coordinator's requests against real brokers, with and without EndTxn v5; a fake one has the versions of Kafka 3.0."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from kafka.protocol.admin import DescribeTransactionsRequest
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer import EndTxnRequest, InitProducerIdRequest

from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.state import TransactionDescription, TransactionStatus
from fixtures.pace import LIMIT, joined, until
from fixtures.wire_server import WireServer

S = TransactionStatus
NewName = Callable[[str], str]
Opener = Callable[..., Producer]
Committed = Callable[[str], list[bytes | None]]


def resolved(coordinator: WireTransactionCoordinator, transactional_id: str) -> TransactionDescription:
    """The description, once the markers are written."""

    def look() -> TransactionDescription | None:
        found = coordinator.describe(transactional_id)
        assert found is not None
        return None if found.status.is_ending else found

    return until(look, f"the markers of {transactional_id}", pause=0)


# --- describe ---------------------------------------------------------------------------------------------------------


def test_an_ongoing_transaction_is_described_with_its_identity(
    coordinator: WireTransactionCoordinator, ongoing: Opener, new_name: NewName
) -> None:
    before = time.time() * 1000
    name, topic = new_name("id"), new_name("topic")
    ongoing(name, topic)
    found = coordinator.describe(name)
    assert found is not None
    assert found.status is S.ONGOING
    assert found.epoch == 0
    assert before - 1000 <= found.start_time_ms <= time.time() * 1000 + 1000
    assert found.partitions == {(topic, 0)}
    assert found.timeout_ms == 60_000


@pytest.mark.parametrize(("commit", "status"), [(True, S.COMPLETE_COMMIT), (False, S.COMPLETE_ABORT)])
def test_an_ended_transaction_keeps_its_start_time(
    coordinator: WireTransactionCoordinator, ongoing: Opener, new_name: NewName, commit: bool, status: S
) -> None:
    name = new_name("id")
    producer = ongoing(name, new_name("topic"))
    during = coordinator.describe(name)
    (producer.commit_transaction if commit else producer.abort_transaction)(20)
    after = resolved(coordinator, name)
    assert during is not None
    assert after.status is status
    assert (after.producer_id, after.start_time_ms) == (during.producer_id, during.start_time_ms)


# --- EndTxn v5 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("commit", "status"), [(True, S.COMPLETE_COMMIT), (False, S.COMPLETE_ABORT)])
def test_an_outcome_is_proven_may_be_repeated_and_raises_the_epoch_and_the_opposite_is_refused(
    coordinator: WireTransactionCoordinator,
    ongoing: Opener,
    new_name: NewName,
    committed: Committed,
    commit: bool,
    status: S,
) -> None:
    name, topic = new_name("id"), new_name("topic")
    ongoing(name, topic, value=b"kept")
    assert committed(topic) == []
    found = coordinator.describe(name)
    assert found is not None
    for _ in range(3):
        answer = coordinator.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch, commit=commit)
        assert answer.proven
        assert (answer.name, answer.producer_id, answer.epoch) == ("NONE", found.producer_id, found.epoch + 1)
    after = resolved(coordinator, name)
    assert (after.status, after.epoch) == (status, found.epoch + 1)
    opposite = coordinator.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch, commit=not commit)
    assert opposite.code == ErrorCode.INVALID_TXN_STATE
    assert resolved(coordinator, name) == after
    assert committed(topic) == ([b"kept"] if commit else [])


def test_another_epoch_is_fenced_and_the_transaction_goes_on(
    coordinator: WireTransactionCoordinator, ongoing: Opener, new_name: NewName
) -> None:
    name = new_name("id")
    ongoing(name, new_name("topic"))
    found = coordinator.describe(name)
    assert found is not None
    for epoch in (found.epoch + 1, found.epoch + 7):
        answer = coordinator.end_transaction(name, producer_id=found.producer_id, epoch=epoch, commit=True)
        assert not answer.proven
        assert answer.name in ("PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
    answer = coordinator.end_transaction(name, producer_id=found.producer_id + 1000, epoch=found.epoch, commit=True)
    assert answer.name == "INVALID_PRODUCER_ID_MAPPING"
    assert coordinator.describe(name) == found
    assert not coordinator.end_transaction(new_name("unknown"), producer_id=1, epoch=0, commit=True).proven


def test_an_abort_with_nothing_ongoing_raises_the_epoch(
    coordinator: WireTransactionCoordinator, ongoing: Opener, new_name: NewName
) -> None:
    """How recovery fences previous owners: a compare-and-set on the described epoch."""
    name = new_name("id")
    ongoing(name, new_name("topic")).commit_transaction(LIMIT)
    found = resolved(coordinator, name)
    answer = coordinator.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch, commit=False)
    assert answer.proven
    assert answer.epoch == found.epoch + 1
    again = coordinator.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch + 7, commit=False)
    assert not again.proven


# --- EndTxn before v5 -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("commit", "status"), [(True, S.COMPLETE_COMMIT), (False, S.COMPLETE_ABORT)])
def test_v4_ends_a_transaction_and_keeps_the_epoch(
    coordinator_v4: WireTransactionCoordinator, ongoing_v4: Opener, new_name: NewName, commit: bool, status: S
) -> None:
    name = new_name("id")
    ongoing_v4(name, new_name("topic"))
    found = coordinator_v4.describe(name)
    assert found is not None
    answer = coordinator_v4.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch, commit=commit)
    assert answer.proven
    after = resolved(coordinator_v4, name)
    assert (after.status, after.epoch, after.start_time_ms) == (status, found.epoch, found.start_time_ms)
    assert coordinator_v4.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch, commit=commit).proven
    opposite = coordinator_v4.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch, commit=not commit)
    assert opposite.code == ErrorCode.INVALID_TXN_STATE
    fenced = coordinator_v4.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch + 1, commit=commit)
    assert not fenced.proven


@pytest.mark.parametrize("commit", [True, False])
def test_a_broker_with_the_versions_of_kafka_3_0_ends_a_transaction(
    new_coordinator: Callable[..., WireTransactionCoordinator], commit: bool
) -> None:
    """EndTxn v4 came with Kafka 3.8."""
    versions = {
        EndTxnRequest: (0, 3),
        InitProducerIdRequest: (0, 4),
        FindCoordinatorRequest: (0, 4),
        MetadataRequest: (0, 12),
        DescribeTransactionsRequest: (0, 0),
    }
    with WireServer(versions=versions, features={}) as server:
        coordinator = new_coordinator(server.bootstrap_servers)
        assert coordinator.end_transaction("id", producer_id=1, epoch=2, commit=commit, timeout=LIMIT).proven
        (ended,) = server.received(EndTxnRequest)
        assert (ended.API_VERSION, ended.producer_id, ended.producer_epoch, ended.committed) == (3, 1, 2, commit)
        assert coordinator.init_producer_id("id", timeout=LIMIT).proven


# --- InitProducerId, ListTransactions, settings -----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", pytest.param("_v4", marks=pytest.mark.slow)])
def test_init_producer_id_aborts_what_is_ongoing_and_fences(
    request: pytest.FixtureRequest, new_name: NewName, version: str
) -> None:
    coordinator: WireTransactionCoordinator = request.getfixturevalue(f"coordinator{version}")
    name = new_name("id")
    request.getfixturevalue(f"ongoing{version}")(name, new_name("topic"))
    found = coordinator.describe(name)
    assert found is not None
    answer = coordinator.init_producer_id(name)
    assert answer.proven or answer.name == "CONCURRENT_TRANSACTIONS"
    assert resolved(coordinator, name).status in (S.COMPLETE_ABORT, S.EMPTY)
    if not answer.proven:
        until(lambda: coordinator.init_producer_id(name).proven, "the markers of the abort", pause=0)
    assert not coordinator.end_transaction(name, producer_id=found.producer_id, epoch=found.epoch, commit=True).proven


def test_init_producer_id_creates_an_unknown_id(coordinator: WireTransactionCoordinator, new_name: NewName) -> None:
    name = new_name("id")
    answer = coordinator.init_producer_id(name)
    assert answer.proven
    assert answer.producer_id >= 0
    found = coordinator.describe(name)
    assert found is not None
    assert (found.status, found.producer_id) == (S.EMPTY, answer.producer_id)


def test_listing_gives_the_ids_of_a_prefix_sorted(
    coordinator: WireTransactionCoordinator, ongoing: Opener, new_name: NewName
) -> None:
    prefix, topic = new_name("list"), new_name("topic")
    ongoing(f"{prefix}-b", topic)
    ongoing(f"{prefix}-a", topic)
    listed = coordinator.list_transactions(prefix)
    assert [(t.kafka_transactional_id, t.status) for t in listed] == [(f"{prefix}-a", S.ONGOING), (f"{prefix}-b", S.ONGOING)]
    assert {t.kafka_transactional_id for t in coordinator.list_transactions()} >= {f"{prefix}-a", f"{prefix}-b"}
    assert coordinator.list_transactions(f"{prefix}-none") == []


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_unreachable_broker_is_named_with_the_setting_within_the_time_limit(free_port: int) -> None:
    coordinator = WireTransactionCoordinator(KafkaConfig.of(f"127.0.0.1:{free_port}"), timeout=0.2)
    for ask in (
        lambda: coordinator.describe("x"),
        coordinator.knows_end_by_epoch,
        coordinator.list_transactions,
        coordinator.transaction_max_timeout_ms,
        lambda: coordinator.init_producer_id("x"),
        lambda: coordinator.end_transaction("x", producer_id=1, epoch=0, commit=True),
    ):
        with pytest.raises(BrokerUnavailableError) as caught:
            ask()
        assert f"127.0.0.1:{free_port}" in str(caught.value)
        assert "bootstrap.servers" in str(caught.value)
        assert "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS" in str(caught.value)
        assert caught.value.retriable


def test_one_of_the_servers_is_enough_also_after_close(broker: DevCluster, free_port: int, new_name: NewName) -> None:
    coordinator = WireTransactionCoordinator(KafkaConfig.of(f"127.0.0.1:{free_port},{broker.bootstrap_servers}"), timeout=LIMIT)
    for _ in range(2):
        assert coordinator.describe(new_name("id")) is None
        coordinator.close()
        coordinator.close()


@pytest.mark.slow
def test_several_threads_may_call_at_once(coordinator: WireTransactionCoordinator, ongoing: Opener, new_name: NewName) -> None:
    topic = new_name("topic")
    names = [new_name("id") for _ in range(4)]
    for name in names:
        ongoing(name, topic)
    wrong: list[object] = []

    def ask(name: str) -> None:
        for _ in range(20):
            found = coordinator.describe(name)
            if found is None or found.status is not S.ONGOING:
                wrong.append((name, found))

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread)
    assert wrong == []
