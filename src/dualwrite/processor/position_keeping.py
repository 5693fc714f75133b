"""Where a processor's positions are: in the database, moved by compare-and-set with the data (the default), or at Kafka.

Whatever a consumer believes about its assignment, compare-and-set makes its writes take effect only if no other consumer has
continued from the same position. The position also shows the outcome of a COMMIT that was not answered: the next attempt finds
it either unchanged or moved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dualwrite.errors import BrokerUnavailableError, ConfigurationError, PositionMovedError, ProducerFencedError
from dualwrite.kafka.base import GroupMetadata
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.inspect import TopicMetadata
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Batch
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.progress import QUERY_TIMEOUT, Progress, place_of
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Move, Partition, Position, Positions
from dualwrite.transaction import Transaction, opened


class StoredProgress(Progress):
    """The positions of a group in the writer's store.

    Raises:
        ConfigurationError: The store does not support consumer positions.
    """

    in_database = True

    def __init__(self, store: TxnStateStore, group_id: str, kafka: Mapping[str, Any], options: ProcessorOptions) -> None:
        super().__init__(group_id, kafka, options)
        if store.positions is None:
            raise ConfigurationError(
                f"The store {type(store).__name__} ({store.description}) does not support consumer positions.",
                next_step="use a SQL database, RocksDB or ZooKeeper; or offsets='kafka'",
            )
        self._positions: Positions = store.positions

    def prepare(self) -> None:
        self._positions.prepare()

    def read(self, consumer: GroupConsumer, keys: Collection[Partition], timeout: float) -> Mapping[Partition, Position]:
        del consumer, keys, timeout
        return self._positions.read(self._group)

    def keep_ends(
        self,
        consumer: GroupConsumer,
        partitions: Sequence[Partition],
        stored: Mapping[Partition, Position],
        topics: Mapping[str, TopicMetadata],
    ) -> bool:
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

    def move(self, consumer: GroupConsumer, batch: Batch, tx: Transaction[Any]) -> None:
        del consumer
        opened(tx).move_positions(self._positions, self._group, self._moves(batch.after))

    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        self._moved(consumer, batch.after)

    def move_to_ends(self, consumer: GroupConsumer, ends: Mapping[Partition, int]) -> None:
        self._positions.reset(self._group, self._moves(ends))
        self._moved(consumer, ends)

    def moved_by_others(self, consumer: GroupConsumer) -> Mapping[Partition, int]:
        begun = super().moved_by_others(consumer)
        found = self._positions.read(self._group)
        moved: dict[Partition, int] = {}
        for key in consumer.owned().keys() - begun.keys():
            position = found.get(key)
            self._check_not_forgotten(key, position)
            if position is not None and place_of(position) != place_of(self._known.get(key)):
                self._note(key, position)
                moved[key] = position.offset
        return {**begun, **moved}

    def _moves(self, after: Mapping[Partition, int]) -> list[Move]:
        return [Move(self._known.get(key), self._at(key, offset)) for key, offset in after.items()]

    def _moved(self, consumer: GroupConsumer, after: Mapping[Partition, int]) -> None:
        self._known |= {key: self._at(key, offset) for key, offset in after.items()}
        consumer.show_progress(after)

    def _at(self, key: Partition, offset: int) -> Position:
        return Position(*key, offset, self._ids.get(key, ""))


class GroupProgress(Progress):
    """The offsets of a group at Kafka. `on_new_topic` has no effect: Kafka deletes the offsets of a topic with the topic.

    Args:
        group_id: The group.
        topics: The topics.
        kafka: The consumer's settings, for queries of the topics' ids.
        options: The policies.
        stored: The positions in the writer's store, if it supports them: the group must not have any there.
    """

    in_database = False

    def __init__(
        self,
        group_id: str,
        topics: Collection[str],
        kafka: Mapping[str, Any],
        options: ProcessorOptions,
        stored: Positions | None,
    ) -> None:
        super().__init__(group_id, kafka, options)
        self._topics = topics
        self._stored = stored
        self._in_doubt = False

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

    def read(self, consumer: GroupConsumer, keys: Collection[Partition], timeout: float) -> Mapping[Partition, Position]:
        return _positions(consumer.offsets.committed(keys, timeout))

    def begin(
        self, consumer: GroupConsumer, partitions: Sequence[Partition], refused: Mapping[Partition, int] | None = None
    ) -> Mapping[Partition, int]:
        """A member that stores positions in the database may have joined in the meantime."""
        self.prepare()
        return super().begin(consumer, partitions, refused)

    def keep_ends(
        self,
        consumer: GroupConsumer,
        partitions: Sequence[Partition],
        stored: Mapping[Partition, Position],
        topics: Mapping[str, TopicMetadata],
    ) -> bool:
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

    def move(self, consumer: GroupConsumer, batch: Batch, tx: Transaction[Any]) -> None:
        if self._in_doubt:
            self._find_out(consumer, batch)
        self._check_membership(consumer)
        tx.send_offsets(consumer.member, batch.after)

    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        del consumer
        self._in_doubt = False
        self._known |= _positions(batch.after)

    def move_to_ends(self, consumer: GroupConsumer, ends: Mapping[Partition, int]) -> None:
        """Only a member of the current generation can do this."""
        consumer.offsets.commit(ends)
        self._known |= _positions(ends)

    def catch_up(self, consumer: GroupConsumer, batch: Batch) -> tuple[Batch, Mapping[Partition, int]]:
        found = super().catch_up(consumer, batch)
        self._in_doubt = False
        return found

    @property
    def can_assign(self) -> bool:
        """Until the writer has ended the transaction, the group's offsets can't be read."""
        return not self._in_doubt

    def left_in_doubt(self) -> None:
        self._in_doubt = True

    def has_lost_partitions(self, error: BaseException) -> bool:
        """The generation has ended. If it is the writer that was fenced, the next transaction reports it."""
        return isinstance(error, ProducerFencedError)

    def forget(self) -> None:
        super().forget()
        self._in_doubt = False

    def _check_membership(self, consumer: GroupConsumer) -> None:
        """Check that the consumer is still a member: the coordinator accepts offsets without a membership from any client.

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

    def _find_out(self, consumer: GroupConsumer, batch: Batch) -> None:
        """Find out the outcome of a transaction in doubt; called inside the next one, when the writer has ended it.

        Only then can the group's offsets be read.

        Raises:
            PositionMovedError: The transaction in doubt has committed.
            BrokerError: The offsets can't be read yet.
        """
        if self._changed(consumer, batch):
            raise PositionMovedError(f"The offsets of the group {self._group!r} have moved.", group_id=self._group)
        self._in_doubt = False


def _positions(offsets: Mapping[Partition, int]) -> dict[Partition, Position]:
    return {key: Position(*key, offset) for key, offset in offsets.items()}
