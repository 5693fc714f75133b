"""What each of Kafka's error codes means while a transaction is sent: retry, look up the leader again, or fail."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerError, BrokerUnavailableError, DeliveryError
from dualwrite.kafka.client.kafka_errors import (
    FENCED,
    FORBIDDEN,
    GROUP_FORBIDDEN,
    GROUP_MOVED,
    INSTANCE_FENCED,
    PERMANENT,
    REFUSED,
    TOO_LARGE,
    UNKNOWN_TOPIC,
    ErrorKind,
    error_name,
)
from dualwrite.kafka.client.kafka_errors import ErrorCode as E
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.state import TransactionDescription

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


class Patience:
    """The waits of one call; each of them is a `with` block that gets the deadline for it.

    All waits share one limit, which starts again when the brokers have stored something: a call with millions of messages may
    take longer than the limit as long as it makes progress. Only waiting counts, not the time in which the caller makes the
    messages.

    Args:
        seconds: The limit.
        stored: The number of records that were stored so far.
    """

    __slots__ = ("_deadline", "_left", "_seconds", "_seen", "_stored")

    def __init__(self, seconds: float, stored: Callable[[], int]) -> None:
        self._seconds = self._left = seconds
        self._stored = stored
        self._seen = stored()

    @classmethod
    def of(cls, limit: float | Deadline | Patience) -> Patience:
        """The patience itself; or, for a single message, one that ends at a deadline, or so many seconds from now."""
        return limit if isinstance(limit, Patience) else _Until(Deadline.of(limit))

    def __enter__(self) -> Deadline:
        self._deadline = Deadline.after(self._left)
        self._deadline.seconds = self._seconds  # for error messages
        return self._deadline

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        stored = self._stored()
        self._left = self._deadline.left if stored == self._seen else self._seconds
        self._seen = stored


class _Until(Patience):
    """A limit that does not start again: a deadline."""

    __slots__ = ()

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def __enter__(self) -> Deadline:
        return self._deadline

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        pass


AT_FIRST: Final = 0.01
"""Seconds after which markers are assumed to be written, as long as nothing was measured."""

CHECK_AGAIN_AFTER: Final = 64
"""Transactions without a check, after which one is made to find out whether markers have become slower."""

_SLOW: Final = 0.015
"""Seconds; a message that comes too early waits longer at the broker (`add.partitions.to.txn.retry.backoff.ms`, 20)."""

_CAUTION: Final = 0.02
"""Which part of the difference the estimate is lowered by, once a message has come too early or a check found no markers."""

_MOST_SKIPPED: Final = 64 * CHECK_AGAIN_AFTER

_LIMIT: Final = 0.1
_FIRST_PAUSE: Final = 0.0002  # the first one; doubled each time, so that a shared coordinator gets about ten requests at most


class MarkerWait:
    """Waits until the last transaction is complete, if that may take longer than the time that has passed since its end.

    A broker that gets a message while markers are being written backs off, for 20 ms in some releases. Checking whether they
    are written costs a request. So the time that a producer's markers take is estimated: at most the time after which the first
    check of a transaction found them written, or else twice the time until a later check did. If markers sometimes take longer
    than the pause between two transactions, the estimate falls slowly, and it doubles when a message without a check was
    answered as late as a message that came too early. The wait only saves time: such a message is refused, and sent again.

    A check without a response within its limit costs the connection. So the next transactions make none, twice as many each
    time: over a connection that slow, the markers are written before the next message arrives.

    Args:
        describe: Describes the producer's id at its coordinator.
    """

    def __init__(self, describe: Callable[[Deadline], TransactionDescription | None]) -> None:
        self._describe = describe
        self._ended_at = 0.0
        self._assumed_written_after = AT_FIRST
        self._without_check = 0
        self._unchecked_after: float | None = None
        self._lowered_by = 1.0
        self._to_skip = 0
        self._skipped_next = CHECK_AGAIN_AFTER

    def transaction_ended(self) -> None:
        """Called after the response to EndTxn."""
        self._ended_at = time.monotonic()

    def wait(self, deadline: Deadline) -> None:
        """Wait, at most until the deadline."""
        passed = time.monotonic() - self._ended_at
        self._unchecked_after = None
        if self._to_skip:
            self._to_skip -= 1
            return
        self._without_check += 1
        enough = self._assumed_written_after
        if self._without_check > CHECK_AGAIN_AFTER:
            enough = max(enough, AT_FIRST)
        if passed > enough:
            self._unchecked_after = passed
            return
        self._without_check = 0
        try:
            self._check(passed, deadline.within(_LIMIT))
        except BrokerUnavailableError:  # this wait only saves milliseconds; sending shows whether the broker is reachable
            self._to_skip, self._skipped_next = self._skipped_next, min(2 * self._skipped_next, _MOST_SKIPPED)
        else:
            self._skipped_next = CHECK_AGAIN_AFTER

    def _check(self, passed: float, limit: Deadline) -> None:
        began = time.monotonic()
        if self._are_written(limit):
            self._assumed_written_after -= max(self._assumed_written_after - passed, 0.0) * self._lowered_by
            return
        self._lowered_by = _CAUTION
        takes = time.monotonic() - began
        pause = _FIRST_PAUSE
        while limit.left > takes:  # a check with less time would be one without a response
            limit.sleep(pause)
            pause *= 2
            if limit.left <= takes or self._are_written(limit):
                break
        self._assumed_written_after = min(2 * (time.monotonic() - self._ended_at), _LIMIT)

    def flushed(self, seconds: float) -> None:
        """Called when the messages of the transaction have been stored, with how long that was waited for at the end."""
        passed = self._unchecked_after
        if passed is not None and passed < AT_FIRST and seconds > _SLOW:
            self._assumed_written_after = 2 * passed
            self._lowered_by = _CAUTION

    def _are_written(self, limit: Deadline) -> bool:
        described = self._describe(limit)
        return described is None or not described.status.is_ending
