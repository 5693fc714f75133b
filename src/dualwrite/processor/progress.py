"""A processor's progress: where partitions begin, and how the position moves with a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dualwrite.kafka.librdkafka import consumer as places
from dualwrite.kafka.librdkafka.batch import Batch
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.starts import BEGINNING, END, Seen, begin_of, topics_of
from dualwrite.processor.work import Finish
from dualwrite.stores.positions import Partition, Position

_PLACES: Final = {BEGINNING: places.BEGINNING, END: places.END}
_READING: Final = 10.0
"""Seconds for reading positions once, where a transaction waits for them."""


class Progress(ABC):
    """The positions of one consumer group, as one of its members knows them. For one thread.

    Args:
        group_id: The group.
        options: The policies.
    """

    def __init__(self, group_id: str, options: ProcessorOptions) -> None:
        self._group = group_id
        self._options = options
        self._known: dict[Partition, Position] = {}

    @abstractmethod
    def read(self, consumer: GroupConsumer, keys: Collection[Partition], timeout: float) -> Mapping[Partition, Position]:
        """The positions of at least these partitions, as they are now; a partition without one is missing.

        Raises:
            DualWriteError: They can't be read.
        """

    @abstractmethod
    def move(self, consumer: GroupConsumer, batch: Batch) -> Finish:
        """What moves the positions behind a batch, in its transaction. It fails if the batch is not ours any more."""

    @abstractmethod
    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        """The transaction has committed."""

    def prepare(self) -> None:  # noqa: B027  (there may be nothing to prepare)
        """Called before partitions are assigned.

        Raises:
            StoreError: The positions can't be kept.
        """

    def known(self) -> Mapping[Partition, Position]:
        """The positions, as far as they are known."""
        return dict(self._known)

    def begin(self, consumer: GroupConsumer, partitions: Sequence[Partition], timeout: float) -> Mapping[Partition, int]:
        """The offset at which each of these partitions begins, or places.BEGINNING, places.END.

        Raises:
            DualWriteError: It can't be found out (retriable), or a policy says to stop.
        """
        stored = self.read(consumer, partitions, timeout)
        seen = self.seen(consumer, partitions, stored, timeout)
        topics = topics_of(stored)
        found: dict[Partition, int] = {}
        for key in partitions:
            begin = begin_of(key, stored.get(key), seen[key], self._options, topics)
            found[key] = begin if isinstance(begin, int) else _PLACES[begin]
            self._note(key, stored.get(key))
        return found

    def seen(
        self, consumer: GroupConsumer, partitions: Sequence[Partition], stored: Mapping[Partition, Position], timeout: float
    ) -> Mapping[Partition, Seen]:
        """The partitions as they are now, to check the positions against."""
        first = consumer.first_offsets([key for key in partitions if key in stored], timeout)
        return {key: Seen("", first.get(key)) for key in partitions}

    def catch_up(self, consumer: GroupConsumer, batch: Batch) -> tuple[Batch, Mapping[Partition, int]]:
        """After PositionMovedError: what is left of a batch, and the offsets of those that have moved.

        Nothing is left of what an earlier attempt of our own has committed.
        """
        moved: dict[Partition, int] = {}
        for key, position in self._elsewhere(consumer, batch).items():
            self._note(key, position)
            moved[key] = places.BEGINNING if position is None else position.offset
        return batch.only(batch.after().keys() - moved.keys()), moved

    @property
    def can_be_begun(self) -> bool:
        """Whether partitions can be assigned now: not while their positions depend on a transaction of this very member."""
        return True

    def left_in_doubt(self) -> None:  # noqa: B027  (a compare-and-set finds out by itself)
        """It is not known whether the last transaction has committed: the next one must find out."""

    def look_again(self, consumer: GroupConsumer) -> Mapping[Partition, Position]:
        """The positions that somebody else has moved; called between two transactions.

        Raises:
            StoreError: They can't be read now.
        """
        del consumer
        return {}

    def is_passing(self, error: BaseException) -> bool:
        """Whether the error is that of a member that may have to give up its partitions."""
        del error
        return False

    def forget(self) -> None:
        """The processor has stopped."""
        self._known.clear()

    def _elsewhere(self, consumer: GroupConsumer, batch: Batch) -> dict[Partition, Position | None]:
        """The positions of a batch's partitions that are not where they were when it was read."""
        keys = batch.after().keys()
        found = self.read(consumer, keys, _READING)
        return {key: found.get(key) for key in keys if place_of(found.get(key)) != place_of(self._known.get(key))}

    def _note(self, key: Partition, position: Position | None) -> None:
        if position is None:
            self._known.pop(key, None)
        else:
            self._known[key] = position


def place_of(position: Position | None) -> tuple[int, str] | None:
    """What is compared of a position: the offset, and the topic that it belongs to."""
    return None if position is None else (position.offset, position.topic_id)
