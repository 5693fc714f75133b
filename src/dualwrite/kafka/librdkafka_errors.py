"""librdkafka's errors as ours: the one place where they are mapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    DeliveryError,
    MessageTooLargeError,
    ProducerFencedError,
    TransactionTimeoutRefusedError,
    UnknownTopicError,
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Codes that mean the same to a user."""

    error: type[BrokerError]
    codes: frozenset[int]
    cause: str | None = None
    next_step: str | None = None


# librdkafka's own codes begin with an underscore: they are public, whatever ruff thinks of the name.
_UNKNOWN_TOPIC: Final = _Kind(
    UnknownTopicError,
    frozenset(
        {
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
            KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
            KafkaError.TOPIC_EXCEPTION,
        }
    ),
    cause="the topic or partition does not exist, and the broker does not create topics by itself",
    next_step="create it, or set auto.create.topics.enable on the broker",
)
_KINDS: Final = (
    _UNKNOWN_TOPIC,
    _Kind(
        MessageTooLargeError,
        frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}),
        cause="the message is larger than the producer's message.max.bytes, the broker's, or the topic's max.message.bytes",
        next_step="make it smaller, or raise all three",
    ),
    _Kind(
        ProducerFencedError,
        frozenset(
            {
                KafkaError._FENCED,  # noqa: SLF001
                KafkaError.INVALID_PRODUCER_EPOCH,
                KafkaError.PRODUCER_FENCED,
                KafkaError.INVALID_PRODUCER_ID_MAPPING,
            }
        ),
        cause="the transactional id was taken over, or recovery ended its transaction",
    ),
    _Kind(
        BrokerAuthorizationError,
        frozenset(
            {
                KafkaError.TOPIC_AUTHORIZATION_FAILED,
                KafkaError.GROUP_AUTHORIZATION_FAILED,
                KafkaError.CLUSTER_AUTHORIZATION_FAILED,
                KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
                KafkaError.SASL_AUTHENTICATION_FAILED,
                KafkaError._AUTHENTICATION,  # noqa: SLF001
            }
        ),
        next_step="check sasl.*, and grant Write and Describe on the topic and, prefixed, on the transactional id",
    ),
    _Kind(
        TransactionTimeoutRefusedError,
        frozenset({KafkaError.INVALID_TRANSACTION_TIMEOUT}),
        cause="transaction.timeout.ms is above the broker's transaction.max.timeout.ms",
        next_step="lower the one or raise the other",
    ),
    _Kind(
        BrokerUnavailableError,
        frozenset(
            {
                KafkaError._TIMED_OUT,  # noqa: SLF001
                KafkaError._TRANSPORT,  # noqa: SLF001
                KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
                KafkaError.COORDINATOR_NOT_AVAILABLE,
                KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
                KafkaError.NOT_COORDINATOR,
                KafkaError.REQUEST_TIMED_OUT,
                KafkaError.LEADER_NOT_AVAILABLE,
            }
        ),
        next_step="see that the brokers run and bootstrap.servers is right",
    ),
)
_PASSING_LOOKUP: Final = frozenset({KafkaError.LEADER_NOT_AVAILABLE, *_UNKNOWN_TOPIC.codes})


def kafka_error(error: Any) -> KafkaError | None:
    """The KafkaError inside what librdkafka raised or reported."""
    if isinstance(error, KafkaException):
        inner = error.args[0] if error.args else None
        return inner if isinstance(inner, KafkaError) else None
    return error if isinstance(error, KafkaError) else None


def is_retriable(error: Any) -> bool:
    """Whether the same call may be made again (for a topic that is looked up: whether it may still be on its way)."""
    inner = kafka_error(error)
    if inner is None:
        return False
    return bool(inner.retriable()) or inner.code() in _PASSING_LOOKUP


def broker_error(error: Any, kafka_transactional_id: str, doing: str) -> BrokerError:
    """The BrokerError that fits; `doing` completes "Kafka failed at …"."""
    inner = kafka_error(error)
    code = None if inner is None else inner.code()
    kind = _kind(code, doing)
    return kind.error(
        f"Kafka failed at {doing}: {'no such topic' if inner is None else inner.str()}.",
        transactional_id=kafka_transactional_id,
        cause=kind.cause,
        next_step=kind.next_step,
        code=code,
        name=None if inner is None else inner.name(),
    )


def _kind(code: int | None, doing: str) -> _Kind:
    if code is None:
        return _UNKNOWN_TOPIC
    for kind in _KINDS:
        if code in kind.codes:
            return kind
    return _Kind(DeliveryError if doing.startswith(("delivering", "sending")) else BrokerError, frozenset())
