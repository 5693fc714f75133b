"""Ask the leaders of partitions, one request to each broker, until every partition has its answer or its problem."""

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
from dualwrite.kafka.client.retry import rounds

Key = tuple[str, int]
"""A topic, and one of its partitions."""


@dataclass(frozen=True, slots=True)
class PartitionReply:
    """What a broker answered about a partition.

    Args:
        broker: The node that was asked; None if none could be asked.
        answer: Its answer; None if there is a problem.
        problem: Why there is no answer.
    """

    broker: int | None
    answer: Any = None
    problem: DualWriteError | None = None


class PartitionQuestion(Protocol):
    """A request that can name several partitions of one broker."""

    @property
    def request_name(self) -> str:
        """The request, as in PERMISSIONS."""

    @property
    def failure(self) -> str:
        """What is said about a partition, `{}`, that gives no answer: `The producers of {} could not be described`."""

    def request(self, connection: Connection, keys: Sequence[Key]) -> Any:
        """The request about these partitions."""

    def answers(self, answer: Any) -> Iterable[tuple[Key, int, Any]]:
        """The partition, the error code and the answer for each partition of a broker's answer."""


def chosen_partitions(seen: ClusterView, partitions: Collection[int]) -> tuple[list[PartitionView], dict[Key, DualWriteError]]:
    """Those partitions of the topics, or all; and why others can't be asked. A topic that is refused has partition -1.

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


def by_topic(keys: Iterable[Key]) -> dict[str, list[int]]:
    """The partitions of each topic."""
    found: dict[str, list[int]] = defaultdict(list)
    for topic, partition in keys:
        found[topic].append(partition)
    return found


def ask_partitions(
    brokers: Brokers,
    seen: ClusterView,
    partitions: Sequence[PartitionView],
    question: PartitionQuestion,
    broker: int | None = None,
) -> dict[Key, PartitionReply]:
    """Ask the leader of each partition, or one broker for its replicas; in the order of the partitions.

    Args:
        brokers: The brokers, for this call.
        seen: What Metadata showed.
        partitions: The partitions; no more than one batch.
        question: The request.
        broker: The node to ask about all of them; None for the leaders.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    return _Batch(brokers, seen, partitions, question, broker).replies()


class _Batch:
    """The partitions of one batch, until each has its reply."""

    def __init__(
        self,
        brokers: Brokers,
        seen: ClusterView,
        partitions: Sequence[PartitionView],
        question: PartitionQuestion,
        broker: int | None,
    ) -> None:
        self._brokers = brokers
        self._seen = seen
        self._question = question
        self._broker = broker
        self._waiting: dict[Key, PartitionView] = {(found.topic, found.partition): found for found in partitions}
        self._order = tuple(self._waiting)
        self._found: dict[Key, PartitionReply] = {}
        self._reasons: dict[Key, str] = {}  # why a partition is asked for again

    def replies(self) -> dict[Key, PartitionReply]:
        for _ in rounds(self._brokers.turn(), pause=PAUSE):
            self._ask()
            self._waiting = {key: view for key, view in self._waiting.items() if key not in self._found}
            if not self._waiting:
                break
            self._look_again()
        for key, view in self._waiting.items():
            self._fail(key, self._node(view), self._reasons.get(key, "no answer"))
        return {key: self._found[key] for key in self._order}

    def _node(self, view: PartitionView) -> int | None:
        return view.leader if self._broker is None else self._broker

    def _ask(self) -> None:
        by_node: dict[int, list[Key]] = defaultdict(list)
        for key, view in self._waiting.items():
            node = self._node(view)
            if node is None:
                self._reasons[key] = "it has no leader"
            elif node not in self._seen.brokers:
                self._reasons[key] = f"broker {node} is down"
            elif self._brokers.is_silent(node):
                self._fail(key, node, f"broker {node} does not answer")
            else:
                by_node[node].append(key)
        questions = {
            node: lambda connection, keys=keys: self._question.request(connection, keys) for node, keys in by_node.items()
        }
        answers = self._brokers.ask(self._seen.brokers, questions, lambda _, answer: answer)
        for node, answer in answers.items():
            for key, code, found in self._question.answers(answer):
                self._add_answer(node, key, code, found)
        for node in by_node.keys() - answers.keys():
            self._reasons |= dict.fromkeys(by_node[node], f"broker {node} does not answer")

    def _add_answer(self, node: int, key: Key, code: int, answer: Any) -> None:
        if code in TRANSIENT:
            self._reasons[key] = f"{self._question.request_name} answered {error_name(code)}"
        elif code in DENIED:
            self._found[key] = PartitionReply(node, problem=denied(self._question.request_name, code, key[0]))
        elif code:
            self._found[key] = PartitionReply(node, problem=_problem("partition", f"{key[0]}-{key[1]}", code))
        else:
            self._found[key] = PartitionReply(node, answer)

    def _look_again(self) -> None:
        """A leader may have moved."""
        self._seen = self._brokers.view(sorted({topic for topic, _ in self._waiting}))
        for view in self._seen.partitions:
            if (view.topic, view.partition) in self._waiting:
                self._waiting[view.topic, view.partition] = view

    def _fail(self, key: Key, node: int | None, reason: str) -> None:
        problem = BrokerUnavailableError(
            f"{self._question.failure.format(f'{key[0]}-{key[1]}')}: {reason}.",
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
