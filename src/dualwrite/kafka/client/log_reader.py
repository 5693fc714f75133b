"""Reads of a partition's log: single requests to its leader (Metadata, Fetch, ListOffsets), and `LogReader`, which retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerError
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataRequest,
)
from dualwrite.kafka.client.record_batches import Batch, batches, following_offset
from dualwrite.kafka.client.retries import AnsweredError, RetryingClient, TryAgainError

T = TypeVar("T")

PartitionData = FetchResponse.FetchableTopicResponse.PartitionData

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1

EARLIEST: Final = -2
LATEST: Final = -1
"""In place of a timestamp: the first offset that the log still has, and the one after the last."""

_READ_SIZE: Final = 2**20
_WAIT_MS: Final = 500  # a broker may have to read from remote storage first
_CERTAIN: Final = 1.0  # seconds for which every answer says that a partition does not exist: one broker may lag behind
_CLIENT: Final = -1
_GONE: Final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED)


class LogNotReadableError(Exception):
    """The partition can't be read at the moment: retry."""


class PartitionGoneError(Exception):
    """The broker knows no such partition, or the principal may not read its topic. Attribute: `code`."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class OffsetGoneError(Exception):
    """The log does not have the offset: no longer, or not yet."""


def leader(network: Network, topic: str, partition: int, deadline: Deadline) -> Address:
    """The address of a partition's leader.

    Raises:
        PartitionGoneError: There is no such partition, or the principal may not describe the topic.
        LogNotReadableError: It has no leader now.
        BrokerError: Kafka does not describe the topic, for another reason.
        ConnectionLostError, BrokerUnavailableError: As for `Network`.
    """
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False)
    response = network.any_broker(deadline).call(request, deadline)
    (found,) = response.topics
    if found.error_code in _GONE:
        raise PartitionGoneError(ErrorCode(found.error_code))
    if found.error_code and not found.partitions:
        raise BrokerError(
            f"Metadata of topic {topic!r} returned {error_name(found.error_code)}.",
            code=found.error_code,
            name=error_name(found.error_code),
        )
    known = [each.leader_id for each in found.partitions if each.partition_index == partition]
    if not known:
        raise PartitionGoneError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    for broker in response.brokers:
        if broker.node_id == known[0]:
            return Address(broker.host, broker.port)
    raise LogNotReadableError(f"{topic}-{partition} has no leader")


def fetched(
    connection: Connection,
    topic: str,
    partition: int,
    offset: int,
    deadline: Deadline,
    *,
    size: int,
    isolation: int,
    max_wait_ms: int = 0,
) -> PartitionData:
    """The leader's response for the partition, with at least one batch, however large it is (KIP-74), if there is one.

    Raises:
        OffsetGoneError: The log does not have the offset.
        PartitionGoneError: The principal may not read the topic.
        LogNotReadableError: For example, the leader has just moved.
        ConnectionLostError: The connection broke.
    """
    wanted = FetchRequest.FetchTopic.FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=size)
    response = connection.call(
        FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=1 if max_wait_ms else 0,
            max_bytes=size,
            isolation_level=isolation,
            topics=[FetchRequest.FetchTopic(topic=topic, partitions=[wanted])],
        ),
        deadline,
    )
    if response.error_code:
        raise LogNotReadableError(f"Fetch returned {error_name(response.error_code)}")
    (found,) = response.responses[0].partitions
    _check(found.error_code, "Fetch", topic, partition)
    return found


def offset_at(connection: Connection, topic: str, partition: int, timestamp_ms: int, deadline: Deadline) -> int | None:
    """The offset of the first record with this timestamp or a later one; None if there is none. Or EARLIEST, or LATEST.

    Raises: as `fetched`.
    """
    asked = ListOffsetsRequest.ListOffsetsTopic
    response: ListOffsetsResponse = connection.call(
        ListOffsetsRequest(
            replica_id=_CLIENT,
            isolation_level=READ_UNCOMMITTED,
            topics=[asked(name=topic, partitions=[asked.ListOffsetsPartition(partition, timestamp=timestamp_ms)])],
            timeout_ms=int(1000 * deadline.left),
        ),
        deadline,
    )
    (found,) = response.topics[0].partitions
    _check(found.error_code, "ListOffsets", topic, partition)
    return found.offset if found.offset >= 0 else None


def _check(code: int, request: str, topic: str, partition: int) -> None:
    """Check a leader's answer. A leader that does not know the partition is a new one, or an old one: only Metadata decides."""
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        raise OffsetGoneError
    if code == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
        raise PartitionGoneError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    if code:
        raise LogNotReadableError(f"{request} of {topic}-{partition} returned {error_name(code)}")


