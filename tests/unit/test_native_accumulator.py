"""Collecting messages into batches: none is lost or moved within its partition, no batch is too large, the buffer is bounded.

The sender is a fake that keeps the batches it gets, and acknowledges them only to make room or when everything is flushed.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch

from dualwrite.deadline import Deadline
from dualwrite.errors import InvalidMessageError, MessageTooLargeError, UnknownTopicError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.native.accumulator import RecordAccumulator
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.kafka.native.partition import Batch, Partition
from dualwrite.kafka.native.partitioners import partitioner_by_name
from dualwrite.kafka.native.retry_policy import Patience
from fixtures.pace import LIMIT
from fixtures.tables import table

PARTITIONS = 3
TIMEOUT = LIMIT
BATCH, BUFFER = 1_000, 4_096
SETTINGS = replace(NativeSettings.of(KafkaConfig.of("127.0.0.1:1")), batch_bytes=BATCH, buffer_bytes=BUFFER)

Message = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None, int | None]

contents = st.binary(max_size=60) | st.integers(0, 600).map(bytes)
messages: st.SearchStrategy[Message] = st.tuples(
    st.none() | st.binary(max_size=3),
    st.none() | contents,
    st.none() | st.lists(st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=9)), max_size=3),
    st.none() | st.integers(0, PARTITIONS - 1),
)


class TopicsDouble:
    """Topics with a number of partitions, which is looked up once and then known."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self._known: dict[str, int] = {}

    def layout(self, topic: str, _: Deadline) -> Any:
        return SimpleNamespace(leaders=(None,) * self._known.setdefault(topic, self.partitions))

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)


class SenderDouble:
    """The part of Sender that the accumulator uses."""

    def __init__(self, partitions: int) -> None:
        self.topics = TopicsDouble(partitions)
        self.batches: dict[tuple[str, int], list[Batch]] = defaultdict(list)
        self.buffered = self.most_buffered = 0
        self._unacknowledged: list[Batch] = []

    def add(self, partition: Partition) -> None:
        partition.close_batch()
        batch = partition.drain()
        self.batches[partition.topic, partition.index].append(batch)
        self._unacknowledged.append(batch)
        self.buffered += batch.size
        self.most_buffered = max(self.most_buffered, self.buffered)

    def push(self, deadline: Deadline) -> None:
        assert deadline.seconds == TIMEOUT

    def make_room(self, limit: int, deadline: Deadline) -> None:
        assert deadline.seconds == TIMEOUT
        assert limit > 0, "would be waited for in vain"
        while self.buffered >= limit:
            self.buffered -= self._unacknowledged.pop(0).size

    def failure_kept(self) -> AbstractContextManager[None]:
        return nullcontext()

    def flush(self, deadline: Deadline) -> None:
        self.make_room(1, deadline)


def begun(partitions: int = PARTITIONS, **settings: Any) -> tuple[SenderDouble, RecordAccumulator]:
    sender = SenderDouble(partitions)
    made: Any = sender
    accumulator = RecordAccumulator(made, replace(SETTINGS, **settings), "orders")
    accumulator.begin(7, 3)
    return sender, accumulator


def records(batch: Batch) -> list[Any]:
    read = DefaultRecordBatch(batch.data)
    assert (read.producer_id, read.producer_epoch) == (7, 3)
    return [(r.key, r.value, r.headers, r.timestamp) for r in read]


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), messages), max_size=120),
    st.sampled_from(["random", "consistent", "consistent_random", "murmur2_random"]),
)
def test_every_message_is_in_a_batch_of_its_partition_in_order(sent: list[tuple[str, Message]], partitioner: str) -> None:
    sender, accumulator = begun(partitioner=partitioner_by_name(partitioner))
    largest = 0
    for number, (topic, (key, value, headers, partition)) in enumerate(sent):
        before = accumulator._filling + sender.buffered
        accumulator.append(topic, key, value, headers, partition, number, TIMEOUT)
        after = accumulator._filling + sender.buffered
        largest = max(largest, after - before)
        assert after <= BUFFER + largest, "the buffer is not bounded"
    assert accumulator.is_empty is (not sent)
    accumulator.flush(Deadline.after(TIMEOUT))
    assert (sender.buffered, accumulator._filling) == (0, 0)
    arrived = {}
    for (topic, index), batches in sender.batches.items():
        found = [record for batch in batches for record in records(batch)]
        numbers = [timestamp for *_, timestamp in found]
        assert numbers == sorted(numbers)
        arrived |= {number: (topic, index, record) for number, record in zip(numbers, found, strict=True)}
        assert all(batch.size <= BATCH or batch.count == 1 for batch in batches), "a batch is too large"
    assert len(arrived) == sum(batch.count for batches in sender.batches.values() for batch in batches)
    for number, (topic, (key, value, headers, partition)) in enumerate(sent):
        where, index, record = arrived[number]
        assert where == topic
        assert partition in (None, index)
        assert record == (key, value, headers or [], number)


