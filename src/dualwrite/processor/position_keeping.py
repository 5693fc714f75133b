"""Where a processor's positions are: in the database, moved by compare-and-set with the data (the default), or at Kafka.

Whatever a consumer believes about its assignment, compare-and-set makes its writes take effect only if no other consumer has
continued from the same position. The position also shows the outcome of a COMMIT that was not answered: the next attempt finds
it either unchanged or moved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from dualwrite.errors import BrokerUnavailableError, ConfigurationError, PositionMovedError, ProducerFencedError
from dualwrite.kafka.base import GroupMetadata
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.inspect import TopicMetadata
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.state import ConsumedOffset
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Move, Partition, Position, Positions
from dualwrite.transaction import Transaction, opened

Stored = Mapping[Partition, Position]
"""Positions as they were read, without partitions that have none."""

Topics = Mapping[str, TopicMetadata]

QUERY_TIMEOUT: Final = 5.0
"""Seconds for one query about positions or offsets; `stop` is noticed at its end."""


class PositionKeeping(ABC):
    """Where the positions of a consumer group are kept: with the data in the database, or as the group's offsets at Kafka.

    Attributes:
        in_database: Whether positions are in the database; they then include the topic's id, unlike a group's offsets at Kafka.
        gone_because: Why a position may be gone.
        membership_errors: Errors of a transaction which say that the member may have lost its partitions.
    """

    in_database: bool
    gone_because: str
    membership_errors: tuple[type[Exception], ...] = ()

    @abstractmethod
    def prepare(self) -> None:
        """Called when the processor starts, and before partitions are assigned.

        Raises:
            StoreError: The positions can't be stored.
            ConfigurationError: The group has positions elsewhere, too.
        """

    @abstractmethod
    def read(self, consumer: GroupConsumer, keys: Collection[Partition]) -> Stored:
        """The positions of at least these partitions, as they are now, without partitions that have none.

        Raises:
            DualWriteError: They can't be read.
        """

    @abstractmethod
    def keep_ends(self, consumer: GroupConsumer, partitions: Sequence[Partition], stored: Stored, topics: Topics) -> bool:
        """If the group starts a topic at its end: store the ends of all its partitions as positions, before it is read.

        Otherwise messages that arrive before the first transaction would be skipped if the consumer crashed, and a partition
        without messages could not be distinguished from one that was added.

        Returns:
            Whether a position may have been stored now, by us or by another member.

        Raises:
            DualWriteError: The ends can't be stored, or another member is about to store them (retriable).
        """

    @abstractmethod
    def move(self, consumer: GroupConsumer, moves: Sequence[Move], tx: Transaction[Any]) -> None:
        """Move positions at the end of a transaction. This fails if a partition is no longer ours."""

    def moved(self, consumer: GroupConsumer, after: Mapping[Partition, int]) -> None:  # noqa: B027  (Kafka's own need nothing)
        """Called when positions have moved."""

    @abstractmethod
    def reset(self, consumer: GroupConsumer, moves: Sequence[Move]) -> None:
        """Move positions outside of a transaction; raises as `move`."""


class DatabaseKeeping(PositionKeeping):
    """The positions of a group in the writer's store.

    Raises:
        ConfigurationError: The store does not support consumer positions.
    """

    in_database = True
    gone_because = "it was removed while the group was consuming (`dualwrite offsets forget --force`, or a restored database)"

    def __init__(self, group_id: str, store: TxnStateStore) -> None:
        if store.positions is None:
            raise ConfigurationError(
                f"The store {type(store).__name__} ({store.description}) does not support consumer positions.",
                next_step="use a SQL database, RocksDB or ZooKeeper; or offsets='kafka'",
            )
        self._group = group_id
        self._positions: Positions = store.positions

    def prepare(self) -> None:
        self._positions.prepare()

    def read(self, consumer: GroupConsumer, keys: Collection[Partition]) -> Stored:
        del consumer, keys
        return self._positions.read(self._group)

    def keep_ends(self, consumer: GroupConsumer, partitions: Sequence[Partition], stored: Stored, topics: Topics) -> bool:
        """If several members start at once, one of them stores all ends; the others continue from there."""
        unread = {topic for topic, _ in partitions} - {topic for topic, _ in stored}
        keys = {(topic, number) for topic in unread for number in topics[topic].partitions}
        keys |= {key for key in partitions if key[0] in unread}
        if not keys:
            return False
        begin = {**consumer.offsets.end_offsets(keys, QUERY_TIMEOUT), **consumer.offsets.committed(keys, QUERY_TIMEOUT)}
        moves = [Move(None, Position(*key, offset, topics[key[0]].id)) for key, offset in begin.items()]
        with suppress(PositionMovedError):
            self._positions.reset(self._group, moves)
        return True

    def move(self, consumer: GroupConsumer, moves: Sequence[Move], tx: Transaction[Any]) -> None:
        del consumer
        opened(tx).move_positions(self._positions, self._group, moves)

    def moved(self, consumer: GroupConsumer, after: Mapping[Partition, int]) -> None:
        consumer.show_progress(after)

    def reset(self, consumer: GroupConsumer, moves: Sequence[Move]) -> None:
        del consumer
        self._positions.reset(self._group, moves)


class KafkaKeeping(PositionKeeping):
    """The offsets of a group at Kafka. `on_new_topic` has no effect: Kafka deletes the offsets of a topic with the topic.

    Args:
        group_id: The group.
        topics: The topics.
        stored: The positions in the writer's store, if it supports them: the group must not have any there.
    """

    in_database = False
    gone_because = "the group's offset was deleted at Kafka, possibly because the topic was deleted"
    membership_errors = (ProducerFencedError,)  # if it is the writer that was fenced, the next transaction reports it

    def __init__(self, group_id: str, topics: Collection[str], stored: Positions | None) -> None:
        self._group = group_id
        self._topics = topics
        self._stored = stored

    def prepare(self) -> None:
        """If the group has positions in the database, its offsets at Kafka are only for monitoring tools."""
        found = {} if self._stored is None else self._stored.read(self._group)
        there = sorted(position for position in found.values() if position.topic in self._topics)
        if there:
            raise ConfigurationError(
                f"The group {self._group!r} has positions in the database, {there[0]} for example: with offsets='kafka' "
                "it would start at its offsets at Kafka, which are behind these.",
                next_step="keep offsets='database'; or stop all processors of the group, and hand its positions over to Kafka: "
                f"`dualwrite offsets forget --group {self._group}`",
            )

    def read(self, consumer: GroupConsumer, keys: Collection[Partition]) -> Stored:
        return {key: Position(*key, offset) for key, offset in consumer.offsets.committed(keys, QUERY_TIMEOUT).items()}

    def keep_ends(self, consumer: GroupConsumer, partitions: Sequence[Partition], stored: Stored, topics: Topics) -> bool:
        """The member that reads partition 0 commits all ends, in one request; the others wait for it.

        Kafka commits offsets unconditionally: a second member could move positions back that the first has already advanced.
        """
        ours = {*partitions, *consumer.owned()}
        changed = False
        for topic in sorted({key[0] for key in partitions if key not in stored}):
            keys = {*((topic, n) for n in topics[topic].partitions), *(key for key in partitions if key[0] == topic)}
            if consumer.offsets.committed(keys, QUERY_TIMEOUT):
                continue  # the group has read the topic, or another member has committed its ends
            if (topic, 0) not in ours:
                raise BrokerUnavailableError(
                    f"The group {self._group!r} has no offsets in {topic!r} yet: the member that reads {topic}-0 commits them.",
                    cause="that member is just starting, or it has died",
                    next_step="retry",
                )
            consumer.offsets.commit(consumer.offsets.end_offsets(keys, QUERY_TIMEOUT))
            changed = True
        return changed

    def move(self, consumer: GroupConsumer, moves: Sequence[Move], tx: Transaction[Any]) -> None:
        group = self._check_membership(consumer)
        positions = [ConsumedOffset(*move.key, move.after.offset, topic_id=move.after.topic_id) for move in moves]
        opened(tx).send_positions(positions, group)

    def reset(self, consumer: GroupConsumer, moves: Sequence[Move]) -> None:
        """Only a member of the current generation can do this."""
        consumer.offsets.commit(_offsets(moves))

    def _check_membership(self, consumer: GroupConsumer) -> GroupMetadata:
        """The consumer's membership, which it still has: the coordinator accepts offsets without one from any client.

        Raises:
            ProducerFencedError: The membership has ended, and librdkafka has noticed that.
        """
        group = GroupMetadata.from_librdkafka(consumer.member.consumer_group_metadata())
        if group.generation_id < 0 or not group.member_id:
            raise ProducerFencedError(
                f"The consumer is no longer a member of the group {self._group!r}.",
                cause="it did not poll for max.poll.interval.ms, or the group received no heartbeat within the session timeout",
                code=ErrorCode.UNKNOWN_MEMBER_ID,
                name=ErrorCode.UNKNOWN_MEMBER_ID.name,
            )
        return group


def _offsets(moves: Sequence[Move]) -> dict[Partition, int]:
    return {move.key: move.after.offset for move in moves}
