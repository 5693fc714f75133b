"""One request to each of several brokers, all at once, from one thread."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError
from dualwrite.kafka.client.cluster import Network
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.connection import Connection, Inbox
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.sockets import ConnectionLostError

_LOOK_AT_OPENINGS: Final = 0.01

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
    return _Round(network, requests, deadline).run()


class _Round:
    """One request to each broker: connections that are being opened, requests without a response, responses."""

    def __init__(self, network: Network, requests: Mapping[Address, MakeRequest], deadline: Deadline) -> None:
        self._network = network
        self._requests = requests
        self._deadline = deadline
        self._unopened = dict.fromkeys(requests)
        self._waiting: dict[Address, tuple[Connection, Inbox]] = {}
        self._responses: dict[Address, Any] = {}

    def run(self) -> dict[Address, Any]:
        while (self._unopened or self._waiting) and not self._deadline.expired:
            for address in tuple(self._unopened):
                self._guarded(address, self._send)
            self._wait()
            for address in tuple(self._waiting):
                self._guarded(address, self._receive)
        for address in self._requests.keys() - self._responses.keys():
            if address in self._waiting:
                self._waiting[address][0].close()  # or a late response would be read as that to the next request
            self._responses[address] = ConnectionLostError(address, f"no response within {self._deadline.seconds:.3g} s")
        return self._responses

    def _guarded(self, address: Address, step: Callable[[Address], None]) -> None:
        try:
            step(address)
        except (ConnectionLostError, DualWriteError) as error:
            self._unopened.pop(address, None)
            self._waiting.pop(address, None)
            self._responses[address] = error

    def _send(self, address: Address) -> None:
        connection = self._network.connection_soon(address, self._deadline, wait=0.0)
        if connection is None:
            return
        inbox: Inbox = []
        connection.send(self._requests[address](connection), inbox, self._deadline)
        del self._unopened[address]
        self._waiting[address] = (connection, inbox)

    def _receive(self, address: Address) -> None:
        connection, inbox = self._waiting[address]
        if not inbox:
            connection.receive(0.0)
        if inbox:
            del self._waiting[address]
            self._responses[address] = inbox[0][1]

    def _wait(self) -> None:
        """Wait until a response arrives; only for a moment while connections are being opened."""
        seconds = min(self._deadline.left, _LOOK_AT_OPENINGS) if self._unopened else self._deadline.left
        if not self._waiting:
            self._network.wait_for_openings(seconds)
            return
        if any(inbox or connection.has_read for connection, inbox in self._waiting.values()):
            return
        with selectors.DefaultSelector() as selector:
            for connection, _ in self._waiting.values():
                selector.register(connection, selectors.EVENT_READ)
            selector.select(seconds)