@given(st.integers(1_024, 5_000), st.lists(st.integers(0, 3_000), min_size=1, max_size=30))
def test_a_buffer_of_any_size_takes_messages_of_any_size(buffer_bytes: int, lengths: list[int]) -> None:
    sender, accumulator = begun(buffer_bytes=buffer_bytes)
    for length in lengths:
        accumulator.append("t", b"key", bytes(length), None, None, 0, TIMEOUT)
        assert accumulator._filling + sender.buffered <= buffer_bytes + length + 100
    accumulator.flush(Deadline.after(TIMEOUT))
    (batches,) = sender.batches.values()
    assert [len(value) for batch in batches for _, value, _, _ in records(batch)] == lengths


def test_a_buffer_is_not_exceeded_by_the_batches_of_many_partitions() -> None:
    sender, accumulator = begun(partitions=100)
    for number in range(2_000):
        accumulator.append("t", None, bytes(60), None, number % 100, 0, TIMEOUT)
        assert accumulator._filling + sender.buffered <= BUFFER + 100


def test_a_message_without_a_key_does_not_overfill_the_batch_that_it_goes_to_next() -> None:
    for _ in range(20):  # the next partition is random
        sender, accumulator = begun(buffer_bytes=10**6)
        for partition in range(PARTITIONS):
            accumulator.append("t", None, bytes(800), None, partition, 0, TIMEOUT)
        accumulator.append("t", None, bytes(500), None, None, 0, TIMEOUT)
        accumulator.flush(Deadline.after(TIMEOUT))
        assert sorted(batch.count for batches in sender.batches.values() for batch in batches) == [1, 1, 1, 1]


@given(st.lists(st.integers(0, 1_500), max_size=60), st.none() | st.integers(0, PARTITIONS - 1), st.integers(0, 10))
def test_extend_equals_repeated_append(lengths: list[int], partition: int | None, before: int) -> None:
    sender, accumulator = begun()
    patience = Patience(TIMEOUT, lambda: 0)
    for _ in range(before):
        accumulator.append("t", b"key", bytes(99), None, None, 0, TIMEOUT)
    accumulator.extend("t", (bytes([n]) * length for n, length in enumerate(lengths)), partition, 7, patience)
    accumulator.flush(Deadline.after(TIMEOUT))
    assert sender.most_buffered <= BUFFER + max([BATCH, *lengths]) + 100
    assert (sender.buffered, accumulator._filling) == (0, 0)
    found = [records(batch) for batches in sender.batches.values() for batch in batches]
    assert all(batch.size <= BATCH or batch.count == 1 for batches in sender.batches.values() for batch in batches)
    values = [value for batch in found for key, value, _, _ in batch if key is None]
    assert sorted(values) == sorted(bytes([n]) * length for n, length in enumerate(lengths))
    for batch in found:
        numbers = [value[0] for key, value, _, _ in batch if key is None and value]
        assert numbers == sorted(numbers)


def test_messages_without_a_key_stay_with_a_partition_until_its_batch_is_full() -> None:
    sender, accumulator = begun(batch_bytes=1_000, buffer_bytes=10**6)
    for _ in range(200):
        accumulator.append("t", None, bytes(60), None, None, 0, TIMEOUT)
    accumulator.flush(Deadline.after(TIMEOUT))
    sizes = [batch.count for batches in sender.batches.values() for batch in batches]
    assert sum(sizes) == 200
    assert len(sender.batches) > 1
    assert min(sizes) < max(sizes) or len(set(sizes)) == 1
    assert len([size for size in sizes if size < max(sizes)]) <= PARTITIONS


def test_a_refused_message_is_not_added() -> None:
    sender, accumulator = begun()
    for topic, value, partition, error in [
        ("no name", b"v", None, InvalidMessageError),
        ("t", b"v", PARTITIONS, UnknownTopicError),
        ("t", b"v", -1, InvalidMessageError),
        ("t", bytes(2_000_000), None, MessageTooLargeError),
        ("t", bytes(2_000_000), 0, MessageTooLargeError),
    ]:
        with pytest.raises(error):
            accumulator.append(topic, None, value, None, partition, 0, TIMEOUT)
    accumulator.append("t", None, b"good", None, 0, 0, TIMEOUT)
    accumulator.flush(Deadline.after(TIMEOUT))
    assert [records(batch) for batches in sender.batches.values() for batch in batches] == [[(None, b"good", [], 0)]]


@table(
    "wrong",
    [{"topic": 5}, {"key": 5}, {"value": 5}, {"headers": 5}, {"headers": {"a": 5}}, {"partition": "0"}, {"timestamp": "now"}],
    ids=str,
)
def test_a_part_of_a_wrong_type_is_refused_and_the_transaction_goes_on(wrong: dict[str, Any]) -> None:
    sender, accumulator = begun()
    message = {"topic": "t", "key": None, "value": b"v", "headers": None, "partition": 0, "timestamp": 5, "limit": TIMEOUT}
    accumulator.append(**message)
    with pytest.raises(InvalidMessageError):
        accumulator.append(**{**message, **wrong})
    accumulator.append(**{**message, "key": "k", "value": bytearray(b"w"), "headers": {"n": "x"}})
    accumulator.flush(Deadline.after(TIMEOUT))
    assert records(sender.batches["t", 0][0]) == [(None, b"v", [], 5), (b"k", b"w", [("n", b"x")], 5)]


