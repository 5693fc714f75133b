"""Decides whether an open transaction of a partition hangs: no coordinator will ever write its marker (KIP-664). No I/O.

The partition's leader knows the producer of an open transaction, the coordinator knows the transaction; the transaction hangs
if the two contradict each other. Its age alone proves nothing: a prepared transaction may wait for days (KIP-939).

DescribeTransactions returns the partitions of an ongoing transaction. While a transaction is being ended, it returns those
whose marker is not written yet. So the coordinator will write the markers of exactly these partitions.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from dualwrite.admin.facts import ActiveProducer, BrokerProblem, DescribedTransaction, PartitionProducers, TransactionListing
from dualwrite.admin.listing import Filter, describe_transactions, list_transactions, note_hidden_topics, sees_every_id
from dualwrite.admin.partitions import describe_producers, producers_of
from dualwrite.admin.requests import Brokers, Key, batches
from dualwrite.errors import DualWriteError
from dualwrite.state import TransactionDescription, TransactionStatus

PADDING_MS: Final = 300_000
"""Added to `transaction.max.timeout.ms`, as in Kafka's metric PartitionsWithLateTransactionsCount (KIP-664)."""

DEFAULT_MAX_TIMEOUT_MS: Final = 900_000
"""Kafka's default for `transaction.max.timeout.ms`, for a principal that may not read the setting."""


class Reason(Enum):
    """How the coordinator contradicts the open transaction, or why this is not known."""

    UNKNOWN_PRODUCER = "no coordinator knows its producer id"
    UNKNOWN_ID = "the coordinator has forgotten the transactional id"
    OTHER_PRODUCER = "the transactional id has another producer id now"
    OTHER_EPOCH = "the coordinator has another epoch"
    WITHOUT_PARTITION = "the transaction at the coordinator does not include the partition"

    NOT_LISTED = "no coordinator lists its producer id, but not all responded, or not for all transactional ids"
    NOT_DESCRIBED = "the coordinator did not respond"
    SEVERAL_COORDINATORS = "more than one broker responds as the coordinator"
    OLDER_EPOCH = "the coordinator has an older epoch: what it knows is out of date, or it has lost its newest state"
    NOT_CONFIRMED = "the partition did not respond when it was queried again"

    @property
    def is_conclusive(self) -> bool:
        """Whether the transaction certainly hangs."""
        return self not in _INCONCLUSIVE


_INCONCLUSIVE: Final = frozenset(
    {
        Reason.NOT_LISTED,
        Reason.NOT_DESCRIBED,
        Reason.SEVERAL_COORDINATORS,
        Reason.OLDER_EPOCH,
        Reason.NOT_CONFIRMED,
    }
)

Name = tuple[str, int, int, int, int | None]
"""What identifies an open transaction: topic, partition, producer id and epoch, first offset."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction in one partition.

    Args:
        topic: The topic.
        partition: The partition.
        broker: The node that described it.
        producer: Its producer there.
    """

    topic: str
    partition: int
    broker: int | None
    producer: ActiveProducer

    @property
    def name(self) -> Name:
        """What identifies it."""
        found = self.producer
        return self.topic, self.partition, found.producer_id, found.epoch, found.transaction_start_offset


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """An open transaction that hangs, or that may hang if the reason is not conclusive.

    Args:
        opened: The transaction in its partition.
        reason: Why it hangs or may hang.
        transactional_id: The id that has its producer id; None if no coordinator lists one.
        coordinator: The node id of that id's coordinator, if known.
        description: The coordinator's description of the id, if it knows it.
    """

    opened: OpenTransaction
    reason: Reason
    transactional_id: str | None = None
    coordinator: int | None = None
    description: TransactionDescription | None = None


