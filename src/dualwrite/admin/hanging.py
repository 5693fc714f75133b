"""Finds open transactions of partitions that hang: no coordinator will ever write their marker (KIP-664).

The partition's leader knows the producer of an open transaction, the coordinator knows the transaction; the transaction hangs
if the two contradict each other. Its age alone proves nothing: a prepared transaction may wait for days (KIP-939).

DescribeTransactions returns the partitions of an ongoing transaction. While a transaction is being ended, it returns those
whose marker is not written yet. So the coordinator will write the markers of exactly these partitions.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from dualwrite.admin.facts import (
    RUNNING,
    DescribedTransaction,
    Key,
    OpenTransaction,
    PartitionProducers,
    Search,
    TransactionListing,
)
from dualwrite.admin.listing import Filter, describe_transactions, list_transactions, note_hidden_topics, sees_every_id
from dualwrite.admin.partitions import describe_producers, producers_of
from dualwrite.admin.requests import Brokers, batches
from dualwrite.state import TransactionDescription, TransactionStatus

PADDING_MS: Final = 300_000
"""Added to `transaction.max.timeout.ms`, as in Kafka's metric PartitionsWithLateTransactionsCount (KIP-664)."""

DEFAULT_MAX_TIMEOUT_MS: Final = 900_000
"""Kafka's default for `transaction.max.timeout.ms`, for a principal that may not read the setting."""

_RECHECK_PAUSE_SECONDS: Final = 1.0
"""Seconds before the second check: by then, an id that was moving to another coordinator has arrived there."""


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
class Holder:
    """An open transaction of a partition, and what its coordinator reports: consumers wait for its end.

    Args:
        opened: The transaction in the partition.
        transactional_id: The id that has its producer id; None if no coordinator lists one.
        coordinator: The node id of that id's coordinator, if known.
        description: The coordinator's description of the id, if it knows it.
        hanging: Why no coordinator will end it, or might not end it; None if its coordinator will end it.
    """

    opened: OpenTransaction
    transactional_id: str | None = None
    coordinator: int | None = None
    description: TransactionDescription | None = None
    hanging: Reason | None = None

    def age_ms(self, now_ms: int) -> int | None:
        """Milliseconds since it began according to its coordinator; if it hangs, since its last message. None if unknown."""
        described = self.description
        if self.hanging is None and described is not None and described.status in RUNNING and described.start_time_ms >= 0:
            return now_ms - described.start_time_ms
        return self.opened.producer.age_ms(now_ms)

    @property
    def as_hanging(self) -> HangingTransaction | None:
        """The same as a transaction that hangs, or may hang; None if its coordinator will end it."""
        if self.hanging is None:
            return None
        return HangingTransaction(self.opened, self.hanging, self.transactional_id, self.coordinator, self.description)


@dataclass(frozen=True, slots=True)
class HangingSearch(Search):
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

    @property
    def unexamined(self) -> Collection[object]:
        """What could not be searched, or decided."""
        return self.undecided or self.unreadable


def is_late(opened: OpenTransaction, limit_ms: int, now_ms: int) -> bool:
    """Whether its last batch is older than the limit. A limit of 0 includes all, and so does an unknown age."""
    age = opened.producer.age_ms(now_ms)
    return limit_ms <= 0 or age is None or age > limit_ms


@dataclass(frozen=True, slots=True)
class CoordinatorReports:
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

    def description(self, opened: OpenTransaction) -> DescribedTransaction | None:
        """The coordinator's description of the id that has the transaction's producer id, if one is listed."""
        listing = self.listed.get(opened.producer.producer_id)
        return None if listing is None else self.described.get(listing.transactional_id)

    def holder(self, opened: OpenTransaction) -> Holder:
        """What the coordinator reports about a transaction, and whether it hangs, or may hang.

        It may have ended after the partition's response and before the coordinator's: query the partition again before you act
        on the result.
        """
        listing = self.listed.get(opened.producer.producer_id)
        if listing is None:
            return Holder(opened, hanging=Reason.UNKNOWN_PRODUCER if self.all_listed else Reason.NOT_LISTED)
        described = self.described.get(listing.transactional_id)
        if described is None or described.problem is not None:
            return Holder(opened, listing.transactional_id, listing.coordinator, None, Reason.NOT_DESCRIBED)
        reason = _contradiction(opened, described.description)
        if reason is not None and reason.is_conclusive and opened.producer.producer_id in self.doubtful:
            reason = Reason.SEVERAL_COORDINATORS  # what one of them contradicts proves nothing
        return Holder(opened, listing.transactional_id, described.coordinator, described.description, reason)


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


