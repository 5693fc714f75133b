"""What the native producer asks coordinators: to register its id (InitProducerId), and to commit a group's offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerError, BrokerUnavailableError, ConfigurationError, TopicReplacedError
from dualwrite.kafka.base import GroupMetadata, InitProducerIdResult, NewProducerId
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.brokers import GROUP, CoordinatorUnavailableError, Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import NO_SUCH_PRODUCER, WireTransactionCoordinator
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.messages_generated import MetadataRequest, TxnOffsetCommitRequest
from dualwrite.kafka.client.retries import repeated
from dualwrite.kafka.client.time_budget import DEFAULT_TRANSACTION_TIMEOUT_MS, NO_TIMEOUT_MS, transaction_timeout_ms
from dualwrite.kafka.native.retry_policy import NO_RESPONSE, Reaction, failure, reaction_to
from dualwrite.state import ConsumedOffset, PreparedTxnState, TransactionStatus

_PAUSE: Final = 0.01
_OFFSETS_PAUSE: Final = 0.005
_NOT_CREATED: Final = (ErrorCode.PRODUCER_FENCED, ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NETWORK_EXCEPTION)
_Topic: TypeAlias = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
_BY_NAME: Final = 5
_BY_TOPIC_ID: Final = 6
"""TxnOffsetCommit: the first version that names topics by their ids (Kafka 4.4)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a producer's next transaction, as its coordinator knows it; or of a prepared one that was kept."""

    producer_id: int
    epoch: int
    timeout_ms: int
    prepared: PreparedTxnState | None = None


