"""The search for hanging transactions: KIP-664's procedure, twice.

What seems to hang may have ended between the answers of its partition and its coordinator, or its id may have been moving from
one coordinator to another, so that neither listed it. So the coordinators are asked again after a moment, the partition last.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from uuid import uuid4

from dualwrite.admin.hanging import (
    DEFAULT_MAX_TIMEOUT_MS,
    PADDING_MS,
    HangingSearch,
    HangingTransaction,
    OpenTransaction,
    confirmed,
    is_late,
    judge,
    open_transactions,
)
from dualwrite.kafka.admin.brokers import Brokers, batches
from dualwrite.kafka.admin.describing import describe_transactions
from dualwrite.kafka.admin.facts import PartitionProducers, TransactionListing
from dualwrite.kafka.admin.listing import Filter, list_transactions
from dualwrite.kafka.admin.producers import by_partition, describe_producers

_SETTLING: Final = 1.0
"""Seconds before everything is asked again: meanwhile an id that was moving to another coordinator has arrived there."""


class Search:
    """One search for hanging transactions.

    Args:
        brokers: The brokers, for this call.
        limit_ms: The age above which an open transaction is examined.
        broker: The node to ask about its replicas; None for the leaders.
    """

    def __init__(self, brokers: Brokers, limit_ms: int, broker: int | None) -> None:
        self._brokers = brokers
        self._limit_ms = limit_ms
        self._broker = broker
        self._open = self._searched = 0
        self._unreadable: list[PartitionProducers] = []

    def run(self, topics: Sequence[str] | None, partitions: Collection[int]) -> HangingSearch:
        """Search these topics, or all; only these partitions, if there are any."""
        found = self._judged(self._late(topics, partitions))
        if found:
            self._brokers.deadline.sleep(_SETTLING)
            found = self._judged([one.opened for one in found])
            found = confirmed(found, self._asked_again(found)) if found else []
        return HangingSearch(
            hanging=tuple(one for one in found if one.reason.is_conclusive),
            undecided=tuple(one for one in found if not one.reason.is_conclusive),
            open=self._open,
            searched=self._searched,
            limit_ms=self._limit_ms,
            unreadable=tuple(self._unreadable),
            problems=self._brokers.problems,
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

    def _judged(self, late: Sequence[OpenTransaction]) -> list[HangingTransaction]:
        """The verdicts that are not in the transaction's favour."""
        if not late:
            return []
        coordinators = self._brokers.coordinators()
        listed: dict[int, TransactionListing] = {}
        for ids in batches(sorted({one.producer.producer_id for one in late})):
            wanted = Filter(producer_ids=frozenset(ids))
            listed |= {found.producer_id: found for found in list_transactions(self._brokers, wanted, coordinators).found}
        names = sorted({found.transactional_id for found in listed.values()})
        described = {found.transactional_id: found for found in describe_transactions(lambda: self._brokers, names)}
        all_listed = all(one.producer.producer_id in listed for one in late) or (
            self._brokers.sees_coordinators
            and all(problem.covered for problem in self._brokers.problems)
            and self._may_describe_any_id()
        )
        verdicts = []
        for one in late:
            listing = listed.get(one.producer.producer_id)
            description = None if listing is None else described.get(listing.transactional_id)
            verdicts.append(judge(one, listing, description, all_listed=all_listed))
        return [verdict for verdict in verdicts if verdict is not None]

    def _may_describe_any_id(self) -> bool:
        """Whether the principal may describe an id that no ACL with a name or a prefix can be meant for."""
        (probed,) = describe_transactions(lambda: self._brokers, [uuid4().hex])
        return probed.problem is None

    def _asked_again(self, suspects: Sequence[HangingTransaction]) -> Mapping[tuple[str, int], PartitionProducers]:
        topics = sorted({one.opened.topic for one in suspects})
        partitions = {one.opened.partition for one in suspects}
        return by_partition(list(describe_producers(self._brokers, topics, partitions, self._broker)))


def limit_ms_of(brokers: Brokers) -> int:
    """The age above which no transaction with a timeout can still be open."""
    return max(map(int, brokers.setting("transaction.max.timeout.ms")), default=DEFAULT_MAX_TIMEOUT_MS) + PADDING_MS
