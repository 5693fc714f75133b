"""The brokers of a cluster, for one call of the transaction tools: leaders, coordinators, and those that don't respond."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from dualwrite.admin.facts import BrokerProblem
from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerAuthorizationError, BrokerError, BrokerUnavailableError, DualWriteError, UnknownTopicError
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError
from dualwrite.kafka.client.brokers import TRANSACTION, CoordinatorUnavailableError, MakeRequest, Network, request_together
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import MetadataRequest
from dualwrite.kafka.client.retries import rounds
from dualwrite.kafka.inspect import BROKER_RESOURCE, TRANSACTION_STATE_TOPIC, InspectionClient, settings_in, settings_request

DENIED: Final = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
    }
)
"""The codes by which a broker refuses a request of these tools."""


@dataclass(frozen=True, slots=True)
class Permission:
    """An operation on a kind of resource, as in an ACL."""

    operation: str
    resource: str


PERMISSIONS: Final = {
    "Metadata": Permission("Describe", "topic"),
    "FindCoordinator": Permission("Describe", "transactional id"),
    "ListTransactions": Permission("Describe", "transactional id"),
    "DescribeTransactions": Permission("Describe", "transactional id"),
    "DescribeProducers": Permission("Read", "topic"),
    "ListOffsets": Permission("Describe", "topic"),
    "Fetch": Permission("Read", "topic"),
    "OffsetFetch": Permission("Describe", "group"),
    "DescribeGroups": Permission("Describe", "group"),
    "WriteTxnMarkers": Permission("ClusterAction", "cluster"),
}
"""The ACL that each request needs."""


def denied(request: str, code: int, name: str) -> BrokerAuthorizationError:
    """The error for a request that was refused because an ACL is missing.

    Args:
        request: A key of PERMISSIONS.
        code: One of DENIED.
        name: The topic, the transactional id or the group.
    """
    needed = PERMISSIONS[request]
    if code == ErrorCode.TOPIC_AUTHORIZATION_FAILED and needed.resource == "group":
        return _topics_of_group(request, code, name)
    resource = "cluster" if code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED else f"{needed.resource} {name!r}"
    return BrokerAuthorizationError(
        f"Kafka refuses {request} for {name!r}: {error_name(code)}.",
        transactional_id=name if code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED else None,
        cause="the principal lacks an ACL",
        next_step=f"grant the principal {needed.operation} on the {resource}",
        code=code,
        name=error_name(code),
    )


def _topics_of_group(request: str, code: int, group: str) -> BrokerAuthorizationError:
    return BrokerAuthorizationError(
        f"Kafka refuses {request} for {group!r}: {error_name(code)}.",
        cause="the principal may not describe a topic that the group consumes",
        next_step="grant the principal Describe on the topics of the group",
        code=code,
        name=error_name(code),
    )


BATCH: Final = 500
"""The number of ids or partitions in one request, as in Apache's own tool."""

TRANSIENT: Final = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.OFFSET_NOT_AVAILABLE,  # of a leader since a moment ago (KIP-207)
        ErrorCode.KAFKA_STORAGE_ERROR,  # of a leader whose disk has failed, until another one is elected
    }
)
"""Errors after which the request is sent again."""

_SHARE: Final = 0.5  # of the time left, for one step
PAUSE: Final = 0.05
"""Seconds before the first retry of a request."""

T = TypeVar("T")


class TryAgainError(Exception):
    """A response with a transient error: send the request again."""


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition, as Metadata shows it; the leader is None if there is none."""

    topic: str
    partition: int
    leader: int | None
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The live brokers, and the requested topics.

    Args:
        brokers: Address by node id.
        partitions: The partitions of the topics that exist, sorted.
        refused: Kafka's error code for each topic that can't be described.
    """

    brokers: Mapping[int, Address]
    partitions: tuple[PartitionView, ...]
    refused: Mapping[str, int]


