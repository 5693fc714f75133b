"""Where a partition begins: each row of the table in the guide about consuming."""

from __future__ import annotations

from typing import Any

import pytest

from dualwrite.errors import LogTruncatedError, MessagesDeletedError, TopicReplacedError
from dualwrite.kafka.librdkafka.consumer import BEGINNING
from dualwrite.processor import ProcessorOptions
from dualwrite.processor.progress import PartitionState, begin_of
from dualwrite.stores.positions import Position
from fixtures.tables import table

KEY = ("orders", 1)


def at(offset: int, topic_id: str = "one") -> Position:
    return Position(*KEY, offset, topic_id)


def begin(stored: Position | None, seen: PartitionState, **options: Any) -> int:
    return begin_of(KEY, stored, seen, ProcessorOptions(**options))


@table(
    ("stored", "seen", "expected"),
    [
        (None, PartitionState("one"), BEGINNING),
        (None, PartitionState("one", committed=7), 7),
        (None, PartitionState("one", first_offset=7, committed=7), 7),
        (at(5), PartitionState("one", first_offset=0), 5),
        (at(5), PartitionState("one", first_offset=5), 5),
        (at(5), PartitionState("one", first_offset=0, committed=9), 5),
        (at(5, ""), PartitionState("one", first_offset=0), 5),
        (at(5), PartitionState("", first_offset=0), 5),
    ],
    ids=["nothing", "at Kafka", "at Kafka, kept", "stored", "all kept", "stored before Kafka's", "no id stored", "old brokers"],
)
@table("start", ["earliest", "latest"])
def test_where_a_partition_begins(stored: Position | None, seen: PartitionState, expected: int, start: str) -> None:
    """`start` has no meaning here: where it is "latest", the ends are positions by now."""
    assert begin(stored, seen, start=start) == expected


@pytest.mark.parametrize("stored", [at(5), None], ids=["stored", "at Kafka"])
def test_deleted_messages(stored: Position | None) -> None:
    seen = PartitionState("one", first_offset=8, committed=5)
    with pytest.raises(MessagesDeletedError, match="Up to 3 messages of orders-1") as caught:
        begin(stored, seen)
    error = caught.value
    assert (error.topic, error.partition, error.position, error.first_offset) == (*KEY, 5, 8)
    assert begin(stored, seen, on_gap="skip") == 8


@pytest.mark.parametrize("end", [5, 9])
def test_a_log_that_has_grown_again_after_it_was_truncated(end: int) -> None:
    """librdkafka compares leader epochs (KIP-320): the end alone does not show it."""
    seen = PartitionState("one", first_offset=0, end_offset=end, is_truncated=True)
    text = f"(?s)was truncated before the position 5, and has grown again since, to {end}: .*go on at the position"
    with pytest.raises(LogTruncatedError, match=text):
        begin(at(5), seen)
    assert begin(at(5), seen, on_gap="skip") == 5
    assert begin(at(5), PartitionState("one", first_offset=0, end_offset=end)) == 5


@pytest.mark.parametrize("stored", [at(5), None], ids=["stored", "at Kafka"])
def test_a_log_that_ends_before_the_position(stored: Position | None) -> None:
    seen = PartitionState("one", first_offset=0, committed=5, end_offset=3)
    with pytest.raises(LogTruncatedError, match="ends at 3") as caught:
        begin(stored, seen)
    error = caught.value
    assert (error.topic, error.partition, error.position, error.end_offset) == (*KEY, 5, 3)
    assert begin(stored, seen, on_gap="skip") == 3


@pytest.mark.parametrize("first_offset", [0, 8])
def test_another_topic_of_the_same_name(first_offset: int) -> None:
    """Its offsets are not compared with those of the one before."""
    seen = PartitionState("two", first_offset=first_offset, committed=7)
    with pytest.raises(TopicReplacedError) as caught:
        begin(at(5), seen, on_gap="skip")
    assert caught.value.topic == "orders"
    assert begin(at(5), seen, on_new_topic="begin") == BEGINNING


@pytest.mark.parametrize(("offsets", "command"), [("database", "dualwrite offsets reset"), ("kafka", "kafka-consumer-groups")])
def test_the_next_step_names_a_command(offsets: str, command: str) -> None:
    with pytest.raises(MessagesDeletedError, match=command):
        begin(at(5), PartitionState("one", first_offset=8), offsets=offsets)
