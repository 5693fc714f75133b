"""How far a partition has been written, and how far `read_committed` consumers can read it (ListOffsets)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.errors import DualWriteError
from dualwrite.kafka.admin.brokers import Brokers, batches
from dualwrite.kafka.admin.leaders import Key, PartitionReply, by_topic, chosen_partitions, request_partitions
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.messages_generated import ListOffsetsRequest, ListOffsetsResponse

_LATEST: Final = -1
_EARLIEST: Final = -2
_CLIENT: Final = -1
_READ_UNCOMMITTED: Final = 0
_READ_COMMITTED: Final = 1


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """The end of a partition.

    Args:
        topic: The topic.
        partition: The partition; -1 if the topic itself can't be described.
        broker: The leader; None if there is none.
        last_stable_offset: Where `read_committed` consumers stop; None if there is a problem.
        high_watermark: Where all others stop; None if there is a problem.
        problem: Why the leader did not respond, if so.
    """

    topic: str
    partition: int
    broker: int | None
    last_stable_offset: int | None = None
    high_watermark: int | None = None
    problem: DualWriteError | None = None

    @property
    def records_behind(self) -> int:
        """How many offsets `read_committed` consumers can't read yet."""
        if self.last_stable_offset is None or self.high_watermark is None:
            return 0
        return max(self.high_watermark - self.last_stable_offset, 0)


def partition_ends(brokers: Brokers, topics: Sequence[str] | None, partitions: Collection[int] = ()) -> Iterator[PartitionEnd]:
    """Both ends of each partition, from its leader; the high watermark first, so that new records make no difference.

    Args:
        brokers: The brokers, for this call.
        topics: The topics; None for all.
        partitions: Their partitions; empty for all.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    seen = brokers.view(topics)
    chosen, refused = chosen_partitions(seen, partitions)
    yield from (PartitionEnd(*key, None, problem=problem) for key, problem in refused.items())
    for batch in batches(chosen):
        written = request_partitions(brokers, seen, batch, _Offset(_READ_UNCOMMITTED))
        stable = request_partitions(brokers, seen, batch, _Offset(_READ_COMMITTED))
        for key, reply in stable.items():
            problem = written[key].problem or reply.problem
            if problem is None:
                yield PartitionEnd(*key, reply.broker, reply.response, written[key].response)
            else:
                yield PartitionEnd(*key, reply.broker, problem=problem)


def first_offsets(brokers: Brokers, topics: Sequence[str], partitions: Collection[int] = ()) -> dict[Key, PartitionReply]:
    """The first offset that retention has left in each partition.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
        UnknownTopicError: There is no such topic or partition.
    """
    seen = brokers.view(topics)
    chosen, refused = chosen_partitions(seen, partitions)
    for problem in refused.values():
        raise problem
    found: dict[Key, PartitionReply] = {}
    for batch in batches(chosen):
        found |= request_partitions(brokers, seen, batch, _Offset(_READ_UNCOMMITTED, _EARLIEST))
    return found


class _Offset:
    """Requests the offset after the last record that can be read, or the first offset."""

    request_name = "ListOffsets"
    failure = "The offsets of {} could not be read"

    def __init__(self, isolation: int, timestamp: int = _LATEST) -> None:
        self._isolation = isolation
        self._timestamp = timestamp

    def request(self, _: Connection, keys: Sequence[Key]) -> ListOffsetsRequest:
        topic_request = ListOffsetsRequest.ListOffsetsTopic
        partition_request = topic_request.ListOffsetsPartition
        return ListOffsetsRequest(
            replica_id=_CLIENT,
            isolation_level=self._isolation,
            topics=[
                topic_request(
                    name=topic,
                    partitions=[partition_request(partition_index=each, timestamp=self._timestamp) for each in indexes],
                )
                for topic, indexes in by_topic(keys).items()
            ],
        )

    @staticmethod
    def responses(response: ListOffsetsResponse) -> Iterator[tuple[Key, int, Any]]:
        for topic in response.topics:
            for found in topic.partitions:
                yield (topic.name, found.partition_index), found.error_code, found.offset
