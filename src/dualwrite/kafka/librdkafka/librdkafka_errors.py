"""What librdkafka reports: its errors as dualwrite's, its log lines; and its calls without an interrupt in their middle."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException

from dualwrite.errors import BrokerError, BrokerUnavailableError, DeliveryError
from dualwrite.kafka.client.kafka_errors import (
    FENCED,
    GROUP_FORBIDDEN,
    INSTANCE_FENCED,
    KINDS,
    NOT_LET_IN,
    PERMANENT,
    READ_FORBIDDEN,
    REFUSED,
    TIMEOUT_REFUSED,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    ErrorKind,
)
from dualwrite.observability.logs import SubjectLogger

# librdkafka's own codes start with an underscore, but they are public API.
_UNREACHABLE: Final = ErrorKind(
    BrokerUnavailableError, next_step="check that the brokers are running and bootstrap.servers is correct"
)
_ENDING: Final = ErrorKind(
    BrokerUnavailableError,
    cause="the last transaction of the id is still ending: its markers are being written, or can't be (a partition without a "
    "leader?)",
    next_step="retry; prepared transactions stay prepared",
)
NO_ANSWER: Final = frozenset(
    {
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._TIMED_OUT_QUEUE,  # noqa: SLF001  it was not even sent
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._DESTROY_BROKER,  # noqa: SLF001  librdkafka has just learned the id of a bootstrap server
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.LEADER_NOT_AVAILABLE,
    }
)
"""A broker is down, or does not answer yet."""
_UNKNOWN_TOPIC_CODES: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
        KafkaError.TOPIC_EXCEPTION,
    }
)
_TOO_LARGE_CODES: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
_BATCH_TOO_LARGE: Final = replace(
    TOO_LARGE,
    cause="librdkafka sends messages in batches of up to batch.size bytes (1,000,000), and a batch exceeded the topic's "
    "max.message.bytes, or the broker's message.max.bytes; the messages may be small",
    next_step="set batch.size, in Kafka's settings, to max.message.bytes or less, or use producer='native', which splits such "
    "batches; if a single message is larger, make it smaller, or raise the limits",
)
"""Reported by a broker. A single message that is too large for the producer's own limit is refused by `send`."""
_KINDS: Final[Mapping[int, ErrorKind]] = {
    **KINDS,
    **dict.fromkeys(_UNKNOWN_TOPIC_CODES, UNKNOWN_TOPIC),
    KafkaError._FENCED: FENCED,  # noqa: SLF001
    **dict.fromkeys((KafkaError._AUTHENTICATION, KafkaError._SSL), NOT_LET_IN),  # noqa: SLF001
    KafkaError.SASL_AUTHENTICATION_FAILED: NOT_LET_IN,
    KafkaError.INVALID_TRANSACTION_TIMEOUT: TIMEOUT_REFUSED,
    KafkaError.CONCURRENT_TRANSACTIONS: _ENDING,  # after init_transactions' limit; librdkafka has retried until then
    **dict.fromkeys(
        (
            *NO_ANSWER,
            KafkaError._WAIT_COORD,  # noqa: SLF001
            KafkaError.COORDINATOR_NOT_AVAILABLE,
            KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
            KafkaError.NOT_COORDINATOR,
            KafkaError.UNSTABLE_OFFSET_COMMIT,
        ),
        _UNREACHABLE,
    ),
}
LEADER_MOVED: Final = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.KAFKA_STORAGE_ERROR,
    }
)
"""The partition has, or will soon have, a leader or leader epoch that librdkafka does not know yet; it reads them again."""

_CONSUMER_RECOVERS: Final = LEADER_MOVED | {
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._RESOLVE,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._MAX_POLL_EXCEEDED,  # noqa: SLF001  it has left the group and rejoins it
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
}

_CONSUMER_KINDS: Final[Mapping[int, ErrorKind]] = {
    **dict.fromkeys(_UNKNOWN_TOPIC_CODES, UNKNOWN_TOPIC),
    KafkaError.TOPIC_AUTHORIZATION_FAILED: READ_FORBIDDEN,
    KafkaError.GROUP_AUTHORIZATION_FAILED: GROUP_FORBIDDEN,
    KafkaError.FENCED_INSTANCE_ID: replace(INSTANCE_FENCED, error=BrokerError),
    KafkaError.UNRELEASED_INSTANCE_ID: ErrorKind(
        BrokerError,
        cause=f"{INSTANCE_FENCED.cause}; or this process was killed before, and its membership has not expired yet",
        next_step=f"{INSTANCE_FENCED.next_step}; after a kill, start it again after group.consumer.session.timeout.ms (45 s)",
    ),
}
"""What ends a consumer; it recovers from the rest."""

