"""What each of Kafka's error codes means while a transaction is sent: retry, look up the leader again, or fail."""

from __future__ import annotations

import random
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from dualwrite.errors import BrokerError, BrokerUnavailableError, DeliveryError
from dualwrite.kafka.client.error_codes import PERMANENT, error_name
from dualwrite.kafka.client.error_codes import ErrorCode as E
from dualwrite.kafka.client.errors import (
    FENCED,
    FORBIDDEN,
    GROUP_FORBIDDEN,
    GROUP_MOVED,
    INSTANCE_FENCED,
    REFUSED,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    ErrorKind,
)
from dualwrite.kafka.native.settings import NativeSettings

NO_RESPONSE: Final = E.NETWORK_EXCEPTION  # Kafka's client-side code for a missing response

_MARKERS_PAUSE: Final = 0.002
_MAX_MARKERS_PAUSE: Final = 0.05
_MAX_DOUBLINGS: Final = 16


class Verdict(Enum):
    """What to do after a response."""

    STORED = "stored"
    AGAIN = "again"
    """Retry after a pause."""
    LOOK_UP = "look up"
    """Retry after looking up the leader or the coordinator."""
    IN_ORDER = "in order"
    """Retry if an earlier batch is not stored yet; otherwise the partition has lost records."""
    SPLIT = "split"
    """Split the batch; a batch of one message is too large."""
    FAILED = "failed"
    """The transaction can only be aborted."""


_VERDICTS: Final[Mapping[int, Verdict]] = MappingProxyType(
    {
        E.NONE: Verdict.STORED,
        E.DUPLICATE_SEQUENCE_NUMBER: Verdict.STORED,  # an earlier attempt was stored
        **dict.fromkeys(
            (
                E.CORRUPT_MESSAGE,  # damaged in transit
                E.REQUEST_TIMED_OUT,
                E.NOT_ENOUGH_REPLICAS,
                E.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
                E.CONCURRENT_TRANSACTIONS,  # the markers of the last transaction are being written
                E.COORDINATOR_LOAD_IN_PROGRESS,
            ),
            Verdict.AGAIN,
        ),
        **dict.fromkeys(
            (
                E.COORDINATOR_NOT_AVAILABLE,
                E.NOT_COORDINATOR,
                E.UNKNOWN_TOPIC_OR_PARTITION,  # not yet, or no longer, known to that broker
                E.LEADER_NOT_AVAILABLE,
                E.NOT_LEADER_OR_FOLLOWER,
                E.BROKER_NOT_AVAILABLE,
                E.REPLICA_NOT_AVAILABLE,
                NO_RESPONSE,
                E.KAFKA_STORAGE_ERROR,
                E.LISTENER_NOT_FOUND,
                E.FENCED_LEADER_EPOCH,
                E.UNKNOWN_LEADER_EPOCH,
            ),
            Verdict.LOOK_UP,
        ),
        E.OUT_OF_ORDER_SEQUENCE_NUMBER: Verdict.IN_ORDER,
        E.UNKNOWN_PRODUCER_ID: Verdict.IN_ORDER,
        E.MESSAGE_TOO_LARGE: Verdict.SPLIT,
        E.RECORD_LIST_TOO_LARGE: Verdict.SPLIT,
    }
)