@table("call", ["extend", "extend_keyed"])
@table("wrong", [{"topic": 5}, {"partition": "0"}, {"value": 5}], ids=str)
def test_a_wrong_type_in_bulk_is_refused(call: str, wrong: dict[str, Any]) -> None:
    sender, accumulator = begun()
    patience = Patience(TIMEOUT, lambda: 0)

    def add(topic: Any = "t", partition: Any = 0, value: Any = b"w") -> None:
        good: list[Any] = [b"v", "v", bytearray(b"v"), memoryview(b"v"), None]
        if call == "extend":
            accumulator.extend(topic, [*good, value], partition, 5, patience)
        else:
            accumulator.extend_keyed(topic, zip([b"k"] * 6, [*good, value], strict=True), partition, 5, patience)

    with pytest.raises(InvalidMessageError):
        add(**wrong)
    add()
    accumulator.flush(Deadline.after(TIMEOUT))
    values = [value for _, value, _, _ in records(sender.batches["t", 0][0])]
    assert values == [b"v", b"v", b"v", b"v", None, b"w"]


@pytest.mark.parametrize("call", ["append", "extend", "extend_keyed"])
def test_an_interrupt_while_a_batch_is_sent_ends_the_transaction(call: str) -> None:
    """The batch may be half closed, so only an abort is possible: the sender is told."""
    sender, accumulator = begun()
    told: list[bool] = []
    changed: Any = sender
    changed.interrupted = lambda: told.append(True)

    def push(_: Deadline) -> None:
        raise KeyboardInterrupt

    changed.push = push
    many = [bytes(100)] * 30
    patience = Patience(TIMEOUT, lambda: 0)
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: [accumulator.append("t", None, value, None, 0, 0, TIMEOUT) for value in many],
        "extend": lambda: accumulator.extend("t", many, 0, 0, patience),
        "extend_keyed": lambda: accumulator.extend_keyed("t", [(b"k", value) for value in many], 0, 0, patience),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert told == [True]


def test_what_a_users_headers_raise_does_not_end_the_transaction() -> None:
    class Failing(UserDict[str, bytes]):
        def __getitem__(self, name: str) -> bytes:
            raise ZeroDivisionError

    sender, accumulator = begun()
    with pytest.raises(ZeroDivisionError):
        accumulator.append("t", None, b"v", Failing(a=b"x"), 0, 5, TIMEOUT)
    accumulator.append("t", None, b"w", None, 0, 5, TIMEOUT)
    accumulator.flush(Deadline.after(TIMEOUT))
    assert records(sender.batches["t", 0][0]) == [(None, b"w", [], 5)]


def test_a_new_transaction_drops_leftover_messages() -> None:
    sender, accumulator = begun()
    accumulator.append("t", None, b"left", None, 0, 0, TIMEOUT)
    accumulator.begin(7, 3)
    assert accumulator.is_empty
    accumulator.append("t", None, b"new", None, 0, 0, TIMEOUT)
    accumulator.flush(Deadline.after(TIMEOUT))
    assert [records(batch) for batch in sender.batches["t", 0]] == [[(None, b"new", [], 0)]]


def test_a_partition_that_was_added_since_the_topic_was_looked_up_is_accepted() -> None:
    sender, accumulator = begun()
    accumulator.append("t", None, b"v", None, 0, 0, TIMEOUT)
    sender.topics.partitions += 1
    accumulator.begin(7, 4)
    accumulator.append("t", None, b"v", None, PARTITIONS, 0, TIMEOUT)
    accumulator.begin(7, 5)
    with pytest.raises(UnknownTopicError):
        accumulator.append("t", None, b"v", None, PARTITIONS + 1, 0, TIMEOUT)


@pytest.mark.parametrize("call", ["append", "extend", "extend_keyed"])
def test_a_partition_that_is_added_during_a_transaction_is_accepted_by_the_next_one(call: str) -> None:
    """Within a transaction the number of partitions does not change, so that a key always means the same partition."""
    sender, accumulator = begun()

    def add(partition: int) -> None:
        if call == "append":
            accumulator.append("t", None, b"v", None, partition, 0, TIMEOUT)
        elif call == "extend":
            accumulator.extend("t", [b"v"], partition, 0, Patience(TIMEOUT, lambda: 0))
        else:
            accumulator.extend_keyed("t", [(b"k", b"v")], partition, 0, Patience(TIMEOUT, lambda: 0))

    add(0)
    sender.topics.partitions += 1
    with pytest.raises(UnknownTopicError):
        add(PARTITIONS)
    accumulator.begin(7, 4)
    add(0)
    add(PARTITIONS)
