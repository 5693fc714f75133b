"""When the native producer retries, fails or waits: what Kafka's error codes mean, how long a call may take, markers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, TypeVar

from dualwrite.deadline import CHANCE, Deadline, Pauses
from dualwrite.errors import BrokerError, BrokerUnavailableError, DeliveryError
from dualwrite.kafka.client.kafka_errors import (
    FENCED,
    KINDS,
    PERMANENT,
    REFUSED,
    ErrorKind,
    error_name,
)
from dualwrite.kafka.client.kafka_errors import ErrorCode as E
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.state import TransactionDescription

NO_RESPONSE: Final = E.NETWORK_EXCEPTION  # Kafka's client-side code for a missing response

T = TypeVar("T")

_CHUNK: Final = 1000
_MARKERS_PAUSE: Final = 0.002
_MAX_MARKERS_PAUSE: Final = 0.05
_MAX_DOUBLINGS: Final = 16

AT_FIRST: Final = 0.01
"""Seconds after which markers are assumed to be written, as long as nothing was measured."""

CHECK_AGAIN_AFTER: Final = 64
"""Transactions without a check, after which one is made to find out whether markers have become slower."""

_SLOW: Final = 0.015
"""Seconds; a message that comes too early waits longer at the broker (`add.partitions.to.txn.retry.backoff.ms`, 20)."""

_CAUTION: Final = 0.02
"""Which part of the difference the estimate is lowered by, once a message has come too early or a check found no markers."""

_MAX_SKIPPED: Final = 64 * CHECK_AGAIN_AFTER

_LIMIT: Final = 0.1
_START_PAUSE: Final = 0.0002  # the first one; doubled each time, so that a shared coordinator gets about ten requests at most


class Reaction(Enum):
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


_MOVED: Final = (
    E.COORDINATOR_NOT_AVAILABLE,
    E.NOT_COORDINATOR,
    E.LEADER_NOT_AVAILABLE,
    E.NOT_LEADER_OR_FOLLOWER,
    E.BROKER_NOT_AVAILABLE,
    E.REPLICA_NOT_AVAILABLE,
    NO_RESPONSE,
    E.KAFKA_STORAGE_ERROR,
    E.LISTENER_NOT_FOUND,
    E.FENCED_LEADER_EPOCH,
    E.UNKNOWN_LEADER_EPOCH,
)

_REACTIONS: Final[Mapping[int, Reaction]] = MappingProxyType(
    {
        E.NONE: Reaction.STORED,
        E.DUPLICATE_SEQUENCE_NUMBER: Reaction.STORED,  # an earlier attempt was stored
        **dict.fromkeys(
            (
                E.CORRUPT_MESSAGE,  # damaged in transit
                E.REQUEST_TIMED_OUT,
                E.NOT_ENOUGH_REPLICAS,
                E.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
                E.CONCURRENT_TRANSACTIONS,  # the markers of the last transaction are being written
                E.COORDINATOR_LOAD_IN_PROGRESS,
            ),
            Reaction.AGAIN,
        ),
        **dict.fromkeys((*_MOVED, E.UNKNOWN_TOPIC_OR_PARTITION), Reaction.LOOK_UP),  # unknown to that broker, now
        E.OUT_OF_ORDER_SEQUENCE_NUMBER: Reaction.IN_ORDER,
        E.UNKNOWN_PRODUCER_ID: Reaction.IN_ORDER,
        E.MESSAGE_TOO_LARGE: Reaction.SPLIT,
        E.RECORD_LIST_TOO_LARGE: Reaction.SPLIT,
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
        **KINDS,
        E.INVALID_TXN_STATE: FENCED,
        **dict.fromkeys((E.NOT_ENOUGH_REPLICAS, E.NOT_ENOUGH_REPLICAS_AFTER_APPEND), _REPLICAS),
        **dict.fromkeys((E.OUT_OF_ORDER_SEQUENCE_NUMBER, E.UNKNOWN_PRODUCER_ID), _LOST_ORDER),
        **dict.fromkeys((*_MOVED, E.REQUEST_TIMED_OUT, E.COORDINATOR_LOAD_IN_PROGRESS), _UNREACHABLE),
    }
)


def reaction_to(code: int) -> Reaction:
    """What to do after this error code."""
    return _REACTIONS.get(code, Reaction.FAILED)


def retry_pause(code: int, attempts: int, settings: NativeSettings) -> float:
    """Seconds before a batch that has failed with this code after so many attempts is sent again.

    The settings don't apply to the wait for markers, which takes milliseconds.
    """
    doublings = min(attempts - 1, _MAX_DOUBLINGS)
    if code == E.CONCURRENT_TRANSACTIONS:
        return float(min(_MARKERS_PAUSE * 2**doublings, _MAX_MARKERS_PAUSE))
    pause = min(settings.retry_backoff * 2**doublings, settings.retry_backoff_max)
    return float(pause * CHANCE.uniform(0.8, 1.2))


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


class Patience(Deadline):
    """The time limit of a call that adds many messages: it starts again whenever the brokers have stored some.

    So a call with millions of messages may take longer than the limit as long as it makes progress.
    """

    __slots__ = ("_seen", "_stored")

    def __init__(self, seconds: float, stored: Callable[[], int]) -> None:
        super().__init__(seconds)
        self._stored = stored
        self._seen = stored()

    def chunks(self, items: Iterable[T]) -> Iterator[list[T]]:
        """The items in lists, a list as it is. The time that the caller needs to make them does not count."""
        if type(items) is list:
            yield from [items] if items else []
            return
        remaining = iter(items)
        while True:
            began = time.monotonic()
            chunk = list(islice(remaining, _CHUNK))
            self._at += time.monotonic() - began
            if not chunk:
                return
            yield chunk

    @property
    def left(self) -> float:
        self._look()
        return super().left

    @property
    def expired(self) -> bool:
        self._look()
        return super().expired

    def within(self, seconds: float) -> Deadline:
        self._look()
        return super().within(seconds)

    def _look(self) -> None:
        stored = self._stored()
        if stored != self._seen:
            self._seen = stored
            self._at = time.monotonic() + self.seconds


class MarkerWait:
    """Waits until the last transaction is complete, if that may take longer than the time that has passed since its end.

    A broker that gets a message while markers are being written backs off, for 20 ms in some releases. Checking whether they
    are written costs a request. So the time that a producer's markers take is estimated: at most the time after which the first
    check of a transaction found them written, or else twice the time until a later check did. If markers sometimes take longer
    than the pause between two transactions, the estimate falls slowly, and it doubles when a message without a check was
    answered as late as a message that came too early. The wait only saves time: such a message is refused, and sent again.

    A check without a response within its limit costs the connection. So the next transactions make none, twice as many each
    time: over a connection that slow, the markers are written before the next message arrives.
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
            self._to_skip, self._skipped_next = self._skipped_next, min(2 * self._skipped_next, _MAX_SKIPPED)
        else:
            self._skipped_next = CHECK_AGAIN_AFTER

    def _check(self, passed: float, limit: Deadline) -> None:
        began = time.monotonic()
        if self._are_written(limit):
            self._assumed_written_after -= max(self._assumed_written_after - passed, 0.0) * self._lowered_by
            return
        self._lowered_by = _CAUTION
        takes = time.monotonic() - began
        pauses = Pauses(_START_PAUSE, spread=0.0)
        while limit.left > takes:  # a check with less time would be one without a response
            limit.pause(pauses)
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
