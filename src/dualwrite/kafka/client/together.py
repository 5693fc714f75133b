"""Requests to several brokers, all at once, from one thread."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Generic, TypeVar

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.connection import Connection, Inbox
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.sockets import ConnectionLostError

_LOOK_AT_OPENINGS: Final = 0.01

K = TypeVar("K", bound=Hashable)

MakeRequest = Callable[[Connection], Request[Any]]
"""Makes the request for a connection: what it may contain depends on the versions that the broker supports."""


def request_together(
    network: Network, requests: Mapping[Address, MakeRequest], deadline: Deadline
) -> dict[Address, Any | ConnectionLostError | DualWriteError]:
    """The response of each broker, or why there is none. A broker that is slow or down does not delay the others.

    Args:
        network: The connections.
        requests: The request for each broker.
        deadline: For all of them; a broker that has not responded by then gets an error in place of a response.
    """
    return requests_together(network, {address: (address, make) for address, make in requests.items()}, deadline)


def requests_together(
    network: Network, requests: Mapping[K, tuple[Address, MakeRequest]], deadline: Deadline
) -> dict[K, Any | ConnectionLostError | DualWriteError]:
    """As `request_together`, also with several requests to one broker.

    Args:
        network: The connections.
        requests: The broker and the request, by keys of the caller's choice.
        deadline: As for `request_together`.
    """
    return _Round(network, requests, deadline).run()


class _Round(Generic[K]):
    """Requests to brokers: those whose connection is being opened, those without a response, responses."""

    def __init__(self, network: Network, requests: Mapping[K, tuple[Address, MakeRequest]], deadline: Deadline) -> None:
        self._network = network
        self._requests = requests
        self._deadline = deadline
        self._unopened = dict.fromkeys(requests)
        self._waiting: dict[K, tuple[Connection, Inbox]] = {}
        self._responses: dict[K, Any] = {}

    def run(self) -> dict[K, Any]:
        while (self._unopened or self._waiting) and not self._deadline.expired:
            for key in tuple(self._unopened):
                self._guarded(key, self._send)
            self._wait()
            for key in tuple(self._waiting):
                self._guarded(key, self._receive)
        for key in self._requests.keys() - self._responses.keys():
            if key in self._waiting:
                self._waiting[key][0].close()  # or a late response would be read as that to the next request
            late = f"no response within {self._deadline.seconds:.3g} s"
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
        connection.send(make(connection), inbox, self._deadline)
        del self._unopened[key]
        self._waiting[key] = (connection, inbox)

    def _receive(self, key: K) -> None:
        connection, inbox = self._waiting[key]
        if not inbox:
            connection.receive(0.0)
        if inbox:
            del self._waiting[key]
            self._responses[key] = inbox[0][1]

    def _wait(self) -> None:
        """Wait until a response arrives; only for a moment while connections are being opened."""
        seconds = min(self._deadline.left, _LOOK_AT_OPENINGS) if self._unopened else self._deadline.left
        if not self._waiting:
            self._network.wait_for_openings(seconds)
            return
        if any(inbox or connection.has_read for connection, inbox in self._waiting.values()):
            return
        with selectors.DefaultSelector() as selector:
            for connection in {connection for connection, _ in self._waiting.values()}:
                selector.register(connection, selectors.EVENT_READ)
            selector.select(seconds)
