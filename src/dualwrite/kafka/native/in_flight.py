"""The Produce requests of one transaction in flight on one connection, and waiting for responses on several connections."""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.connection import Connection, Inbox
from dualwrite.kafka.client.messages_generated import ProduceRequest
from dualwrite.kafka.client.sockets import ConnectionLostError
from dualwrite.kafka.native.partition import Batch, Partition

_NOT_NUMBERED = -1


@dataclass(slots=True, eq=False)
class SentBatches:
    """The batches of one Produce request without a response yet, by topic and partition; and when it was sent."""

    sent_at: float
    batches: dict[tuple[str, int], tuple[Partition, Batch]]


@dataclass(slots=True, eq=False)
class InFlightRequests:
    """The transaction's requests in flight on one connection, and the responses that have arrived.

    Args:
        connection: The connection, which other transactions may share.
        requests: The requests, by their number on the connection.
        inbox: The responses that have been read and not processed yet.
    """

    connection: Connection
    requests: dict[int, SentBatches] = field(default_factory=dict)
    inbox: Inbox = field(default_factory=list)

    def send(
        self, request: ProduceRequest, batches: dict[tuple[str, int], tuple[Partition, Batch]], deadline: Deadline
    ) -> None:
        """Send a request with these batches.

        Raises:
            ConnectionLostError: It may have been sent; the batches are in `requests`.
        """
        # Recorded before it is sent, under a number that no response has, so that it is found if the connection breaks.
        self.requests[_NOT_NUMBERED] = SentBatches(time.monotonic(), batches)
        number = self.connection.send(request, self.inbox, deadline)
        self.requests[number] = self.requests.pop(_NOT_NUMBERED)


def wait_for_responses(in_flight: Sequence[InFlightRequests], timeout: float) -> None:
    """Wait until a response may have arrived on one of several connections, or the timeout.

    Raises:
        ConnectionLostError: One of them is closed.
    """
    if any(each.inbox or each.connection.has_read for each in in_flight):
        return
    with selectors.DefaultSelector() as selector:
        for each in in_flight:
            try:
                selector.register(each.connection, selectors.EVENT_READ)
            except ValueError as error:
                raise ConnectionLostError(each.connection.address, str(error)) from error
        selector.select(timeout)
