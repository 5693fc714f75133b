"""What librdkafka reports about partitions, where no real broker can be made to cause it: mocks take its consumer's place."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import BrokerOffsets
from dualwrite.processor.dead_letters import dead_letter_headers

KEY = ("orders", 0)
TRUNCATED = "fetch failed at offset 100: Partition log truncation detected at 100 (leader epoch 3): broker end offset is 90"


class Report:
    """A message of librdkafka's that is an error, or that has a value."""

    def __init__(self, offset: int | None, error: KafkaError | None = None) -> None:
        self._offset = offset
        self._error = error

    def error(self) -> KafkaError | None:
        return self._error

    def topic(self) -> str:
        return KEY[0]

    def partition(self) -> int:
        return KEY[1]

    def offset(self) -> int | None:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return 0, 0

    def headers(self) -> None:
        return None


@pytest.mark.parametrize(
    ("offset", "text", "truncated"), [(None, TRUNCATED, {KEY}), (100, "fetch failed: Broker: Offset out of range", set())]
)
def test_a_truncation_is_told_from_an_offset_out_of_range(
    monkeypatch: pytest.MonkeyPatch, offset: int | None, text: str, truncated: set[Any]
) -> None:
    consumer = GroupConsumer({"group.id": "group", "bootstrap.servers": "127.0.0.1:1"}, ["orders"], lambda _: {})
    consumer._began({KEY: 100})
    report = Report(offset, KafkaError(KafkaError._AUTO_OFFSET_RESET, text))
    with monkeypatch.context() as patched:
        patched.setattr(consumer, "_consumer", type("Polled", (), {"poll": lambda *_: report, "seek": lambda *_: None})())
        assert consumer._polled(0) is None
        assert (consumer.refused, consumer.truncated) == ({KEY: 100}, truncated)
        consumer.seek({KEY: 100})
        assert (consumer.refused, consumer.truncated) == ({}, set())
    consumer.close()


@pytest.mark.parametrize("code", [KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.LEADER_NOT_AVAILABLE])
def test_partitions_without_a_leader_are_waited_for(code: int) -> None:
    """librdkafka calls them unknown if none of those that it looks up has a leader."""

    class Leaderless:
        def offsets_for_times(self, *_: Any) -> Any:
            raise KafkaException(KafkaError(code))

    with pytest.raises(BrokerUnavailableError) as caught:
        BrokerOffsets(Leaderless(), "group").first_offsets([KEY], 1.0)  # type: ignore[arg-type]  # a mock
    assert caught.value.retriable


def test_the_error_in_a_dead_letter_may_be_any_text() -> None:
    """As of a message with half of a surrogate pair, which JSON allows."""
    headers = dict(dead_letter_headers(Report(7), ValueError("unknown customer \ud800x"), group_id="group", attempts=1))
    assert headers["dualwrite.error.message"] == b"unknown customer \\ud800x"