class Registrar:
    """Registers one id at its coordinator. It has no state, apart from the timeout, which is read from a broker once."""

    def __init__(
        self, config: KafkaConfig, coordinator: WireTransactionCoordinator, kafka_transactional_id: str, *, two_phase: bool
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._id = kafka_transactional_id
        self._two_phase = two_phase
        self._chosen_timeout_ms: int | None = None

    def register(self, deadline: Deadline, *, keep_prepared: bool) -> Identity:
        self._check_broker(deadline)
        timeout_ms = self._timeout_ms(deadline)
        last_is_ending = False
        while True:
            try:
                response = self._coordinator.init_producer_id(
                    self._id, timeout_ms=timeout_ms, two_phase=self._two_phase, keep_prepared=keep_prepared, timeout=deadline
                )
            except BrokerUnavailableError as error:
                if last_is_ending and deadline.expired:  # the retry was cut off; the last response shows the cause
                    raise self._not_ended(deadline.seconds) from error
                raise
            if keep_prepared and response.code == ErrorCode.UNSUPPORTED_VERSION:
                return self._kept_by_describing(deadline)
            if response.code != ErrorCode.CONCURRENT_TRANSACTIONS:
                break
            last_is_ending = True
            deadline.sleep(_PAUSE)
            if deadline.expired:
                raise self._not_ended(deadline.seconds)
        self._check_proven(response)
        kept = None
        if response.ongoing_producer_id >= 0:
            kept = PreparedTxnState(response.ongoing_producer_id, response.ongoing_epoch)
        return Identity(response.producer_id, response.epoch, self.wanted_timeout_ms(deadline), kept)

    def create(self, deadline: Deadline) -> Identity | None:
        """As `created`."""
        (answer,) = self._coordinator.create_all([self.creation(deadline)], timeout=deadline)
        return self.created(answer, deadline)

    def creation(self, deadline: Deadline) -> NewProducerId:
        self._check_broker(deadline)
        return NewProducerId(self._id, self._timeout_ms(deadline), self._two_phase)

    def created(self, response: InitProducerIdResult, deadline: Deadline) -> Identity | None:
        """None if the coordinator knew the id, or has not answered."""
        if response.code in _NOT_CREATED:
            return None
        self._check_proven(response)
        return Identity(response.producer_id, response.epoch, self.wanted_timeout_ms(deadline))

    def wanted_timeout_ms(self, deadline: Deadline) -> int:
        return NO_TIMEOUT_MS if self._two_phase else self._timeout_ms(deadline)

    def _check_proven(self, response: InitProducerIdResult) -> None:
        if response.code in NO_SUCH_PRODUCER:
            raise BrokerError(
                f"Kafka refuses to register the transactional id: InitProducerId returned {response.name}.",
                transactional_id=self._id,
                cause="the broker implements transactions in another way than Apache Kafka",
                next_step="set producer='librdkafka' (environment: DUALWRITE_PRODUCER), and report this with the broker's name",
                code=response.code,
                name=response.name,
            )
        if not response.proven:
            raise failure(response.code, "InitProducerId", self._id, otherwise=BrokerError)

    def _kept_by_describing(self, deadline: Deadline) -> Identity:
        """Emulate `keepPreparedTxn`: describe first, and change only what has ended."""
        while not deadline.expired:
            described = self._coordinator.describe(self._id, timeout=deadline)
            if described is None:
                created = self.create(deadline)
                if created is not None:
                    return created
                continue
            if described.status is TransactionStatus.ONGOING:
                prepared = PreparedTxnState(described.producer_id, described.epoch)
                return Identity(described.producer_id, described.epoch, described.timeout_ms, prepared)
            if not described.status.is_ending:
                response = self._coordinator.end_transaction(
                    self._id,
                    producer_id=described.producer_id,
                    epoch=described.epoch,
                    commit=False,
                    timeout=deadline,
                )
                if (
                    response.proven
                ):  # all who abort this epoch get the same response: only InitProducerId gives us our own epoch
                    return self.register(deadline, keep_prepared=False)
            deadline.sleep(_PAUSE)
        raise self._not_ended(deadline.seconds)

    def _check_broker(self, deadline: Deadline) -> None:
        """Check that EndTxn gives each transaction its own epoch: otherwise two transactions could not be distinguished."""
        if not self._coordinator.knows_end_by_epoch(timeout=deadline):
            raise ConfigurationError(
                "The native producer requires transaction.version 2 (KIP-890), but this cluster has an older version.",
                transactional_id=self._id,
                cause="the brokers are older than Apache Kafka 4.1, or were upgraded without `kafka-features.sh upgrade`",
                next_step="upgrade the feature transaction.version to 2, or use the librdkafka producer",
            )

    def _timeout_ms(self, deadline: Deadline) -> int:
        """The timeout for InitProducerId; under two-phase commit brokers ignore it."""
        if self._chosen_timeout_ms is None:
            self._chosen_timeout_ms = (
                DEFAULT_TRANSACTION_TIMEOUT_MS
                if self._two_phase
                else transaction_timeout_ms(self._config, self._coordinator, timeout=deadline)
            )
        return self._chosen_timeout_ms

    def _not_ended(self, timeout: float) -> BrokerError:
        return BrokerUnavailableError(
            f"Kafka did not complete the last transaction of the id within {timeout:g} s.",
            transactional_id=self._id,
            cause="its markers can't be written (a partition without a leader?)",
            next_step="retry; prepared transactions stay prepared",
        )


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
        TopicReplacedError: A topic that was read is gone, or another one has its name; see `ConsumedOffset.topic_id`.
        ProducerFencedError: The consumer's generation is over, or another process has ended the transaction.
        BrokerAuthorizationError: The principal lacks Read on the group.
        BrokerUnavailableError: The group's coordinator did not respond within the time limit.
    """
    action = f"offset commit for group {group.group_id!r}"

    def once(deadline: Deadline) -> None:
        try:
            coordinator = network.coordinator(group.group_id, GROUP, deadline)
            by_id = coordinator.supports(TxnOffsetCommitRequest, _BY_TOPIC_ID) and all(each.topic_id for each in offsets)
            request = _request(kafka_transactional_id, producer_id, epoch, offsets, group, by_id=by_id)
            response = coordinator.call(request, deadline)
            codes = [p.error_code for topic in response.topics for p in topic.partitions if p.error_code]
            if ErrorCode.UNKNOWN_TOPIC_ID in codes:
                _check_not_replaced(coordinator, offsets, kafka_transactional_id, deadline)
                raise _AgainError(ErrorCode.UNKNOWN_TOPIC_ID)  # the coordinator has not learned of a new topic yet
        except (ConnectionLostError, CoordinatorUnavailableError, BrokerUnavailableError) as error:
            code = getattr(error, "code", None)
            if code and reaction_to(code) is Reaction.FAILED:  # FindCoordinator checks the ACLs of the group, too
                raise failure(code, action, kafka_transactional_id) from error
            network.forget_coordinator(group.group_id, GROUP)
            raise _AgainError(NO_RESPONSE) from error
        for code in codes:
            if reaction_to(code) is Reaction.FAILED:
                raise failure(code, action, kafka_transactional_id)
        if codes:
            if reaction_to(codes[0]) is Reaction.LOOK_UP:
                network.forget_coordinator(group.group_id, GROUP)
            raise _AgainError(codes[0])

    try:
        repeated(once, (_AgainError,), deadline, pause=_OFFSETS_PAUSE)
    except _AgainError as error:
        raise failure(error.code, action, kafka_transactional_id, message=f"within {deadline.seconds:g} s") from error


def _check_not_replaced(
    coordinator: Connection, offsets: Sequence[ConsumedOffset], kafka_transactional_id: str, deadline: Deadline
) -> None:
    read = {each.topic: each.topic_id for each in offsets}
    named = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in read]
    response = coordinator.call(MetadataRequest(topics=named, allow_auto_topic_creation=False), deadline)
    for found in response.topics:
        is_gone = found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if is_gone or (not found.error_code and str(found.topic_id) != read[found.name]):
            raise TopicReplacedError(
                f"The topic {found.name!r} was deleted{'' if is_gone else ' and created again'} since it was read: the offsets "
                "of the transaction belong to the old one.",
                next_step="read the topic from where its messages are new, with a consumer that starts anew",
                topic=found.name,
                transactional_id=kafka_transactional_id,
            )


def _request(
    kafka_transactional_id: str,
    producer_id: int,
    epoch: int,
    offsets: Sequence[ConsumedOffset],
    group: GroupMetadata,
    *,
    by_id: bool,
) -> TxnOffsetCommitRequest:
    topics: dict[tuple[str, str], list[_Topic.TxnOffsetCommitRequestPartition]] = {}
    for consumed in offsets:
        topics.setdefault((consumed.topic, consumed.topic_id), []).append(
            _Topic.TxnOffsetCommitRequestPartition(
                partition_index=consumed.partition,
                committed_offset=consumed.offset,
                committed_leader_epoch=consumed.leader_epoch,
                committed_metadata=consumed.metadata,
            )
        )
    return TxnOffsetCommitRequest(
        version=_BY_TOPIC_ID if by_id else _BY_NAME,
        transactional_id=kafka_transactional_id,
        group_id=group.group_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        generation_id=group.generation_id,
        member_id=group.member_id,
        group_instance_id=group.group_instance_id,
        topics=[
            _Topic(topic_id=UUID(topic_id), partitions=read) if by_id else _Topic(name=name, partitions=read)
            for (name, topic_id), read in topics.items()
        ],
    )
