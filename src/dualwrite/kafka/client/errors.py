"""Kafka's errors as ours, for whichever client met them: which error, its likely cause, the next step."""

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
    """What several of Kafka's codes mean to a user alike.

    Args:
        error: The error that is raised for them.
        cause: The likely cause, as far as it is known.
        next_step: What the reader can do.
    """

    error: type[BrokerError]
    cause: str | None = None
    next_step: str | None = None


UNKNOWN_TOPIC: Final = ErrorKind(
    UnknownTopicError,
    cause="the topic or partition does not exist, and the broker does not create topics by itself",
    next_step="create it, or set auto.create.topics.enable on the broker",
)
TOO_LARGE: Final = ErrorKind(
    MessageTooLargeError,
    cause="the message is larger than the producer's message.max.bytes, the broker's, or the topic's max.message.bytes",
    next_step="make it smaller, or raise all three",
)
REFUSED: Final = ErrorKind(
    MessageRefusedError,
    cause="the topic or the broker does not take such messages: without a key in a compacted topic, with a timestamp outside "
    "the topic's limits, against a policy, or compressed in a way that it does not know",
    next_step="change the message, or the topic's settings; the same message would be refused again",
)
FENCED: Final = ErrorKind(
    ProducerFencedError,
    cause="the transactional id was taken over, recovery ended its transaction, or it timed out",
)
FORBIDDEN: Final = ErrorKind(
    BrokerAuthorizationError,
    next_step="check sasl.*, and grant Write and Describe on the topic and, prefixed, on the transactional id",
)
TIMEOUT_REFUSED: Final = ErrorKind(
    TransactionTimeoutRefusedError,
    cause="transaction.timeout.ms is above the broker's transaction.max.timeout.ms",
    next_step="lower the one or raise the other",
)
GROUP_FORBIDDEN: Final = ErrorKind(BrokerAuthorizationError, next_step="grant the principal Read on the consumer group")
GROUP_MOVED: Final = ErrorKind(
    ProducerFencedError,
    cause="the consumer's generation is over: its partitions may be another member's by now",
    next_step="abort, let the consumer rejoin, and consume again from the committed offsets",
)
