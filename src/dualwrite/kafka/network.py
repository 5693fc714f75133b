"""The connections to one cluster: a bootstrap server, the broker that coordinates an id, every broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kafka.protocol.metadata import CoordinatorType, FindCoordinatorRequest, MetadataRequest

from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.config import Address, KafkaConfig
from dualwrite.kafka.wire import Connection, ConnectionLostError, kafka_error_name

GROUP: Final = int(CoordinatorType.GROUP)
TRANSACTION: Final = int(CoordinatorType.TRANSACTION)
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
        self._coordinators: dict[tuple[int, str], Address] = {}
        self._seen: dict[Address, None] = {}  # brokers that were told of; the ones in the settings may be gone one day

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
        """A connection to whichever known broker answers: open ones first, then those in the settings, then all.

        Raises:
            BrokerUnavailableError: None of them; the message names every address with its reason.
        """
        known = [a for a, c in self._connections.items() if c.usable]
        tried = []
        for address in dict.fromkeys((*known, *self.config.bootstrap, *self._seen)):
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

    def coordinator(self, key: str, kind: int = TRANSACTION) -> Connection:
        """A connection to the coordinator of a transactional id, or of a consumer group.

        Raises:
            CoordinatorUnavailableError: There is none at the moment; ask again.
            BrokerUnavailableError: No broker can be reached.
            ConnectionLostError: A connection broke while asking.
        """
        address = self._coordinators.get((kind, key))
        if address is None:
            address = self._find(key, kind)
            self._coordinators[kind, key] = address
        try:
            return self.connection(address)
        except ConnectionLostError:
            self.forget_coordinator(key, kind)
            raise

    def forget_coordinator(self, key: str, kind: int = TRANSACTION) -> None:
        """Ask anew the next time: the coordinator has moved."""
        self._coordinators.pop((kind, key), None)

    def metadata(self, topics: Sequence[str], *, timeout: float | None = None) -> Any:
        """The answer to a Metadata request for these topics, which makes them where the broker does that by itself.

        Raises:
            BrokerUnavailableError: No broker can be reached.
            ConnectionLostError: The connection broke while asking.
        """
        named = [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
        answer = self.any_broker().call(MetadataRequest(topics=named, allow_auto_topic_creation=True), timeout=timeout)
        self._seen.update((Address(b.host, b.port), None) for b in answer.brokers)
        return answer

    def brokers(self) -> dict[int, Address]:
        """Every live broker by its node id, by a Metadata request."""
        answer = self.any_broker().call(MetadataRequest(topics=[], allow_auto_topic_creation=False))
        found = {b.node_id: Address(b.host, b.port) for b in answer.brokers}
        self._seen.update((address, None) for address in found.values())
        return found

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._coordinators.clear()

    def _find(self, key: str, kind: int) -> Address:
        connection = self.any_broker()
        if connection.version_of(FindCoordinatorRequest) >= _BATCHED_FIND_COORDINATOR:
            found: Any = connection.call(FindCoordinatorRequest(key_type=kind, coordinator_keys=[key])).coordinators[0]
        else:
            found = connection.call(FindCoordinatorRequest(key=key, key_type=kind))
        if found.error_code:
            raise CoordinatorUnavailableError(
                f"FindCoordinator answered {kafka_error_name(found.error_code)}", found.error_code
            )
        return Address(found.host, found.port)
