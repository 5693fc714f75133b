"""The requests of the transaction tools to brokers: to any, to several at once, in batches; and which brokers don't respond."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from dualwrite.admin.facts import BrokerProblem, OfPartition
from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import BrokerAuthorizationError, BrokerError, BrokerUnavailableError, DualWriteError
from dualwrite.kafka.client.broker_connection import ConnectionLostError
from dualwrite.kafka.client.brokers import TRANSACTION, CoordinatorUnavailableError, MakeRequest, Network, request_together
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.fields import Request
from dualwrite.kafka.client.kafka_errors import ErrorCode, error_name
from dualwrite.kafka.client.messages_generated import MetadataRequest
from dualwrite.kafka.client.requests import BROKER_RESOURCE, settings_in, settings_request
from dualwrite.kafka.client.retries import TryAgainError
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC, to_cluster

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

MAX_KEYS: Final = 500
"""The number of ids or partitions in one request, as in Apache's own tool."""

_SHARE_OF_TIME: Final = 0.5  # of the time left, for one step
PAUSE_SECONDS: Final = 0.05
"""Seconds before the first retry of a request."""

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

DENIED: Final = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
    }
)
"""The codes by which a broker refuses a request of these tools."""

PERMISSIONS: Final = {
    "Metadata": ("Describe", "topic"),
    "FindCoordinator": ("Describe", "transactional id"),
    "ListTransactions": ("Describe", "transactional id"),
    "DescribeTransactions": ("Describe", "transactional id"),
    "DescribeProducers": ("Read", "topic"),
    "ListOffsets": ("Describe", "topic"),
    "Fetch": ("Read", "topic"),
    "OffsetFetch": ("Describe", "group"),
    "DescribeGroups": ("Describe", "group"),
    "WriteTxnMarkers": ("ClusterAction", "cluster"),
}
"""The ACL that each request needs: an operation on a kind of resource."""


@dataclass(frozen=True, slots=True)
class PartitionView(OfPartition):
    """A partition, as Metadata shows it; the leader is None if there is none."""

    leader: int | None
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The live brokers, the sorted partitions of the topics that exist, and the error code of each topic that is refused."""

    brokers: Mapping[int, Address]
    partitions: tuple[PartitionView, ...]
    refused: Mapping[str, int]


class Brokers:
    """Requests to the brokers during one call.

    A broker that does not respond for `patience` seconds is noted in `problems`, and gets no more requests during the call.
    Each method that asks Kafka raises BrokerUnavailableError if no broker responds before the deadline, and
    BrokerAuthorizationError if the login is refused.
    """

    def __init__(self, network: Network, deadline: Deadline, patience: float) -> None:
        self.network = network
        self.deadline = deadline
        self._patience = patience
        self._problems: dict[int | str, BrokerProblem] = {}
        self._hidden: dict[str, DualWriteError] = {}
        self.sees_coordinators = True
        """Whether `coordinators` could check that each id has one (ACL Describe on `__transaction_state`)."""

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
        return self.deadline.within(min(self._patience, self.deadline.left * _SHARE_OF_TIME))

    def view(self, topics: Sequence[str] | None) -> ClusterView:
        """The live brokers and these topics, none of which is created; None for all topics."""
        return self._of_any(lambda network, attempt: _view(network, topics, attempt))

    def located(self, ids: Sequence[str]) -> dict[str, tuple[int, Address] | CoordinatorUnavailableError]:
        """Node id and address of each transactional id's coordinator, or why it has none at the moment."""
        return self._of_any(lambda network, attempt: network.coordinators(ids, TRANSACTION, attempt))

    def call_any(self, make: Callable[[], Request[T]]) -> T:
        """The response of any broker; the request is made anew for each attempt, since it gets a broker's version."""
        return self._of_any(lambda network, attempt: network.any_broker(attempt).call(make(), attempt))

    def setting(self, name: str) -> frozenset[str]:
        """The values that a setting has on the brokers; empty if it can't be read (ACL DescribeConfigs on the cluster)."""
        brokers = self.view([]).brokers
        requests = {node: lambda _, node=node: settings_request(BROKER_RESOURCE, [str(node)], [name]) for node in brokers}
        found = self.request(brokers, requests, lambda node, response: settings_in(response).get(str(node), {}).get(name))
        return frozenset(value for value in found.values() if value is not None)

    def coordinators(self) -> dict[int, Address]:
        """The live brokers, each of which may be a transaction coordinator.

        Notes the brokers that are down, and the partitions of `__transaction_state` without a leader.
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
        """Whether the broker has not responded in this call. One that was down, and that others cover for, may be back."""
        return node in self._problems and not self._problems[node].covered

    def request(
        self, brokers: Mapping[int, Address], requests: Mapping[int, MakeRequest], conclude: Callable[[int, Any], T]
    ) -> dict[int, T]:
        """Send each node's request to its address at the same time, and again while `conclude` raises TryAgainError.

        Returns what `conclude` makes of the responses, by node; a node that is missing is in `problems`.
        """
        found: dict[int, T] = {}
        waiting = {node: request for node, request in requests.items() if not self.is_silent(node)}
        reasons: dict[int, Exception] = {}  # why a node's request is sent again
        patience = self.turn()
        for _ in patience.attempts(Pauses(PAUSE_SECONDS)):
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
        return to_cluster(self.network, lambda network, _: request(network, self.turn()), self.deadline)

    def _give_up(self, node: int, address: Address, error: Exception) -> None:
        self.note(BrokerProblem(node, str(address), f"{error}".removeprefix(f"{address}: ")))


def _view(network: Network, topics: Sequence[str] | None, deadline: Deadline) -> ClusterView:
    named = None if topics is None else [MetadataRequest.MetadataRequestTopic(name=topic) for topic in topics]
    response = network.any_broker(deadline).call(MetadataRequest(topics=named, allow_auto_topic_creation=False), deadline)
    existing = (ErrorCode.NONE, ErrorCode.LEADER_NOT_AVAILABLE)
    return ClusterView(
        brokers={broker.node_id: Address(broker.host, broker.port) for broker in response.brokers},
        partitions=tuple(
            PartitionView(topic.name, p.partition_index, p.leader_id if p.leader_id >= 0 else None, tuple(p.replica_nodes))
            for topic in sorted(response.topics, key=lambda found: found.name)
            if topic.error_code in existing
            for p in sorted(topic.partitions, key=lambda found: found.partition_index)
        ),
        refused={topic.name: topic.error_code for topic in response.topics if topic.error_code not in existing},
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """A broker's response about a partition or an id, or why there is none; the broker is None if none was asked."""

    broker: int | None
    response: Any = None
    problem: DualWriteError | None = None


