"""The names in kafka-python that dualwrite relies on: if one has moved, one test fails and names it, without a broker.

Every field that dualwrite uses is sent through `KafkaProtocol` in the request and response versions that dualwrite uses.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import pytest
from kafka.errors import KafkaError, for_code
from kafka.net.sasl import get_sasl_mechanism
from kafka.protocol import admin, metadata, producer, sasl
from kafka.protocol.parser import KafkaProtocol
from kafka.record.default_records import DefaultRecordBatch

from dualwrite.kafka.admin.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse
from dualwrite.kafka.client.cluster import GROUP, TRANSACTION
from dualwrite.kafka.client.config import MECHANISMS
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.hot_messages import Produce
from dualwrite.kafka.native.compression import compression_by_name
from dualwrite.kafka.native.records import BatchBuilder
from dualwrite.kafka.native.txn_offsets import TXN_OFFSET_COMMIT_VERSION
from fixtures.tables import table


@dataclass(frozen=True)
class Exchange:
    """A request and its response, with every field that dualwrite sets or reads."""

    versions: tuple[int, ...]
    request: Any
    sent: dict[str, Any]
    response: Any
    received: dict[str, Any]


_Topic = producer.ProduceRequest.TopicProduceData
_Stored = producer.ProduceResponse.TopicProduceResponse
_Offsets = producer.TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
_Committed = producer.TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
_Found = metadata.MetadataResponse.MetadataResponseTopic
_Configs = admin.DescribeConfigsResponse.DescribeConfigsResult
_Group = admin.DescribeGroupsResponse.DescribedGroup
_Described = admin.DescribeTransactionsResponse.TransactionState
_Listed = admin.ListTransactionsResponse.TransactionState
_Producers = admin.DescribeProducersResponse.TopicResponse
_WHERE = {"node_id": 1, "host": "h", "port": 9092, "error_code": 0}

EXCHANGES = {
    "ApiVersions, the oldest": Exchange(
        (0,),
        metadata.ApiVersionsRequest,
        {},
        metadata.ApiVersionsResponse,
        {
            "error_code": 35,
            "api_keys": [metadata.ApiVersionsResponse.ApiVersion(api_key=18, min_version=0, max_version=3)],
        },
    ),
    "ApiVersions": Exchange(
        (3, 4),
        metadata.ApiVersionsRequest,
        {"client_software_name": "dualwrite", "client_software_version": "0"},
        metadata.ApiVersionsResponse,
        {
            "error_code": 0,
            "api_keys": [metadata.ApiVersionsResponse.ApiVersion(api_key=0, min_version=3, max_version=13)],
            "finalized_features": [
                metadata.ApiVersionsResponse.FinalizedFeatureKey(name="f", max_version_level=2, min_version_level=2)
            ],
        },
    ),
    "SaslHandshake": Exchange(
        (1,),
        sasl.SaslHandshakeRequest,
        {"mechanism": "PLAIN"},
        sasl.SaslHandshakeResponse,
        {"error_code": 33, "mechanisms": ["PLAIN"]},
    ),
    "SaslAuthenticate": Exchange(
        (1,),
        sasl.SaslAuthenticateRequest,
        {"auth_bytes": b"a"},
        sasl.SaslAuthenticateResponse,
        {"error_code": 0, "error_message": "why", "auth_bytes": b"b", "session_lifetime_ms": 1000},
    ),
    "Metadata": Exchange(
        (9, 12, 13),
        metadata.MetadataRequest,
        {
            "topics": [metadata.MetadataRequest.MetadataRequestTopic(name="t")],
            "allow_auto_topic_creation": True,
            "include_topic_authorized_operations": True,
        },
        metadata.MetadataResponse,
        {
            "brokers": [metadata.MetadataResponse.MetadataResponseBroker(node_id=1, host="h", port=9092)],
            "topics": [
                _Found(
                    error_code=0,
                    name="t",
                    partitions=[
                        _Found.MetadataResponsePartition(
                            error_code=0, partition_index=0, leader_id=1, replica_nodes=[1], isr_nodes=[1], offline_replicas=[]
                        )
                    ],
                )
            ],
        },
    ),
    "FindCoordinator, one key": Exchange(
        (1, 3),
        metadata.FindCoordinatorRequest,
        {"key": "k", "key_type": TRANSACTION},
        metadata.FindCoordinatorResponse,
        _WHERE,
    ),
    "FindCoordinator, a list of keys": Exchange(
        (4, 6),
        metadata.FindCoordinatorRequest,
        {"key_type": GROUP, "coordinator_keys": ["k"]},
        metadata.FindCoordinatorResponse,
        {"coordinators": [metadata.FindCoordinatorResponse.Coordinator(key="k", **_WHERE)]},
    ),
    "InitProducerId": Exchange(
        (3, 4),
        producer.InitProducerIdRequest,
        {"transactional_id": "i", "transaction_timeout_ms": 1, "producer_id": 2**63 - 2, "producer_epoch": 3},
        producer.InitProducerIdResponse,
        {"error_code": 51, "producer_id": 5, "producer_epoch": 6},
    ),
    "InitProducerId, KIP-939": Exchange(
        (6,),
        producer.InitProducerIdRequest,
        {
            "transactional_id": "i",
            "transaction_timeout_ms": 1,
            "producer_id": 2,
            "producer_epoch": 3,
            "enable2_pc": True,
            "keep_prepared_txn": True,
        },
        producer.InitProducerIdResponse,
        {
            "error_code": 0,
            "producer_id": 5,
            "producer_epoch": 6,
            "ongoing_txn_producer_id": 7,
            "ongoing_txn_producer_epoch": 8,
        },
    ),
    "Produce": Exchange(
        (Produce.API_VERSION,),
        producer.ProduceRequest,
        {
            "transactional_id": "i",
            "acks": -1,
            "timeout_ms": 30_000,
            "topic_data": [
                _Topic(name="t", partition_data=[_Topic.PartitionProduceData(index=1, records=b"r")]),
            ],
        },
        producer.ProduceResponse,
        {
            "responses": [
                _Stored(
                    name="t",
                    partition_responses=[
                        _Stored.PartitionProduceResponse(
                            index=1,
                            error_code=10,
                            base_offset=-1,
                            log_append_time_ms=-1,
                            record_errors=[],
                            error_message="too large",
                        )
                    ],
                )
            ]
        },
    ),
    "EndTxn": Exchange(
        (4, 5),
        producer.EndTxnRequest,
        {"transactional_id": "i", "producer_id": 1, "producer_epoch": 2, "committed": True},
        producer.EndTxnResponse,
        {"error_code": 48},
    ),
    "EndTxn, KIP-890": Exchange(
        (5,),
        producer.EndTxnRequest,
        {"transactional_id": "i", "producer_id": 1, "producer_epoch": 2, "committed": False},
        producer.EndTxnResponse,
        {"error_code": 0, "producer_id": 3, "producer_epoch": 4},
    ),
    "TxnOffsetCommit": Exchange(
        (TXN_OFFSET_COMMIT_VERSION,),
        producer.TxnOffsetCommitRequest,
        {
            "transactional_id": "i",
            "group_id": "g",
            "producer_id": 1,
            "producer_epoch": 2,
            "generation_id": 3,
            "member_id": "m",
            "group_instance_id": "s",
            "topics": [
                _Offsets(
                    name="t",
                    partitions=[
                        _Offsets.TxnOffsetCommitRequestPartition(
                            partition_index=1, committed_offset=2, committed_leader_epoch=3, committed_metadata="x"
                        )
                    ],
                )
            ],
        },
        producer.TxnOffsetCommitResponse,
        {
            "topics": [
                _Committed(name="t", partitions=[_Committed.TxnOffsetCommitResponsePartition(partition_index=1, error_code=22)])
            ]
        },
    ),
    "DescribeTransactions": Exchange(
        (0,),
        admin.DescribeTransactionsRequest,
        {"transactional_ids": ["i"]},
        admin.DescribeTransactionsResponse,
        {
            "transaction_states": [
                _Described(
                    error_code=0,
                    transactional_id="i",
                    transaction_state="Ongoing",
                    transaction_timeout_ms=1,
                    transaction_start_time_ms=2,
                    producer_id=3,
                    producer_epoch=4,
                    topics=[_Described.TopicData(topic="t", partitions=[5])],
                )
            ]
        },
    ),
    "ListTransactions": Exchange(
        (0, 1, 2),
        admin.ListTransactionsRequest,
        {"state_filters": ["Ongoing"], "producer_id_filters": [1]},
        admin.ListTransactionsResponse,
        {
            "error_code": 0,
            "transaction_states": [_Listed(transactional_id="i", producer_id=1, transaction_state="Empty")],
        },
    ),
    "ListTransactions, by duration and pattern": Exchange(
        (2,),
        admin.ListTransactionsRequest,
        {"duration_filter": 1000, "transactional_id_pattern": "i.*"},
        admin.ListTransactionsResponse,
        {"error_code": 128, "transaction_states": []},
    ),
    "DescribeProducers": Exchange(
        (0,),
        admin.DescribeProducersRequest,
        {"topics": [admin.DescribeProducersRequest.TopicRequest(name="t", partition_indexes=[0])]},
        admin.DescribeProducersResponse,
        {
            "topics": [
                _Producers(
                    name="t",
                    partitions=[
                        _Producers.PartitionResponse(
                            partition_index=0,
                            error_code=0,
                            active_producers=[
                                _Producers.PartitionResponse.ProducerState(
                                    producer_id=1,
                                    producer_epoch=2,
                                    last_sequence=3,
                                    last_timestamp=4,
                                    coordinator_epoch=5,
                                    current_txn_start_offset=6,
                                )
                            ],
                        )
                    ],
                )
            ]
        },
    ),
    "DescribeGroups": Exchange(
        (5, 6),
        admin.DescribeGroupsRequest,
        {"groups": ["g"], "include_authorized_operations": False},
        admin.DescribeGroupsResponse,
        {
            "groups": [
                _Group(
                    error_code=0,
                    group_id="g",
                    group_state="Stable",
                    protocol_type="consumer",
                    protocol_data="range",
                    members=[
                        _Group.DescribedGroupMember(member_id="m", client_id="c", client_host="h", member_assignment=b"a")
                    ],
                )
            ]
        },
    ),
    "DescribeCluster": Exchange(
        (0, 1),
        admin.DescribeClusterRequest,
        {"include_cluster_authorized_operations": True},
        admin.DescribeClusterResponse,
        {"authorized_operations": {8}},
    ),
    "ConsumerGroupDescribe, by our schema": Exchange(
        (0,),
        ConsumerGroupDescribeRequest,
        {"group_ids": ["g"], "include_authorized_operations": False},
        ConsumerGroupDescribeResponse,
        {"groups": []},
    ),
    "DescribeConfigs": Exchange(
        (1, 4),
        admin.DescribeConfigsRequest,
        {
            "resources": [
                admin.DescribeConfigsRequest.DescribeConfigsResource(
                    resource_type=4, resource_name="1", configuration_keys=["k"]
                )
            ],
            "include_synonyms": False,
            "include_documentation": False,
        },
        admin.DescribeConfigsResponse,
        {
            "results": [
                _Configs(
                    error_code=0,
                    resource_type=4,
                    resource_name="1",
                    configs=[
                        _Configs.DescribeConfigsResourceResult(
                            name="k", value="v", read_only=False, is_sensitive=False, synonyms=[]
                        )
                    ],
                )
            ]
        },
    ),
}


def assert_carries(read: Any, wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        found = getattr(read, name)
        if not isinstance(value, list):
            assert found == value, name
            continue
        assert len(found) == len(value), name
        for one, other in zip(found, value, strict=True):
            assert one == other, name


@table(("name", "version"), [(name, v) for name, exchange in EXCHANGES.items() for v in exchange.versions])
def test_a_request_and_its_response_have_the_fields_that_dualwrite_uses(name: str, version: int) -> None:
    exchange = EXCHANGES[name]
    assert exchange.request.min_version <= version <= exchange.request.max_version
    protocol = KafkaProtocol(client_id="dualwrite")
    request = exchange.request(version=version, **exchange.sent)
    assert version == request.API_VERSION
    number = protocol.send_request(request)
    framed = protocol.send_bytes()
    (length,) = struct.unpack_from(">i", framed)
    assert length == len(framed) - 4
    assert struct.unpack_from(">hh", framed, 4) == (exchange.request.API_KEY, version)
    assert_carries(exchange.request.decode(framed[4:], version=version, header=True), exchange.sent)
    response = exchange.response(**exchange.received)
    response.API_VERSION = version
    response.with_header(correlation_id=number)
    written = response.encode(header=True, framed=True)
    assert protocol.receive_bytes(written[:7]) == []  # in parts, as from a socket
    ((answered, read),) = protocol.receive_bytes(written[7:])
    assert answered == number
    assert_carries(read, exchange.received)


def test_a_request_without_a_version_can_be_given_one_later() -> None:
    request = metadata.MetadataRequest(topics=[], allow_auto_topic_creation=False)
    assert request.API_VERSION is None
    request.API_VERSION = 12
    assert KafkaProtocol(client_id="dualwrite").send_request(request) == 1


def test_a_field_that_a_request_does_not_have_is_an_error() -> None:
    """Otherwise a renamed `enable2_pc` would be omitted silently."""
    with pytest.raises(ValueError, match="enable_2pc"):
        producer.InitProducerIdRequest(version=6, transactional_id="i", transaction_timeout_ms=1, enable_2pc=True)


def test_unexpected_and_broken_answers_are_kafka_errors() -> None:
    """The connection closes on a KafkaError; any other exception would propagate to the caller."""
    answer = struct.pack(">iii", 8, 77, 0)
    with pytest.raises(KafkaError):
        KafkaProtocol(client_id="dualwrite").receive_bytes(answer)
    protocol = KafkaProtocol(client_id="dualwrite")
    protocol.send_request(producer.EndTxnRequest(version=5, transactional_id="i", producer_id=1, producer_epoch=2))
    with pytest.raises(KafkaError):
        protocol.receive_bytes(answer)
    protocol = KafkaProtocol(client_id="dualwrite")
    number = protocol.send_request(producer.EndTxnRequest(version=5, transactional_id="i", producer_id=1, producer_epoch=2))
    with pytest.raises(KafkaError):
        protocol.receive_bytes(struct.pack(">iib", 5, number, 0))


NEWER = {ErrorCode.INVALID_REGULAR_EXPRESSION, ErrorCode.REBOOTSTRAP_REQUIRED}  # which kafka-python does not know
RENAMED = {"NOT_LEADER_OR_FOLLOWER", "MESSAGE_TOO_LARGE", "INVALID_TOPIC_EXCEPTION", "UNKNOWN_SERVER_ERROR", "NONE"}


def test_the_table_of_error_codes_equals_kafkas() -> None:
    """Kafka has renamed some since then; kafka-python and librdkafka keep the old names."""
    for code in ErrorCode:
        assert error_name(code) == code.name
        if code in NEWER:
            continue
        assert for_code(code).errno == code
        assert code.name in RENAMED or for_code(code).message == code.name


def test_an_error_code_of_a_newer_kafka_has_a_name() -> None:
    assert error_name(999)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_sasl_mechanism_gives_bytes_to_send_until_it_is_done(mechanism: str) -> None:
    made = get_sasl_mechanism(mechanism)(
        host="h",
        security_protocol="SASL_SSL",
        sasl_mechanism=mechanism,
        sasl_plain_username="user",
        sasl_plain_password="password",
    )
    assert not made.is_done()
    assert b"user" in made.auth_bytes()
    if mechanism == "PLAIN":
        made.receive(b"")
        assert made.is_done()


def test_the_record_reader_reads_what_the_native_producer_writes() -> None:
    builder = BatchBuilder()
    headers: list[tuple[str, bytes | None]] = [("h", None), ("h", b"v")]
    builder.append(b"k", None, headers, 1_700_000_000_000)
    builder.append(None, b"v", None, 1_700_000_000_007)
    read = DefaultRecordBatch(builder.build(producer_id=1, epoch=2, base_sequence=3, compression=compression_by_name("none")))
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == (1, 2, 3)
    assert read.validate_crc()
    first, second = read
    assert (first.key, first.value, first.headers, first.timestamp) == (
        b"k",
        None,
        [("h", None), ("h", b"v")],
        1_700_000_000_000,
    )
    assert (second.key, second.value, second.headers, second.timestamp) == (None, b"v", [], 1_700_000_000_007)
    assert first.size_in_bytes > 0
