"""How a transaction ended, according to Kafka's log: the evidence that is left once its coordinator has forgotten it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from dualwrite.deadline import Deadline, Limit
from dualwrite.delivery import Delivery, Place
from dualwrite.errors import BrokerError
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.logs import SubjectLogger
from dualwrite.recovery.decision import Decision, decide_by_log
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostTransaction, StateRow

log = SubjectLogger(__name__)

_AGAIN: Final = 2.0
"""The maximum seconds for reading the log again for UNVERIFIED entries: nothing is open, so recovery should not wait for it."""


_LEAST: Final = 0.5
"""The least seconds for one entry, however many there are: more than a new connection takes."""


def decision_by_log(
    coordinator: TransactionCoordinator, stored: PreparedTxnState, delivery: Delivery | None, limit: Limit | None = None
) -> Decision:
    """Decide by the log, for a state that its coordinator has forgotten; UNVERIFIED if the log has no evidence either.

    The places are read one after another, until one proves how the transaction ended: retention, deletion and permissions
    differ from topic to topic. A place that can't be read matters only if no other one proves it.

    Raises: as for `TransactionCoordinator.fate`.
    """
    places = () if delivery is None else delivery.proofs
    shares = ((None, place) for place in places) if limit is None else Deadline.of(limit).shared(places)
    unreadable: BrokerError | None = None
    for share, place in shares:
        try:
            fate = coordinator.fate(stored, place, timeout=share)
        except BrokerError as error:
            log.info("the log of %s, for transaction %s, can't be read: %s", place, stored, error, **_fields(place))
            unreadable = unreadable or error
            continue
        log.info(
            "the log of %s: transaction %s, unknown to its coordinator, is %s", place, stored, fate.value, **_fields(place)
        )
        decision = decide_by_log(fate)
        if decision is not Decision.UNVERIFIED:
            return decision
    if unreadable is not None:
        raise unreadable
    return Decision.UNVERIFIED


def _fields(place: Place) -> dict[str, Any]:
    return {"topic": place.topic, "partition": place.partition, "offset": place.first_offset}


def proven_by_log(
    coordinator: TransactionCoordinator, row: StateRow, entries: Iterable[LostTransaction], limit: Limit | None
) -> Iterator[tuple[LostTransaction, Decision]]:
    """The UNVERIFIED entries of the row that the log proves now, for example because Read was granted (rule UC).

    An entry is skipped if it was recorded for another cluster than the row's: here, the same offset may have another
    transaction with the same producer id and epoch. If the log can't be read now, the entry stays UNVERIFIED.
    """
    deadline = Deadline.after(_AGAIN) if limit is None else Deadline.of(limit).within(_AGAIN)
    comparable = [entry for entry in entries if entry.cluster_id and entry.cluster_id == row.cluster_id]
    for share, entry in deadline.shared(comparable, least=_LEAST):
        try:
            decision = decision_by_log(coordinator, entry.state, entry.delivery, share)
        except BrokerError:  # logged above
            continue
        if decision is not Decision.UNVERIFIED:
            yield entry, decision