_REPLICAS: Final = ErrorKind(
    DeliveryError,
    cause="fewer replicas are in sync than the topic's min.insync.replicas",
    next_step="check which brokers are down",
)
_LOST_ORDER: Final = ErrorKind(
    DeliveryError,
    cause="the partition has lost acknowledged records (an unclean leader election?)",
    next_step="retry the whole transaction",
)
_UNREACHABLE: Final = ErrorKind(
    BrokerUnavailableError,
    cause="the partition's leader does not respond, or has moved and the new one is not known yet",
    next_step="check that the brokers are running and reachable at their advertised addresses",
)
_KINDS: Final[Mapping[int, ErrorKind]] = MappingProxyType(
    {
        **dict.fromkeys(PERMANENT, REFUSED),
        **dict.fromkeys(
            (E.INVALID_PRODUCER_EPOCH, E.INVALID_TXN_STATE, E.INVALID_PRODUCER_ID_MAPPING, E.PRODUCER_FENCED), FENCED
        ),
        **dict.fromkeys((E.MESSAGE_TOO_LARGE, E.RECORD_LIST_TOO_LARGE), TOO_LARGE),
        **dict.fromkeys(
            (E.TOPIC_AUTHORIZATION_FAILED, E.CLUSTER_AUTHORIZATION_FAILED, E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), FORBIDDEN
        ),
        E.GROUP_AUTHORIZATION_FAILED: GROUP_FORBIDDEN,
        **dict.fromkeys((E.UNKNOWN_TOPIC_OR_PARTITION, E.INVALID_TOPIC_EXCEPTION), UNKNOWN_TOPIC),
        **dict.fromkeys((E.NOT_ENOUGH_REPLICAS, E.NOT_ENOUGH_REPLICAS_AFTER_APPEND), _REPLICAS),
        **dict.fromkeys((E.OUT_OF_ORDER_SEQUENCE_NUMBER, E.UNKNOWN_PRODUCER_ID), _LOST_ORDER),
        **dict.fromkeys((E.ILLEGAL_GENERATION, E.UNKNOWN_MEMBER_ID), GROUP_MOVED),
        E.FENCED_INSTANCE_ID: INSTANCE_FENCED,
        **dict.fromkeys(
            (
                E.LEADER_NOT_AVAILABLE,
                E.NOT_LEADER_OR_FOLLOWER,
                E.REQUEST_TIMED_OUT,
                E.BROKER_NOT_AVAILABLE,
                E.REPLICA_NOT_AVAILABLE,
                NO_RESPONSE,
                E.COORDINATOR_LOAD_IN_PROGRESS,
                E.COORDINATOR_NOT_AVAILABLE,
                E.NOT_COORDINATOR,
                E.KAFKA_STORAGE_ERROR,
                E.LISTENER_NOT_FOUND,
                E.FENCED_LEADER_EPOCH,
                E.UNKNOWN_LEADER_EPOCH,
            ),
            _UNREACHABLE,
        ),
    }
)


def verdict_on(code: int) -> Verdict:
    """What to do after this error code."""
    return _VERDICTS.get(code, Verdict.FAILED)


def retry_pause(code: int, attempts: int, settings: NativeSettings) -> float:
    """Seconds before a batch that has failed with this code is sent again.

    Args:
        code: The error code.
        attempts: How often the batch was sent.
        settings: `retry_backoff` and its maximum; they don't apply to the wait for markers, which takes milliseconds.
    """
    doublings = min(attempts - 1, _MAX_DOUBLINGS)
    if code == E.CONCURRENT_TRANSACTIONS:
        return float(min(_MARKERS_PAUSE * 2**doublings, _MAX_MARKERS_PAUSE))
    pause = min(settings.retry_backoff * 2**doublings, settings.retry_backoff_max)
    return float(pause * random.uniform(0.8, 1.2))  # noqa: S311  (spreads retries; no secret)


def failure(
    code: int,
    action: str,
    kafka_transactional_id: str,
    *,
    message: str | None = None,
    otherwise: type[BrokerError] = DeliveryError,
    unreachable: type[BrokerError] = BrokerUnavailableError,
    **facts: Any,
) -> BrokerError:
    """The error for a code; `otherwise` is raised for codes without an error of their own, `unreachable` for a silent leader.

    `action` completes "Kafka error during …"; `message` is the broker's error message.
    """
    known = _KINDS.get(code)
    kind = known if known is not None and (known is not REFUSED or otherwise is DeliveryError) else ErrorKind(otherwise)
    name = error_name(code)
    return (unreachable if kind is _UNREACHABLE else kind.error)(
        f"Kafka error during {action}: {name}{f' ({message})' if message else ''}.",
        transactional_id=kafka_transactional_id,
        cause=kind.cause,
        next_step=kind.next_step,
        code=code,
        name=name,
        **facts,
    )