class Brokers:
    """Requests to the brokers during one call.

    A broker that does not respond for `patience` seconds is noted in `problems`, and gets no more requests during the call.

    Args:
        network: The connections.
        deadline: For the whole call.
        patience: Seconds for which requests to one broker are retried before the call continues without it.

    Attributes:
        sees_coordinators: Whether `coordinators` could check that each id has one (ACL Describe on `__transaction_state`).
    """

    def __init__(self, network: Network, deadline: Deadline, patience: float) -> None:
        self.network = network
        self.deadline = deadline
        self._patience = patience
        self._problems: dict[int | str, BrokerProblem] = {}
        self._hidden: dict[str, DualWriteError] = {}
        self.sees_coordinators = True

    def renewed(self, deadline: Deadline) -> Brokers:
        """A copy for the next part of a call, with its own deadline; brokers that did not respond get no more requests."""
        again = Brokers(self.network, deadline, self._patience)
        again._problems = self._problems
        again._hidden = self._hidden
        return again

    @property
    def problems(self) -> tuple[BrokerProblem, ...]:
        """The brokers and coordinators that did not respond, each once."""
        return tuple(sorted(self._problems.values(), key=str))

    @property
    def hidden(self) -> tuple[DualWriteError, ...]:
        """What Kafka may have left out of its responses because of missing ACLs: each error names the ACL and what it hides."""
        return tuple(self._hidden.values())

    def turn(self) -> Deadline:
        """The deadline of one step of the call, so that a silent broker leaves time for the next steps."""
        return self.deadline.within(min(self._patience, self.deadline.left * _SHARE))

    def view(self, topics: Sequence[str] | None) -> ClusterView:
        """The live brokers and these topics, none of which is created; None for all topics.

        Raises:
            BrokerUnavailableError: No broker responded before the deadline.
            BrokerAuthorizationError: The login was refused.
        """
        return self._of_any(lambda network, attempt: _view(network, topics, attempt))

    def located(self, ids: Sequence[str]) -> dict[str, tuple[int, Address] | CoordinatorUnavailableError]:
        """Node id and address of each transactional id's coordinator, or why it has none at the moment.

        Raises: as for `view`.
        """
        return self._of_any(lambda network, attempt: network.coordinators(ids, TRANSACTION, attempt))

    def call_any(self, make: Callable[[], Request[T]]) -> T:
        """The response of any broker; the request is made anew for each attempt, since it gets a broker's version.

        Raises: as for `view`.
        """
        return self._of_any(lambda network, attempt: network.any_broker(attempt).call(make(), attempt))

    def setting(self, name: str) -> frozenset[str]:
        """The values that a setting has on the brokers; empty if it can't be read (ACL DescribeConfigs on the cluster).

        Raises: as for `view`.
        """
        brokers = self.view([]).brokers
        requests = {node: lambda _, node=node: settings_request(BROKER_RESOURCE, [str(node)], [name]) for node in brokers}
        found = self.request(brokers, requests, lambda node, response: settings_in(response).get(str(node), {}).get(name))
        return frozenset(value for value in found.values() if value is not None)

    def coordinators(self) -> dict[int, Address]:
        """The live brokers, each of which may be a transaction coordinator.

        Notes the brokers that are down, and the partitions of `__transaction_state` without a leader.

        Raises: as for `view`.
        """
        seen = self.view([TRANSACTION_STATE_TOPIC])
        self.sees_coordinators = seen.refused.get(TRANSACTION_STATE_TOPIC) not in DENIED
        leaderless = [str(found.partition) for found in seen.partitions if found.leader is None]
        if leaderless:
            named = ", ".join(leaderless)
            self.note(BrokerProblem(None, None, f"{TRANSACTION_STATE_TOPIC} {named} without a leader: their ids are missing"))
        for node in sorted({replica for found in seen.partitions for replica in found.replicas} - seen.brokers.keys()):
            taken_over = "; other brokers have taken over what it coordinated"
            self.note(BrokerProblem(node, None, f"is down{'' if leaderless else taken_over}", covered=not leaderless))
        return dict(seen.brokers)

    def note(self, problem: BrokerProblem) -> None:
        """Add a problem; only the first one of each broker is kept, or the first that is not covered."""
        key = problem.reason if problem.broker is None else problem.broker
        known = self._problems.get(key)
        if known is None or (known.covered and not problem.covered):
            self._problems[key] = problem

    def hide(self, what: str, error: DualWriteError) -> None:
        """Note that something is missing because of an ACL; only the first error about each `what` is kept."""
        self._hidden.setdefault(what, error)

    def is_silent(self, node: int) -> bool:
        """Whether the broker has not responded in this call. One that was down may be back."""
        return node in self._problems and not self._problems[node].covered

    def request(
        self, brokers: Mapping[int, Address], requests: Mapping[int, MakeRequest], conclude: Callable[[int, Any], T]
    ) -> dict[int, T]:
        """Send requests to brokers at the same time, and again while their errors are transient.

        Args:
            brokers: Address by node id.
            requests: The request for each node.
            conclude: Makes the result from a node's response; raises TryAgainError for a transient error.

        Returns:
            The results by node; a node that is missing is in `problems`.
        """
        found: dict[int, T] = {}
        waiting = {node: request for node, request in requests.items() if not self.is_silent(node)}
        reasons: dict[int, Exception] = {}  # why a node's request is sent again
        patience = self.turn()
        for _ in rounds(patience, pause=PAUSE):
            responses = request_together(self.network, {brokers[node]: waiting[node] for node in waiting}, patience)
            reasons.clear()
            for node in waiting:
                response = responses[brokers[node]]
                try:
                    if isinstance(response, Exception):
                        raise response
                    found[node] = conclude(node, response)
                except (TryAgainError, ConnectionLostError) as error:
                    reasons[node] = error
                except DualWriteError as error:
                    self._give_up(node, brokers[node], error)
            waiting = {node: waiting[node] for node in reasons}
            if not waiting:
                break
        for node, reason in reasons.items():
            self._give_up(node, brokers[node], reason)
        return found

    def _of_any(self, request: Callable[[Network, Deadline], T]) -> T:
        """Send a request to any broker, and to another one if it does not respond."""
        client = InspectionClient(self.network.config, timeout=self.deadline, network=self.network)
        return client.to_cluster(lambda network, _: request(network, self.turn()))

    def _give_up(self, node: int, address: Address, error: Exception) -> None:
        self.note(BrokerProblem(node, str(address), str(error).removeprefix(f"{address}: ")))


