"""One partition's batches in one transaction: being filled, waiting, in flight; with their sequence numbers. No I/O.

Batches are retried in order, with the same sequence numbers and the same bytes, and only after every batch in flight to the
partition has got its response. So the broker recognizes duplicates and accepts the following batches (KIP-98, "Idempotent
Producer Guarantees").
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

from dualwrite.deadline import CHANCE
from dualwrite.errors import UnknownTopicError
from dualwrite.kafka.client.compression import Compression
from dualwrite.kafka.messages import MAX_PARTITION, check_number
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.kafka.native.records import BatchBuilder, EncodedRecords, next_sequence, split
from dualwrite.state import Place


class ProduceBatch:
    """Records of one partition that are sent together.

    Attributes:
        order: The number of the partition's records before it; never wraps, unlike the sequence of its first record.
        size: The bytes that it occupies in the buffer.
        attempts: How often it was sent.
    """

    __slots__ = ("attempts", "count", "data", "order", "sequence", "size")

    def __init__(self, order: int, sequence: int, count: int, data: bytes, size: int, attempts: int = 0) -> None:
        self.order = order
        self.sequence = sequence
        self.count = count
        self.data = data
        self.size = size
        self.attempts = attempts


class Partition:
    """One partition of a topic, as one transaction writes to it. Sequence numbers begin with 0 in each epoch (KIP-890).

    Attributes:
        builder: The batch being filled.
        first_offset: The offset of the transaction's first record here, once the broker has acknowledged it with an offset.
        waiting: The batches to be sent, in order.
        in_flight: The batches that were sent and have no response yet, in order.
        not_before: When the first waiting batch may be retried, by `time.monotonic`.
        last_code: The error code that made a batch wait; 0 again once a batch is stored.
    """

    __slots__ = (
        "_compression",
        "_epoch",
        "_next_order",
        "_next_sequence",
        "_producer_id",
        "builder",
        "first_offset",
        "in_flight",
        "index",
        "last_code",
        "not_before",
        "topic",
        "waiting",
    )

    def __init__(self, topic: str, index: int, producer_id: int, epoch: int, compression: Compression) -> None:
        self.topic = topic
        self.index = index
        self._producer_id = producer_id
        self._epoch = epoch
        self._compression = compression
        self._next_order = 0
        self._next_sequence = 0
        self.builder = BatchBuilder()
        self.first_offset: int | None = None
        self.waiting: deque[ProduceBatch] = deque()
        self.in_flight: list[ProduceBatch] = []
        self.not_before = 0.0
        self.last_code = 0

    def may_send(self, now: float, most: int) -> bool:
        """Whether the first waiting batch may be sent now, with at most `most` in flight."""
        if not self.waiting or now < self.not_before:
            return False
        if self.in_flight and (self.last_code or self.waiting[0].attempts):
            return False  # a retry: wait for the responses to everything in flight first
        return len(self.in_flight) < most

    def add(self, records: BatchBuilder | EncodedRecords) -> ProduceBatch:
        """Encode a batch; it follows all batches that were encoded before."""
        batch = self._encoded(records, self._next_order, self._next_sequence, records.size)
        self.waiting.append(batch)
        self._next_order += batch.count
        self._next_sequence = next_sequence(self._next_sequence, batch.count)
        return batch

    def drain(self) -> ProduceBatch:
        """Move the first waiting batch to those in flight, and return it."""
        batch = self.waiting.popleft()
        batch.attempts += 1
        self.in_flight.append(batch)
        return batch

    def stored(self, batch: ProduceBatch, base_offset: int) -> None:
        """Record that the broker has stored a batch at this offset; -1 if it reports none (for a duplicate that is too old)."""
        self.in_flight.remove(batch)
        self.last_code = 0
        if batch.order == 0 and base_offset >= 0:
            self.first_offset = base_offset

    @property
    def place(self) -> Place:
        """What the transaction has written here."""
        return Place(self.topic, self.index, self.first_offset, self._next_order)

    def send_again(self, batch: ProduceBatch, not_before: float, code: int) -> None:
        """Put back a batch that failed with a transient error or got no response, in its old position."""
        self.in_flight.remove(batch)
        self._put_back(batch, not_before, code)

    def is_behind_another(self, batch: ProduceBatch) -> bool:
        """Whether an earlier batch is not stored yet, which explains an out-of-order sequence error."""
        return any(other.order < batch.order for other in (*self.in_flight, *self.waiting))

    def split(self, batch: ProduceBatch, not_before: float, code: int) -> None:
        """Put back a batch that is too large for the topic, as two; records and sequence numbers stay the same."""
        self.in_flight.remove(batch)
        order, sequence, size_left = batch.order, batch.sequence, batch.size
        for builder in split(batch.data):
            size = min(builder.size, size_left)
            self._put_back(self._encoded(builder, order, sequence, size, batch.attempts), not_before, code)
            order, sequence, size_left = order + builder.count, next_sequence(sequence, builder.count), size_left - size

    def _put_back(self, batch: ProduceBatch, not_before: float, code: int) -> None:
        insort(self.waiting, batch, key=lambda waiting: waiting.order)
        self.not_before = max(self.not_before, not_before)
        self.last_code = code

    def _encoded(
        self, records: BatchBuilder | EncodedRecords, order: int, sequence: int, size: int, attempts: int = 0
    ) -> ProduceBatch:
        data = records.build(
            producer_id=self._producer_id, epoch=self._epoch, base_sequence=sequence, compression=self._compression
        )
        return ProduceBatch(order, sequence, records.count, data, size, attempts)


class TopicPartitions:
    """The partitions of a topic that one transaction writes to, created when the first message goes to each.

    Their number does not change during the transaction. `forget` is called with the topic when a message is for a partition
    that does not exist: it may have been added since the topic was looked up, and then the next transaction may write to it.

    Attributes:
        partitions: Every partition by its number, or None if nothing was written to it; also read by the accumulator's loops.
        sticky: The partition that currently gets the messages without a key; None if the next one is to choose it.
    """

    __slots__ = ("_epoch", "_forget", "_id", "_partitioner", "_producer_id", "_settings", "_topic", "partitions", "sticky")

    def __init__(
        self,
        topic: str,
        count: int,
        producer_id: int,
        epoch: int,
        settings: NativeSettings,
        kafka_transactional_id: str,
        forget: Callable[[str], None],
    ) -> None:
        self._topic = topic
        self._producer_id = producer_id
        self._epoch = epoch
        self._settings = settings
        self._partitioner = settings.partitioner
        self._id = kafka_transactional_id
        self._forget = forget
        self.partitions: list[Partition | None] = [None] * count
        self.sticky: Partition | None = None

    def target(self, key: bytes | None, partition: Any) -> Partition:
        """The partition that a message goes to. Raises as `check_partition`."""
        partitions = self.partitions
        if partition is not None:
            try:
                check_partition(self._topic, partition, len(partitions), self._id)
            except UnknownTopicError:
                self._forget(self._topic)
                raise
            index = partition
        else:
            chosen = self._partitioner(key, len(partitions))
            if chosen is None:
                if self.sticky is None:
                    self.sticky = self._created(CHANCE.randrange(len(partitions)))
                return self.sticky
            index = chosen
        return partitions[index] or self._created(index)

    def _created(self, index: int) -> Partition:
        found = self.partitions[index]
        if found is None:
            found = Partition(str(self._topic), index, self._producer_id, self._epoch, self._settings.compression)
            self.partitions[index] = found
        return found


def check_partition(topic: str, partition: Any, count: int, kafka_transactional_id: str) -> None:
    """Check a partition number that the user gave.

    Raises:
        InvalidMessageError: It is not a valid partition number.
        UnknownTopicError: The topic has only `count` partitions.
    """
    if check_number("partition", partition, MAX_PARTITION) >= count:
        raise UnknownTopicError(
            f"Topic {topic!r} has no partition {partition}; it has {count} partitions.",
            transactional_id=kafka_transactional_id,
            next_step="omit the partition, so that the key determines it, or add partitions to the topic",
        )
