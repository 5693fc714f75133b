"""Adds a consumer's offsets to the transaction: TxnOffsetCommit to the group's coordinator (KIP-447, KIP-890)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.client.cluster import GROUP, CoordinatorUnavailableError, Network
from dualwrite.kafka.client.messages_generated import TxnOffsetCommitRequest
from dualwrite.kafka.client.retry import repeated
from dualwrite.kafka.client.sockets import ConnectionLostError
from dualwrite.kafka.native.retry_policy import NO_RESPONSE, Verdict, failure, verdict_on
from dualwrite.kafka.offsets import ConsumedOffset, GroupMetadata

_PAUSE: Final = 0.005
_Topic: Final = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic


class _AgainError(Exception):
    """A transient error: retry."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def commit_offsets(
    network: Network,
    kafka_transactional_id: str,
    producer_id: int,
    epoch: int,
    offsets: Sequence[ConsumedOffset],
    group: GroupMetadata,
    deadline: Deadline,
) -> None:
    """Send the offsets until the group's coordinator has accepted them; the request is idempotent.

    Raises:
        ProducerFencedError: The consumer's generation is over, or another process has ended the transaction.
        BrokerAuthorizationError: The principal lacks Read on the group.
        BrokerUnavailableError: The group's coordinator did not respond within the time limit.
    """
    action = f"offset commit for group {group.group_id!r}"

    def once() -> None:
        try:
            coordinator = network.coordinator(group.group_id, GROUP, deadline)
            response = coordinator.call(_request(kafka_transactional_id, producer_id, epoch, offsets, group), deadline)
        except (ConnectionLostError, CoordinatorUnavailableError, BrokerUnavailableError) as error:
            code = getattr(error, "code", None)
            if code and verdict_on(code) is Verdict.FAILED:  # FindCoordinator checks the ACLs of the group, too
                raise failure(code, action, kafka_transactional_id) from error
            network.forget_coordinator(group.group_id, GROUP)
            raise _AgainError(NO_RESPONSE) from error
        codes = [p.error_code for topic in response.topics for p in topic.partitions if p.error_code]
        for code in codes:
            if verdict_on(code) is Verdict.FAILED:
                raise failure(code, action, kafka_transactional_id)
        if codes:
            if verdict_on(codes[0]) is Verdict.LOOK_UP:
                network.forget_coordinator(group.group_id, GROUP)
            raise _AgainError(codes[0])

    try:
        repeated(once, (_AgainError,), deadline, pause=_PAUSE)
    except _AgainError as error:
        raise failure(error.code, action, kafka_transactional_id, message=f"within {deadline.seconds:g} s") from error


def _request(
    kafka_transactional_id: str, producer_id: int, epoch: int, offsets: Sequence[ConsumedOffset], group: GroupMetadata
) -> TxnOffsetCommitRequest:
    topics: dict[str, list[TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic.TxnOffsetCommitRequestPartition]] = {}
    for consumed in offsets:
        topics.setdefault(consumed.topic, []).append(
            _Topic.TxnOffsetCommitRequestPartition(
                partition_index=consumed.partition,
                committed_offset=consumed.offset,
                committed_leader_epoch=consumed.leader_epoch,
                committed_metadata=consumed.metadata,
            )
        )
    return TxnOffsetCommitRequest(
        transactional_id=kafka_transactional_id,
        group_id=group.group_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        generation_id=group.generation_id,
        member_id=group.member_id,
        group_instance_id=group.group_instance_id,
        topics=[_Topic(name=name, partitions=partitions) for name, partitions in topics.items()],
    )