_MOVED: Final = ErrorKind(
    BrokerUnavailableError,
    cause="the partition's leader has just changed, or started again",
    next_step="retry; if the error persists, check that every broker is running",
)
_TRANSIENT_LOOKUP: Final = frozenset({KafkaError.LEADER_NOT_AVAILABLE, *_UNKNOWN_TOPIC_CODES})

T = TypeVar("T")

log = SubjectLogger("dualwrite.kafka.librdkafka")

INTERVAL: Final = 60.0
"""Seconds after which a line that repeats is logged again."""

_BEFORE_TEXT: Final = "]: "


def kafka_error(error: Any) -> KafkaError | None:
    """The KafkaError in an exception or a delivery report of librdkafka."""
    if isinstance(error, KafkaException):
        inner = error.args[0] if error.args else None
        return inner if isinstance(inner, KafkaError) else None
    return error if isinstance(error, KafkaError) else None


def text_of(error: KafkaError) -> str:
    """Librdkafka's text, without the full stop that some have."""
    return error.str().strip().rstrip(".")


def is_retriable(error: Any) -> bool:
    """Whether the same call may be retried (for a topic lookup: whether the topic may still be created)."""
    inner = kafka_error(error)
    if inner is None:
        return False
    return bool(inner.retriable()) or inner.code() in _TRANSIENT_LOOKUP


def consumer_recovers(error: KafkaError) -> bool:
    """Whether librdkafka's consumer recovers from the error by itself, so that consuming may continue."""
    return error.code() in _CONSUMER_RECOVERS and not error.fatal()


def broker_error(error: Any, kafka_transactional_id: str | None, action: str) -> BrokerError:
    """The matching BrokerError; `action` completes "Kafka error during …"."""
    inner = kafka_error(error)
    code = None if inner is None else inner.code()
    kind = _kind(code, action)
    return kind.error(
        f"Kafka error during {action}: {'no such topic' if inner is None else text_of(inner)}.",
        transactional_id=kafka_transactional_id,
        cause=kind.cause,
        next_step=kind.next_step,
        code=code,
        name=None if inner is None else inner.name(),
    )


def _kind(code: int | None, action: str) -> ErrorKind:
    if code is None:
        return UNKNOWN_TOPIC
    is_delivery = action.startswith(("delivery", "send to"))
    if is_delivery and code in PERMANENT:
        return REFUSED
    if action.startswith("delivery") and code in _TOO_LARGE_CODES:
        return _BATCH_TOO_LARGE
    if not is_delivery and code in LEADER_MOVED:
        return _MOVED
    return _KINDS.get(code) or ErrorKind(DeliveryError if is_delivery else BrokerError)


def consuming_error(error: KafkaError, where: str, group: str = "") -> BrokerError:
    """The error for a consumer that can't continue; `where` completes "Consuming"."""
    kind = next((kind for code, kind in _CONSUMER_KINDS.items() if _is_caused_by(error, code)), ErrorKind(BrokerError))
    return kind.error(
        f"Consuming{where} failed: {text_of(error)}.",
        cause=kind.cause,
        next_step=f"{kind.next_step} {group!r}" if kind is GROUP_FORBIDDEN else kind.next_step,
        code=error.code(),
        name=error.name(),
    )


def _is_caused_by(error: KafkaError, code: int) -> bool:
    """Whether an error has the code, or is librdkafka's fatal error for it, which has only its text."""
    return error.code() == code or (error.code() == KafkaError._FATAL and KafkaError(code).str() in error.str())  # noqa: SLF001


class OwnLines:
    """What a client logs, with the fields that say what the client is for (`observability.logs`).

    Of warnings and errors, the first of each kind and thread of librdkafka is logged, then one in a minute, with the number of
    those left out. They are logged as warnings: librdkafka goes on after what it calls errors, and what does fail raises one of
    ours. Its lines below that level, such as those that the setting `debug` turns on, are all passed on.
    """

    def __init__(self, **fields: str) -> None:
        self._fields: dict[str, Any] = fields
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}  # by kind: when, and how many since

    def log(self, level: int, message: str, *parts: Any) -> None:
        """Called by confluent-kafka: the parts are librdkafka's facility, the client's name, and the text."""
        if level < logging.WARNING or not parts:
            log.log(level, message, *parts, **self._fields)
            return
        facility, text = str(parts[0]), str(parts[-1])
        kind = (facility, text.partition(_BEFORE_TEXT)[0])  # the thread, which is that of one broker
        logged_at, left_out = self._logged.get(kind, (-INTERVAL, 0))
        now = time.monotonic()
        if now - logged_at < INTERVAL:
            self._logged[kind] = (logged_at, left_out + 1)
            return
        self._logged[kind] = (now, 0)
        more = f" ({left_out} more since the last such line)" if left_out else ""
        log.warning("librdkafka: %s: %s%s", facility, text, more, **self._fields)
