"""Requests to the leaders of partitions, one to each broker, until every partition has a result or has failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dualwrite.errors import BrokerError, BrokerUnavailableError, DualWriteError, UnknownTopicError
from dualwrite.kafka.admin.brokers import PAUSE, TRANSIENT, Brokers, ClusterView, PartitionView
from dualwrite.kafka.admin.permissions import DENIED, denied
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.retry import rounds

Key = tuple[str, int]
"""A topic, and one of its partitions."""


@dataclass(frozen=True, slots=True)
class PartitionReply:
    """A broker's response about a partition.

    Args:
        broker: The node that got the request; None if there was none.
        response: Its response; None if there is a problem.
        problem: Why there is no response.
    """

    broker: int | None
    response: Any = None
    problem: DualWriteError | None = None


class PartitionRequest(Protocol):
    """A request that can name several partitions of one broker."""

    @property
    def request_name(self) -> str:
        """The request's name, a key of PERMISSIONS."""

    @property
    def failure(self) -> str:
        """How the error for a partition without a response begins, `{}` being the partition.

        For example `The producers of {} could not be described`.
        """

    def request(self, connection: Connection, keys: Sequence[Key]) -> Request[Any]:
        """The request about these partitions."""

    def responses(self, response: Any) -> Iterable[tuple[Key, int, Any]]:
        """The partition, the error code and the response for each partition of a broker's response."""


def chosen_partitions(seen: ClusterView, partitions: Collection[int]) -> tuple[list[PartitionView], dict[Key, DualWriteError]]:
    """The chosen partitions of the topics, and an error for each that does not exist or can't be described.

    The error for a whole topic has partition -1.

    Args:
        seen: What Metadata showed.
        partitions: The partitions of each topic; empty for all.
    """
    refused = {(topic, -1): _topic_problem(topic, code) for topic, code in seen.refused.items()}
    chosen = [found for found in seen.partitions if not partitions or found.partition in partitions]
    for topic in dict.fromkeys(found.topic for found in seen.partitions):
        missing = {*partitions} - {found.partition for found in chosen if found.topic == topic}
        for key in ((topic, index) for index in sorted(missing)):
            refused[key] = _problem("partition", f"{topic}-{key[1]}", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    return chosen, refused


def refused_partition(request_name: str, key: Key, code: int) -> DualWriteError:
    """The error for a partition about which a broker refuses a request, for a reason that will not pass."""
    return denied(request_name, code, key[0]) if code in DENIED else _problem("partition", f"{key[0]}-{key[1]}", code)


def by_topic(keys: Iterable[Key]) -> dict[str, list[int]]:
    """The partitions of each topic."""
    found: dict[str, list[int]] = defaultdict(list)
    for topic, partition in keys:
        found[topic].append(partition)
    return found


def request_partitions(
    brokers: Brokers,
    seen: ClusterView,
    partitions: Sequence[PartitionView],
    request: PartitionRequest,
    broker: int | None = None,
) -> dict[Key, PartitionReply]:
    """Send the request to the leader of each partition, or to one broker for its replicas.

    Args:
        brokers: The brokers, for this call.
        seen: What Metadata showed.
        partitions: The partitions; no more than one batch.
        request: The request.
        broker: The node to send all requests to; None for the leaders.

    Returns:
        The replies, in the order of the partitions.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    return _Batch(brokers, seen, partitions, request, broker).replies()


class _Batch:
    """The partitions of one batch, until each has a reply."""

    def __init__(
        self,
        brokers: Brokers,
        seen: ClusterView,
        partitions: Sequence[PartitionView],
        request: PartitionRequest,
        broker: int | None,
    ) -> None:
        self._brokers = brokers
        self._seen = seen
        self._request = request
        self._broker = broker
        self._waiting: dict[Key, PartitionView] = {(found.topic, found.partition): found for found in partitions}
        self._order = tuple(self._waiting)
        self._found: dict[Key, PartitionReply] = {}
        self._reasons: dict[Key, str] = {}  # why a partition is requested again

    def replies(self) -> dict[Key, PartitionReply]:
        for _ in rounds(self._brokers.turn(), pause=PAUSE):
            self._send_requests()
            self._waiting = {key: view for key, view in self._waiting.items() if key not in self._found}
            if not self._waiting:
                break
            self._look_again()
        for key, view in self._waiting.items():
            self._fail(key, self._node(view), self._reasons.get(key, "no response"))
        return {key: self._found[key] for key in self._order}

    def _node(self, view: PartitionView) -> int | None:
        return view.leader if self._broker is None else self._broker

    def _send_requests(self) -> None:
        by_node: dict[int, list[Key]] = defaultdict(list)
        for key, view in self._waiting.items():
            node = self._node(view)
            if node is None:
                self._reasons[key] = "it has no leader"
            elif node not in self._seen.brokers:
                self._reasons[key] = f"broker {node} is down"
            elif self._brokers.is_silent(node):
                self._fail(key, node, f"broker {node} does not respond")
            else:
                by_node[node].append(key)
        requests = {
            node: lambda connection, keys=keys: self._request.request(connection, keys) for node, keys in by_node.items()
        }
        responses = self._brokers.request(self._seen.brokers, requests, lambda _, response: response)
        for node, response in responses.items():
            for key, code, found in self._request.responses(response):
                self._add_response(node, key, code, found)
        for node in by_node.keys() - responses.keys():
            self._reasons |= dict.fromkeys(by_node[node], f"broker {node} does not respond")

    def _add_response(self, node: int, key: Key, code: int, response: Any) -> None:
        if code in TRANSIENT:
            self._reasons[key] = f"{self._request.request_name} returned {error_name(code)}"
        elif code:
            self._found[key] = PartitionReply(node, problem=refused_partition(self._request.request_name, key, code))
        else:
            self._found[key] = PartitionReply(node, response)

    def _look_again(self) -> None:
        """Read the leaders again, since they may have moved."""
        self._seen = self._brokers.view(sorted({topic for topic, _ in self._waiting}))
        for view in self._seen.partitions:
            if (view.topic, view.partition) in self._waiting:
                self._waiting[view.topic, view.partition] = view

    def _fail(self, key: Key, node: int | None, reason: str) -> None:
        problem = BrokerUnavailableError(
            f"{self._request.failure.format(f'{key[0]}-{key[1]}')}: {reason}.",
            cause="the broker is down, overloaded, or unreachable from here",
            next_step="retry once it is back",
            servers=self._brokers.network.config.servers,
        )
        self._found[key] = PartitionReply(node, problem=problem)


def _topic_problem(topic: str, code: int) -> DualWriteError:
    return denied("Metadata", code, topic) if code in DENIED else _problem("topic", topic, code)


def _problem(kind: str, what: str, code: int) -> DualWriteError:
    if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return UnknownTopicError(
            f"There is no {kind} {what!r}.",
            next_step="check its name and the cluster's address",
            code=int(code),
            name=error_name(code),
        )
    return BrokerError(f"Kafka refuses {what}: {error_name(code)}.", code=code, name=error_name(code))
