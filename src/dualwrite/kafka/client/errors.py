"""Mapping of Kafka's errors to dualwrite's, for every client: which exception, its likely cause, the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    MessageRefusedError,
    MessageTooLargeError,
    ProducerFencedError,
    TransactionTimeoutRefusedError,
    UnknownTopicError,
)


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """A group of Kafka error codes that mean the same to a user.

    Args:
        error: The exception that is raised for them.
        cause: The likely cause, if known.
        next_step: What the user can do.
    """

    error: type[BrokerError]
    cause: str | None = None
    next_step: str | None = None


UNKNOWN_TOPIC: Final = ErrorKind(
    UnknownTopicError,
    cause="the topic or partition does not exist, and the broker does not create topics automatically",
    next_step="create it, or set auto.create.topics.enable on the broker",
)
TOO_LARGE: Final = ErrorKind(
    MessageTooLargeError,
    cause="the message exceeds message.max.bytes of the producer or the broker, or the topic's max.message.bytes",
    next_step="make it smaller, or raise all three limits",
)
REFUSED: Final = ErrorKind(
    MessageRefusedError,
    cause="the topic or the broker does not accept the message: no key in a compacted topic, a timestamp outside the topic's "
    "limits, a policy violation, or an unsupported compression type",
    next_step="change the message or the topic's settings; the same message would be refused again",
)
FENCED: Final = ErrorKind(
    ProducerFencedError,
    cause="the transactional id was taken over, or recovery or a timeout ended its transaction",
)
FORBIDDEN: Final = ErrorKind(
    BrokerAuthorizationError,
    next_step="check sasl.*, and grant Write and Describe on the topic and, prefixed, on the transactional id",
)
TIMEOUT_REFUSED: Final = ErrorKind(
    TransactionTimeoutRefusedError,
    cause="transaction.timeout.ms is above the broker's transaction.max.timeout.ms",
    next_step="lower the first or raise the second",
)
GROUP_FORBIDDEN: Final = ErrorKind(BrokerAuthorizationError, next_step="grant the principal Read on the consumer group")
READ_FORBIDDEN: Final = ErrorKind(BrokerAuthorizationError, next_step="check sasl.*, and grant the principal Read on the topic")
INSTANCE_FENCED: Final = ErrorKind(
    ProducerFencedError,
    cause="another consumer of the group has the same group.instance.id",
    next_step="give each process a group.instance.id of its own, for example the name of its pod",
)
GROUP_MOVED: Final = ErrorKind(
    ProducerFencedError,
    cause="the consumer's generation is over: its partitions may belong to another member by now",
    next_step="abort, let the consumer rejoin, and consume again from the committed offsets",
)
