"""Retry until a conclusive response or the deadline: the one retry loop of the Kafka side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from dualwrite.deadline import Deadline, Limit, Pauses
from dualwrite.errors import BrokerError, BrokerUnavailableError, DualWriteError
from dualwrite.kafka.client.broker_connection import ConnectionLostError
from dualwrite.kafka.client.brokers import (
    GROUP,
    TRANSACTION,
    CoordinatorType,
    CoordinatorUnavailableError,
    MakeRequest,
    Network,
    requests_together,
)
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.kafka_errors import FORBIDDEN_CODES, ErrorCode, error_name, forbidden
from dualwrite.kafka.client.support import check_answer
from dualwrite.observability.outages import REQUEST, SideCall, kafka_at

T = TypeVar("T")

_PAUSE: Final = 0.01
_MOVED: Final = (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR)
_TRANSIENT_CODES: Final = (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)


class TryAgainError(Exception):
    """A transient error: send the request again."""


class NoLeaderError(TryAgainError):
    """A partition of the transaction has no leader that could write the marker."""


class AnsweredError(TryAgainError):
    """Kafka has answered, and may answer otherwise in a moment: to ask it again is no outage."""


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
    call: SideCall | None = None,
) -> T:
    """Call until it raises none of `passing`; after the deadline, the last of these errors is raised.

    If the deadline cuts off a request, the error of the attempt before it is raised, since it says what was wrong. No call
    starts after the deadline, except the first; `once` must observe it, too. The first pause takes `pause` seconds.
    """
    pauses = Pauses(pause)
    before: Exception | None = None
    while True:
        try:
            return once(deadline)
        except passing as error:
            if call is not None:
                call.error = error
                if isinstance(error, AnsweredError):
                    call.began = time.monotonic() + pauses.upcoming  # a pause of ours is no time without an answer
            if before is not None and isinstance(error, ConnectionLostError) and deadline.expired:
                raise before from error
            before = error
            if not deadline.pause(pauses):
                raise


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
        UnsupportedBrokerError: The broker does not have the request.
        BrokerError: Any other error.
    """
    check_retriable(code, kafka_transactional_id or "", request, operation)
    check_answer(request, code)
    if code:
        raise BrokerError(
            f"{request} returned {error_name(code)} ({code}).",
            transactional_id=kafka_transactional_id,
            code=code,
            name=error_name(code),
        )


def result_of(read: Callable[[], T]) -> T | Exception:
    """What `read` returns, or its error, which is about one of several ids."""
    try:
        return read()
    except (DualWriteError, *TRANSIENT) as error:
        return error


def answers(
    network: Network,
    requests: Mapping[str, MakeRequest],
    read: Callable[[str, Any], T],
    addresses: Mapping[str, Address],
    deadline: Deadline,
) -> dict[str, T | Exception]:
    """Send each id's request to its address, side by side, and read the responses; for `RetryingClient.of_each`."""
    results: dict[str, T | Exception] = {}
    sent = {name: (address, requests[name]) for name, address in addresses.items()}
    for name, found in requests_together(network, sent, deadline).items():
        results[name] = found if isinstance(found, Exception) else result_of(partial(read, name, found))
    return results


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

    def of_each(
        self,
        names: Iterable[str],
        ask: Callable[[Mapping[str, Address], Deadline], Mapping[str, T | Exception]],
        timeout: Limit | None,
        *,
        kind: CoordinatorType = TRANSACTION,
    ) -> dict[str, T]:
        """What the coordinators of transactional ids, or of groups, answer about each of them.

        Args:
            names: The ids.
            ask: Gets the addresses of the ids' coordinators; returns an answer or an error for each, asked for side by side. It
                is called again for those with a transient error; a coordinator that has moved is looked up again.
            timeout: The limit for all.
            kind: The kind of the coordinators.

        Raises:
            BrokerUnavailableError: No conclusive response about one of them within the time limit.
            BrokerAuthorizationError: The principal may not describe one of them.
            BrokerError: As returned by `ask`.
        """
        wanted = list(dict.fromkeys(names))
        found: dict[str, T] = {}
        if not wanted:
            return found

        def once(deadline: Deadline) -> dict[str, T]:
            answers: dict[str, T | Exception] = {}
            known: dict[str, Address] = {}
            for name, place in self.network.find_coordinators(wanted, deadline, kind=kind).items():
                if isinstance(place, Address):
                    known[name] = place
                else:
                    answers[name] = place
            answers.update(ask(known, deadline.within(self.network.config.socket_timeout)))
            failed: list[Exception] = []
            for name, answer in answers.items():
                if isinstance(answer, Exception):
                    failed.append(self._noted(name, answer, kind))
                else:
                    found[name] = answer
                    wanted.remove(name)
            if wanted:
                nothing = TryAgainError(f"the responses say nothing about {wanted[0]!r}")
                raise min(failed, key=lambda error: isinstance(error, TRANSIENT), default=nothing)
            return found

        what = "the coordinators" if len(wanted) > 1 else f"the coordinator of {'the group ' * (kind == GROUP)}{wanted[0]!r}"
        return self.repeated(once, what, timeout)

    def _noted(self, name: str, error: Exception, kind: CoordinatorType) -> Exception:
        """An error about an id or a group: the coordinator is looked up again if it has moved."""
        if isinstance(error, ConnectionLostError | CoordinatorMovedError):
            self.network.forget_coordinator(name, kind)
        if isinstance(error, CoordinatorUnavailableError) and error.code in FORBIDDEN_CODES:
            return forbidden(error.code, name, "FindCoordinator", "Describe")
        return error

    def forget_cluster(self) -> None:
        """Close the connections and forget which cluster they were to, between two calls."""
        with self._lock:
            self.network.close()

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
                answer = repeated(once, TRANSIENT, deadline, pause=_PAUSE, call=call)
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
            else:
                return answer
            finally:
                with suppress(RuntimeError):  # not acquired: the time limit passed, or KeyboardInterrupt came first
                    self._lock.release()