def confirmed(suspects: Iterable[Holder], again: Mapping[Key, PartitionProducers]) -> Iterator[Holder]:
    """Those that are still open according to a second response from their partitions."""
    for suspect in suspects:
        described = again.get(suspect.opened.key)
        if described is None or described.problem is not None:
            is_proven = suspect.hanging is not None and suspect.hanging.is_conclusive
            yield replace(suspect, hanging=Reason.NOT_CONFIRMED) if is_proven else suspect
        elif suspect.opened.name in {found.name for found in described.opened}:
            yield suspect


# --- queries ----------------------------------------------------------------------------------------------------------


def coordinator_reports(brokers: Brokers, opened: Sequence[OpenTransaction]) -> CoordinatorReports:
    """What the coordinators know about open transactions now."""
    coordinators = brokers.coordinators()
    listings: list[TransactionListing] = []
    for ids in batches(sorted({one.producer.producer_id for one in opened})):
        listings += list_transactions(brokers, Filter(producer_ids=frozenset(ids)), coordinators).found
    listed = {found.producer_id: found for found in listings}
    names = sorted({found.transactional_id for found in listed.values()})
    described = {found.transactional_id: found for found in describe_transactions(brokers, names)}
    all_listed = all(one.producer.producer_id in listed for one in opened) or (
        all(problem.covered for problem in brokers.problems) and sees_every_id(brokers)
    )
    doubtful = {
        found.producer_id
        for found in listings
        if found != listed[found.producer_id] or found.coordinator != described[found.transactional_id].coordinator
    }
    return CoordinatorReports(listed, described, all_listed, frozenset(doubtful))


def holders_of(
    brokers: Brokers, opened: Sequence[OpenTransaction], reports: CoordinatorReports | None = None, broker: int | None = None
) -> list[Holder]:
    """The transactions that are still open, sorted by partition. Each that seems to hang is checked a second time.

    Args:
        brokers: The brokers, for this call.
        opened: The open transactions.
        reports: The result of a call of `coordinator_reports` just before, if there was one.
        broker: The node to query about its replicas; None for the leaders.
    """
    if not opened:
        return []
    found = list(map((reports or coordinator_reports(brokers, opened)).holder, opened))
    suspects = [one.opened for one in found if one.hanging is not None]
    if suspects:
        brokers.deadline.sleep(_RECHECK_PAUSE_SECONDS)
        again = map(coordinator_reports(brokers, suspects).holder, suspects)
        partitions = {one.key: one for one in producers_of(brokers, {each.key for each in suspects}, broker)}
        found = [*(one for one in found if one.hanging is None), *confirmed(again, partitions)]
    return sorted(found, key=lambda one: (one.opened.key, one.opened.producer))


def find_hanging(
    brokers: Brokers, topics: Sequence[str] | None, partitions: Collection[int], *, limit_ms: int | None, broker: int | None
) -> HangingSearch:
    """As `TransactionAdmin.find_hanging`: in these topics, or all; in these partitions, if any are given."""
    if limit_ms is None:
        maximum = max(map(int, brokers.setting("transaction.max.timeout.ms")), default=DEFAULT_MAX_TIMEOUT_MS)
        limit_ms = maximum + PADDING_MS
    if topics is None:
        note_hidden_topics(brokers)
    all_opened, searched = 0, 0
    late: list[OpenTransaction] = []
    unreadable: list[PartitionProducers] = []
    for described in describe_producers(brokers, topics, partitions, broker):
        if described.problem is not None:
            unreadable.append(described)
            continue
        searched += 1
        opened = described.opened
        all_opened += len(opened)
        now = int(time.time() * 1000)
        late += [one for one in opened if is_late(one, limit_ms, now)]
    holders = holders_of(brokers, late, broker=broker)
    found = [hanging for one in holders if (hanging := one.as_hanging) is not None]
    return HangingSearch(
        hanging=tuple(one for one in found if one.reason.is_conclusive),
        undecided=tuple(one for one in found if not one.reason.is_conclusive),
        open=all_opened,
        searched=searched,
        limit_ms=limit_ms,
        unreadable=tuple(unreadable),
        problems=brokers.problems,
        hidden=brokers.hidden,
    )
