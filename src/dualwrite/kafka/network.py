"""The connections to one cluster: a bootstrap server, the broker that coordinates an id, every broker."""

from __future__ import annotations

from typing import Any, Final

from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest, MetadataRequest

from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.config import Address, KafkaConfig
from dualwrite.kafka.wire import Connection, ConnectionLostError, kafka_error_name

_BATCHED_FIND_COORDINATOR: Final = 4  # from this version on the request takes a list of keys


class CoordinatorUnavailableError(Exception):
    """FindCoordinator answered an error that passes by itself, or no broker could be asked."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class Network:
    """Connections by address, kept open and made anew when they broke. Not safe for several threads.

    Args:
        config: The cluster's settings.
    """

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self._connections: dict[Address, Connection] = {}
        self._coordinators: dict[str, Address] = {}

    def connection(self, address: Address) -> Connection:
        """The open connection to a broker, or a new one."""
        found = self._connections.get(address)
        if found is not None and found.usable:
            return found
        if found is not None:
            found.close()
        self._connections[address] = made = Connection(address, self.config)
        return made

    def any_broker(self) -> Connection:
        """A connection to whichever known broker answers, open ones first.

        Raises:
            BrokerUnavailableError: None of them; the message names every address with its reason.
        """
        known = [a for a, c in self._connections.items() if c.usable]
        tried = []
        for address in [*known, *(a for a in self.config.bootstrap if a not in known)]:
            try:
                return self.connection(address)
            except ConnectionLostError as error:
                tried.append(str(error))
        raise BrokerUnavailableError(
            f"No Kafka broker can be reached: {'; '.join(tried)}.",
            next_step="see that the brokers run and that bootstrap.servers "
            "(environment: DUALWRITE_KAFKA_BOOTSTRAP_SERVERS) and security.protocol are right",
            servers=self.config.servers,
        )

    def coordinator(self, kafka_transactional_id: str) -> Connection:
        """A connection to the id's transaction coordinator.

        Raises:
            CoordinatorUnavailableError: There is none at the moment; ask again.
            BrokerUnavailableError: No broker can be reached.
            ConnectionLostError: A connection broke while asking.
        """
        address = self._coordinators.get(kafka_transactional_id)
        if address is None:
            address = self._find(kafka_transactional_id)
            self._coordinators[kafka_transactional_id] = address
        try:
            return self.connection(address)
        except ConnectionLostError:
            self.forget_coordinator(kafka_transactional_id)
            raise

    def forget_coordinator(self, kafka_transactional_id: str) -> None:
        """Ask anew the next time: the coordinator has moved."""
        self._coordinators.pop(kafka_transactional_id, None)

    def brokers(self) -> dict[int, Address]:
        """Every live broker by its node id, by a Metadata request."""
        answer = self.any_broker().call(MetadataRequest(topics=[], allow_auto_topic_creation=False))
        return {b.node_id: Address(b.host, b.port) for b in answer.brokers}

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._coordinators.clear()

    def _find(self, kafka_transactional_id: str) -> Address:
        connection = self.any_broker()
        kind = int(CoordinatorType.TRANSACTION)
        if connection.version_of(FindCoordinatorRequest) >= _BATCHED_FIND_COORDINATOR:
            request = FindCoordinatorRequest(key_type=kind, coordinator_keys=[kafka_transactional_id])
            found: Any = connection.call(request).coordinators[0]
        else:
            found = connection.call(FindCoordinatorRequest(key=kafka_transactional_id, key_type=kind))
        if found.error_code:
            raise CoordinatorUnavailableError(
                f"FindCoordinator answered {kafka_error_name(found.error_code)}", found.error_code
            )
        return Address(found.host, found.port)
