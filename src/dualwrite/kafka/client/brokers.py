"""The connections to one cluster: to a bootstrap server, to the coordinator of an id, to every broker."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing, suppress
from enum import IntEnum
from functools import partial
from typing import Any, Final, Generic, TypeVar

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import BrokerAuthorizationError, BrokerUnavailableError, ClusterMismatchError, DualWriteError
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError, Inbox, Node, about_the_cluster
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.connecting import ConnectionAttempt, OtherNodeError
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.kafka_errors import error_name
from dualwrite.kafka.client.messages_generated import FindCoordinatorRequest, MetadataRequest, MetadataResponse
from dualwrite.kafka.client.support import check_answer, check_has_transactions

_LOOK_AT_OPENINGS: Final = 0.01

K = TypeVar("K", bound=Hashable)

MakeRequest = Callable[[Connection], Request[Any] | None]
"""Makes the request for a connection: what it may contain depends on the versions that the broker supports; None: nothing."""


class CoordinatorType(IntEnum):
    """What FindCoordinator finds the coordinator of."""

    GROUP = 0
    TRANSACTION = 1


GROUP: Final = CoordinatorType.GROUP
TRANSACTION: Final = CoordinatorType.TRANSACTION
_JUST_NOW: Final = 1.0  # seconds for which a broker's answer counts as one given now
REFUSAL_LIMIT: Final = 2.0
"""Seconds in which brokers show that they refuse a client, in the middle of its work; else it asks again soon."""
_HEAD_START: Final = 1.0  # seconds to wait for one of several brokers before the next is tried as well


class CoordinatorUnavailableError(Exception):
    """FindCoordinator failed with a transient error, or no broker is reachable."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class Network:
    """Connections by address, one to each broker, kept open and replaced when they break. Not thread-safe.

    Each call has a deadline for everything that it waits for: name lookup, connecting, TLS, login, the response. Without a
    deadline, `socket.connection.setup.timeout.ms` and `socket.timeout.ms` limit each step.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self._connections: dict[Address, Connection] = {}
        self._aside: dict[Address, Connection] = {}
        self._openings: dict[Address, ConnectionAttempt] = {}
        self._coordinators: dict[tuple[int, str], Address] = {}
        self._nodes: dict[Address, int] = {}  # as brokers have named them; the bootstrap servers may be replaced one day
        self._cluster_id: str | None = None
        self._has_identities = False  # whether brokers check that they are the ones that a client expects (KIP-1242)
        self._told: dict[Address, tuple[str, float]] = {}  # the cluster id, and when it was reported

    def connection(self, address: Address, deadline: Deadline | None = None) -> Connection:
        """The open connection to a broker, or a new one.

        Raises:
            ConnectionLostError: It was not open by the deadline. Opening continues in the background: a later call may get it.
            BrokerAuthorizationError: The broker refused the login, or its TLS certificate is not trusted.
        """
        deadline = deadline or Deadline(self.config.connect_timeout)
        made = self.connection_soon(address, deadline)
        if made is None:
            raise ConnectionLostError(address, f"no connection within {deadline.seconds:.3g} s")
        return made

    def connection_soon(self, address: Address, deadline: Deadline, *, wait: float | None = None) -> Connection | None:
        """As `connection`, but returns None if it is not open within `wait` seconds, or by the deadline."""
        found = self._connections.get(address)
        if found is not None:
            if found.make_ready(deadline):
                return found
            del self._connections[address]
            found.close()
        opening = self._openings.get(address)
        if opening is None or not opening.is_ours:
            self._openings[address] = opening = ConnectionAttempt(address, self.config, self._expected(address))
        if not opening.wait(deadline.left if wait is None else wait):
            return None
        del self._openings[address]
        if opening.error is not None:
            if isinstance(opening.error, OtherNodeError):
                self._nodes.pop(address, None)  # the next attempt takes whichever broker of the cluster is there
            raise opening.error
        made = opening.connection
        assert made is not None
        self._has_identities = made.asks_for_identity
        self._check_cluster(made, opening.cluster_id)
        self._connections[address] = made
        return made

    def _expected(self, address: Address) -> Node | None:
        """Which broker should be at an address, if it can be asked whether it is that one; it is, or `_check_cluster` asks."""
        node = self._nodes.get(address)
        return None if node is None or not (self._has_identities and self._cluster_id) else Node(self._cluster_id, node)

    def _check_cluster(self, made: Connection, found: str) -> None:
        """Refuse a broker of another cluster: a host name may resolve to one while work on this cluster continues (rule CL).

        Raises:
            ClusterMismatchError: The broker belongs to another cluster than the first broker that was connected to.
        """
        self._told[made.address] = found, time.monotonic()
        if self._cluster_id is None:
            self._cluster_id = found
        if found != self._cluster_id:
            made.close()
            raise ClusterMismatchError(
                f"{made.address} is now a broker of Kafka cluster {found!r}; the first connection was to {self._cluster_id!r}.",
                cause="a broker's host name now resolves to another cluster, or the cluster was recreated",
                next_step="check what bootstrap.servers and advertised.listeners resolve to; nothing was sent to this broker",
                stored_cluster_id=self._cluster_id,
                seen_cluster_id=found,
            )

    def set_aside(self, connection: Connection) -> None:
        """Have another connection to its broker from now on, since a quota holds back messages on this one, but not commits.

        There are at most two connections to a broker, which change places.
        """
        address = connection.address
        if self._connections.get(address) is connection:
            if (other := self._aside.pop(address, None)) is not None:
                self._connections[address] = other
            else:
                del self._connections[address]
            self._aside[address] = connection

    def is_aside(self, connection: Connection) -> bool:
        """Whether a connection was set aside."""
        return self._aside.get(connection.address) is connection

    def wait_for_openings(self, seconds: float) -> None:
        """Wait for at most `seconds` until one of the connections being opened is open or has failed; each ends one wait."""
        openings = [opening for opening in self._openings.values() if not opening.is_reported]
        for opening in openings:
            opening.is_reported = opening.wait(seconds / len(openings))

    @property
    def has_openings(self) -> bool:
        """Whether `wait_for_openings` has connections to wait for."""
        return bool(self._openings) and any(not opening.is_reported for opening in self._openings.values())

    def is_opening(self, address: Address) -> bool:
        """Whether a connection to this broker is being opened."""
        return address in self._openings

    def any_broker(self, deadline: Deadline | None = None) -> Connection:
        """A connection to any known broker: open connections first, then the bootstrap servers, then all other brokers.

        A broker that drops packets does not use up the time: after a second the next one is tried in parallel. One that refuses
        this client does not matter if another lets it in.

        Raises:
            BrokerAuthorizationError: None lets this client in, and at least one of them has answered that it does not.
            BrokerUnavailableError: No broker can be reached; the message names every address with its reason.
        """
        deadline = deadline or Deadline(self.config.connect_timeout)
        known = [a for a, c in self._connections.items() if c.usable]
        untried = list(dict.fromkeys((*known, *self.config.bootstrap, *self._nodes)))
        failed: dict[Address, str] = {}
        refused: BrokerAuthorizationError | None = None
        without_token: BrokerUnavailableError | None = None
        while untried:
            silent = []
            for position, address in enumerate(untried):
                wait = deadline.left / (len(untried) - position)
                try:
                    made = self.connection_soon(address, deadline, wait=wait if len(untried) == 1 else min(wait, _HEAD_START))
                except ConnectionLostError as error:
                    failed[address] = f"{error}"
                    without_token = error.__cause__ if isinstance(error.__cause__, BrokerUnavailableError) else without_token
                    continue
                except BrokerAuthorizationError as error:
                    refused = refused or error
                    continue
                if made is not None:
                    return made
                failed[address] = f"{address}: no connection within {deadline.seconds:.3g} s"
                silent.append(address)
            untried = [] if deadline.expired else silent
        if refused is not None:
            raise refused
        if without_token is not None:
            raise without_token
        raise BrokerUnavailableError(
            f"No Kafka broker can be reached: {'; '.join(failed.values())}.",
            next_step="check that the brokers are running and that bootstrap.servers "
            "(environment: DUALWRITE_KAFKA_BOOTSTRAP_SERVERS) and security.protocol are correct",
            servers=self.config.servers,
        )

    def coordinator(self, key: str, kind: int = TRANSACTION, deadline: Deadline | None = None) -> Connection:
        """A connection to the coordinator of a transactional id, or of a consumer group.

        Raises:
            CoordinatorUnavailableError: There is no coordinator at the moment; retry.
            BrokerUnavailableError: No broker can be reached.
            ConnectionLostError: The connection broke during the request.
        """
        address = self._coordinators.get((kind, key))
        if address is None:
            found = self.find_coordinators([key], deadline, kind=kind)[key]
            if isinstance(found, CoordinatorUnavailableError):
                raise found
            address = found
        try:
            return self.connection(address, deadline)
        except ConnectionLostError:
            self.forget_coordinator(key, kind)
            raise

    def coordinators(
        self, keys: Sequence[str], kind: int = TRANSACTION, deadline: Deadline | None = None
    ) -> dict[str, tuple[int, Address] | CoordinatorUnavailableError]:
        """Node id and address of each key's coordinator, or why it has none now; one request for all keys, never cached.

        Raises:
            BrokerUnavailableError: No broker can be reached.
            ConnectionLostError: The connection broke during the request.
            UnsupportedBrokerError: The broker is too old, or has no transactions.
        """
        connection = self.any_broker(deadline)
        if kind == TRANSACTION:
            check_has_transactions(connection.address, connection.api_versions)
        response = connection.call(FindCoordinatorRequest(key_type=kind, coordinator_keys=list(keys)), deadline)
        self._nodes.update((Address(c.host, c.port), c.node_id) for c in response.coordinators if not c.error_code)
        for found in response.coordinators:
            check_answer(f"FindCoordinator of type {int(kind)}", found.error_code, at=connection.address)
        return {
            found.key: CoordinatorUnavailableError(f"FindCoordinator returned {error_name(found.error_code)}", found.error_code)
            if found.error_code
            else (found.node_id, Address(found.host, found.port))
            for found in response.coordinators
        }

    def find_coordinators(
        self, keys: Sequence[str], deadline: Deadline | None = None, *, kind: int = TRANSACTION
    ) -> dict[str, Address | CoordinatorUnavailableError]:
        """The addresses of the coordinators of ids; those that are not known yet are looked up by one request.

        Raises: as `coordinators`.
        """
        places: dict[str, Address | CoordinatorUnavailableError] = {}
        unknown = []
        for key in keys:
            if (kind, key) in self._coordinators:
                places[key] = self._coordinators[kind, key]
            else:
                unknown.append(key)
        for key, found in self.coordinators(unknown, kind, deadline).items() if unknown else ():
            if isinstance(found, CoordinatorUnavailableError):
                places[key] = found
            else:
                places[key] = self._coordinators[kind, key] = found[1]
        return places

    def forget_coordinator(self, key: str, kind: int = TRANSACTION) -> None:
        """Look up the coordinator again next time, since it has moved."""
        self._coordinators.pop((kind, key), None)

    def metadata(self, topics: Sequence[str], deadline: Deadline | None = None) -> MetadataResponse:
        """The response to a Metadata request for these topics; missing ones are created if the broker does so automatically.

        Raises:
            BrokerUnavailableError: No broker can be reached.
            ConnectionLostError: The connection broke during the request.
        """
        named = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
        response = self.any_broker(deadline).call(MetadataRequest(topics=named, allow_auto_topic_creation=True), deadline)
        self._nodes.update((Address(b.host, b.port), b.node_id) for b in response.brokers)
        return response

    def cluster_id(self, deadline: Deadline | None = None) -> str:
        """Kafka's `cluster.id`, as a broker reports it now, or has within the last second; empty if the brokers have none."""
        broker = self.any_broker(deadline)
        found, at = self._told.get(broker.address, ("", -_JUST_NOW))
        if time.monotonic() - at < _JUST_NOW:
            return found
        found = broker.call(about_the_cluster(), deadline).cluster_id or ""
        self._told[broker.address] = found, time.monotonic()
        return found

    def brokers(self, deadline: Deadline | None = None) -> dict[int, Address]:
        """Every live broker by its node id, from a Metadata request."""
        response = self.any_broker(deadline).call(about_the_cluster(), deadline)
        found = {b.node_id: Address(b.host, b.port) for b in response.brokers}
        self._nodes.update((address, node) for node, address in found.items())
        return found

    def close(self) -> None:
        """Close all connections, and forget which cluster they were to."""
        for connection in (*self._connections.values(), *self._aside.values()):
            connection.close()
        for opening in self._openings.values():
            opening.give_up()
        self._connections.clear()
        self._aside.clear()
        self._openings.clear()
        self._coordinators.clear()
        self._told.clear()
        self._nodes.clear()
        self._cluster_id = None


