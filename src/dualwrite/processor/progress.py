"""The contract of a processor's progress: where partitions begin, and how the position moves with a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from dualwrite.kafka.librdkafka import consumer as places
from dualwrite.kafka.librdkafka.batch import Batch
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.processor.starts import BEGINNING, END
from dualwrite.processor.work import Finish
from dualwrite.stores.positions import Partition, Position

PLACES = {BEGINNING: places.BEGINNING, END: places.END}


class Progress(ABC):
    """The positions of one consumer group, as one of its members knows them. For one thread."""

    alone: bool
    """Whether the move needs a transaction of its own: it can't be part of a unit that shares its commit."""

    def prepare(self) -> None:  # noqa: B027  (there may be nothing to prepare)
        """Called before partitions are assigned.

        Raises:
            StoreError: The positions can't be kept.
        """

    @abstractmethod
    def known(self) -> Mapping[Partition, Position]:
        """The positions, as far as they are known."""

    @abstractmethod
    def begin(self, consumer: GroupConsumer, partitions: Sequence[Partition], timeout: float) -> Mapping[Partition, int]:
        """The offset at which each of these partitions begins, or places.BEGINNING, places.END.

        Raises:
            DualWriteError: It can't be found out (retriable), or a policy says to stop.
        """

    @abstractmethod
    def move(self, consumer: GroupConsumer, batch: Batch) -> Finish:
        """What moves the positions behind a batch, in its transaction. It fails if the batch is not ours any more."""

    @abstractmethod
    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        """The transaction has committed."""

    @abstractmethod
    def catch_up(self, consumer: GroupConsumer, batch: Batch) -> tuple[Batch, Mapping[Partition, int]]:
        """After PositionMovedError: what is left of a batch, and the offsets of those that have moved.

        Nothing is left of what an earlier attempt of our own has committed.
        """

    @property
    def can_be_begun(self) -> bool:
        """Whether partitions can be assigned now: not while their positions depend on a transaction of this very member."""
        return True

    def left_in_doubt(self) -> None:  # noqa: B027  (a compare-and-set finds out by itself)
        """It is not known whether the last transaction has committed: the next one must find out."""

    def look_again(self, consumer: GroupConsumer) -> Mapping[Partition, Position]:
        """The positions that somebody else has moved, while nothing comes.

        Raises:
            StoreError: They can't be read now.
        """
        del consumer
        return {}

    def is_passing(self, error: Exception) -> bool:
        """Whether the error is that of a member that may have to give up its partitions."""
        del error
        return False

    def forget(self) -> None:  # noqa: B027  (there may be nothing to forget)
        """The processor has stopped."""
