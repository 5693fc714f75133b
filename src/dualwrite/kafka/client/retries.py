"""Retry until a conclusive response or the deadline: the one retry loop of the Kafka side."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, TypeVar

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerError, BrokerUnavailableError
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.brokers import CoordinatorUnavailableError, Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.kafka_errors import FORBIDDEN_CODES, ErrorCode, error_name, forbidden
from dualwrite.outages import REQUEST, Call, kafka_at

T = TypeVar("T")

_MOST: Final = 1.0
_PAUSE: Final = 0.01
_MOVED: Final = (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR)
_TRANSIENT_CODES: Final = (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)


class TryAgainError(Exception):
    """A transient error: send the request again."""


class NoLeaderError(TryAgainError):
    """A partition of the transaction has no leader that could write the marker."""


class CoordinatorMovedError(Exception):
    """The id has another coordinator now: look the coordinator up and send the request there."""


TRANSIENT: Final = (
    TryAgainError,
    CoordinatorMovedError,
    ConnectionLostError,
    CoordinatorUnavailableError,
    BrokerUnavailableError,
)


def repeated(
    once: Callable[[Deadline], T],
    passing: tuple[type[Exception], ...],
    deadline: Deadline,
    *,
    pause: float,
    call: Call | None = None,
) -> T:
    """Call until it raises none of `passing`; after the deadline, the last of these errors is raised.

    If the deadline cuts off a request, the error of the attempt before it is raised, since it says what was wrong. No call
    starts after the deadline, except the first; `once` must observe it, too. The pause, in seconds, is doubled each time, up
    to 1 s.
    """
    before: Exception | None = None
    while True:
        try:
            return once(deadline)
        except passing as error:
            if call is not None:
                call.error = error
            if before is not None and isinstance(error, ConnectionLostError) and deadline.expired:
                raise before from error
            before = error
            deadline.sleep(pause * random.uniform(1.0, 2.0))  # noqa: S311  (spreads retries; no secret)
            if deadline.expired:
                raise
            pause = min(2 * pause, _MOST)


def rounds(deadline: Deadline, *, pause: float) -> Iterator[None]:
    """Rounds of attempts, for work whose parts succeed one by one; the caller leaves the loop when nothing is left.

    No round starts after the deadline, except the first. The pause is as for `repeated`.
    """
    while True:
        yield
        if deadline.expired:
            return
        deadline.sleep(pause * random.uniform(1.0, 2.0))  # noqa: S311  (spreads retries; no secret)
        pause = min(2 * pause, _MOST)


def check_transient(code: int, request: str) -> None:
    """Raise transient errors, after which the request is sent again; all others are left to the caller.

    Raises:
        TryAgainError, CoordinatorMovedError: The error is transient.
    """
    if code in _MOVED:
        raise CoordinatorMovedError(f"{request} returned {error_name(code)}")
    if code in _TRANSIENT_CODES:
        raise TryAgainError(f"{request} returned {error_name(code)}")


def check_retriable(code: int, kafka_transactional_id: str, request: str, operation: str) -> None:
    """As `check_transient`, and for authorization errors.

    `operation` is that of the ACL that the request requires.

    Raises:
        BrokerAuthorizationError: The principal lacks the ACL.
    """
    check_transient(code, request)
    if code in FORBIDDEN_CODES:
        raise forbidden(code, kafka_transactional_id, request, operation)


def check_response(code: int, kafka_transactional_id: str | None, request: str, operation: str) -> None:
    """As `check_retriable`, for requests whose other errors the caller does not handle.

    Raises:
        BrokerError: Any other error.
    """
    check_retriable(code, kafka_transactional_id or "", request, operation)
    if code:
        raise BrokerError(
            f"{request} returned {error_name(code)} ({code}).",
            transactional_id=kafka_transactional_id,
            code=code,
            name=error_name(code),
        )


class RetryingClient:
    """A Network that threads share, with retries; a call without its own limit takes at most `timeout` seconds."""

    def __init__(self, config: KafkaConfig, timeout: float) -> None:
        self.network = Network(config)
        self._kafka = kafka_at(config.servers)
        self._timeout = timeout
        self._lock = threading.RLock()  # only its owner can release it, which matters after KeyboardInterrupt

    def limit(self, timeout: Limit | None) -> Deadline:
        """The deadline of a call with this limit; None means the client's own."""
        return timeout if isinstance(timeout, Deadline) else Deadline(self._timeout if timeout is None else timeout)

    def to_coordinator(
        self, kafka_transactional_id: str, request: Callable[[Connection, Deadline], T], timeout: Limit | None
    ) -> T:
        """Send a request to the coordinator of an id, which is looked up again when it has moved.

        Raises:
            BrokerUnavailableError: No conclusive response within the time limit.
            BrokerAuthorizationError: The principal may not describe the id.
        """

        def once(deadline: Deadline) -> T:
            try:
                return request(self.network.coordinator(kafka_transactional_id, deadline=deadline), deadline)
            except (ConnectionLostError, CoordinatorMovedError):
                self.network.forget_coordinator(kafka_transactional_id)
                raise
            except CoordinatorUnavailableError as error:
                if error.code in FORBIDDEN_CODES:
                    raise forbidden(error.code, kafka_transactional_id, "FindCoordinator", "Describe") from error
                raise

        return self.repeated(once, f"the coordinator of {kafka_transactional_id!r}", timeout)

    def repeated(self, once: Callable[[Deadline], T], what: str, timeout: Limit | None) -> T:
        """Call `once` until it raises none of `TRANSIENT`; waiting for other threads' calls counts against the limit.

        Raises:
            BrokerUnavailableError: No conclusive response from `what` within the time limit.
        """
        deadline = self.limit(timeout)
        with self._kafka.call(REQUEST) as call:
            try:
                if not self._lock.acquire(timeout=deadline.left):
                    raise TryAgainError("another thread is still using the connections")
                return repeated(once, TRANSIENT, deadline, pause=_PAUSE, call=call)
            except BrokerUnavailableError:
                raise
            except NoLeaderError as error:
                raise BrokerUnavailableError(
                    f"The transaction could not be ended within {deadline.seconds:.3g} s by {what}: {error}.",
                    cause="the brokers with the partition's replicas are down or still starting",
                    next_step="start them and retry; prepared and open transactions stay as they are",
                    servers=self.network.config.servers,
                ) from error
            except TRANSIENT as error:
                raise BrokerUnavailableError(
                    f"No answer from {what} at {self.network.config.servers} within {deadline.seconds:.3g} s: {error}.",
                    cause="the broker is starting, overloaded, or unreachable at its advertised address",
                    next_step="retry; prepared transactions stay prepared",
                    servers=self.network.config.servers,
                ) from error
            finally:
                with suppress(RuntimeError):  # not acquired: the time limit passed, or KeyboardInterrupt came first
                    self._lock.release()
