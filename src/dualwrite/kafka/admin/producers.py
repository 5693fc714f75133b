"""The producers that the replicas of partitions remember (KIP-664, DescribeProducers), in batches for each broker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kafka.protocol.admin import DescribeProducersRequest

from dualwrite.errors import BrokerError, BrokerUnavailableError, DualWriteError, UnknownTopicError
from dualwrite.kafka.admin.brokers import PASSING, PAUSE, Brokers, ClusterView, PartitionView, batches
from dualwrite.kafka.admin.facts import ActiveProducer, PartitionProducers
from dualwrite.kafka.admin.permissions import DENIED, denied
from dualwrite.kafka.client.error_codes import ErrorCode, error_name
from dualwrite.kafka.client.retry import rounds

_Key = tuple[str, int]


def describe_producers(
    brokers: Brokers, topics: Sequence[str] | None, partitions: Collection[int] = (), broker: int | None = None
) -> Iterator[PartitionProducers]:
    """Ask the leader of each partition, or one broker for its replicas. Yields a partition at a time.

    Args:
        brokers: The brokers, for this call.
        topics: The topics; None for all.
        partitions: Their partitions; empty for all.
        broker: The node to ask, about the partitions that it has a replica of.

    Raises:
        BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
    """
    seen = brokers.view(topics)
    yield from (_refused(topic, code) for topic, code in seen.refused.items())
    chosen = [found for found in seen.partitions if not partitions or found.partition in partitions]
    for topic in dict.fromkeys(found.topic for found in seen.partitions):
        there = {found.partition for found in chosen if found.topic == topic}
        yield from (_refused(topic, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, index) for index in sorted({*partitions} - there))
    if broker is not None and partitions:
        yield from (_no_replica(found, broker) for found in chosen if broker not in found.replicas)
    kept = [found for found in chosen if broker is None or broker in found.replicas]
    for batch in batches(kept):
        yield from _Batch(brokers, seen, batch, broker).described()


class _Batch:
    """The partitions of one batch, until each has its answer or its problem."""

    def __init__(self, brokers: Brokers, seen: ClusterView, partitions: Sequence[PartitionView], broker: int | None) -> None:
        self._brokers = brokers
        self._seen = seen
        self._broker = broker
        self._waiting: dict[_Key, PartitionView] = {(found.topic, found.partition): found for found in partitions}
        self._order = tuple(self._waiting)
        self._found: dict[_Key, PartitionProducers] = {}
        self._reasons: dict[_Key, str] = {}  # why a partition is asked for again

    def described(self) -> list[PartitionProducers]:
        for _ in rounds(self._brokers.turn(), pause=PAUSE):
            self._ask()
            self._waiting = {key: view for key, view in self._waiting.items() if key not in self._found}
            if not self._waiting:
                break
            self._look_again()
        for key, view in self._waiting.items():
            problem = self._unanswered(key, self._reasons.get(key, "no answer"))
            self._found[key] = PartitionProducers(*key, self._node(view), problem=problem)
        return [self._found[key] for key in self._order]

    def _node(self, view: PartitionView) -> int | None:
        return view.leader if self._broker is None else self._broker

    def _ask(self) -> None:
        by_node: dict[int, list[_Key]] = defaultdict(list)
        for key, view in self._waiting.items():
            node = self._node(view)
            if node is None:
                self._reasons[key] = "it has no leader"
            elif node not in self._seen.brokers:
                self._reasons[key] = f"broker {node} is down"
            elif self._brokers.is_silent(node):
                self._found[key] = PartitionProducers(
                    *key, node, problem=self._unanswered(key, f"broker {node} does not answer")
                )
            else:
                by_node[node].append(key)
        questions = {node: lambda _, keys=keys: _request(keys) for node, keys in by_node.items()}
        answers = self._brokers.ask(self._seen.brokers, questions, lambda _, answer: answer.topics)
        for node, topics in answers.items():
            for topic in topics:
                for partition in topic.partitions:
                    self._take(node, (topic.name, partition.partition_index), partition)
        for node in by_node.keys() - answers.keys():
            self._reasons |= dict.fromkeys(by_node[node], f"broker {node} does not answer")

    def _take(self, node: int, key: _Key, answer: Any) -> None:
        code = answer.error_code
        if code in PASSING:
            self._reasons[key] = f"DescribeProducers answered {error_name(code)}"
        elif code:
            self._found[key] = PartitionProducers(*key, node, problem=_problem(key[0], code, key[1]))
        else:
            self._found[key] = PartitionProducers(*key, node, tuple(sorted(map(_producer, answer.active_producers))))

    def _look_again(self) -> None:
        """A leader may have moved."""
        self._seen = self._brokers.view(sorted({topic for topic, _ in self._waiting}))
        for view in self._seen.partitions:
            if (view.topic, view.partition) in self._waiting:
                self._waiting[view.topic, view.partition] = view

    def _unanswered(self, key: _Key, reason: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"The producers of {key[0]}-{key[1]} could not be described: {reason}.",
            cause="the broker is down, overloaded, or unreachable from here",
            next_step="retry once it is back",
            servers=self._brokers.network.config.servers,
        )


def _request(keys: Sequence[_Key]) -> Any:
    by_topic: dict[str, list[int]] = defaultdict(list)
    for topic, partition in keys:
        by_topic[topic].append(partition)
    topic_request = DescribeProducersRequest.TopicRequest
    return DescribeProducersRequest(
        topics=[topic_request(name=topic, partition_indexes=indexes) for topic, indexes in by_topic.items()]
    )


def _producer(found: Any) -> ActiveProducer:
    return ActiveProducer(
        producer_id=found.producer_id,
        epoch=found.producer_epoch,
        last_sequence=found.last_sequence,
        last_timestamp_ms=_known(found.last_timestamp),
        coordinator_epoch=_known(found.coordinator_epoch),
        transaction_start_offset=_known(found.current_txn_start_offset),
    )


def _known(number: int) -> int | None:
    """Kafka has -1 for what it does not know."""
    return None if number < 0 else number


def _refused(topic: str, code: int, partition: int = -1) -> PartitionProducers:
    return PartitionProducers(topic, partition, None, problem=_problem(topic, code, partition))


def _problem(topic: str, code: int, partition: int) -> DualWriteError:
    what = topic if partition < 0 else f"{topic}-{partition}"
    if code in DENIED:
        return denied("Metadata" if partition < 0 else "DescribeProducers", code, topic)
    if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return UnknownTopicError(
            f"There is no {'topic' if partition < 0 else 'partition'} {what!r}.",
            next_step="check its name and the cluster's address",
            code=int(code),
            name=error_name(code),
        )
    return BrokerError(f"{what} can't be described: {error_name(code)}.", code=code, name=error_name(code))


def _no_replica(found: PartitionView, broker: int) -> PartitionProducers:
    replicas = ", ".join(map(str, found.replicas))
    problem = BrokerError(
        f"Broker {broker} has no replica of {found.topic}-{found.partition}.", next_step=f"ask one of brokers {replicas}"
    )
    return PartitionProducers(found.topic, found.partition, None, problem=problem)


def by_partition(described: Sequence[PartitionProducers]) -> Mapping[_Key, PartitionProducers]:
    """The descriptions by topic and partition."""
    return {(found.topic, found.partition): found for found in described}
