"""Requests that are sent again until a conclusive response or the deadline, by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.client.cluster import CoordinatorUnavailableError, Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.refusals import FORBIDDEN_CODES, forbidden
from dualwrite.kafka.client.retry import repeated
from dualwrite.kafka.client.sockets import ConnectionLostError
from dualwrite.kafka.client.transient import TRANSIENT, CoordinatorMovedError, NoLeaderError, TryAgainError
from dualwrite.outages import REQUEST, Call, kafka_at

_PAUSE: Final = 0.01
_T = TypeVar("_T")


class RetryingClient:
    """A Network that threads share, with retries.

    Args:
        config: The cluster's settings.
        timeout: Seconds that one call may take, including retries, unless the call has its own limit.
    """

    def __init__(self, config: KafkaConfig, timeout: float) -> None:
        self.network = Network(config)
        self._kafka = kafka_at(config.servers)
        self._timeout = timeout
        self._lock = threading.RLock()  # only its owner can release it, which matters after KeyboardInterrupt

    def limit(self, timeout: Limit | None) -> Deadline:
        """The deadline of a call with this limit; None means the client's own."""
        return Deadline.of(self._timeout if timeout is None else timeout)

    def to_coordinator(
        self, kafka_transactional_id: str, request: Callable[[Connection, Deadline], _T], timeout: Limit | None
    ) -> _T:
        """Send a request to the coordinator of an id, which is looked up again when it has moved.

        Args:
            kafka_transactional_id: The id.
            request: Sends the request; raises one of `TRANSIENT` to be called again.
            timeout: See `limit`.

        Raises:
            BrokerUnavailableError: No conclusive response within the time limit.
            BrokerAuthorizationError: The principal may not describe the id.
        """

        def once(deadline: Deadline) -> _T:
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

    def repeated(self, once: Callable[[Deadline], _T], what: str, timeout: Limit | None) -> _T:
        """Call `once` until it raises none of `TRANSIENT`; waiting for other threads' calls counts against the limit.

        Args:
            once: Sends requests.
            what: For error messages: what does not respond.
            timeout: See `limit`.

        Raises:
            BrokerUnavailableError: No conclusive response within the time limit.
        """
        deadline = self.limit(timeout)
        with self._kafka.call(REQUEST) as call:
            return self._repeated(once, what, deadline, call)

    def _repeated(self, once: Callable[[Deadline], _T], what: str, deadline: Deadline, call: Call) -> _T:
        def noting() -> _T:
            try:
                return once(deadline)
            except TRANSIENT as error:
                call.error = error
                raise

        try:
            try:
                if not self._lock.acquire(timeout=deadline.left):
                    raise TryAgainError("another thread is still using the connections")
                return repeated(noting, TRANSIENT, deadline, pause=_PAUSE)
            finally:
                with suppress(RuntimeError):  # not acquired: the time limit passed, or KeyboardInterrupt came first
                    self._lock.release()
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
