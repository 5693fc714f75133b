"""Positions as the group's offsets at Kafka, committed in the transaction of the data (KIP-447).

The group's coordinator refuses the offsets of a member whose generation is over. While a transaction with offsets is prepared,
the group's offsets can't be read (UNSTABLE_OFFSET_COMMIT): whoever takes the partition over waits until the transaction has
ended, which for one that died takes recovery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dualwrite.errors import PositionMovedError, ProducerFencedError
from dualwrite.kafka.librdkafka import consumer as places
from dualwrite.kafka.librdkafka.batch import Batch
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.progress import PLACES, Progress
from dualwrite.processor.starts import Seen, begin_of, topics_of
from dualwrite.processor.work import Finish
from dualwrite.stores.positions import Partition, Position
from dualwrite.transaction import Transaction

_READING: Final = 10.0
"""Seconds for reading the group's offsets once."""


class GroupProgress(Progress):
    """The offsets of a group at Kafka.

    Args:
        group_id: The group.
        options: The policies; `on_new_topic` has no meaning, since Kafka forgets the offsets of a topic that is deleted.
    """

    alone = True

    def __init__(self, group_id: str, options: ProcessorOptions) -> None:
        self._group = group_id
        self._options = options
        self._known: dict[Partition, Position] = {}
        self._in_doubt = False

    def known(self) -> Mapping[Partition, Position]:
        """See Progress."""
        return dict(self._known)

    def begin(self, consumer: GroupConsumer, partitions: Sequence[Partition], timeout: float) -> Mapping[Partition, int]:
        """See Progress."""
        committed = _positions(consumer.committed(partitions, timeout))
        topics = topics_of(committed)
        found: dict[Partition, int] = {}
        for key in partitions:
            position = committed.get(key)
            first = None if position is None else consumer.first_offset(key, timeout)
            begin = begin_of(key, position, Seen("", first), self._options, topics)
            found[key] = begin if isinstance(begin, int) else PLACES[begin]
            self._note(key, position)
        return found

    def move(self, consumer: GroupConsumer, batch: Batch) -> Finish:
        """See Progress."""

        def finish(tx: Transaction[Any]) -> None:
            if self._in_doubt:
                self._find_out(consumer, batch)
            tx.send_offsets(consumer.member, batch.after())

        return finish

    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        """See Progress."""
        del consumer
        self._in_doubt = False
        self._known |= _positions(batch.after())

    def catch_up(self, consumer: GroupConsumer, batch: Batch) -> tuple[Batch, Mapping[Partition, int]]:
        """See Progress."""
        after = batch.after()
        found = consumer.committed(after, _READING)
        self._in_doubt = False
        moved: dict[Partition, int] = {}
        for key in after:
            offset = found.get(key)
            if offset == self._offset(key):
                continue
            self._note(key, None if offset is None else Position(*key, offset))
            moved[key] = places.BEGINNING if offset is None else offset
        return batch.only(after.keys() - moved.keys()), moved

    @property
    def can_be_begun(self) -> bool:
        """See Progress: until the writer has ended the transaction, the group's offsets can't be read."""
        return not self._in_doubt

    def left_in_doubt(self) -> None:
        """See Progress."""
        self._in_doubt = True

    def is_passing(self, error: Exception) -> bool:
        """See Progress."""
        return isinstance(
            error, ProducerFencedError
        )  # the generation is over; of a fenced writer, the next transaction says so

    def forget(self) -> None:
        """See Progress."""
        self._known.clear()
        self._in_doubt = False

    def _find_out(self, consumer: GroupConsumer, batch: Batch) -> None:
        """Inside of the next transaction: the writer has ended the one before, so that its offsets can be read.

        Raises:
            PositionMovedError: It has committed.
            BrokerError: The offsets can't be read yet.
        """
        found = consumer.committed(batch.after(), _READING)
        if any(found.get(key) != self._offset(key) for key in batch.after()):
            raise PositionMovedError(f"The offsets of the group {self._group!r} have moved.", group_id=self._group)
        self._in_doubt = False

    def _note(self, key: Partition, position: Position | None) -> None:
        if position is None:
            self._known.pop(key, None)
        else:
            self._known[key] = position

    def _offset(self, key: Partition) -> int | None:
        position = self._known.get(key)
        return None if position is None else position.offset


def _positions(offsets: Mapping[Partition, int]) -> dict[Partition, Position]:
    return {key: Position(*key, offset) for key, offset in offsets.items()}
