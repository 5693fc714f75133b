"""Read-only requests to a cluster, retried until a conclusive response or the deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Final, Self, TypeVar

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerAuthorizationError, BrokerUnavailableError
from dualwrite.kafka.client.cluster import CoordinatorUnavailableError, Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import DescribeConfigsRequest, DescribeConfigsResponse
from dualwrite.kafka.client.retry import repeated
from dualwrite.kafka.client.sockets import ConnectionLostError

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4

_TRANSIENT: Final = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.REQUEST_TIMED_OUT,
)
_PAUSE: Final = 0.02

T = TypeVar("T")


class _TryAgainError(Exception):
    """A transient error: retry."""


class InspectionClient:
    """Sends read-only requests to one cluster, all under one time limit. Must be closed, by `with` or `close()`.

    Args:
        config: The cluster's settings.
        timeout: Seconds from now on, including retries.
        network: The connections to use, if there are some already; the caller closes them.
    """

    def __init__(self, config: KafkaConfig, *, timeout: Limit, network: Network | None = None) -> None:
        self._owns_network = network is None
        self._network = Network(config) if network is None else network
        self._deadline = Deadline.of(timeout)

    def to_coordinator(self, kafka_transactional_id: str, request: Callable[[Connection, Deadline], T]) -> T:
        """Send a request to the coordinator of an id; `request` must observe the deadline.

        Raises:
            BrokerUnavailableError: No response within the time limit.
            BrokerAuthorizationError: The principal lacks Describe on the id.
        """

        def once() -> T:
            try:
                return request(self._network.coordinator(kafka_transactional_id, deadline=self._deadline), self._deadline)
            except CoordinatorUnavailableError as error:
                if error.code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                    raise forbidden(kafka_transactional_id, "FindCoordinator", error.code) from error
                raise
            except (ConnectionLostError, _TryAgainError):
                self._network.forget_coordinator(kafka_transactional_id)
                raise

        return self._repeated(once, f"the transaction coordinator of {kafka_transactional_id!r}")

    def to_cluster(self, request: Callable[[Network, Deadline], T]) -> T:
        """Send requests to the brokers that `request` chooses; it must observe the deadline.

        Raises:
            BrokerUnavailableError: No response within the time limit.
        """
        return self._repeated(lambda: request(self._network, self._deadline), "a broker")

    def close(self) -> None:
        """Close the connections, unless they belong to the caller."""
        if self._owns_network:
            self._network.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _repeated(self, once: Callable[[], T], what: str) -> T:
        transient = (_TryAgainError, ConnectionLostError, CoordinatorUnavailableError, BrokerUnavailableError)
        try:
            return repeated(once, transient, self._deadline, pause=_PAUSE)
        except BrokerUnavailableError:
            raise
        except transient as error:
            servers = self._network.config.servers
            raise BrokerUnavailableError(
                f"No answer from {what} at {servers} within {self._deadline.seconds:.3g} s: {error}.",
                cause="the broker is starting, overloaded, or unreachable at its advertised address",
                next_step="check that the brokers are running and their advertised.listeners are reachable from here; retry",
                servers=servers,
            ) from error


def raise_if_transient(code: int, request: str) -> None:
    """Have an InspectionClient send the request again if the response's error is transient."""
    if code in _TRANSIENT:
        raise _TryAgainError(f"{request} returned {error_name(code)}")


def forbidden(kafka_transactional_id: str, request: str, code: int) -> BrokerAuthorizationError:
    """The error for a principal that lacks a permission on the id."""
    return BrokerAuthorizationError(
        f"Kafka refuses {request}: {error_name(code)}.",
        transactional_id=kafka_transactional_id,
        next_step="grant the principal Write and Describe on this transactional id, preferably by a prefixed ACL, or use an "
        "id that it may use",
        code=code,
        name=error_name(code),
    )


def described_settings(
    connection: Connection, resource_type: int, names: Iterable[str], keys: Iterable[str], deadline: Deadline
) -> dict[str, Mapping[str, str]]:
    """Settings of topics, or of the broker on this connection (DescribeConfigs), by resource and key.

    A key is missing if the principal may not read it, or the broker does not know it: a broker also lists unknown keys from
    its server.properties, without a value.
    """
    return settings_in(connection.call(settings_request(resource_type, names, keys), deadline))


def settings_request(resource_type: int, names: Iterable[str], keys: Iterable[str]) -> DescribeConfigsRequest:
    """The request of `described_settings`."""
    resource = DescribeConfigsRequest.DescribeConfigsResource
    wanted = list(keys)
    return DescribeConfigsRequest(
        resources=[resource(resource_type=resource_type, resource_name=n, configuration_keys=wanted) for n in names],
        include_synonyms=False,
        include_documentation=False,
    )


def settings_in(response: DescribeConfigsResponse) -> dict[str, Mapping[str, str]]:
    """The settings in the response to `settings_request`."""
    return {
        found.resource_name: {entry.name: entry.value for entry in found.configs if entry.value is not None}
        for found in response.results
        if not found.error_code
    }