def check_not_refused(kafka: KafkaConfig | Mapping[str, Any] | str, timeout: Limit) -> None:
    """Connect once, for a client of librdkafka, which takes a refusal for an outage: it goes on until its time limit.

    What librdkafka reports can't replace this: it reports the same for a broker that is starting.

    Raises:
        BrokerAuthorizationError: As for `Network.any_broker`. If no broker answers, nothing is raised.
    """
    with closing(Network(KafkaConfig.of(kafka))) as network, suppress(BrokerUnavailableError):
        network.any_broker(Deadline.of(timeout))


def request_together(
    network: Network, requests: Mapping[Address, MakeRequest], deadline: Deadline
) -> dict[Address, Any | ConnectionLostError | DualWriteError]:
    """The response of each broker, or why there is none. A broker that is slow or down does not delay the others.

    A broker that has not responded by the deadline gets an error in place of a response.
    """
    return requests_together(network, {address: (address, make) for address, make in requests.items()}, deadline)


def requests_together(
    network: Network, requests: Mapping[K, tuple[Address, MakeRequest]], deadline: Deadline
) -> dict[K, Any | ConnectionLostError | DualWriteError]:
    """As `request_together`, also with several requests to one broker, by keys of the caller's choice."""
    return _Round(network, requests, deadline).run()


