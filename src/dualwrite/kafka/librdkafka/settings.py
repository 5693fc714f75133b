"""What librdkafka's producer is created with: the user's settings, and those that transactions require."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaException, Producer

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.librdkafka.interrupts import undisturbed
from dualwrite.kafka.librdkafka.own_lines import with_own_lines
from dualwrite.kafka.time_budget import DEFAULT_TRANSACTION_TIMEOUT_MS, chosen_timeout_ms

_OURS: Final = ("transactional.id", "transaction.timeout.ms", "acks", "request.required.acks", "enable.idempotence")


def check_settings(config: KafkaConfig) -> None:
    """Check that librdkafka accepts the settings; opens no connection.

    Raises:
        ConfigurationError: librdkafka does not know a setting, or rejects its value.
    """
    timeout_ms = chosen_timeout_ms(config) or DEFAULT_TRANSACTION_TIMEOUT_MS
    only_reference = [open_producer(config, "dualwrite-check", timeout_ms)]
    undisturbed(only_reference.clear)


def open_producer(config: KafkaConfig, kafka_transactional_id: str, timeout_ms: int) -> Producer:
    """A producer of librdkafka, which opens its connections in its own threads.

    Args:
        config: The cluster's settings.
        kafka_transactional_id: The id that Kafka sees.
        timeout_ms: The transaction timeout.

    Raises:
        ConfigurationError: librdkafka does not know a setting, or rejects its value.
    """
    settings: Mapping[str, Any] = {
        "client.id": config.client_id,
        "socket.keepalive.enable": True,  # with its default (off), a peer that vanished goes unnoticed for minutes
        "linger.ms": 0,  # the default of 5 ms only delays prepare; under load, messages are batched while others are in flight
        **{name: value for name, value in config.properties.items() if name not in _OURS},
        "bootstrap.servers": config.servers,
        "transactional.id": kafka_transactional_id,
        "transaction.timeout.ms": timeout_ms,
        "enable.idempotence": True,
        "acks": "all",
    }
    try:
        return undisturbed(lambda: Producer(with_own_lines(settings, kafka_transactional_id=kafka_transactional_id)))
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise ConfigurationError(
            f"librdkafka rejects the Kafka settings: {reason.strip()}.", next_step="see librdkafka's CONFIGURATION.md"
        ) from error
