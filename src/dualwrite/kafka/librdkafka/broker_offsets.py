"""Offsets at the brokers, read through a consumer: its group's committed offsets, and the first and last ones of partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.kafka.librdkafka.batch import Partition
from dualwrite.kafka.librdkafka.errors import broker_error

_EARLIEST: Final = -2
"""ListOffsets' timestamp for the first offset."""

_LATEST: Final = -1
"""ListOffsets' timestamp for the end: the last stable offset, for a consumer that reads committed messages."""

_WITHOUT_LEADER: Final = frozenset({"_UNKNOWN_PARTITION", "_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART"})
_REBALANCING: Final = frozenset({"REBALANCE_IN_PROGRESS", "STALE_MEMBER_EPOCH"})


class BrokerOffsets:
    """Reads offsets, and commits those of the consumer's group.

    Args:
        consumer: A member of the group.
        group_id: The group.
    """

    def __init__(self, consumer: Consumer, group_id: str) -> None:
        self._consumer = consumer
        self._group = group_id

    def committed(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The group's committed offsets, for those partitions that have one.

        Raises:
            BrokerError: They can't be read: a transaction that commits offsets of the group is open, or no broker responds.
        """
        try:
            found = self._consumer.committed([TopicPartition(*key) for key in partitions], timeout)
        except KafkaException as error:
            raise self._unreadable(error) from error
        refused = next((one.error for one in found if one.error is not None), None)
        if refused is not None:
            raise self._unreadable(refused)
        return {(one.topic, one.partition): one.offset for one in found if one.offset >= 0}

    def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit offsets of the group, and wait for the response; refused if this member's generation is over.

        Raises:
            BrokerError: They were not committed.
        """
        wanted = [TopicPartition(*key, offset) for key, offset in offsets.items()]
        try:
            done = self._consumer.commit(offsets=wanted, asynchronous=False)
        except KafkaException as error:
            raise self._uncommitted(error.args[0]) from error
        refused = next((one.error for one in done or () if one.error is not None), None)
        if refused is not None:
            raise self._uncommitted(refused)

    def first_offsets(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The first offset that retention has left in each partition; one request to each leader.

        Raises:
            BrokerError: A partition's leader does not respond.
        """
        return self._listed(partitions, _EARLIEST, "first", timeout)

    def end_offsets(self, partitions: Iterable[Partition], timeout: float) -> dict[Partition, int]:
        """The end of each partition, before the first open transaction; one request to each leader.

        Raises:
            BrokerError: A partition's leader does not respond.
        """
        return self._listed(partitions, _LATEST, "last stable", timeout)

    def _listed(self, partitions: Iterable[Partition], timestamp: int, name: str, timeout: float) -> dict[Partition, int]:
        wanted = [TopicPartition(*key, timestamp) for key in partitions]
        try:
            found = self._consumer.offsets_for_times(wanted, timeout) if wanted else ()
        except KafkaException as error:
            raise _unlisted(error.args[0], f"reading the {name} offsets of partitions") from error
        for one in found:
            if one.error is not None:
                raise _unlisted(one.error, f"reading the {name} offset of {one.topic}-{one.partition}")
        return {(one.topic, one.partition): one.offset for one in found}

    def _unreadable(self, error: KafkaException | KafkaError) -> BrokerError:
        found = broker_error(error, None, f"reading the offsets of group {self._group!r}")
        if isinstance(found, BrokerUnavailableError):
            found.cause = "no broker responds, or a process that has died left a transaction with the group's offsets open"
            found.next_step = (
                f"check that the brokers are running; `dualwrite stuck --group {self._group}` shows such a transaction, and "
                "`dualwrite recover` ends it"
            )
        return found

    def _uncommitted(self, error: KafkaError) -> BrokerError:
        doing = f"committing offsets of group {self._group!r}"
        if error.name() in _REBALANCING:
            return BrokerUnavailableError(f"Kafka error during {doing}: {error.str()}.", next_step="retry")
        return broker_error(error, None, doing)


def _unlisted(error: KafkaError, doing: str) -> BrokerError:
    """The error of a lookup of offsets; librdkafka calls partitions without a leader unknown, if all that it looks up are."""
    if error.name() not in _WITHOUT_LEADER:
        return broker_error(error, None, doing)
    return BrokerUnavailableError(
        f"Kafka error during {doing}: {error.str()}.",
        cause="the partitions have no leader, or the brokers don't know them yet",
        next_step="retry; check that every broker is running",
    )
