"""What batches show about one transaction: its run in a partition. No I/O.

A run is what one producer wrote to a partition in one transaction: its batches from one marker of the producer to the next.
The batches of a run continue each other's sequence numbers, which compaction keeps, so that a missing record shows.

A producer that has one epoch for each transaction has one run for it. A client that keeps its epoch (librdkafka) may have
several in a partition, one after another. A lost transaction is the last one of its epoch, so its run is the last one in every
partition to which it has written: retention and compaction can't remove it and leave an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dualwrite.kafka.client.record_batches import Batch
from dualwrite.state import FoundPlace, PreparedTxnState

_SEQUENCES: Final = 2**31


@dataclass(slots=True)
class PartitionRun:
    """One transaction's batches in a partition, as far as they were read.

    Args:
        first_offset: The offset of the first batch that was read.
        next_sequence: The sequence number after the last batch.
        messages: How many records it has.
        removed: How many compaction has removed, from the first batch on.
        damage: Why it can't be used, as a part of a sentence.
        marker: The marker that ended it; None: none was read yet.
    """

    first_offset: int
    next_sequence: int
    messages: int = 0
    removed: int = 0
    damage: str | None = None
    marker: Batch | None = None

    @property
    def is_committed(self) -> bool:
        """Whether its marker is COMMIT."""
        return self.marker is not None and self.marker.commits

    @property
    def ended_ms(self) -> int:
        """When its marker was written, by the clock of the partition's leader."""
        assert self.marker is not None
        return self.marker.max_timestamp_ms

    def add(self, batch: Batch) -> None:
        """Add the next batch of the transaction.

        Raises:
            MissingDependencyError: The package that decompresses it is not installed.
        """
        gap = (batch.base_sequence - self.next_sequence) % _SEQUENCES
        self.removed += gap + batch.removed
        self.messages += batch.count
        self.next_sequence = batch.last_sequence_end
        _ = batch.compression  # a missing package is noticed before anything is decoded
        if not batch.is_intact:
            self.damage = f"the checksum of the batch at offset {batch.base_offset} is wrong"
        elif batch.removed < 0 or gap >= _SEQUENCES // 2:
            self.damage = f"the batch at offset {batch.base_offset} does not continue the one before it"

    def place(self, topic: str, partition: int) -> FoundPlace:
        """As a value of the report."""
        assert self.marker is not None
        return FoundPlace(topic, partition, self.first_offset, self.marker.base_offset, self.messages)


class RunsInPartition:
    """The runs of a transaction's producer and epoch in one partition: batches are added in the order of their offsets.

    Attributes:
        last: The last run, which may not have ended yet.
    """

    def __init__(self, state: PreparedTxnState) -> None:
        self._state = state
        self.last: PartitionRun | None = None

    @property
    def open(self) -> PartitionRun | None:
        """The run that has no marker yet."""
        return self.last if self.last is not None and self.last.marker is None else None

    def add(self, batch: Batch) -> None:
        """Add a complete batch of any producer."""
        if batch.producer_id != self._state.producer_id:
            return
        opened = self.open
        if batch.is_control:
            if opened is not None:
                opened.marker = batch
        elif batch.epoch != self._state.epoch or not batch.is_transactional:
            if opened is not None:
                opened.damage = f"at offset {batch.base_offset} another transaction begins before this one has a marker"
        else:
            if opened is None:
                opened = self.last = PartitionRun(batch.base_offset, batch.base_sequence)
            opened.add(batch)
