"""What Kafka reports about transactions and producers (KIP-664), and which brokers did not respond. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from dualwrite.errors import DualWriteError
from dualwrite.state import TransactionDescription, TransactionStatus

T = TypeVar("T")

RUNNING: Final = frozenset(status for status in TransactionStatus if status is TransactionStatus.ONGOING or status.is_ending)
"""The states of a transactional id with a transaction that has not ended."""

Key = tuple[str, int]
"""A topic, and one of its partitions."""

Name = tuple[str, int, int, int, int | None]
"""What identifies an open transaction: topic, partition, producer id and epoch, first offset."""


@dataclass(frozen=True, slots=True)
class BrokerProblem:
    """A broker that did not respond, or partitions without a leader: the result may lack what they would have contributed.

    Args:
        broker: The node id; None if the partitions have no leader.
        address: Host and port, if known.
        reason: What happened.
        covered: Whether other brokers have taken over what it coordinated, so that nothing is missing.
    """

    broker: int | None
    address: str | None
    reason: str
    covered: bool = False

    def __str__(self) -> str:
        if self.broker is None:
            return self.reason
        where = f" ({self.address})" if self.address else ""
        return f"Broker {self.broker}{where}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The base class of what was found in a cluster, from which something may be missing.

    Args:
        problems: The brokers that did not respond; empty if every broker responded.
        hidden: The ACLs without which Kafka may have left something out, as errors that name them.
    """

    problems: tuple[BrokerProblem, ...] = ()
    hidden: tuple[DualWriteError, ...] = ()

    @property
    def unexamined(self) -> Collection[object]:
        """What was found, and could not be examined."""
        return ()

    @property
    def complete(self) -> bool:
        """Whether all was examined, and nothing can be missing because of a broker that did not respond, or of an ACL."""
        return not self.hidden and not self.unexamined and all(problem.covered for problem in self.problems)


@dataclass(frozen=True, slots=True)
class Answer(Search, Generic[T]):
    """What was found, and which brokers did not respond. Iterating over it yields what was found.

    Args:
        found: The result, sorted.
        problems: Empty if every broker responded.
        hidden: The ACLs without which Kafka may have left something out, as errors that name them.
    """

    found: tuple[T, ...]

    def __iter__(self) -> Iterator[T]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


@dataclass(frozen=True, slots=True, order=True)
class TransactionListing:
    """One transactional id that a coordinator listed (KIP-664, ListTransactions).

    Args:
        transactional_id: The id, as Kafka sees it.
        coordinator: The node id of its coordinator.
        producer_id: Its current producer id.
        state: Kafka's name for its state, such as Ongoing; see TransactionStatus.
    """

    transactional_id: str
    coordinator: int
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class DescribedTransaction:
    """What the coordinator of a transactional id reports about it (KIP-664, DescribeTransactions).

    Args:
        transactional_id: The id, as Kafka sees it.
        coordinator: The node id of its coordinator; None if that could not be found out.
        description: The state; None if the coordinator does not know the id, or `problem` is set.
        problem: Why the id could not be described: the coordinator did not respond, or an ACL is missing.
    """

    transactional_id: str
    coordinator: int | None
    description: TransactionDescription | None
    problem: DualWriteError | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether the coordinator has reported that it does not know the id."""
        return self.description is None and self.problem is None

    @property
    def hides_topics(self) -> bool:
        """Whether topics of its open transaction are certainly left out, since the principal may not describe them.

        Kafka leaves out each such topic, without an error. An ongoing transaction always has a partition.
        """
        found = self.description
        return found is not None and found.status is TransactionStatus.ONGOING and not found.partitions


@dataclass(frozen=True, slots=True, order=True)
class ActiveProducer:
    """A producer that a replica of a partition remembers (KIP-664, DescribeProducers).

    Args:
        producer_id: The producer id.
        epoch: The epoch of its last batch or marker there.
        last_sequence: The sequence number of its last message; -1 if it has none.
        last_timestamp_ms: The timestamp of its last batch, as the producer or the user set it; None if unknown.
        coordinator_epoch: The coordinator's epoch in its last marker; None if there is none.
        transaction_start_offset: The first offset of its open transaction there; None if none is open.
    """

    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int | None
    coordinator_epoch: int | None
    transaction_start_offset: int | None

    def age_ms(self, now_ms: int) -> int | None:
        """Milliseconds since its last batch; None if unknown, as with a timestamp in the future."""
        if self.last_timestamp_ms is None or self.last_timestamp_ms > now_ms:
            return None
        return now_ms - self.last_timestamp_ms


@dataclass(frozen=True, slots=True)
class OfPartition:
    """What is known about something in a partition."""

    topic: str
    partition: int

    @property
    def key(self) -> Key:
        """Its topic and partition."""
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class PartitionProducers(OfPartition):
    """The producers that one replica of a partition remembers.

    Args:
        topic: The topic.
        partition: The partition; -1 if the topic itself could not be described.
        broker: The node that got the request, the leader unless another was chosen; None if there was none.
        producers: The producers, sorted by id.
        problem: Why they could not be described, if so.
    """

    broker: int | None
    producers: tuple[ActiveProducer, ...] = ()
    problem: DualWriteError | None = None

    @property
    def opened(self) -> list[OpenTransaction]:
        """The open transactions of these producers."""
        return [
            OpenTransaction(self.topic, self.partition, self.broker, producer)
            for producer in self.producers
            if producer.transaction_start_offset is not None
        ]


@dataclass(frozen=True, slots=True)
class OpenTransaction(OfPartition):
    """An open transaction in one partition.

    Args:
        topic: The topic.
        partition: The partition.
        broker: The node that described it.
        producer: Its producer there.
    """

    broker: int | None
    producer: ActiveProducer

    @property
    def name(self) -> Name:
        """What identifies it."""
        found = self.producer
        return self.topic, self.partition, found.producer_id, found.epoch, found.transaction_start_offset
