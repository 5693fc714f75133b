"""Collects a transaction's messages into batches by partition, in a bounded buffer, and passes full ones to the sender."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError, MessageTooLargeError
from dualwrite.kafka.messages import MAX_PARTITION, MAX_TIMESTAMP, TIMESTAMP, as_bytes, check_number, check_topic
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.kafka.native.partition import Partition, TopicPartitions, check_partition
from dualwrite.kafka.native.records import (
    BATCH_OVERHEAD,
    NO_HEADERS,
    RECORD_OVERHEAD,
    WITHOUT_HEADERS,
    EncodedRecords,
    Record,
    encoded_headers,
)
from dualwrite.kafka.native.retry_policy import Patience
from dualwrite.kafka.native.sender import Sender, Whole
from dualwrite.state import Place

if TYPE_CHECKING:
    from dualwrite.kafka.native.arrow_records import RecordColumns  # needs pyarrow

_NO_TOPIC: Final = object()

WORTHWHILE_BYTES = 64 * 1024  # not Final: compiled code would not see that a test changes it
"""Minimum per partition: in smaller calls, messages are added one by one, to batches that later calls continue to fill."""


class RecordAccumulator:
    """The messages of the current transaction that were not yet passed to the sender. Not thread-safe.

    Topics and partitions that users gave are `Any` until they are checked: compiled code raises TypeError for a wrong type.
    """

    def __init__(self, sender: Sender, settings: NativeSettings, kafka_transactional_id: str) -> None:
        self._sender = sender
        self._settings = settings
        self._id = kafka_transactional_id
        self._partitioner = settings.partitioner
        self._batch_bytes = settings.batch_bytes
        self._buffer_bytes = settings.buffer_bytes
        self._topics: dict[str, TopicPartitions] = {}
        self._filling = 0  # bytes in batches that are not closed yet
        self._room = settings.buffer_bytes  # the limit for `_filling`: what the sender's unacknowledged batches leave
        self._is_sticky = settings.partitioner(None, 1) is None  # whether a message without a key may go to any partition
        self._producer_id = self._epoch = -1

    def begin(self, producer_id: int, epoch: int) -> None:
        """A new transaction with this producer id and epoch; what is left of the previous one is dropped."""
        self._producer_id, self._epoch = producer_id, epoch
        self._topics.clear()
        self._filling = 0
        self._room = self._buffer_bytes

    @property
    def places(self) -> list[Place]:
        """What the transaction has written, by partition."""
        return [partition.place for topic in self._topics.values() for partition in topic.partitions if partition is not None]

    @property
    def is_empty(self) -> bool:
        """Whether the transaction has no messages."""
        return not self._topics

    def add(self, messages: Iterable[Any], now_ms: int, limit: float | Deadline) -> None:  # noqa: C901, PLR0912  (the hot path: a call would cost as much as a part)
        """Check and add messages; if the buffer is full or a topic not yet known, wait at most for `limit`.

        No user code may run in `messages`: it might add messages itself. If a message is invalid, those before it were added.

        Args:
            messages: Messages as somebody has given them.
            now_ms: The time of those without one, in milliseconds since 1970.
            limit: A number of seconds is a limit of `Patience`, which begins with the first wait.

        Raises:
            InvalidMessageError: A part of the message has a wrong type or is out of range.
            UnknownTopicError: The topic or the partition does not exist.
            MessageTooLargeError: The message exceeds `message.max.bytes`.
            BrokerError: The transaction has failed; see `Sender`.
        """
        opened: TopicPartitions
        opened_topic: Any = _NO_TOPIC
        partitioner, largest = self._partitioner, self._batch_bytes
        try:
            for topic, value, key, headers, partition, timestamp in messages:
                content: bytes | None = value if type(value) is bytes else as_bytes("value", value)
                key_bytes: bytes | None = key if key is None or type(key) is bytes else as_bytes("key", key)
                if headers is None:
                    encoded, size = NO_HEADERS, RECORD_OVERHEAD
                else:
                    encoded = encoded_headers(headers)
                    size = WITHOUT_HEADERS + len(encoded)
                if content is not None:
                    size += len(content)
                if key_bytes is not None:
                    size += len(key_bytes)
                if timestamp is None:
                    timestamp = now_ms  # noqa: PLW2901  (the hot path, as above)
                elif type(timestamp) is not int or not 0 <= timestamp <= MAX_TIMESTAMP:
                    check_number(TIMESTAMP, timestamp, MAX_TIMESTAMP)
                if topic is not opened_topic:
                    known = self._topics.get(topic) if type(topic) is str else None
                    if known is None:
                        limit = self._started(limit)
                        known = self._opened(topic, partition, limit)
                    opened, opened_topic = known, topic
                if partition is not None:
                    target = opened.target(key_bytes, partition)
                elif key is None and self._is_sticky:
                    target = opened.sticky or opened.target(None, None)
                else:
                    index = partitioner(key_bytes, len(opened.partitions))
                    target = (opened.sticky if index is None else opened.partitions[index]) or opened.target(key_bytes, None)
                builder = target.builder
                if builder.size + size > largest:
                    self._check_size(topic, size)
                    limit = self._started(limit)
                    builder = self._with_room(opened, target, key_bytes, partition, size, limit).builder
                builder.records.append((key_bytes, content, encoded, timestamp))
                builder.size += size
                self._filling += size
            if self._filling > self._room:
                self._make_room(self._started(limit))
        except DualWriteError:
            raise
        except BaseException:  # as `Whole`, which costs more
            self._sender.interrupted()
            raise

    def extend(self, topic: Any, values: list[Any], partition: Any, timestamp_ms: int, deadline: Deadline) -> None:
        """As `add`, for messages of one topic that have nothing but a value, at half the cost."""
        target: Partition | None = None
        records: list[Record] = []
        largest = size = self._batch_bytes
        with Whole(self._sender):
            opened = self._opened(topic, partition, deadline)
            try:
                for value in values:
                    content: bytes | None = value if type(value) is bytes else as_bytes("value", value)
                    needed = RECORD_OVERHEAD if content is None else RECORD_OVERHEAD + len(content)
                    if size + needed > largest:
                        if target is not None:
                            self._set_size(target, size)
                        target = None
                        self._check_size(topic, needed)
                        target = self._with_room(opened, opened.target(None, partition), None, partition, needed, deadline)
                        records, size = target.builder.records, target.builder.size
                    records.append((None, content, NO_HEADERS, timestamp_ms))
                    size += needed
            finally:
                if target is not None:
                    self._set_size(target, size)
            if self._filling > self._room:
                self._make_room(deadline)

    def extend_columns(self, topic: Any, columns: RecordColumns, partition: Any, timestamp_ms: int, deadline: Deadline) -> bool:
        """As `add`, from Arrow columns; returns False, and adds nothing, if messages must be added one by one.

        That is the case if a message exceeds the batch size or `message.max.bytes` (for which `add` raises the error), if a
        key does not determine a partition, or if the batches would be small, since each call makes its own batches.
        """
        opened = self._opened(topic, partition, deadline)
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
        with Whole(self._sender):
            for index, part in parts:
                for begin, end in part.batches(self._batch_bytes):
                    self._add_batch(opened, index, part.encoded(begin, end, timestamp_ms), deadline)
        return True

    def push(self, deadline: Deadline) -> None:
        """Close every batch and send what can be sent now, without waiting for responses; see `Sender.push` for errors."""
        for partition in self._filled():
            self._close(partition)
        self._sender.push(deadline)

    def flush(self, deadline: Deadline) -> None:
        """Send everything and wait until it is stored; see `Sender.flush` for errors."""
        with Whole(self._sender):
            for partition in self._filled():
                self._close(partition)
            self._sender.flush(deadline)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _with_room(
        self,
        opened: TopicPartitions,
        target: Partition,
        key: bytes | None,
        partition: Any,
        size: int,
        deadline: Deadline,
    ) -> Partition:
        """The target, or an equivalent partition, once its batch has room for `size` more bytes; full batches are sent."""
        while target.builder.records and target.builder.size + size > self._batch_bytes:
            self._close(target)
            self._sender.push(deadline)
            if self._filling > self._room:
                self._make_room(deadline)
            if opened.sticky is target and partition is None:
                opened.sticky = None  # the next batch without keys goes to another partition, which may be full, too
                target = opened.target(key, partition)
        return target

    def _add_batch(self, opened: TopicPartitions, partition: Any, records: EncodedRecords, deadline: Deadline) -> None:
        target = opened.target(None, partition)
        if target.builder.records:
            self._close(target)
        self._sender.add(target, records)
        self._room = self._buffer_bytes - self._sender.buffered
        if opened.sticky is target and partition is None:
            opened.sticky = None  # the next batch without keys goes to another partition
        self._sender.push(deadline)
        if self._filling > self._room:
            self._make_room(deadline)

    def _set_size(self, target: Partition, size: int) -> None:
        self._filling += size - target.builder.size
        target.builder.size = size

    def _started(self, limit: float | Deadline) -> Deadline:
        return limit if isinstance(limit, Deadline) else Patience(limit, lambda: self._sender.stored)

    def _opened(self, topic: Any, partition: Any, deadline: Deadline) -> TopicPartitions:
        found = self._topics.get(topic) if isinstance(topic, str) else None
        if found is None:
            check_topic(topic)
            topics = self._sender.topics
            count = len(topics.layout(topic, deadline).leaders)
            if partition is not None:
                if check_number("partition", partition, MAX_PARTITION) >= count:  # it may have been added since the lookup
                    topics.forget(topic)
                    count = len(topics.layout(topic, deadline).leaders)
                check_partition(topic, partition, count, self._id)
            found = TopicPartitions(topic, count, self._producer_id, self._epoch, self._settings, self._id, topics.forget)
            self._topics[topic] = found
        return found

    def _close(self, partition: Partition) -> None:
        self._filling -= partition.builder.size
        self._sender.add(partition)
        self._room = self._buffer_bytes - self._sender.buffered

    def _make_room(self, deadline: Deadline) -> None:
        """Wait for acknowledgements; if mostly unsent batches occupy the buffer, send them as well."""
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

    def _check_size(self, topic: str, size: int) -> None:
        limit = self._settings.message_max_bytes - BATCH_OVERHEAD
        if size > limit:
            raise MessageTooLargeError(
                f"A message for topic {topic!r} needs {size} bytes including overhead; message.max.bytes allows {limit}.",
                transactional_id=self._id,
                cause="the message exceeds the producer's limit",
                next_step="make it smaller, or raise message.max.bytes here and on the broker, and the topic's limit",
                size=size,
                limit=limit,
            )