class _Round(Generic[K]):
    """Requests to brokers: those whose connection is being opened, those without a response, responses."""

    def __init__(self, network: Network, requests: Mapping[K, tuple[Address, MakeRequest]], deadline: Deadline) -> None:
        self._network = network
        self._requests = requests
        self._deadline = deadline
        self._unopened = dict.fromkeys(requests)
        self._waiting: dict[K, tuple[Connection, Inbox, str]] = {}
        self._responses: dict[K, Any] = {}

    def run(self) -> dict[K, Any]:
        while (self._unopened or self._waiting) and not self._deadline.expired:
            for key in tuple(self._unopened):
                self._guarded(key, self._send)
            is_alone = len(self._waiting) == 1 and not self._unopened
            if not is_alone:
                self._wait()
            for key in tuple(self._waiting):
                self._guarded(key, partial(self._receive, seconds=self._deadline.left if is_alone else 0.0))
        for key in self._requests.keys() - self._responses.keys():
            late = f"no connection within {self._deadline.seconds:.3g} s"
            if key in self._waiting:
                connection, _, name = self._waiting[key]
                connection.close()  # or a late response would be read as that to the next request
                late = f"no response to {name} within {self._deadline.seconds:.3g} s"
            self._responses[key] = ConnectionLostError(self._requests[key][0], late)
        return self._responses

    def _guarded(self, key: K, step: Callable[[K], None]) -> None:
        try:
            step(key)
        except (ConnectionLostError, DualWriteError) as error:
            self._unopened.pop(key, None)
            self._waiting.pop(key, None)
            self._responses[key] = error

    def _send(self, key: K) -> None:
        address, make = self._requests[key]
        connection = self._network.connection_soon(address, self._deadline, wait=0.0)
        if connection is None:
            return
        inbox: Inbox = []
        request = make(connection)
        del self._unopened[key]
        if request is None:
            self._responses[key] = None
            return
        connection.send(request, inbox, self._deadline)
        self._waiting[key] = (connection, inbox, type(request).__name__)

    def _receive(self, key: K, *, seconds: float) -> None:
        connection, inbox, _ = self._waiting[key]
        if not inbox:
            connection.receive(seconds)
        if inbox:
            del self._waiting[key]
            self._responses[key] = inbox[0][1]

    def _wait(self) -> None:
        """Wait until a response arrives; only for a moment while connections are being opened."""
        seconds = min(self._deadline.left, _LOOK_AT_OPENINGS) if self._unopened else self._deadline.left
        if not self._waiting:
            self._network.wait_for_openings(seconds)
            return
        if any(inbox or connection.has_read for connection, inbox, _ in self._waiting.values()):
            return
        with selectors.DefaultSelector() as selector:
            for connection in {connection for connection, *_ in self._waiting.values()}:
                selector.register(connection, selectors.EVENT_READ)
            selector.select(seconds)
