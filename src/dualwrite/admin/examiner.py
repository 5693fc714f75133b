"""Compares open transactions with their coordinators' descriptions: KIP-664's procedure, run twice.

A transaction that seems to hang may have ended between the responses of its partition and its coordinator, or its id may have
been moving from one coordinator to another, so that neither listed it. So after a short pause the coordinators are queried
again, and then the partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dualwrite.admin.hanging import CoordinatorSide, HangingTransaction, OpenTransaction, confirmed
from dualwrite.kafka.admin.brokers import Brokers, batches
from dualwrite.kafka.admin.describing import describe_transactions
from dualwrite.kafka.admin.facts import PartitionProducers, TransactionListing
from dualwrite.kafka.admin.hidden import sees_every_id
from dualwrite.kafka.admin.leaders import Key
from dualwrite.kafka.admin.listing import Filter, list_transactions
from dualwrite.kafka.admin.producers import producers_of

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
