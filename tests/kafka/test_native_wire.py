"""NativeProducer with answers that no released broker gives, such as accepting `keepPreparedTxn`, from a fake server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kafka.protocol.admin import DescribeTransactionsRequest, ListTransactionsRequest, ListTransactionsResponse
from kafka.protocol.admin import DescribeTransactionsResponse as Described
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest, MetadataResponse
from kafka.protocol.producer import EndTxnRequest, EndTxnResponse, InitProducerIdRequest, ProduceRequest

import dualwrite
from dualwrite.errors import (
    BrokerError,
    BrokerUnavailableError,
    DeliveryError,
    ProducerFencedError,
    UnknownTransactionStateError,
)
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.connecting import ConnectionAttempt
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.native import retry_policy
from dualwrite.kafka.native.native_producer import NativeProducer, ProducerState
from dualwrite.kafka.native.sender import Sender
from dualwrite.state import PreparedTxnState
from fixtures.pace import LIMIT
from fixtures.wire_server import NODE_ID, PRODUCER_ID, WireServer, init_producer_id_answer

CONCURRENT_TRANSACTIONS, REBOOTSTRAP_REQUIRED, UNKNOWN = 51, 129, -1
NOBODY = -1
OTHER = PreparedTxnState(1, 1)


def one_topic(request: Any, server: WireServer, *, leader: int = NODE_ID) -> Any:
    """A Metadata answer in which every topic has one partition, by default with the server as its leader."""
    answer = server.metadata(request)
    found = MetadataResponse.MetadataResponseTopic
    partition = found.MetadataResponsePartition(
        error_code=0, partition_index=0, leader_id=leader, replica_nodes=[NODE_ID], isr_nodes=[NODE_ID], offline_replicas=[]
    )
    answer.topics = [found(error_code=0, name=asked.name, partitions=[partition]) for asked in request.topics or ()]
    return answer


def on_server(server: WireServer, **more: Any) -> NativeProducer:
    server._handlers[MetadataRequest] = lambda request: one_topic(request, server)
    settings = {"bootstrap.servers": server.bootstrap_servers, "retry.backoff.ms": 1, **more}
    return NativeProducer(KafkaConfig.of(settings), "orders", two_phase=True)


def prepare_one(producer: NativeProducer) -> None:
    producer.begin_transaction()
    producer.send("topic", b"v")
    assert producer.prepare_transaction(timeout=LIMIT) is not None


@pytest.mark.parametrize("commit", [True, False])
def test_an_accepted_keep_prepared_txn_is_ended_with_the_new_producer_id_and_epoch(commit: bool) -> None:
    """KIP-939: the answer names the kept transaction, and EndTxn carries the epoch that fences its owner."""
    kept_one = lambda _: init_producer_id_answer(epoch=9, ongoing_producer_id=70, ongoing_epoch=3)  # noqa: E731
    with WireServer({InitProducerIdRequest: kept_one}) as server:
        producer = on_server(server)
        kept = producer.init_transactions(keep_prepared_txn=True, timeout=LIMIT)
        assert kept == PreparedTxnState(70, 3)
        assert producer.state is ProducerState.PREPARED
        producer.complete_prepared_transaction(kept if commit else OTHER, timeout=LIMIT)
        (asked,) = server.received(InitProducerIdRequest)
        assert (asked.API_VERSION, asked.enable2_pc, asked.keep_prepared_txn) == (6, True, True)
        (ended,) = server.received(EndTxnRequest)
        assert (ended.producer_id, ended.producer_epoch, ended.committed) == (PRODUCER_ID, 9, commit)
        assert producer.identity == (PRODUCER_ID, 10)
        prepare_one(producer)
        producer.close()


def test_an_unclear_answer_to_end_txn_leaves_the_outcome_open_and_the_commit_can_be_repeated() -> None:
    codes = [UNKNOWN, 0]
    ended = lambda _: EndTxnResponse(error_code=codes.pop(0), producer_id=PRODUCER_ID, producer_epoch=1)  # noqa: E731
    with WireServer({EndTxnRequest: ended}) as server:
        producer = on_server(server)
        producer.init_transactions(timeout=LIMIT)
        prepare_one(producer)
        with pytest.raises(BrokerError, match="UNKNOWN") as caught:
            producer.commit_transaction(timeout=LIMIT)
        assert not isinstance(caught.value, ProducerFencedError)
        assert producer.state is ProducerState.UNCERTAIN
        assert producer.must_be_replaced
        producer.commit_transaction(timeout=LIMIT)
        assert not producer.must_be_replaced
        first, second = server.received(EndTxnRequest)
        assert (first.producer_epoch, first.committed) == (second.producer_epoch, second.committed) == (0, True)
        producer.close()


def test_an_id_whose_last_transaction_does_not_end_is_reported_in_time() -> None:
    being_written = lambda _: init_producer_id_answer(error_code=CONCURRENT_TRANSACTIONS)  # noqa: E731
    with WireServer({InitProducerIdRequest: being_written}) as server:
        producer = on_server(server)
        with pytest.raises(BrokerUnavailableError, match="did not complete the last transaction"):
            producer.init_transactions(timeout=0.2)
        assert producer.state is ProducerState.UNINITIALIZED
        assert len(server.received(InitProducerIdRequest)) > 1
        producer.close()


def test_a_batch_without_an_answer_is_resent_unchanged() -> None:
    """A broker that stores a batch, but leaves it out of its answer."""
    answers: list[Any] = []

    def produce(request: Any) -> Any:
        answer = server.produce(request)
        if not answers:
            answer.responses = []
        answers.append(answer)
        return answer

    with WireServer({ProduceRequest: produce}) as server:
        producer = on_server(server)
        producer.init_transactions(timeout=LIMIT)
        prepare_one(producer)
        first, second = (request.topic_data[0].partition_data[0].records for request in server.received(ProduceRequest))
        assert bytes(first) == bytes(second)
        producer.close()


# --- unknown answers of newer brokers, and the number of requests -----------------------------------------------------------


def described_as(state: str, request: Any) -> Any:
    """A description of an id in this state."""
    found = Described.TransactionState
    return Described(
        transaction_states=[
            found(
                error_code=0,
                transactional_id=name,
                transaction_state=state,
                transaction_timeout_ms=1,
                transaction_start_time_ms=1,
                producer_id=PRODUCER_ID,
                producer_epoch=0,
                topics=[],
            )
            for name in request.transactional_ids
        ]
    )


def test_an_unknown_transaction_state_is_an_error_with_a_next_step() -> None:
    listed = ListTransactionsResponse.TransactionState
    handlers = {
        DescribeTransactionsRequest: lambda request: described_as("Hibernating", request),
        ListTransactionsRequest: lambda _: ListTransactionsResponse(
            error_code=0, transaction_states=[listed(transactional_id="orders", producer_id=1, transaction_state="Hibernating")]
        ),
    }
    with WireServer(handlers) as server:
        coordinator = WireTransactionCoordinator(KafkaConfig.of(server.bootstrap_servers), timeout=LIMIT)
        for ask in (lambda: coordinator.describe("orders"), coordinator.list_transactions):
            with pytest.raises(UnknownTransactionStateError, match=r"(?s)Hibernating.*'orders'.*upgrade dualwrite") as caught:
                ask()
            assert (caught.value.state, caught.value.retriable) == ("Hibernating", False)
        coordinator.close()


def test_a_coordinator_with_fast_markers_is_not_asked_for_every_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer learns by looking that they are written in time; then a transaction is Produce and EndTxn only."""
    now = [1000.0]
    monkeypatch.setattr(retry_policy, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(retry_policy, "_SLOW", LIMIT)  # how long a message takes here says nothing about markers
    epochs = iter(range(1, 1000))
    finished = lambda request: described_as("CompleteCommit", request)  # noqa: E731
    ended = lambda _: EndTxnResponse(error_code=0, producer_id=PRODUCER_ID, producer_epoch=next(epochs))  # noqa: E731
    with WireServer({DescribeTransactionsRequest: finished, EndTxnRequest: ended}) as server:
        producer = on_server(server)
        producer.init_transactions(timeout=LIMIT)
        prepare_one(producer)
        producer.commit_transaction(timeout=LIMIT)
        before = len(server.requests)
        for pause in (0.005, *(50 * [0.006])):
            now[0] += pause
            prepare_one(producer)
            producer.commit_transaction(timeout=LIMIT)
        found = [type(request) for request in server.requests[before:]]
        assert found == [DescribeTransactionsRequest, *(51 * [ProduceRequest, EndTxnRequest])]
        producer.close()


def test_metadata_that_requires_a_rebootstrap_is_asked_for_again_over_a_new_connection() -> None:
    """KIP-1102: such a response names neither brokers nor topics, nor the cluster."""
    codes: list[int] = []

    def metadata(request: Any) -> Any:
        if codes and codes.pop(0):
            return MetadataResponse(brokers=[], cluster_id=None, controller_id=-1, topics=[], error_code=REBOOTSTRAP_REQUIRED)
        return one_topic(request, server)

    with WireServer() as server:
        producer = on_server(server)
        server._handlers[MetadataRequest] = metadata
        producer.init_transactions(timeout=LIMIT)
        prepare_one(producer)
        before = len(server.received(ApiVersionsRequest))
        codes += [REBOOTSTRAP_REQUIRED, REBOOTSTRAP_REQUIRED]  # to the request for the topic, and when connecting again
        producer.abort_transaction(timeout=LIMIT)
        producer.begin_transaction()
        producer.send("other", b"v")
        assert codes == []
        assert len(server.received(ApiVersionsRequest)) == before + 2
        producer.close()


def test_a_topic_that_is_missing_in_the_metadata_is_asked_for_again() -> None:
    empty = [True]

    def metadata(request: Any) -> Any:
        return (
            server.metadata(MetadataRequest(topics=[]))
            if request.topics and empty and empty.pop()
            else one_topic(request, server)
        )

    with WireServer() as server:
        producer = on_server(server)
        server._handlers[MetadataRequest] = metadata
        producer.init_transactions(timeout=LIMIT)
        prepare_one(producer)
        assert empty == []
        producer.close()


def test_a_wait_sleeps_although_nobody_asks_for_a_connection_that_could_not_be_opened(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that to a bootstrap server which was given up for another one; here a partition's leader is waited for."""
    waits: list[float] = []
    wait = Sender._wait

    def counted(self: Sender, timeout: float) -> None:
        waits.append(timeout)
        wait(self, timeout)

    monkeypatch.setattr(Sender, "_wait", counted)
    with WireServer() as server:
        producer = on_server(server, **{"retry.backoff.ms": 100})
        server._handlers[MetadataRequest] = lambda request: one_topic(request, server, leader=NOBODY)
        producer.init_transactions(timeout=LIMIT)
        failed = ConnectionAttempt(Address("127.0.0.1", free_port), producer._network.config)
        producer._network._openings[Address("127.0.0.1", free_port)] = failed
        assert failed.wait(LIMIT)
        producer.begin_transaction()
        producer.send("topic", b"v")
        with pytest.raises(DeliveryError):
            producer.prepare_transaction(timeout=0.5)
        assert len(waits) <= 10
        producer.close()


def test_brokers_get_the_version_of_dualwrite() -> None:
    """KIP-511: it appears in their metrics and logs."""
    with WireServer() as server:
        coordinator = WireTransactionCoordinator(KafkaConfig.of(server.bootstrap_servers), timeout=LIMIT)
        coordinator.describe("orders")
        coordinator.close()
        (asked,) = server.received(ApiVersionsRequest)
        assert (asked.client_software_name, asked.client_software_version) == ("dualwrite", dualwrite.__version__)


def test_an_answer_read_by_another_call_counts_even_if_the_connection_breaks_afterwards() -> None:
    """A producer and its coordinator share a connection: each gets its answers, even if read by the other, without a retry."""
    with WireServer() as server:
        server._handlers[MetadataRequest] = lambda request: one_topic(request, server)
        config = KafkaConfig.of({"bootstrap.servers": server.bootstrap_servers, "retry.backoff.ms": 1})
        coordinator = WireTransactionCoordinator(config, timeout=LIMIT)
        producer = NativeProducer(config, "orders", coordinator, two_phase=True, network=coordinator.network)
        producer.init_transactions(timeout=LIMIT)
        producer.begin_transaction()
        producer.send("topic", b"v")
        assert coordinator.describe("orders") is None  # answered after the batch
        for connection in coordinator.network._connections.values():
            connection.close()
        assert producer.prepare_transaction(timeout=LIMIT) is not None
        producer.commit_transaction(timeout=LIMIT)
        assert len(server.received(ProduceRequest)) == 1
        producer.close()
        coordinator.close()
