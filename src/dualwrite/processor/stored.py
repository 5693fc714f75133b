"""Positions in the database, moved by compare-and-set in the transaction of the data: the default.

Whatever a consumer believes about its assignment, what it writes takes effect only if nobody has gone on from the same
position. The outcome of a COMMIT that was not answered is read from there as well: the next attempt finds the position where it
left it, or moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualwrite.errors import BrokerUnavailableError, ConfigurationError
from dualwrite.kafka.inspect.topic_ids import topic_ids
from dualwrite.kafka.librdkafka import consumer as places
from dualwrite.kafka.librdkafka.batch import Batch
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.progress import PLACES, Progress
from dualwrite.processor.starts import Seen, begin_of, topics_of
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

    alone = False

    def __init__(
        self, store: TxnStateStore, group_id: str, topics: Sequence[str], kafka: Mapping[str, Any], options: ProcessorOptions
    ) -> None:
        self._positions = _positions_of(store)
        self._group = group_id
        self._topics = topics
        self._kafka = _connection(kafka)
        self._options = options
        self._stored: dict[Partition, Position] = {}
        self._ids: Mapping[str, str] = {}

    def prepare(self) -> None:
        """See Progress."""
        self._positions.prepare()

    def known(self) -> Mapping[Partition, Position]:
        """See Progress."""
        return dict(self._stored)

    def begin(self, consumer: GroupConsumer, partitions: Sequence[Partition], timeout: float) -> Mapping[Partition, int]:
        """See Progress."""
        stored = self._positions.read(self._group)
        self._ids = topic_ids(self._kafka, self._topics, timeout=timeout)
        for topic in {topic for topic, _ in partitions} - self._ids.keys():  # or a new one could pass for the one before it
            raise BrokerUnavailableError(
                f"The brokers don't know the topic {topic!r} of an assigned partition.",
                cause="it was created or deleted just now",
                next_step="retry",
            )
        missing = [key for key in partitions if key not in stored]
        committed = consumer.committed(missing, timeout) if missing else {}
        topics = topics_of(stored)
        found: dict[Partition, int] = {}
        for key in partitions:
            position = stored.get(key)
            first = None if position is None else consumer.first_offset(key, timeout)
            seen = Seen(self._ids.get(key[0], ""), first, committed.get(key))
            begin = begin_of(key, position, seen, self._options, topics)
            found[key] = begin if isinstance(begin, int) else PLACES[begin]
            if position is None:
                self._stored.pop(key, None)
            else:
                self._stored[key] = position
        return found

    def move(self, consumer: GroupConsumer, batch: Batch) -> Finish:
        """See Progress."""
        del consumer

        def finish(tx: Transaction[Any]) -> None:
            moves = [Move(self._stored.get(key), self._at(key, offset)) for key, offset in batch.after().items()]
            tx.move_positions(self._positions, self._group, moves)

        return finish

    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        """See Progress."""
        after = batch.after()
        self._stored |= {key: self._at(key, offset) for key, offset in after.items()}
        consumer.show_progress(after)

    def catch_up(self, consumer: GroupConsumer, batch: Batch) -> tuple[Batch, Mapping[Partition, int]]:
        """See Progress."""
        del consumer
        found = self._positions.read(self._group)
        after = batch.after()
        moved: dict[Partition, int] = {}
        for key in after:
            if _place(found, key) == _place(self._stored, key):
                continue
            position = found.get(key)
            if position is None:
                self._stored.pop(key, None)
                moved[key] = places.BEGINNING
            else:
                self._stored[key] = position
                moved[key] = position.offset
        return batch.only(after.keys() - moved.keys()), moved

    def look_again(self, consumer: GroupConsumer) -> Mapping[Partition, Position]:
        """See Progress."""
        found = self._positions.read(self._group)
        owned = consumer.owned()
        moved = {key: one for key, one in found.items() if key in owned and _place(found, key) != _place(self._stored, key)}
        self._stored |= moved
        return moved

    def forget(self) -> None:
        """See Progress."""
        self._stored.clear()

    def _at(self, key: Partition, offset: int) -> Position:
        return Position(*key, offset, self._ids.get(key[0], ""))


def _place(positions: Mapping[Partition, Position], key: Partition) -> tuple[int, str] | None:
    found = positions.get(key)
    return None if found is None else (found.offset, found.topic_id)


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
