"""Kafka's error codes and their names."""

from __future__ import annotations

from kafka.errors import for_code

from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name

NEWEST_OF_KAFKA_PYTHON = 127
RENAMED = {  # since then by Kafka; kafka-python and librdkafka keep the old names
    "NOT_LEADER_OR_FOLLOWER",
    "MESSAGE_TOO_LARGE",
    "INVALID_TOPIC_EXCEPTION",
    "UNKNOWN_SERVER_ERROR",
    "NONE",
    "INVALID_REPLICA_ASSIGNMENT",
}


def test_the_table_of_error_codes_equals_kafkas() -> None:
    assert [*ErrorCode] == [*range(-1, len(ErrorCode) - 1)]
    for code in ErrorCode:
        assert error_name(code) == code.name
        if code <= NEWEST_OF_KAFKA_PYTHON:
            assert for_code(code).errno == code
            assert code.name in RENAMED or for_code(code).message == code.name


def test_an_error_code_of_a_newer_kafka_has_a_name() -> None:
    assert error_name(999) == "error 999"