def check(code: int, request: str) -> None:
    """Raise an error if the response as a whole has an error code.

    Raises:
        TryAgainError: The error is transient.
        BrokerError: It is not transient.
    """
    if code in TRANSIENT:
        raise TryAgainError(f"{request} returned {error_name(code)}")
    if code:
        raise BrokerError(f"{request} returned {error_name(code)}.", code=code, name=error_name(code))


def batches(items: Iterable[T], size: int = BATCH) -> Iterator[list[T]]:
    """Yield the items in lists of at most `size`; each list is made when it is needed."""
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _view(network: Network, topics: Sequence[str] | None, deadline: Deadline) -> ClusterView:
    named = None if topics is None else [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
    response = network.any_broker(deadline).call(MetadataRequest(topics=named, allow_auto_topic_creation=False), deadline)
    there = (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
    return ClusterView(
        brokers={broker.node_id: Address(broker.host, broker.port) for broker in response.brokers},
        partitions=tuple(
            PartitionView(topic.name, p.partition_index, p.leader_id if p.leader_id >= 0 else None, tuple(p.replica_nodes))
            for topic in sorted(response.topics, key=lambda found: found.name)
            if topic.error_code in there
            for p in sorted(topic.partitions, key=lambda found: found.partition_index)
        ),
        refused={topic.name: topic.error_code for topic in response.topics if topic.error_code not in there},
    )


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
