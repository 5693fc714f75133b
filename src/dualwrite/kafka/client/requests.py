"""Requests about transactional ids, to the coordinators of several at once, about groups, and about settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from dualwrite.deadline import Deadline, Limit
from dualwrite.kafka.base import NewProducerId
from dualwrite.kafka.client.brokers import GROUP, Network, request_together
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.kafka_errors import FORBIDDEN_CODES, ErrorCode, forbidden, status_of
from dualwrite.kafka.client.messages_generated import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    InitProducerIdRequest,
    MetadataRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from dualwrite.kafka.client.retries import NoLeaderError, RetryingClient, TryAgainError, answers, check_response, result_of
from dualwrite.state import TransactionDescription

END_BY_EPOCH: Final = 5
"""EndTxn: the first version that is idempotent, and returns the next producer id and epoch (KIP-890)."""

INIT_TWO_PHASE: Final = 6
"""InitProducerId with `enable2Pc` and `keepPreparedTxn` (KIP-939)."""

_INIT_PLAIN: Final = 4  # of Kafka 3.0

FOREIGN_PRODUCER_ID: Final = 2**63 - 2
"""A producer id that no producer has: brokers allocate ids in blocks, starting from 0."""

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4

_NAMED: Final = 5  # partitions listed in an error


def described(
    network: Network, addresses: Mapping[str, Address], deadline: Deadline
) -> dict[str, TransactionDescription | Exception | None]:
    """The descriptions of ids, by one request to each coordinator; None for an id that it does not know, or an error.

    Errors are transient ones (`retries.TRANSIENT`), and BrokerAuthorizationError and UnknownTransactionStateError as for all
    requests about an id.
    """
    ids: dict[Address, list[str]] = {}
    for name, address in addresses.items():
        ids.setdefault(address, []).append(name)
    requests = {address: partial(_about_ids, names) for address, names in ids.items()}
    found: dict[str, TransactionDescription | Exception | None] = {}
    for address, response in request_together(network, requests, deadline).items():
        if isinstance(response, Exception):
            found.update(dict.fromkeys(ids[address], response))
        else:
            states = response.transaction_states
            found.update({state.transactional_id: result_of(partial(_description, state)) for state in states})
    return found


def _about_ids(names: list[str], _: object) -> DescribeTransactionsRequest:
    return DescribeTransactionsRequest(transactional_ids=names)


def _description(state: DescribeTransactionsResponse.TransactionState) -> TransactionDescription | None:
    if state.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        return None
    check_response(state.error_code, state.transactional_id, "DescribeTransactions", "Describe")
    return description_of(state)


def description_of(state: DescribeTransactionsResponse.TransactionState) -> TransactionDescription:
    """One id's part of a response to DescribeTransactions."""
    return TransactionDescription(
        status=status_of(state.transaction_state, state.transactional_id),
        producer_id=state.producer_id,
        epoch=state.producer_epoch,
        timeout_ms=state.transaction_timeout_ms,
        start_time_ms=state.transaction_start_time_ms,
        partitions=frozenset((t.topic, p) for t in state.topics for p in t.partitions),
    )


def leaderless(
    network: Network,
    partitions: Mapping[str, frozenset[tuple[str, int]]],
    addresses: Mapping[str, Address],
    deadline: Deadline,
) -> dict[str, Exception]:
    """The ids of which a partition has no leader, in the metadata of the id's coordinator, each with the error that says so."""
    topics: dict[Address, set[str]] = {}
    partitions = {name: some for name, some in partitions.items() if some}
    for name, some in partitions.items():
        topics.setdefault(addresses[name], set()).update(topic for topic, _ in some)
    responses = request_together(network, {at: partial(_about_topics, names) for at, names in topics.items()}, deadline)
    checks = {name: result_of(partial(check_partitions, responses[addresses[name]], some)) for name, some in partitions.items()}
    return {name: problem for name, problem in checks.items() if problem is not None}


def _about_topics(names: Iterable[str], _: object) -> MetadataRequest:
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(names)]
    return MetadataRequest(topics=topics, allow_auto_topic_creation=False)


