"""Claiming an id with all its lanes: first check that the database and Kafka are the right ones and answer, then claim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dualwrite.deadline import Deadline
from dualwrite.kafka.base import ProducerFactory, TransactionCoordinator
from dualwrite.outages import DATABASE, database_at
from dualwrite.recipe.ownership import Ownership
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.state import TransactionDescription
from dualwrite.stores.base import Acquiring, ClaimedLanes, StateRow, TxnStateStore
from dualwrite.stores.rows import new_token, on_cluster


@dataclass(frozen=True, slots=True)
class CheckedClaim:
    """A claim of all lanes.

    Args:
        cluster_id: The Kafka cluster that was compared with the rows.
        claimed: The rows.
    """

    cluster_id: str
    claimed: ClaimedLanes


class LaneClaims:
    """Claims the lanes of one writer; see `Lanes` for why in this order.

    Args:
        store: The database.
        coordinator: Kafka's side.
        producers: Of the writer.
    """

    def __init__(self, store: TxnStateStore, coordinator: TransactionCoordinator, producers: ProducerFactory) -> None:
        self._store = store
        self._database = database_at(store.description, is_local=store.is_local)
        self._coordinator = coordinator
        self._kind = producers.kind
        self._intended: str | None = None  # the token of a claim that is not known to have succeeded yet

    def make(self, owned: Mapping[str, Ownership], *, expected_fence: int | None) -> CheckedClaim:
        """Check and claim.

        A claim takes the id from a writer that may work. So before it, the database must be the original, and Kafka must be the
        cluster of the rows; and the coordinator of each generation that is needed must answer.

        If it is not known whether the claim has succeeded, the next call repeats it under the same token: it may be in the
        rows, and must not be taken for another process's.

        Args:
            owned: The writer's lanes by their ids, lane 0 first.
            expected_fence: See `TxnStateStore.claim_lanes`.

        Raises:
            StoreCopiedError: The database is a copy, or has moved.
            ClusterMismatchError: A row names another cluster. Nothing was claimed.
            BrokerUnavailableError: A coordinator does not answer. Nothing was claimed.
            DualWriteError: As for `TxnStateStore.claim_lanes`.
        """
        ids, timeouts = list(owned), owned[next(iter(owned))].timeouts
        rows = {row.transactional_id: row for row in self._store.look_at(ids)}
        cluster_id = self._coordinator.cluster_id(timeout=timeouts.kafka)
        for row in rows.values():
            on_cluster(row, cluster_id)
        deadline = Deadline.after(timeouts.kafka)
        described = self._coordinator.describe_all(_needed(ids, rows), timeout=deadline)
        acquiring = Acquiring(self._kind, frozenset(ids), self._reusable(owned, rows, described, deadline), cluster_id)
        self._intended = self._intended or new_token()
        with self._database.call(DATABASE, may_wait=True):  # for the rows' locks
            claimed = self._store.claim_lanes(
                [*ids, *(row_id for row_id in rows if row_id not in owned)],
                describe_owner("writer"),
                timeout=timeouts.claim,
                cluster_id=cluster_id,
                expected_fence=expected_fence,
                token=self._intended,
                acquiring=acquiring,
            )
        self._intended = None
        return CheckedClaim(cluster_id, claimed)

    def _reusable(
        self,
        owned: Mapping[str, Ownership],
        rows: Mapping[str, StateRow],
        described: Mapping[str, TransactionDescription | None],
        deadline: Deadline,
    ) -> frozenset[str]:
        """The lanes that can continue with their newest generation, if nothing changes until they are claimed."""

        def can_reuse(row: StateRow) -> bool:
            newest = described.get(row.kafka_id(row.generation))
            return owned[row.transactional_id].can_reuse(row, newest, deadline)

        return frozenset(row_id for row_id, row in rows.items() if row_id in owned and can_reuse(row))


def _needed(ids: Sequence[str], rows: Mapping[str, StateRow]) -> list[str]:
    """The ids at Kafka of the generations that an opening will need: those to recover, or else the newest."""

    def needed() -> Iterator[str]:
        for row_id in (*ids, *(found for found in rows if found not in ids)):
            row = rows.get(row_id)
            if row is None:
                yield row_id
            else:
                yield from map(row.kafka_id, row.generations_to_recover or (row.generation,))

    return list(needed())
