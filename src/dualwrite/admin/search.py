"""The search for hanging transactions in the partitions of a cluster (KIP-664)."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from dualwrite.admin.examiner import Examiner
from dualwrite.admin.hanging import (
    DEFAULT_MAX_TIMEOUT_MS,
    PADDING_MS,
    HangingSearch,
    OpenTransaction,
    is_late,
    open_transactions,
)
from dualwrite.kafka.admin.brokers import Brokers
from dualwrite.kafka.admin.facts import PartitionProducers
from dualwrite.kafka.admin.hidden import note_hidden_topics
from dualwrite.kafka.admin.producers import describe_producers


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