@dataclass(frozen=True, slots=True)
class HangingSearch:
    """The result of `TransactionAdmin.find_hanging`.

    Args:
        hanging: The transactions that hang, sorted by partition.
        undecided: Those that may hang: a broker or coordinator that could decide this did not respond, or is out of date.
        open: How many transactions were open in the partitions, of any age.
        searched: How many partitions were described.
        limit_ms: The age above which an open transaction was examined, in milliseconds.
        unreadable: The partitions and topics that could not be described.
        problems: The brokers that did not respond.
        hidden: The missing ACLs because of which transactions are undecided, or topics are left out, as errors that name them.
    """

    hanging: tuple[HangingTransaction, ...]
    undecided: tuple[HangingTransaction, ...]
    open: int
    searched: int
    limit_ms: int
    unreadable: tuple[PartitionProducers, ...] = ()
    problems: tuple[BrokerProblem, ...] = ()
    hidden: tuple[DualWriteError, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether everything that was to be searched was searched, and decided."""
        if self.undecided or self.unreadable or self.hidden:
            return False
        return all(problem.covered for problem in self.problems)


def open_transactions(described: PartitionProducers) -> list[OpenTransaction]:
    """The open transactions of a partition."""
    return [
        OpenTransaction(described.topic, described.partition, described.broker, producer)
        for producer in described.producers
        if producer.transaction_start_offset is not None
    ]


def is_late(opened: OpenTransaction, limit_ms: int, now_ms: int) -> bool:
    """Whether its last batch is older than the limit. A limit of 0 includes all, and so does an unknown age."""
    age = opened.producer.age_ms(now_ms)
    return limit_ms <= 0 or age is None or age > limit_ms


def judge(
    opened: OpenTransaction,
    listing: TransactionListing | None,
    described: DescribedTransaction | None,
    *,
    all_listed: bool,
) -> HangingTransaction | None:
    """Whether an open transaction hangs according to its coordinator; None if the coordinator will end it.

    The transaction may have ended after the partition's response and before the coordinator's: query the partition again before
    you act on the result.

    Args:
        opened: The transaction in its partition.
        listing: The id that a coordinator lists for its producer id.
        described: The coordinator's description of that id.
        all_listed: Whether every coordinator has responded, for every id.
    """
    if listing is None:
        return HangingTransaction(opened, Reason.UNKNOWN_PRODUCER if all_listed else Reason.NOT_LISTED)
    if described is None or described.problem is not None:
        return HangingTransaction(opened, Reason.NOT_DESCRIBED, listing.transactional_id, listing.coordinator)
    reason = _contradiction(opened, described.description)
    if reason is None:
        return None
    return HangingTransaction(opened, reason, listing.transactional_id, described.coordinator, described.description)


def _contradiction(opened: OpenTransaction, description: TransactionDescription | None) -> Reason | None:
    if description is None:
        return Reason.UNKNOWN_ID
    if description.producer_id != opened.producer.producer_id:
        return Reason.OTHER_PRODUCER
    if description.epoch < opened.producer.epoch:  # only a coordinator hands out epochs
        return Reason.OLDER_EPOCH
    if not _is_epoch_of(description, opened.producer.epoch):
        return Reason.OTHER_EPOCH
    if (opened.topic, opened.partition) not in description.partitions:
        return Reason.WITHOUT_PARTITION
    return None


def _is_epoch_of(description: TransactionDescription, epoch: int) -> bool:
    """Whether it is the epoch of the described transaction. Ending a transaction may raise its epoch (KIP-890).

    While the transaction is being ended, the partition gets a marker with the description's epoch, which ends it there whatever
    its own epoch is: Kafka 4.0.0 raises the epoch twice.
    """
    if description.status is TransactionStatus.ONGOING:
        return epoch == description.epoch
    if description.status.is_ending:
        return epoch <= description.epoch
    return description.epoch - 1 <= epoch <= description.epoch


@dataclass(frozen=True, slots=True)
class CoordinatorSide:
    """What the coordinators know about the producers of open transactions.

    Args:
        listed: The transactional id that a coordinator lists for a producer id.
        described: The description of each of these ids.
        all_listed: Whether every coordinator has responded, for every id.
        doubtful: The producer ids that several brokers list, or that a different broker lists than describes their id: one of
            them may be a former coordinator that is cut off from the others, and knows only what it was before.
    """

    listed: Mapping[int, TransactionListing]
    described: Mapping[str, DescribedTransaction]
    all_listed: bool
    doubtful: frozenset[int] = frozenset()

    def listing(self, opened: OpenTransaction) -> TransactionListing | None:
        """The id that has the transaction's producer id, if one is listed."""
        return self.listed.get(opened.producer.producer_id)

    def description(self, opened: OpenTransaction) -> DescribedTransaction | None:
        """The coordinator's description of that id."""
        listing = self.listing(opened)
        return None if listing is None else self.described.get(listing.transactional_id)

    def verdict(self, opened: OpenTransaction) -> HangingTransaction | None:
        """What one of several coordinators contradicts proves nothing."""
        found = judge(opened, self.listing(opened), self.description(opened), all_listed=self.all_listed)
        if found is None or not found.reason.is_conclusive or opened.producer.producer_id not in self.doubtful:
            return found
        return replace(found, reason=Reason.SEVERAL_COORDINATORS)


def confirmed(
    suspects: Iterable[HangingTransaction], again: Mapping[tuple[str, int], PartitionProducers]
) -> list[HangingTransaction]:
    """Those that are still open according to a second response from their partitions; sorted by partition.

    Args:
        suspects: The verdicts.
        again: The partitions' second responses.
    """
    kept = []
    for suspect in suspects:
        opened = suspect.opened
        described = again.get((opened.topic, opened.partition))
        if described is None or described.problem is not None:
            reason = Reason.NOT_CONFIRMED if suspect.reason.is_conclusive else suspect.reason
            kept.append(HangingTransaction(opened, reason, suspect.transactional_id, suspect.coordinator, suspect.description))
        elif opened.name in {found.name for found in open_transactions(described)}:
            kept.append(suspect)
    return sorted(kept, key=lambda found: (found.opened.topic, found.opened.partition, found.opened.producer))


_RECHECK_PAUSE: Final = 1.0
"""Seconds before the second check: by then, an id that was moving to another coordinator has arrived there."""


class Examiner:
    """Queries the coordinators about open transactions of partitions.

    Args:
        brokers: The brokers, for this call.
        broker: The node to query about its replicas; None for the leaders.
    """

    def __init__(self, brokers: Brokers, broker: int | None = None) -> None:
        self._brokers = brokers
        self._broker = broker

    def describe(self, opened: Sequence[OpenTransaction]) -> CoordinatorSide:
        """What the coordinators know about the transactions now.

        Raises:
            BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
        """
        coordinators = self._brokers.coordinators()
        listings: list[TransactionListing] = []
        for ids in batches(sorted({one.producer.producer_id for one in opened})):
            wanted = Filter(producer_ids=frozenset(ids))
            listings += list_transactions(self._brokers, wanted, coordinators).found
        listed = {found.producer_id: found for found in listings}
        names = sorted({found.transactional_id for found in listed.values()})
        described = {found.transactional_id: found for found in describe_transactions(lambda: self._brokers, names)}
        all_listed = all(one.producer.producer_id in listed for one in opened) or (
            all(problem.covered for problem in self._brokers.problems) and sees_every_id(self._brokers)
        )
        doubtful = {
            found.producer_id
            for found in listings
            if found != listed[found.producer_id] or found.coordinator != described[found.transactional_id].coordinator
        }
        return CoordinatorSide(listed, described, all_listed, frozenset(doubtful))

    def hanging(self, opened: Sequence[OpenTransaction], first: CoordinatorSide | None = None) -> list[HangingTransaction]:
        """The transactions that hang, or may hang. Each that seems to hang is checked a second time.

        Args:
            opened: The open transactions.
            first: The result of a call of `describe` just before, if there was one.

        Raises:
            BrokerUnavailableError, BrokerAuthorizationError: As for `Brokers.view`.
        """
        found = self._suspects(opened, first)
        if not found:
            return []
        self._brokers.deadline.sleep(_RECHECK_PAUSE)
        found = self._suspects([one.opened for one in found])
        return confirmed(found, self._partitions_of(found)) if found else []

    def _suspects(self, opened: Sequence[OpenTransaction], side: CoordinatorSide | None = None) -> list[HangingTransaction]:
        """The transactions that hang, or may hang, according to the coordinators."""
        if not opened:
            return []
        side = side or self.describe(opened)
        return [verdict for one in opened if (verdict := side.verdict(one)) is not None]

    def _partitions_of(self, suspects: Sequence[HangingTransaction]) -> Mapping[Key, PartitionProducers]:
        keys = {(one.opened.topic, one.opened.partition) for one in suspects}
        return {(found.topic, found.partition): found for found in producers_of(self._brokers, keys, self._broker)}


class Search:
    """One search for hanging transactions.

    Args:
        brokers: The brokers, for this call.
        limit_ms: The age above which an open transaction is examined.
        broker: The node to query about its replicas; None for the leaders.
    """

    def __init__(self, brokers: Brokers, limit_ms: int, broker: int | None) -> None:
        self._brokers = brokers
        self._limit_ms = limit_ms
        self._broker = broker
        self._open = self._searched = 0
        self._unreadable: list[PartitionProducers] = []

    def run(self, topics: Sequence[str] | None, partitions: Collection[int]) -> HangingSearch:
        """Search these topics, or all; only these partitions, if any are given."""
        if topics is None:
            note_hidden_topics(self._brokers)
        found = Examiner(self._brokers, self._broker).hanging(self._late(topics, partitions))
        return HangingSearch(
            hanging=tuple(one for one in found if one.reason.is_conclusive),
            undecided=tuple(one for one in found if not one.reason.is_conclusive),
            open=self._open,
            searched=self._searched,
            limit_ms=self._limit_ms,
            unreadable=tuple(self._unreadable),
            problems=self._brokers.problems,
            hidden=self._brokers.hidden,
        )

    def _late(self, topics: Sequence[str] | None, partitions: Collection[int]) -> list[OpenTransaction]:
        late = []
        for described in describe_producers(self._brokers, topics, partitions, self._broker):
            if described.problem is not None:
                self._unreadable.append(described)
                continue
            self._searched += 1
            opened = open_transactions(described)
            self._open += len(opened)
            now = int(time.time() * 1000)
            late += [one for one in opened if is_late(one, self._limit_ms, now)]
        return late


def limit_ms_of(brokers: Brokers) -> int:
    """The age above which no transaction with a timeout can still be open."""
    return max(map(int, brokers.setting("transaction.max.timeout.ms")), default=DEFAULT_MAX_TIMEOUT_MS) + PADDING_MS
