"""Collects one transaction's messages into batches by partition, within a bounded buffer, and hands full ones to the sender."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

from dualwrite.deadline import Deadline
from dualwrite.delivery import Place
from dualwrite.errors import DualWriteError, MessageTooLargeError, UnknownTopicError
from dualwrite.kafka.messages import as_bytes, check_number, check_topic
from dualwrite.kafka.native.partition import Partition
from dualwrite.kafka.native.records import BATCH_OVERHEAD, RECORD_OVERHEAD, EncodedRecords, Record, size_bound
from dualwrite.kafka.native.sender import Sender
from dualwrite.kafka.native.settings import NativeSettings

if TYPE_CHECKING:
    from dualwrite.kafka.native.arrow_records import RecordColumns  # needs pyarrow

WORTHWHILE_BYTES: Final = 64 * 1024
"""For each partition: with less in a call, messages go one by one, into batches that the next call fills further."""

_CHUNK: Final = 1000
_MAX_PARTITION: Final = 2**31 - 1


class _Topic:
    """A topic as the current transaction writes to it; `sticky` is where messages without a key go at the moment."""

    __slots__ = ("partitions", "sticky")

    def __init__(self, count: int) -> None:
        self.partitions: list[Partition | None] = [None] * count
        self.sticky: Partition | None = None


class RecordAccumulator:
    """The messages of the current transaction that have not been handed to the sender. For one thread.

    Args:
        sender: Takes the batches, and knows the topics.
        settings: Sizes, compression, partitioner.
        kafka_transactional_id: For error messages.
    """

    def __init__(self, sender: Sender, settings: NativeSettings, kafka_transactional_id: str) -> None:
        self._sender = sender
        self._settings = settings
        self._id = kafka_transactional_id
        self._partitioner = settings.partitioner
        self._batch_bytes = settings.batch_bytes
        self._buffer_bytes = settings.buffer_bytes
        self._topics: dict[str, _Topic] = {}
        self._filling = 0  # bytes in batches that are not closed yet
        self._room = settings.buffer_bytes  # for `_filling`: what the sender's unacknowledged batches leave
        self._sticks = settings.partitioner(None, 1) is None  # whether a message without a key goes anywhere
        self._producer_id = self._epoch = -1

    def begin(self, producer_id: int, epoch: int) -> None:
        """A new transaction under this producer id and epoch; what the last one left is dropped."""
        self._producer_id, self._epoch = producer_id, epoch
        self._topics.clear()
        self._filling = 0
        self._room = self._buffer_bytes

    @property
    def places(self) -> Iterator[Place]:
        """What the transaction has written, partition by partition."""
        for topic in self._topics.values():
            yield from (partition.place for partition in topic.partitions if partition is not None)

    @property
    def is_empty(self) -> bool:
        """Whether the transaction has no message."""
        return not self._topics

    def append(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] | None,
        partition: int | None,
        timestamp_ms: int,
        limit: float | Deadline,
    ) -> None:
        """Add one message; waits, where the buffer is full or the topic is not known yet, until the limit (or for its seconds).

        Raises:
            InvalidMessageError: The topic's name or the partition's number is none; nothing was added.
            UnknownTopicError: There is no such topic or partition; nothing was added.
            MessageTooLargeError: Above `message.max.bytes`; nothing was added.
            BrokerError: The transaction has failed: see `Sender`.
        """
        opened = self._topics.get(topic) if type(topic) is str else None
        if opened is None:
            limit = Deadline.of(limit)  # only who has to wait needs one
            opened = self._opened(topic, partition, limit)
        if key is None and partition is None and opened.sticky is not None and self._sticks:
            target = opened.sticky
        else:
            target = self._target(topic, opened, key, partition)
        builder = target.builder
        size = RECORD_OVERHEAD
        if value is not None:
            size += len(value)
        if key is not None or headers:
            size = size_bound(key, value, headers)
        if builder.size + size > self._batch_bytes:
            self._check_size(topic, size)
            limit = Deadline.of(limit)
            builder = self._with_room(topic, opened, target, key, partition, size, limit).builder
        builder.records.append((key, value, headers, timestamp_ms))
        builder.size += size
        self._filling += size
        if self._filling > self._room:
            self._make_room(Deadline.of(limit))

    def extend(
        self, topic: str, values: Iterable[bytes | str | None], partition: int | None, timestamp_ms: int, timeout: float
    ) -> None:
        """Add messages that have no key, as `append` would one after another, at half its cost.

        How many were added before a value that can't be taken, or before an error of the iterable's own, is left open.
        `timeout` is for each message that has to wait.

        Raises: as `append`, and whatever iterating raises.
        """
        remaining = iter(values)
        while chunk := [v if type(v) is bytes else as_bytes("value", v) for v in islice(remaining, _CHUNK)]:
            self._extend_by(topic, chunk, partition, timestamp_ms, timeout)

    def _extend_by(
        self, topic: str, values: list[bytes | None], partition: int | None, timestamp_ms: int, timeout: float
    ) -> None:
        """As `extend`, for what is at hand: no code of a user's runs meanwhile, which might send something itself."""
        opened = self._topics.get(topic) if type(topic) is str else None
        if opened is None:
            opened = self._opened(topic, partition, Deadline.after(timeout))
        target: Partition | None = None
        records: list[Record] = []
        limit = size = self._batch_bytes
        try:
            for value in values:
                needed = RECORD_OVERHEAD if value is None else RECORD_OVERHEAD + len(value)
                if size + needed > limit:
                    if target is not None:
                        self._filled_by(target, size)
                    target = None
                    self._check_size(topic, needed)
                    chosen = self._target(topic, opened, None, partition)
                    limit_for_one = Deadline.after(timeout)
                    target = self._with_room(topic, opened, chosen, None, partition, needed, limit_for_one)
                    records, size = target.builder.records, target.builder.size
                records.append((None, value, None, timestamp_ms))
                size += needed
        except DualWriteError:
            raise
        except BaseException:  # KeyboardInterrupt: else a batch that was closed by half could be sent twice
            self._sender.interrupted()
            raise
        finally:
            if target is not None:
                self._filled_by(target, size)
        if self._filling > self._room:
            self._make_room(Deadline.after(timeout))

    def extend_keyed(
        self,
        topic: str,
        pairs: Iterable[tuple[bytes | str | None, bytes | str | None]],
        partition: int | None,
        timestamp_ms: int,
        timeout: float,
    ) -> None:
        """As `extend`, for messages with keys."""
        remaining = iter(pairs)
        while True:
            chunk: list[Record] = [
                (
                    key if type(key) is bytes else as_bytes("key", key),
                    value if type(value) is bytes else as_bytes("value", value),
                    None,
                    timestamp_ms,
                )
                for key, value in islice(remaining, _CHUNK)
            ]
            if not chunk:
                return
            self._extend_keyed_by(topic, chunk, partition, timeout)

    def _extend_keyed_by(  # noqa: C901  (the hot path: a call for each message would double its cost)
        self, topic: str, records: list[Record], partition: int | None, timeout: float
    ) -> None:
        opened = self._topics.get(topic) if type(topic) is str else None
        if opened is None:
            opened = self._opened(topic, partition, Deadline.after(timeout))
        partitions, count, partitioner, limit = opened.partitions, len(opened.partitions), self._partitioner, self._batch_bytes
        fixed = None if partition is None else self._target(topic, opened, None, partition)
        added = 0
        try:
            for record in records:
                key, value = record[0], record[1]
                size = RECORD_OVERHEAD
                if value is not None:
                    size += len(value)
                if key is not None:
                    size += len(key)
                target = fixed
                if target is None:
                    index = partitioner(key, count)
                    target = opened.sticky if index is None else partitions[index]
                    if target is None:
                        target = self._target(topic, opened, key, None)
                builder = target.builder
                if builder.size + size > limit:
                    self._filling += added
                    added = 0
                    self._check_size(topic, size)
                    builder = self._with_room(topic, opened, target, key, partition, size, Deadline.after(timeout)).builder
                builder.records.append(record)
                builder.size += size
                added += size
        except DualWriteError:
            raise
        except BaseException:  # KeyboardInterrupt: else a batch that was closed by half could be sent twice
            self._sender.interrupted()
            raise
        finally:
            self._filling += added
        if self._filling > self._room:
            self._make_room(Deadline.after(timeout))

    def extend_columns(
        self, topic: str, columns: RecordColumns, partition: int | None, timestamp_ms: int, timeout: float
    ) -> bool:
        """As `extend` and `extend_keyed`, by column; False, and nothing was added, where it is to be done message by message.

        That is so where a message is too long for a batch or for the cluster (`append` says so), where a key leaves the
        partition open, and where the batches would become small: each call has batches of its own.
        """
        opened = self._opened(topic, partition, Deadline.after(timeout))
        if columns.longest > min(self._batch_bytes, self._settings.message_max_bytes - BATCH_OVERHEAD):
            return False
        keys = columns.keys if partition is None else None
        if keys is None:
            parts = [(partition, columns)]
        else:
            count = len(opened.partitions)
            indexes = [self._partitioner(key, count) for key in keys]
            if None in indexes:
                return False
            parts = list(columns.by_partition(cast("list[int]", indexes)))
        if columns.size < len(parts) * WORTHWHILE_BYTES:
            return False
        try:
            for index, part in parts:
                for begin, end in part.batches(self._batch_bytes):
                    self._add_batch(topic, opened, index, part.encoded(begin, end, timestamp_ms), Deadline.after(timeout))
        except DualWriteError:
            raise
        except BaseException:  # KeyboardInterrupt: else a batch that was closed by half could be sent twice
            self._sender.interrupted()
            raise
        return True

    def push(self, deadline: Deadline) -> None:
        """Close every batch and send what may be sent, without waiting for answers."""
        with self._sender.failure_kept():
            for partition in self._filled():
                self._close(partition)
            self._sender.push(deadline)

    def flush(self, deadline: Deadline) -> None:
        """Send everything, and wait until it is stored; see `Sender.flush` for errors."""
        with self._sender.failure_kept():
            for partition in self._filled():
                self._close(partition)
            self._sender.flush(deadline)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _with_room(
        self,
        topic: str,
        opened: _Topic,
        target: Partition,
        key: bytes | None,
        partition: int | None,
        size: int,
        deadline: Deadline,
    ) -> Partition:
        """The target, or another that will do, once its batch can take `size` more bytes; full batches are sent."""
        while target.builder.records and target.builder.size + size > self._batch_bytes:
            self._close(target)
            self._sender.push(deadline)
            if self._filling > self._room:
                self._make_room(deadline)
            if opened.sticky is target and partition is None:
                opened.sticky = None  # the next batch without keys goes elsewhere, where another may be full, too
                target = self._target(topic, opened, key, partition)
        return target

    def _add_batch(
        self, topic: str, opened: _Topic, partition: int | None, records: EncodedRecords, deadline: Deadline
    ) -> None:
        target = self._target(topic, opened, None, partition)
        if target.builder.records:
            self._close(target)
        self._sender.add(target, records)
        self._room = self._buffer_bytes - self._sender.buffered
        if opened.sticky is target and partition is None:
            opened.sticky = None  # the next batch without keys goes elsewhere
        self._sender.push(deadline)
        if self._filling > self._room:
            self._make_room(deadline)

    def _filled_by(self, target: Partition, size: int) -> None:
        self._filling += size - target.builder.size
        target.builder.size = size

    def _opened(self, topic: str, partition: int | None, deadline: Deadline) -> _Topic:
        check_topic(topic)
        found = self._topics.get(topic)  # a subclass of str
        if found is None:
            layout = self._sender.topics.layout(topic, deadline)
            if partition is not None:
                self._check_partition(topic, partition, len(layout.leaders))
            self._topics[topic] = found = _Topic(len(layout.leaders))
        return found

    def _target(self, topic: str, opened: _Topic, key: bytes | None, partition: int | None) -> Partition:
        """The partition that a message goes to."""
        partitions = opened.partitions
        if partition is not None:
            self._check_partition(topic, partition, len(partitions))
            index = partition
        else:
            chosen = self._partitioner(key, len(partitions))
            if chosen is None:
                if opened.sticky is None:
                    opened.sticky = self._made(topic, opened, random.randrange(len(partitions)))  # noqa: S311  (no secret)
                return opened.sticky
            index = chosen
        return partitions[index] or self._made(topic, opened, index)

    def _made(self, topic: str, opened: _Topic, index: int) -> Partition:
        target = opened.partitions[index]
        if target is None:
            target = Partition(str(topic), index, self._producer_id, self._epoch, self._settings.compression)
            opened.partitions[index] = target
        return target

    def _close(self, partition: Partition) -> None:
        self._filling -= partition.builder.size
        self._sender.add(partition)
        self._room = self._buffer_bytes - self._sender.buffered

    def _make_room(self, deadline: Deadline) -> None:
        """Wait for acknowledgements; where the batches that are being filled are what fills the buffer, send them as well."""
        if self._sender.buffered < self._buffer_bytes // 2:
            for partition in self._filled():
                self._close(partition)
        self._sender.make_room(max(self._buffer_bytes - self._filling, 1), deadline)
        self._room = self._buffer_bytes - self._sender.buffered

    def _filled(self) -> Iterator[Partition]:
        for opened in self._topics.values():
            for partition in opened.partitions:
                if partition is not None and partition.builder.records:
                    yield partition

    def _check_partition(self, topic: str, partition: int, count: int) -> None:
        if check_number("partition", partition, _MAX_PARTITION) >= count:
            raise UnknownTopicError(
                f"Topic {topic!r} has no partition {partition}: it has {count}.",
                transactional_id=self._id,
                next_step="leave the partition out, so that the key chooses one, or add partitions",
            )

    def _check_size(self, topic: str, size: int) -> None:
        limit = self._settings.message_max_bytes - BATCH_OVERHEAD
        if size > limit:
            raise MessageTooLargeError(
                f"A message for topic {topic!r} takes {size} bytes with its overhead; message.max.bytes leaves {limit}.",
                transactional_id=self._id,
                cause="the producer's limit",
                next_step="make it smaller, or raise message.max.bytes here, at the broker, and the topic's max.message.bytes",
                size=size,
                limit=limit,
            )
