"""Positions as the group's offsets at Kafka, committed in the transaction of the data (KIP-447).

The group's coordinator refuses the offsets of a member whose generation is over. While a transaction with offsets is prepared,
the group's offsets can't be read (UNSTABLE_OFFSET_COMMIT): whoever takes the partition over waits until the transaction has
ended, which for one that died takes recovery.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dualwrite.errors import PositionMovedError, ProducerFencedError
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.librdkafka.batch import Batch
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.offsets import GroupMetadata
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.progress import Progress
from dualwrite.processor.work import Finish
from dualwrite.stores.positions import Partition, Position
from dualwrite.transaction import Transaction


class GroupProgress(Progress):
    """The offsets of a group at Kafka.

    Args:
        group_id: The group.
        options: The policies; `on_new_topic` has no meaning, since Kafka forgets the offsets of a topic that is deleted.
    """

    def __init__(self, group_id: str, options: ProcessorOptions) -> None:
        super().__init__(group_id, options)
        self._in_doubt = False

    def read(self, consumer: GroupConsumer, keys: Collection[Partition], timeout: float) -> Mapping[Partition, Position]:
        """See Progress."""
        return _positions(consumer.committed(keys, timeout))

    def move(self, consumer: GroupConsumer, batch: Batch) -> Finish:
        """See Progress."""

        def finish(tx: Transaction[Any]) -> None:
            if self._in_doubt:
                self._find_out(consumer, batch)
            self._check_membership(consumer)
            tx.send_offsets(consumer.member, batch.after())

        return finish

    def moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        """See Progress."""
        del consumer
        self._in_doubt = False
        self._known |= _positions(batch.after())

    def catch_up(self, consumer: GroupConsumer, batch: Batch) -> tuple[Batch, Mapping[Partition, int]]:
        """See Progress."""
        found = super().catch_up(consumer, batch)
        self._in_doubt = False
        return found

    @property
    def can_be_begun(self) -> bool:
        """See Progress: until the writer has ended the transaction, the group's offsets can't be read."""
        return not self._in_doubt

    def left_in_doubt(self) -> None:
        """See Progress."""
        self._in_doubt = True

    def is_passing(self, error: BaseException) -> bool:
        """See Progress: the generation is over. Of a writer that was fenced, the next transaction says so."""
        return isinstance(error, ProducerFencedError)

    def forget(self) -> None:
        """See Progress."""
        super().forget()
        self._in_doubt = False

    def _check_membership(self, consumer: GroupConsumer) -> None:
        """The coordinator takes the offsets of a consumer without a membership from anybody, as from one without a group.

        Raises:
            ProducerFencedError: The membership is over, and librdkafka knows it: it has none any more.
        """
        group = GroupMetadata.from_librdkafka(consumer.member.consumer_group_metadata())
        if group.generation_id < 0 or not group.member_id:
            raise ProducerFencedError(
                f"The consumer is no member of the group {self._group!r} any more.",
                cause="it did not poll for max.poll.interval.ms, or the group did not hear from it for its session's timeout",
                code=ErrorCode.UNKNOWN_MEMBER_ID,
                name=ErrorCode.UNKNOWN_MEMBER_ID.name,
            )

    def _find_out(self, consumer: GroupConsumer, batch: Batch) -> None:
        """Inside of the next transaction: the writer has ended the one before, so that its offsets can be read.

        Raises:
            PositionMovedError: It has committed.
            BrokerError: The offsets can't be read yet.
        """
        if self._elsewhere(consumer, batch):
            raise PositionMovedError(f"The offsets of the group {self._group!r} have moved.", group_id=self._group)
        self._in_doubt = False


def _positions(offsets: Mapping[Partition, int]) -> dict[Partition, Position]:
    return {key: Position(*key, offset) for key, offset in offsets.items()}
