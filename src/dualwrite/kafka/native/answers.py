"""What Kafka's error codes mean for a transaction that is being sent: try again, look the leader up again, or it has failed."""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from dualwrite.errors import BrokerError, BrokerUnavailableError, DeliveryError
from dualwrite.kafka.error_kinds import FENCED, FORBIDDEN, GROUP_FORBIDDEN, GROUP_MOVED, TOO_LARGE, UNKNOWN_TOPIC, ErrorKind
from dualwrite.kafka.wire import kafka_error_name

OUT_OF_ORDER_SEQUENCE: Final = 45
CONCURRENT_TRANSACTIONS: Final = 51
NO_ANSWER: Final = 13  # NETWORK_EXCEPTION, Kafka's code for clients that got none


class Verdict(Enum):
    """What to do after an answer."""

    STORED = "stored"
    AGAIN = "again"
    """The same again, after a while."""
    LOOK_UP = "look up"
    """The same again, after looking up the leader or the coordinator."""
    IN_ORDER = "in order"
    """The same again if an earlier batch is not stored yet; else the partition has lost records."""
    SPLIT = "split"
    """Smaller batches, or a message that is too large."""
    FAILED = "failed"
    """The transaction can only be aborted."""


_VERDICTS: Final = MappingProxyType(
    {
        0: Verdict.STORED,
        46: Verdict.STORED,  # DUPLICATE_SEQUENCE_NUMBER: an earlier attempt was stored
        2: Verdict.AGAIN,  # CORRUPT_MESSAGE: damaged on the way
        7: Verdict.AGAIN,  # REQUEST_TIMED_OUT
        19: Verdict.AGAIN,  # NOT_ENOUGH_REPLICAS
        20: Verdict.AGAIN,  # NOT_ENOUGH_REPLICAS_AFTER_APPEND
        CONCURRENT_TRANSACTIONS: Verdict.AGAIN,  # the markers of the last transaction are being written
        14: Verdict.AGAIN,  # COORDINATOR_LOAD_IN_PROGRESS
        15: Verdict.LOOK_UP,  # COORDINATOR_NOT_AVAILABLE
        16: Verdict.LOOK_UP,  # NOT_COORDINATOR
        3: Verdict.LOOK_UP,  # UNKNOWN_TOPIC_OR_PARTITION: not known there yet, or no more
        5: Verdict.LOOK_UP,  # LEADER_NOT_AVAILABLE
        6: Verdict.LOOK_UP,  # NOT_LEADER_OR_FOLLOWER
        8: Verdict.LOOK_UP,  # BROKER_NOT_AVAILABLE
        9: Verdict.LOOK_UP,  # REPLICA_NOT_AVAILABLE
        NO_ANSWER: Verdict.LOOK_UP,
        56: Verdict.LOOK_UP,  # KAFKA_STORAGE_ERROR
        72: Verdict.LOOK_UP,  # LISTENER_NOT_FOUND
        74: Verdict.LOOK_UP,  # FENCED_LEADER_EPOCH
        75: Verdict.LOOK_UP,  # UNKNOWN_LEADER_EPOCH
        OUT_OF_ORDER_SEQUENCE: Verdict.IN_ORDER,
        59: Verdict.IN_ORDER,  # UNKNOWN_PRODUCER_ID
        10: Verdict.SPLIT,  # MESSAGE_TOO_LARGE
        18: Verdict.SPLIT,  # RECORD_LIST_TOO_LARGE
    }
)

_REPLICAS: Final = ErrorKind(
    DeliveryError,
    cause="fewer replicas are in sync than the topic's min.insync.replicas",
    next_step="see which brokers are down",
)
_LOST_ORDER: Final = ErrorKind(
    DeliveryError,
    cause="the partition has lost records that it had acknowledged (an unclean leader election?)",
    next_step="the transaction can be tried again as a whole",
)
_UNREACHABLE: Final = ErrorKind(
    BrokerUnavailableError,
    cause="the partition's leader does not answer, or has moved and is not known yet",
    next_step="see that the brokers run and can be reached at the addresses that they advertise",
)
_KINDS: Final = MappingProxyType(
    {
        **dict.fromkeys((47, 48, 49, 90), FENCED),  # INVALID_PRODUCER_EPOCH, _TXN_STATE, _PRODUCER_ID_MAPPING, PRODUCER_FENCED
        **dict.fromkeys((10, 18), TOO_LARGE),
        **dict.fromkeys((29, 31, 53), FORBIDDEN),  # TOPIC, CLUSTER, TRANSACTIONAL_ID _AUTHORIZATION_FAILED
        30: GROUP_FORBIDDEN,  # GROUP_AUTHORIZATION_FAILED
        **dict.fromkeys((3, 17), UNKNOWN_TOPIC),
        **dict.fromkeys((19, 20), _REPLICAS),
        **dict.fromkeys((OUT_OF_ORDER_SEQUENCE, 59), _LOST_ORDER),
        **dict.fromkeys((22, 25, 82), GROUP_MOVED),  # ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID
        **dict.fromkeys((5, 6, 7, 8, 9, NO_ANSWER, 14, 15, 16, 56, 72, 74, 75), _UNREACHABLE),
    }
)


def verdict_on(code: int) -> Verdict:
    """What to do after this error code."""
    return _VERDICTS.get(code, Verdict.FAILED)


def failure(
    code: int,
    doing: str,
    kafka_transactional_id: str,
    *,
    message: str | None = None,
    otherwise: type[BrokerError] = DeliveryError,
    unreachable: type[BrokerError] = BrokerUnavailableError,
    **facts: Any,
) -> BrokerError:
    """The error for a code, `otherwise` where the code has none of its own, `unreachable` where nobody answers for it.

    `doing` completes "Kafka failed at …", `message` is what the broker says of it.
    """
    kind = _KINDS.get(code) or ErrorKind(otherwise)
    name = kafka_error_name(code)
    return (unreachable if kind is _UNREACHABLE else kind.error)(
        f"Kafka failed at {doing}: {name}{f' ({message})' if message else ''}.",
        transactional_id=kafka_transactional_id,
        cause=kind.cause,
        next_step=kind.next_step,
        code=code,
        name=name,
        **facts,
    )
