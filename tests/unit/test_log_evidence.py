"""Which UNVERIFIED entries the log proves: a mock takes the place of brokers of which one does not respond."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerUnavailableError
from dualwrite.recovery.decision import Decision
from dualwrite.recovery.resolve import proven_by_log
from dualwrite.state import Delivery, Fate, Place, PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction

NOON = datetime(2026, 11, 25, 12, 0, 0, tzinfo=UTC)


def entry(topic: str, cluster_id: str = "one") -> LostTransaction:
    delivery = Delivery(1, (Place(topic, 0, 7, 1),), NOON)
    return LostTransaction(LostKind.UNVERIFIED, PreparedTxnState(7, 1), 1, NOON, delivery, cluster_id=cluster_id)


def test_an_unreadable_topic_leaves_time_for_the_entries_after_it() -> None:
    whole = Deadline.after(1.0)
    shares: list[float] = []

    def fate(stored: PreparedTxnState, place: Place, *, timeout: Deadline) -> Fate:
        del stored
        shares.append(timeout.left / whole.left)
        if place.topic == "offline":
            raise BrokerUnavailableError("it has no leader")
        return Fate.COMMITTED

    log: Any = SimpleNamespace(fate=fate)
    row: Any = SimpleNamespace(cluster_id="one")
    offline, readable = entry("offline"), entry("readable")
    entries = [entry("readable", cluster_id="another"), offline, readable]
    assert list(proven_by_log(log, row, entries, whole)) == [(readable, Decision.ALREADY_COMMITTED)]
    assert len(shares) == 2
    assert shares[0] < 0.75