@dataclass(frozen=True, slots=True)
class KeyedRequest(Generic[K]):
    """A request about partitions or ids, each of which has a broker that is asked about it.

    Args:
        name: A key of PERMISSIONS.
        located: The node and address to ask about each key; a text says why it can't be asked yet, an error why it never can.
        make: Makes the request about these keys, all for one broker.
        responses: Each key in a broker's response, its error code, and what was found, which may be an error too.
        refused: The error for an error code that is not in TRANSIENT.
        unanswered: The error for a key without a response, for this reason.
    """

    name: str
    located: Callable[[list[K]], Mapping[K, tuple[int | None, Address | str | DualWriteError]]]
    make: Callable[[list[K]], Request[Any]]
    responses: Callable[[Any], Iterable[tuple[K, int, Any]]]
    refused: Callable[[K, int], DualWriteError]
    unanswered: Callable[[K, str], BrokerUnavailableError]

    def replies(self, brokers: Brokers, keys: Iterable[K]) -> dict[K, Reply]:
        """The replies about at most `MAX_KEYS` keys, in their order. Errors as for `Brokers`.

        Each key is asked about at its broker, and again, perhaps elsewhere, until all have a reply.
        """
        found: dict[K, Reply] = {}
        wanted = waiting = list(dict.fromkeys(keys))
        reasons: dict[K, tuple[int | None, str]] = {}  # why a key is asked about again
        for _ in brokers.turn().attempts(Pauses(PAUSE_SECONDS)):
            reasons = self._ask(brokers, waiting, found)
            waiting = list(reasons)
            if not waiting:
                break
        for key, (node, reason) in reasons.items():
            found[key] = Reply(node, problem=self.unanswered(key, reason))
        return {key: found[key] for key in wanted}

    def _ask(self, brokers: Brokers, waiting: list[K], found: dict[K, Reply]) -> dict[K, tuple[int | None, str]]:
        """Ask once, and add the replies to `found`; returns the keys without one, each with its broker and the reason."""
        without: dict[K, tuple[int | None, str]] = {}
        by_node: dict[int, list[K]] = defaultdict(list)
        addresses: dict[int, Address] = {}
        for key, (node, where) in self.located(waiting).items():
            if isinstance(where, DualWriteError):
                found[key] = Reply(node, problem=where)
            elif node is None or isinstance(where, str):
                without[key] = node, str(where)
            elif brokers.is_silent(node):
                found[key] = Reply(node, problem=self.unanswered(key, _silent(node)))
            else:
                by_node[node].append(key)
                addresses[node] = where
                without[key] = node, _silent(node)  # unless it responds
        requests = {node: lambda _, keys=keys: self.make(keys) for node, keys in by_node.items()}
        for node, response in brokers.request(addresses, requests, lambda _, response: response).items():
            for key, code, content in self.responses(response):
                if code in TRANSIENT:
                    without[key] = node, f"{self.name} returned {error_name(code)}"
                    continue
                without.pop(key, None)
                if code:
                    found[key] = Reply(node, problem=self.refused(key, code))
                elif isinstance(content, DualWriteError):
                    found[key] = Reply(node, problem=content)
                else:
                    found[key] = Reply(node, content)
        return without


def _silent(node: int) -> str:
    return f"broker {node} does not respond"


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of at most `MAX_KEYS`; each list is made when it is needed."""
    left = iter(items)
    while batch := list(islice(left, MAX_KEYS)):
        yield batch


def check(code: int, request: str) -> None:
    """Raise an error if the response as a whole has an error code: TryAgainError if it is transient, else BrokerError."""
    if code in TRANSIENT:
        raise TryAgainError(f"{request} returned {error_name(code)}")
    if code:
        raise BrokerError(f"{request} returned {error_name(code)}.", code=code, name=error_name(code))


def denied(request: str, code: int, name: str) -> BrokerAuthorizationError:
    """The error for a request, a key of PERMISSIONS, that was refused with one of DENIED for a topic, an id or a group."""
    operation, resource = PERMISSIONS[request]
    cause, place = "the principal lacks an ACL", f"{resource} {name!r}"
    if code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
        place = "cluster"
    elif code == ErrorCode.TOPIC_AUTHORIZATION_FAILED and resource == "group":
        cause, place = "the principal may not describe a topic that the group consumes", "topics of the group"
    return BrokerAuthorizationError(
        f"Kafka refuses {request} for {name!r}: {error_name(code)}.",
        transactional_id=name if code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED else None,
        cause=cause,
        next_step=f"grant the principal {operation} on the {place}",
        code=code,
        name=error_name(code),
    )
