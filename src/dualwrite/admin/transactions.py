"""`TransactionAdmin`: lists, examines and ends the transactions of a cluster, of any client (KIP-664, KIP-939)."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from dualwrite.admin.ending import Examined, abort, examine, force_terminate
from dualwrite.admin.facts import Answer, DescribedTransaction, PartitionProducers, TransactionListing
from dualwrite.admin.hanging import HangingSearch, find_hanging
from dualwrite.admin.listing import Filter, describe_transactions, find_transactions, sees_every_id
from dualwrite.admin.partitions import PartitionEnd, describe_producers, first_offsets, partition_ends
from dualwrite.admin.record_transaction import RecordTransaction, transaction_of
from dualwrite.admin.requests import Brokers
from dualwrite.admin.waiting import StoredPositions, StuckSearch, find_stuck
from dualwrite.deadline import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.settings import Settings
from dualwrite.state import TransactionStatus


class TransactionAdmin:
    """Reads the transactional state of a cluster from all of its brokers. Not thread-safe.

    Only `abort` and `force_terminate` change anything. They know only Kafka: what a database has committed must not be
    aborted, so query the database first, as `dualwrite transactions` does: `admin.decisions.Decisions` returns what a database
    knows, and `refusal_to_abort` and its like have the rules.

    A broker that does not respond is named in the result, which contains what the other brokers know. Close the object with
    `close()`, or use it in a `with` statement.

    Args:
        kafka: As for `dualwrite.connect`: `host:port`, or settings by librdkafka's names; None for those of the environment.
        timeout: Seconds for each call, including retries.
        broker_timeout: Seconds after which a call continues without a broker that does not respond.
        settings: The settings to use instead of those of the environment.

    Raises:
        ConfigurationError: A setting is missing or invalid.
    """

    def __init__(
        self,
        kafka: str | Mapping[str, Any] | KafkaConfig | None = None,
        *,
        timeout: float = 30.0,
        broker_timeout: float = 5.0,
        settings: Settings | None = None,
    ) -> None:
        self._network = Network(KafkaConfig.over(kafka, (settings or Settings.from_environment()).kafka))
        self._timeout = timeout
        self._broker_timeout = broker_timeout

    def list(
        self,
        *,
        states: Collection[str | TransactionStatus] = (),
        producer_ids: Iterable[int] = (),
        pattern: str | None = None,
        running_longer_than: float | None = None,
    ) -> Answer[TransactionListing]:
        """The transactional ids that the coordinators know, sorted (ListTransactions, KIP-664, KIP-994, KIP-1152).

        Kafka silently leaves out ids that the principal may not describe; in this case `hidden` names the missing ACL.

        Args:
            states: Only ids in one of these states, such as `Ongoing`.
            producer_ids: Only ids with one of these as their current producer id.
            pattern: Only ids that match this regular expression completely.
            running_longer_than: Only ids with a transaction that has been open for more than this many seconds.

        Raises:
            ConfigurationError: There is no such state, or the pattern is not a regular expression.
            BrokerUnavailableError: No broker responded.
            BrokerAuthorizationError: The login was refused.
        """
        wanted = Filter.of(states, producer_ids, pattern, running_longer_than)
        brokers = self._brokers()
        found = find_transactions(brokers, wanted)
        if all(problem.covered for problem in brokers.problems):  # otherwise the result is incomplete in any case
            sees_every_id(brokers)
        return Answer(tuple(found), problems=brokers.problems, hidden=brokers.hidden)

    def describe(self, transactional_ids: Iterable[str]) -> Iterator[DescribedTransaction]:
        """The coordinators' descriptions of ids, in the order of the ids (DescribeTransactions, KIP-664).

        The ids may come from an iterator of any length: they are requested in batches of 500, each with its own time limit. A
        broker that does not respond is not queried again for later batches.

        Args:
            transactional_ids: The ids, as Kafka sees them.

        Raises:
            BrokerUnavailableError: No broker responded.
            BrokerAuthorizationError: The login was refused.
        """
        ids = [transactional_ids] if isinstance(transactional_ids, str) else transactional_ids
        return describe_transactions(self._brokers(), ids, batch_timeout=self._timeout)

    def describe_producers(
        self, topic: str, partitions: Collection[int] = (), *, broker: int | None = None
    ) -> Answer[PartitionProducers]:
        """The producers that a topic's partitions remember, and their open transactions (DescribeProducers, KIP-664).

        If a partition could not be described, its `problem` is the error.

        Args:
            topic: The topic.
            partitions: Its partitions; empty for all.
            broker: The node to query, which must have replicas; None for the leaders.

        Raises:
            ConfigurationError: There is no such broker, or it has no replica of the topic.
            BrokerUnavailableError: No broker responded.
            BrokerAuthorizationError: The login was refused.
        """
        brokers = self._brokers()
        found = tuple(describe_producers(brokers, [topic], frozenset(partitions), broker))
        return Answer(found, problems=brokers.problems)

    def find_hanging(
        self,
        *,
        topic: str | None = None,
        partitions: Collection[int] = (),
        broker: int | None = None,
        max_transaction_timeout: float | None = None,
    ) -> HangingSearch:
        """Open transactions whose marker no coordinator will write, so that read_committed consumers wait forever (KIP-664).

        Describes the producers of the partitions, looks up the transactional ids of those whose open transaction is older than
        the limit, and queries the ids' coordinators. A transaction hangs if no coordinator knows it, if the coordinator has
        another epoch for it, or if the coordinator's transaction does not include the partition; and if it is still open
        afterwards. A transaction that its coordinator will end, or that is prepared, does not hang, however old it is.

        Kafka lists only the transactional ids that the principal may describe. If it may not describe all of them,
        transactions that are not listed are reported as undecided. If topics may be left out, `hidden` names the missing ACL.

        Args:
            topic: Only this topic; None for all that the principal may describe, including Kafka's internal topics.
            partitions: Only these partitions of the topic.
            broker: Only partitions with a replica on this broker, which is queried about them instead of the leaders.
            max_transaction_timeout: Seconds since the last batch above which an open transaction is examined; 0 for all. By
                default the broker's `transaction.max.timeout.ms` (15 minutes if it can't be read) plus 5 minutes.

        Raises:
            ConfigurationError: Partitions were given without a topic; or there is no such broker, or it has no replica.
            BrokerUnavailableError: No broker responded.
            BrokerAuthorizationError: The login was refused.
        """
        if partitions and topic is None:
            raise ConfigurationError("Partitions were given without a topic.", next_step="give the topic too")
        limit_ms = None if max_transaction_timeout is None else int(max_transaction_timeout * 1000)
        topics = None if topic is None else [topic]
        return find_hanging(self._brokers(), topics, frozenset(partitions), limit_ms=limit_ms, broker=broker)

    def stuck(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        longer_than: float = 0.0,
        stored: StoredPositions | None = None,
    ) -> StuckSearch:
        """Where `read_committed` consumers wait for an open transaction, who owns it, and which consumer groups wait.

        Compares the last stable offset of each partition with its high watermark. A group is listed if it has members and has
        not read past the last stable offset; for a partition of `__consumer_offsets`, if its positions are pending in the
        transaction (KIP-447). Kafka leaves out groups and topics that the principal may not describe; in this case `hidden`
        names the missing ACL.

        Args:
            topic: Only this topic; None for all that the principal may describe, including Kafka's internal topics.
            group: Only partitions that this consumer group reads, with or without members.
            longer_than: Only partitions whose transaction has been open for at least this many seconds.
            stored: For groups that keep their positions with their data: called with a group's id, returns the next offset by
                (topic, partition). Errors are passed on.

        Raises:
            UnknownGroupError: There is no such group, or the principal may not describe it.
            BrokerUnavailableError: No broker responded.
            BrokerAuthorizationError: The login was refused.
        """
        return find_stuck(self._brokers(), topic=topic, group=group, longer_than_ms=int(longer_than * 1000), stored=stored)

    def ends(self, topics: Iterable[str], partitions: Collection[int] = ()) -> builtins.list[PartitionEnd]:
        """The high watermark and the last stable offset of the partitions of topics (ListOffsets).

        Args:
            topics: The topics.
            partitions: Only these of their partitions; empty for all.

        Raises:
            BrokerUnavailableError: No broker responded.
            BrokerAuthorizationError: The login was refused.
        """
        return builtins.list(partition_ends(self._brokers(), sorted(topics), frozenset(partitions)))

    def first_offsets(self, topic: str, partitions: Collection[int] = ()) -> dict[tuple[str, int], int]:
        """The first offset that still exists in each partition of a topic.

        Raises:
            UnknownTopicError: There is no such topic or partition.
            BrokerUnavailableError: A partition's leader did not respond.
            BrokerAuthorizationError: The login was refused, or Describe on the topic is missing.
        """
        return first_offsets(self._brokers(), topic, frozenset(partitions))

    def transaction_of(self, topic: str, partition: int, offset: int) -> RecordTransaction:
        """The transaction that a record belongs to, its owner, and how it ended.

        The log shows which producer wrote the record and how the transaction ended; the coordinators know which transactional
        id has this producer id now.

        Args:
            topic: The topic.
            partition: The partition.
            offset: The record's offset.

        Raises:
            UnknownTopicError: There is no such partition.
            BrokerError: There is no record at the offset: it was not written yet, or retention or compaction has deleted it.
            BrokerUnavailableError: The leader did not respond.
            BrokerAuthorizationError: The login was refused, or Read on the topic is missing.
        """
        return transaction_of(self._brokers(), (topic, partition), offset)

    def examine(
        self,
        topic: str,
        partition: int,
        *,
        start_offset: int | None = None,
        producer_id: int | None = None,
        epoch: int | None = None,
    ) -> Examined | None:
        """An open transaction of a partition, and whether it hangs (as `find_hanging`); None if there is no such transaction.

        Args:
            topic: The topic.
            partition: The partition.
            start_offset: Its first offset there.
            producer_id: Its producer id.
            epoch: Its producer's epoch.

        Raises:
            UnknownTopicError: There is no such partition.
            BrokerUnavailableError: The leader did not respond.
            BrokerAuthorizationError: The login was refused, or Read on the topic is missing.
        """
        return examine(self._brokers(), (topic, partition), (start_offset, producer_id, epoch))

    def abort(self, found: Examined, *, coordinator_epoch: int | None = None, force: bool = False) -> None:
        """Abort a hanging transaction in its partition, by writing a marker (WriteTxnMarkers, KIP-664).

        The transaction is examined again first. Nothing is written if it does not hang: a marker in one partition would
        contradict the outcome in the others.

        Args:
            found: The result of `examine`.
            coordinator_epoch: The epoch to write the marker with; by default that of the producer's last marker there, or 0.
            force: Abort it even if it is not certain that it hangs, or if its coordinator may have committed it: the
                coordinator has committed the producer's last transaction, has a later one, or does not know it.

        Raises:
            RepairRefusedError: It does not hang, or no longer hangs, or this is not certain.
            TransactionChangedError: It has ended in the meantime, or the partition knows a newer epoch.
            BrokerAuthorizationError: ClusterAction on the cluster is missing.
            BrokerUnavailableError: The leader did not respond; the marker may have been written.
        """
        abort(self._brokers(), found, coordinator_epoch=coordinator_epoch, force=force)

    def force_terminate(self, transactional_id: str, *, producer_id: int, epoch: int) -> None:
        """End an open transaction by aborting it, even a prepared one (KIP-939), and fence its producer.

        Only the transaction with this producer id and epoch is ended (EndTxn v5). On brokers without transaction.version 2, a
        producer keeps its epoch: a later transaction of the same producer would be ended as well, and a message of it that
        arrives late may hang in its partition (rule FA).

        Args:
            transactional_id: The id, as Kafka sees it.
            producer_id: Its producer id, as `describe` has shown it.
            epoch: Its epoch, as `describe` has shown it.

        Raises:
            TransactionChangedError: It is no longer open; nothing was done.
            BrokerAuthorizationError: Write or Describe on the transactional id is missing.
            BrokerUnavailableError: The coordinator did not respond; the transaction may have been ended.
        """
        with closing(WireTransactionCoordinator(self._network.config, timeout=self._timeout)) as coordinator:
            force_terminate(coordinator, transactional_id, producer_id, epoch, Deadline.after(self._timeout))

    def close(self) -> None:
        """Close the connections."""
        self._network.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _brokers(self) -> Brokers:
        return Brokers(self._network, Deadline.after(self._timeout), self._broker_timeout)
