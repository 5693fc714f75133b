"""The native producer's settings: librdkafka's names and defaults, and clear error messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.kafka.native.partitioners import partitioner_by_name
from fixtures.tables import table

SERVERS = {"bootstrap.servers": "127.0.0.1:9092"}
NUMBERS = {
    "batch.size": "batch_bytes",
    "message.max.bytes": "message_max_bytes",
    "queue.buffering.max.kbytes": "buffer_bytes",
    "max.in.flight.requests.per.connection": "in_flight",
    "max.in.flight": "in_flight",
    "request.timeout.ms": "request_timeout",
    "topic.metadata.refresh.interval.ms": "metadata_max_age",
    "retry.backoff.ms": "retry_backoff",
    "retry.backoff.max.ms": "retry_backoff_max",
}


def read(**given: Any) -> NativeSettings:
    return NativeSettings.of(KafkaConfig.of({**SERVERS, **given}))


def test_the_defaults_are_those_of_librdkafka_except_the_buffer() -> None:
    found = read()
    assert (found.batch_bytes, found.message_max_bytes, found.buffer_bytes) == (1_000_000, 1_000_000, 32 * 2**20)
    assert (found.in_flight, found.request_timeout, found.answer_timeout, found.metadata_max_age) == (5, 30, 30, 300)
    assert (found.retry_backoff, found.retry_backoff_max) == (0.1, 1)
    assert found.compression.name == "none"
    assert found.partitioner is partitioner_by_name("consistent_random")


@table(
    ("given", "name", "value"),
    [
        ({"batch.size": "5000"}, "batch_bytes", 5000),
        ({"message.max.bytes": 2000}, "batch_bytes", 2000),
        ({"message.max.bytes": 2000}, "message_max_bytes", 2000),
        ({"queue.buffering.max.kbytes": 7}, "buffer_bytes", 7168),
        ({"max.in.flight": 1}, "in_flight", 1),
        ({"max.in.flight.requests.per.connection": 1000}, "in_flight", 5),
        ({"request.timeout.ms": "1500"}, "request_timeout", 1.5),
        ({"socket.timeout.ms": 2000}, "answer_timeout", 2.0),
        ({"topic.metadata.refresh.interval.ms": -1}, "metadata_max_age", -0.001),
        ({"retry.backoff.ms": 20}, "retry_backoff", 0.02),
        ({"retry.backoff.max.ms": 20}, "retry_backoff_max", 0.02),
    ],
)
def test_a_setting_has_the_name_and_unit_of_librdkafka(given: dict[str, Any], name: str, value: float) -> None:
    assert getattr(read(**given), name) == value


@pytest.mark.parametrize("name", ["compression.type", "compression.codec"])
def test_compression_has_two_names_and_a_level(name: str) -> None:
    assert read(**{name: "gzip", "compression.level": "6"}).compression.name == "gzip"


@table(
    ("given", "named"),
    [
        ({"partitioner": "by_hand"}, "partitioner"),
        ({"partitioner": None}, "partitioner"),
        ({"compression.type": "best"}, "compression.type"),
        ({"compression.level": 13}, "compression.level"),
        ({"compression.type": "gzip", "compression.level": 10}, "compression.level"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(**given)
    assert named in str(caught.value)


@table("value", ["many", None, True, -7, 10**12, 1.5, float("inf"), b"\xff"])
def test_numbers_that_are_invalid_or_out_of_range_are_refused_by_name(value: object) -> None:
    known = {"max.in.flight": "max.in.flight.requests.per.connection"}
    for named in NUMBERS:
        with pytest.raises(ConfigurationError) as caught:
            read(**{named: value})
        assert known.get(named, named) in str(caught.value)


@given(st.dictionaries(st.sampled_from(sorted(NUMBERS)), st.one_of(st.integers(), st.floats(), st.text(), st.none())))
def test_any_settings_work_or_are_refused(given: dict[str, Any]) -> None:
    try:
        found = read(**given)
    except ConfigurationError:
        return
    assert 1 <= found.batch_bytes <= found.message_max_bytes
    assert found.buffer_bytes >= 1024
    assert 1 <= found.in_flight <= 5
    assert min(found.request_timeout, found.answer_timeout, found.retry_backoff, found.retry_backoff_max) > 0
