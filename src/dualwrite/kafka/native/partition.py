"""One partition's batches within one transaction: being filled, waiting, under way; with their sequences. No I/O.

What is sent again is sent again in order, with the same sequence and the same bytes, and only after every batch of the
partition that is under way has been answered: then the broker knows a repeated batch, and takes the others as they follow
(KIP-98, "Idempotent Producer Guarantees").
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from dualwrite.delivery import Place
from dualwrite.kafka.native.compression import Compression
from dualwrite.kafka.native.records import BatchBuilder, EncodedRecords, next_sequence, split


class Batch:
    """Records of one partition that are sent together.

    Attributes:
        order: How many of the partition's records come before it; never wraps, unlike the sequence.
        sequence: Of its first record.
        count: How many records it holds.
        data: The encoded batch.
        size: What it takes of the buffer, in bytes.
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
    """One partition of a topic, as one transaction writes to it.

    Args:
        topic: The topic's name.
        index: The partition's number.
        producer_id: Whose batches they are.
        epoch: The transaction's epoch; sequences begin at 0 with it (KIP-890).
        compression: For the batches.

    Attributes:
        builder: What is being filled.
        first_offset: Of the transaction's first record here, once the broker has acknowledged it and said where it lies.
        waiting: What is to be sent, in order.
        under_way: What was sent and has no answer, in order.
        not_before: When the first waiting batch may be sent again, by `time.monotonic`.
        last_code: Kafka's error code for which a batch had to wait, until one is stored.
    """

    __slots__ = (
        "_compression",
        "_epoch",
        "_next_order",
        "_next_sequence",
        "_producer_id",
        "builder",
        "first_offset",
        "index",
        "last_code",
        "not_before",
        "topic",
        "under_way",
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
        self.waiting: deque[Batch] = deque()
        self.under_way: list[Batch] = []
        self.not_before = 0.0
        self.last_code = 0

    def may_send(self, now: float, most: int) -> bool:
        """Whether the first waiting batch may leave now, with at most `most` under way."""
        if not self.waiting or now < self.not_before:
            return False
        if self.under_way and (self.last_code or self.waiting[0].attempts):
            return False  # something is sent again: first hear of all that is under way
        return len(self.under_way) < most

    def close_batch(self) -> None:
        """Encode what was filled, and begin a new batch."""
        if self.builder.count:
            self.add(self.builder)
            self.builder = BatchBuilder()

    def add(self, records: BatchBuilder | EncodedRecords) -> None:
        """Encode a batch, which comes after all that were encoded before."""
        self.waiting.append(self._encoded(records, self._next_order, self._next_sequence, records.size))
        self._next_order += records.count
        self._next_sequence = next_sequence(self._next_sequence, records.count)

    def take(self) -> Batch:
        """The first waiting batch, now under way."""
        batch = self.waiting.popleft()
        batch.attempts += 1
        self.under_way.append(batch)
        return batch

    def stored(self, batch: Batch, base_offset: int) -> None:
        """The broker has stored a batch, from this offset on; -1 where it does not say (a repeated batch may be too old)."""
        self.under_way.remove(batch)
        self.last_code = 0
        if batch.order == 0 and base_offset >= 0:
            self.first_offset = base_offset

    @property
    def place(self) -> Place:
        """What the transaction has written here."""
        return Place(self.topic, self.index, self.first_offset, self._next_order)

    def send_again(self, batch: Batch, not_before: float, code: int) -> None:
        """A batch was refused for a reason that passes, or its answer never came; it waits in its old place."""
        self.under_way.remove(batch)
        self._put_back(batch, not_before, code)

    def is_behind_another(self, batch: Batch) -> bool:
        """Whether an earlier batch is not stored yet, which explains a sequence that the broker finds out of order."""
        return any(other.order < batch.order for other in (*self.under_way, *self.waiting))

    def split(self, batch: Batch, not_before: float, code: int) -> None:
        """Put a batch that is too large for the topic back as two; their records and sequences stay what they were."""
        self.under_way.remove(batch)
        order, sequence, size_left = batch.order, batch.sequence, batch.size
        for builder in split(batch.data, 2):
            size = min(builder.size, size_left)
            self._put_back(self._encoded(builder, order, sequence, size, batch.attempts), not_before, code)
            order, sequence, size_left = order + builder.count, next_sequence(sequence, builder.count), size_left - size

    def _put_back(self, batch: Batch, not_before: float, code: int) -> None:
        insort(self.waiting, batch, key=lambda waiting: waiting.order)
        self.not_before = max(self.not_before, not_before)
        self.last_code = code

    def _encoded(
        self, records: BatchBuilder | EncodedRecords, order: int, sequence: int, size: int, attempts: int = 0
    ) -> Batch:
        data = records.build(
            producer_id=self._producer_id, epoch=self._epoch, base_sequence=sequence, compression=self._compression
        )
        return Batch(order, sequence, records.count, data, size, attempts)
