"""Positions in the database, moved by compare-and-set in the transaction of the data: the default.

Whatever a consumer believes about its assignment, its writes take effect only if no other consumer has continued from the same
position. The position also shows the outcome of a COMMIT that was not answered: the next attempt finds it either unchanged or
moved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dualwrite.errors import ConfigurationError, PositionMovedError
from dualwrite.kafka.inspect.topic_metadata import TopicMetadata
from dualwrite.kafka.librdkafka.batch import Batch
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.progress import Progress, place_of, topics_without
from dualwrite.processor.work import Finish
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Move, Partition, Position, Positions
from dualwrite.transaction import Transaction, opened


class StoredProgress(Progress):
    """The positions of a group in a store.

    Args:
        store: The writer's store.
        group_id: The group.
        kafka: The consumer's settings, for queries of the topics' ids.
        options: The policies.

    Raises:
        ConfigurationError: The store does not support consumer positions.
    """

    keeps_ids = True
    forgotten_because = (
        "it was removed while the group was consuming (`dualwrite offsets forget --force`, or a restored database)"
    )

    def __init__(self, store: TxnStateStore, group_id: str, kafka: Mapping[str, Any], options: ProcessorOptions) -> None:
        super().__init__(group_id, kafka, options)
        self._positions = _positions_of(store)

    def prepare(self) -> None:
        """See Progress."""
        self._positions.prepare()

    def read(self, consumer: GroupConsumer, keys: Collection[Partition], timeout: float) -> Mapping[Partition, Position]:
        """See Progress."""
        del consumer, keys, timeout
        return self._positions.read(self._group)

    def committed(self, consumer: GroupConsumer, keys: Collection[Partition], timeout: float) -> Mapping[Partition, int]:
        """See Progress: the offsets that an earlier consumer has committed."""
        return consumer.offsets.committed(keys, timeout)

    def keep_ends(
        self,
        consumer: GroupConsumer,
        partitions: Sequence[Partition],
        stored: Mapping[Partition, Position],
        topics: Mapping[str, TopicMetadata],
        timeout: float,
    ) -> bool:
        """See Progress. If several members start at once, one of them stores all ends; the others continue from there."""
        unread = topics_without(partitions, stored)
        keys = {(topic, number) for topic in unread for number in topics[topic].partitions}
        keys |= {key for key in partitions if key[0] in unread}
        if not keys:
            return False
        begin = {**consumer.offsets.end_offsets(keys, timeout), **consumer.offsets.committed(keys, timeout)}
        moves = [Move(None, Position(*key, offset, topics[key[0]].id)) for key, offset in begin.items()]
        with suppress(PositionMovedError):
            self._positions.reset(self._group, moves)
        return True

    def move(self, consumer: GroupConsumer, batch: Batch) -> Finish:
        """See Progress."""
        del consumer

        def finish(tx: Transaction[Any]) -> None:
            opened(tx).move_positions(self._positions, self._group, self._moves(batch.after))

        return finish

    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        """See Progress."""
        self._moved(consumer, batch.after)

    def move_to_ends(self, consumer: GroupConsumer, ends: Mapping[Partition, int]) -> None:
        """See Progress."""
        self._positions.reset(self._group, self._moves(ends))
        self._moved(consumer, ends)

    def look_again(self, consumer: GroupConsumer) -> Mapping[Partition, int]:
        """See Progress."""
        begun = super().look_again(consumer)
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


def _positions_of(store: TxnStateStore) -> Positions:
    found = store.positions
    if found is None:
        raise ConfigurationError(
            f"The store {type(store).__name__} ({store.description}) does not support consumer positions.",
            next_step="use a SQL database, RocksDB or ZooKeeper; or offsets='kafka'",
        )
    return found
