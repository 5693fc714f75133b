"""The settings of the native producer, read from the dict with librdkafka's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.compression import Compression, compression_by_name
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.logins import TOKEN_NAMES
from dualwrite.kafka.native.partitioners import Partitioner, partitioner_by_name

MAX_IN_FLIGHT: Final = 5  # a broker remembers this many batches of a producer to detect duplicates (KIP-98)
DEFAULT_BUFFER_BYTES: Final = 32 * 2**20  # as buffer.memory of Kafka's Java producer
_KIB: Final = 1024


KNOWN_NAMES: Final = frozenset(
    {
        "acks",
        "batch.size",
        "bootstrap.servers",
        "client.id",
        "compression.codec",
        "compression.level",
        "compression.type",
        "enable.idempotence",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "message.max.bytes",
        "metadata.broker.list",
        "partitioner",
        "queue.buffering.max.kbytes",
        "request.required.acks",
        "request.timeout.ms",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.password",
        "sasl.username",
        "security.protocol",
        "socket.connection.setup.timeout.ms",
        "socket.keepalive.enable",
        "socket.timeout.ms",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.key.pem",
        "topic.metadata.refresh.interval.ms",
        "transaction.timeout.ms",
        *TOKEN_NAMES,
    }
)
"""Settings whose values our own code checks. All other names and their values are checked by librdkafka."""


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """What the native producer reads from a KafkaConfig; the defaults are librdkafka's, except for the buffer.

    Args:
        batch_bytes: A partition's batch is sent when its records reach this size (`batch.size`).
        message_max_bytes: The largest message, and the largest request (`message.max.bytes`).
        buffer_bytes: Unacknowledged bytes at which `send` blocks (`queue.buffering.max.kbytes`).
        in_flight: The limit for Produce requests in flight to one broker (`max.in.flight.requests.per.connection`), 1 to 5.
        request_timeout: Seconds that a broker may take to store a batch on all in-sync replicas (`request.timeout.ms`).
        answer_timeout: Seconds without a response after which a connection is closed (`socket.timeout.ms`).
        metadata_max_age: Seconds after which a topic's partitions are looked up again
            (`topic.metadata.refresh.interval.ms`).
        retry_backoff: Seconds to wait before the first retry, doubled each time (`retry.backoff.ms`).
        retry_backoff_max: The maximum of this wait (`retry.backoff.max.ms`).
        compression: How batches are compressed (`compression.type`, `compression.level`).
        partitioner: How a key determines the partition (`partitioner`).
    """

    batch_bytes: int
    message_max_bytes: int
    buffer_bytes: int
    in_flight: int
    request_timeout: float
    answer_timeout: float
    metadata_max_age: float
    retry_backoff: float
    retry_backoff_max: float
    compression: Compression
    partitioner: Partitioner

    @classmethod
    def of(cls, config: KafkaConfig) -> Self:
        """Read and validate the settings.

        Raises:
            ConfigurationError: A value is not a number or out of range, or the compression or partitioner is unknown.
            MissingDependencyError: The package for the compression is not installed.
        """
        given = config.properties
        message_max = _number(given, ("message.max.bytes",), 1_000_000, 1_000, 1_000_000_000)
        buffer_kib = _number(given, ("queue.buffering.max.kbytes",), DEFAULT_BUFFER_BYTES // _KIB, 1, 2_147_483_647)
        in_flight = ("max.in.flight.requests.per.connection", "max.in.flight")
        return cls(
            batch_bytes=min(_number(given, ("batch.size",), 1_000_000, 1, 2_147_483_647), message_max),
            message_max_bytes=message_max,
            buffer_bytes=buffer_kib * _KIB,
            in_flight=min(_number(given, in_flight, MAX_IN_FLIGHT, 1, 1_000_000), MAX_IN_FLIGHT),
            request_timeout=_number(given, ("request.timeout.ms",), 30_000, 1, 900_000) / 1000,
            answer_timeout=config.socket_timeout,
            metadata_max_age=_number(given, ("topic.metadata.refresh.interval.ms",), 300_000, -1, 3_600_000) / 1000,
            retry_backoff=_number(given, ("retry.backoff.ms",), 100, 1, 300_000) / 1000,
            retry_backoff_max=_number(given, ("retry.backoff.max.ms",), 1_000, 1, 300_000) / 1000,
            compression=compression_by_name(
                str(_first(given, ("compression.type", "compression.codec"), "none")),
                _number(given, ("compression.level",), -1, -1, 12),
            ),
            partitioner=partitioner_by_name(str(_first(given, ("partitioner",), "consistent_random"))),
        )


def _first(given: Mapping[str, Any], names: tuple[str, ...], default: Any) -> Any:
    """The value of a setting for which librdkafka has several names."""
    return next((given[name] for name in names if name in given), default)


def _number(given: Mapping[str, Any], names: tuple[str, ...], default: int, lowest: int, highest: int) -> int:
    value = _first(given, names, default)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = lowest - 1
    if isinstance(value, bool | float) or not lowest <= number <= highest:
        raise ConfigurationError(f"{names[0]} is {value!r}; it must be an integer from {lowest} to {highest}.")
    return number
