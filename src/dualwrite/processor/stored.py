"""Positions in the database, moved by compare-and-set in the transaction of the data: the default.

Whatever a consumer believes about its assignment, what it writes takes effect only if nobody has gone on from the same
position. The outcome of a COMMIT that was not answered is read from there as well: the next attempt finds the position where it
left it, or moved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dualwrite.errors import BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.inspect.topic_ids import topic_ids
from dualwrite.kafka.librdkafka.batch import Batch
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.progress import Progress, place_of
from dualwrite.processor.starts import Seen
from dualwrite.processor.work import Finish
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Move, Partition, Position, Positions
from dualwrite.transaction import Transaction


class StoredProgress(Progress):
    """The positions of a group in a store.

    Args:
        store: The writer's store.
        group_id: The group.
        topics: The topics.
        kafka: The consumer's settings, to ask for the topics' ids.
        options: The policies.

    Raises:
        ConfigurationError: The store keeps no positions.
    """

    def __init__(
        self, store: TxnStateStore, group_id: str, topics: Sequence[str], kafka: Mapping[str, Any], options: ProcessorOptions
    ) -> None:
        super().__init__(group_id, options)
        self._positions = _positions_of(store)
        self._topics = topics
        self._kafka = _connection(kafka)
        self._ids: Mapping[str, str] = {}

    def prepare(self) -> None:
        """See Progress."""
        self._positions.prepare()

    def read(self, consumer: GroupConsumer, keys: Collection[Partition], timeout: float) -> Mapping[Partition, Position]:
        """See Progress."""
        del consumer, keys, timeout
        return self._positions.read(self._group)

    def seen(
        self, consumer: GroupConsumer, partitions: Sequence[Partition], stored: Mapping[Partition, Position], timeout: float
    ) -> Mapping[Partition, Seen]:
        """See Progress. Also the topics' ids, and the group's offsets at Kafka, from a consumer before this one."""
        self._ids = topic_ids(self._kafka, self._topics, timeout=timeout)
        for topic in {topic for topic, _ in partitions} - self._ids.keys():  # or a new one could pass for the one before it
            raise BrokerUnavailableError(
                f"The brokers don't know the topic {topic!r} of an assigned partition.",
                cause="it was created or deleted just now",
                next_step="retry",
            )
        missing = [key for key in partitions if key not in stored]
        committed = consumer.committed(missing, timeout) if missing else {}
        found = super().seen(consumer, partitions, stored, timeout)
        return {
            key: replace(one, topic_id=self._ids.get(key[0], ""), committed=committed.get(key)) for key, one in found.items()
        }

    def move(self, consumer: GroupConsumer, batch: Batch) -> Finish:
        """See Progress."""
        del consumer

        def finish(tx: Transaction[Any]) -> None:
            moves = [Move(self._known.get(key), self._at(key, offset)) for key, offset in batch.after().items()]
            tx.move_positions(self._positions, self._group, moves)

        return finish

    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        """See Progress."""
        after = batch.after()
        self._known |= {key: self._at(key, offset) for key, offset in after.items()}
        consumer.show_progress(after)

    def look_again(self, consumer: GroupConsumer) -> Mapping[Partition, Position]:
        """See Progress."""
        owned = consumer.owned()
        found = self._positions.read(self._group).items()
        moved = {key: one for key, one in found if key in owned and place_of(one) != place_of(self._known.get(key))}
        self._known |= moved
        return moved

    def _at(self, key: Partition, offset: int) -> Position:
        return Position(*key, offset, self._ids.get(key[0], ""))


def _positions_of(store: TxnStateStore) -> Positions:
    found = store.positions
    if found is None:
        raise ConfigurationError(
            f"The store {type(store).__name__} ({store.description}) keeps no positions.",
            next_step="use a SQL database, RocksDB or ZooKeeper; or offsets='kafka'",
        )
    return found


def _connection(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those of a consumer."""
    return {name: value for name, value in settings.items() if not name.startswith(("group.", "partition.assignment", "auto."))}