class LogReader:
    """Reads the log of any partition. It holds the connections for one request at a time.

    Args:
        client: The connections, and the retries.
        timeout: As for `TransactionCoordinator.find_messages`: seconds without progress, or a deadline for everything.
    """

    def __init__(self, client: RetryingClient, timeout: Limit | None) -> None:
        self._client = client
        self._whole = timeout if isinstance(timeout, Deadline) else None
        self._seconds = client.limit(timeout).seconds
        self._leaders: dict[tuple[str, int], Address] = {}

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        """The offset of the first record with this timestamp or a later one, or None.

        Raises: as `batches_from`.
        """

        def ask(connection: Connection, deadline: Deadline) -> int | None:
            return offset_at(connection, topic, partition, timestamp_ms, deadline)

        return self._from_leader(topic, partition, ask)

    def first_offset(self, topic: str, partition: int) -> int:
        """The first offset that the log still has.

        Raises: as `batches_from`.
        """
        return self.offset_at(topic, partition, EARLIEST) or 0

    def batches_from(
        self, topic: str, partition: int, offset: int, has_more: Callable[[], bool] = lambda: False
    ) -> Iterator[Batch]:
        """Every batch from the one with the offset to the end that the partition has now.

        Args:
            topic: The topic.
            partition: The partition.
            offset: The offset.
            has_more: Whether more batches must follow at the end. They are waited for; what else follows is no progress.

        Raises:
            OffsetGoneError: The partition does not have the offset, or not any more the one reached.
            PartitionGoneError: It does not exist, or the principal may not read it.
            BrokerUnavailableError: Nothing could be read within the time limit.
        """
        # of a leader that was just elected, only ListOffsets waits until it knows the end (KIP-207)
        end = self.offset_at(topic, partition, LATEST) or 0
        if offset >= end:
            raise OffsetGoneError
        limit = self._limit
        while True:
            found = self._fetched(topic, partition, offset, limit)
            for batch in batches(found.records):
                if not batch.is_truncated:
                    yield batch
            offset = following_offset(found.records) or offset
            if offset >= end:
                if not has_more():
                    return
                limit = Deadline.of(limit)

    def _fetched(self, topic: str, partition: int, offset: int, limit: Limit) -> PartitionData:
        def ask(connection: Connection, deadline: Deadline) -> PartitionData:
            found = fetched(
                connection,
                topic,
                partition,
                offset,
                deadline,
                size=_READ_SIZE,
                isolation=READ_UNCOMMITTED,
                max_wait_ms=min(_WAIT_MS, int(500 * deadline.left)),
            )
            if following_offset(found.records) is None:
                raise LogNotReadableError(f"{topic}-{partition} has nothing at offset {offset} yet")
            return found

        return self._from_leader(topic, partition, ask, limit)

    @property
    def _limit(self) -> Limit:
        return self._seconds if self._whole is None else self._whole

    def _from_leader(
        self, topic: str, partition: int, ask: Callable[[Connection, Deadline], T], limit: Limit | None = None
    ) -> T:
        """Ask the leader of a partition, and look the leader up again when it has moved."""
        certain = Certain()
        key = (topic, partition)
        network = self._client.network

        def once(deadline: Deadline) -> T:
            with certain:
                if key not in self._leaders:
                    self._leaders[key] = leader(network, topic, partition, deadline)
                try:
                    return ask(network.connection(self._leaders[key], deadline), deadline)
                except (LogNotReadableError, ConnectionLostError, PartitionGoneError):
                    del self._leaders[key]
                    raise

        return self._client.repeated(once, f"the leader of {topic}-{partition}", self._limit if limit is None else limit)


class Certain:
    """Makes errors that may pass ones that are tried again: a partition is gone only after every answer of a while says so."""

    def __init__(self) -> None:
        self._gone_since: float | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, LogNotReadableError):
            raise TryAgainError(f"{error}") from error
        if isinstance(error, PartitionGoneError) and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            now = time.monotonic()
            self._gone_since = self._gone_since or now
            if now - self._gone_since < _CERTAIN:
                raise AnsweredError("the partition is unknown") from error
        elif error is None:
            self._gone_since = None