def check_partitions(response: Any, partitions: frozenset[tuple[str, int]]) -> None:
    """Raise NoLeaderError unless each of the partitions has a leader, according to the coordinator's response; or its error."""
    if isinstance(response, Exception):
        raise response
    # For a topic that was deleted, or that the principal may not describe, there is nothing to wait for.
    leaderless = {
        (topic.name, partition.partition_index)
        for topic in response.topics
        for partition in topic.partitions
        if partition.leader_id < 0 and partition.error_code in (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
    }
    if missing := sorted(leaderless & partitions):
        named = ", ".join(f"{topic}-{index}" for topic, index in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise NoLeaderError(f"{named}{more} has no leader to write the transaction's marker")


def init_request(
    new: NewProducerId, producer_id: int = FOREIGN_PRODUCER_ID, epoch: int = 0, *, keep_prepared: bool = False
) -> InitProducerIdRequest:
    """InitProducerId: by default one that creates an unknown id, and leaves a known one unchanged."""
    return InitProducerIdRequest(
        version=INIT_TWO_PHASE if new.two_phase or keep_prepared else _INIT_PLAIN,
        transactional_id=new.kafka_transactional_id,
        transaction_timeout_ms=new.timeout_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        enable2_pc=new.two_phase,
        keep_prepared_txn=keep_prepared,
    )


# --- groups -------------------------------------------------------------------------------------------------------------------

_Group = OffsetFetchRequest.OffsetFetchRequestGroup


def committed_positions(
    client: RetryingClient, group_id: str, partitions: Iterable[tuple[str, int]], timeout: Limit | None
) -> dict[tuple[str, int], int]:
    """The offset of the next message to read in each partition; without those that the group has not committed.

    Offsets of a transaction that is still open are waited for (`requireStable`, KIP-447).

    Raises:
        BrokerUnavailableError: No conclusive response within the time limit.
        BrokerAuthorizationError: The principal lacks Describe on the group.
    """
    by_topic = defaultdict(list)
    for topic, partition in partitions:
        by_topic[topic].append(partition)
    topics = [_Group.OffsetFetchRequestTopics(name=topic, partition_indexes=indexes) for topic, indexes in by_topic.items()]
    request = OffsetFetchRequest(groups=[_Group(group_id=group_id, topics=topics)], require_stable=True)
    ask = partial(answers, client.network, {group_id: lambda _: request}, _positions)
    return client.of_each([group_id], ask, timeout, kind=GROUP)[group_id]


def _positions(group_id: str, response: OffsetFetchResponse) -> dict[tuple[str, int], int]:
    (group,) = response.groups
    for code in (group.error_code, *(one.error_code for topic in group.topics for one in topic.partitions)):
        if code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
            raise TryAgainError("a transaction with offsets of the group is still open")
        if code in FORBIDDEN_CODES:
            raise forbidden(code, group_id, "OffsetFetch", "Describe")
        check_response(code, None, "OffsetFetch", "Describe")
    return {
        (topic.name, one.partition_index): one.committed_offset
        for topic in group.topics
        for one in topic.partitions
        if one.committed_offset >= 0
    }


# --- settings -----------------------------------------------------------------------------------------------------------------


def settings_request(resource_type: int, names: Iterable[str], keys: Iterable[str]) -> DescribeConfigsRequest:
    """Asks for settings of topics, or of the broker that it is sent to (DescribeConfigs); see `settings_in`."""
    resource = DescribeConfigsRequest.DescribeConfigsResource
    wanted = list(keys)
    return DescribeConfigsRequest(
        resources=[resource(resource_type=resource_type, resource_name=n, configuration_keys=wanted) for n in names],
        include_synonyms=False,
        include_documentation=False,
    )


def settings_in(response: DescribeConfigsResponse) -> dict[str, Mapping[str, str]]:
    """The settings in the response to `settings_request`, by resource and key.

    A key is missing if the principal may not read it, or the broker does not know it: a broker also lists unknown keys from
    its server.properties, without a value.
    """
    return {
        found.resource_name: {entry.name: entry.value for entry in found.configs if entry.value is not None}
        for found in response.results
        if not found.error_code
    }
