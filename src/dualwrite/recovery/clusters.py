"""Which Kafka cluster an id is on (rule CL): seen before anything is claimed; and moving an id to another cluster.

Recovery on another cluster would find nothing of what is prepared there, and take it for lost. So the row keeps Kafka's
`cluster.id`, written when a generation is taken. A row of an older release has none: the first opening that gets as far as
taking a generation decides. Until then nothing is lost by a wrong one: what it can't find is kept as UNVERIFIED, and
committed by the right cluster (rule UC).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from dualwrite.errors import NotSettledError, StoreError
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.stores.base import LostKind, LostTransaction, Settlement, StateRow, TxnStateStore
from dualwrite.stores.rows import on_cluster

log = logging.getLogger(__name__)


def check_cluster(
    store: TxnStateStore, coordinator: TransactionCoordinator, ids: Iterable[str], *, timeout: float | None = None
) -> str:
    """See that the database is the original one, that Kafka answers, and that it is the cluster of these ids. Claims nothing.

    Returns:
        Kafka's `cluster.id`.

    Raises:
        StoreCopiedError: The database is a copy, or has moved.
        ClusterMismatchError: The row of one of the ids speaks of another cluster.
        BrokerUnavailableError: Kafka can't be reached.
        StoreError: The database can't be read.
    """
    store.check_original()
    seen = coordinator.cluster_id(timeout=timeout)
    for row in map(store.read, ids):
        if row is not None:
            on_cluster(row, seen)
    return seen


@dataclass(frozen=True, slots=True)
class Move:
    """One id, or one lane of it, that has moved.

    Args:
        transactional_id: The id of the row.
        from_cluster_id: The cluster that the row spoke of; empty where it spoke of none.
        to_cluster_id: The cluster that it speaks of now.
        given_up: What was prepared on the old cluster and is given up: it stands in the row as UNVERIFIED.
    """

    transactional_id: str
    from_cluster_id: str
    to_cluster_id: str
    given_up: LostTransaction | None = None


def move_to_cluster(
    store: TxnStateStore,
    coordinator: TransactionCoordinator,
    ids: Iterable[str],
    *,
    give_up_prepared: bool = False,
    timeout: float,
) -> tuple[Move, ...]:
    """Have ids speak of the cluster that answers now, for those who have moved to it for good.

    What is prepared on the old cluster can be committed or aborted only there: recover there first. With `give_up_prepared` it
    is given up instead: a committed state stands in the row as UNVERIFIED until somebody acknowledges it, and messages that
    were open on the old cluster stay open there, where nobody looks any more.

    It raises the fences: a writer that is still at work on the old cluster gets FencedError.

    Args:
        store: The database.
        coordinator: The new cluster.
        ids: The ids of the rows, lanes by their own ids.
        give_up_prepared: As above.
        timeout: Seconds that each claim may wait.

    Returns:
        What has moved; ids that speak of this cluster already are left out.

    Raises:
        NotSettledError: Something of an id is still to be recovered on the old cluster. Nothing was changed.
        StoreError: There is no such id, or the database can't be read or written.
        FencedError: Somebody else has claimed an id meanwhile; those before it have moved.
        BrokerUnavailableError: Kafka can't be reached.
    """
    store.check_original()
    seen = coordinator.cluster_id()
    rows = [row for row in (_existing(store, name) for name in ids) if row.cluster_id != seen]
    for row in rows:
        if not give_up_prepared:
            _demand_settled(row, seen)
    return tuple(_moved(store, row, seen, timeout) for row in rows)


def _existing(store: TxnStateStore, transactional_id: str) -> StateRow:
    row = store.read(transactional_id)
    if row is None:
        raise StoreError(
            "There is no such transactional id in this database.",
            transactional_id=transactional_id,
            next_step=f"`dualwrite status` lists the ids of {store.description}",
        )
    return row


def _demand_settled(row: StateRow, seen: str) -> None:
    if row.prepared_state is None and not row.unsettled_generations:
        return
    raise NotSettledError(
        f"The id can't move to Kafka cluster {seen!r}: something of it is still open on cluster {row.cluster_id!r}.",
        transactional_id=row.transactional_id,
        cause="a writer is at work, or has crashed; what it has prepared can be committed only where it is",
        next_step=f"stop the writers, run `dualwrite recover --id {row.transactional_id}` with the old cluster's address, then "
        "move. If the old cluster is gone for good: --give-up-prepared (library: give_up_prepared=True)",
    )


def _moved(store: TxnStateStore, row: StateRow, seen: str, timeout: float) -> Move:
    claim = store.claim(row.transactional_id, describe_owner("mover"), timeout=timeout, expected_fence=row.fence)
    row = store.read_claimed(claim)
    given_up = None
    if row.prepared_state is not None:
        now = datetime.now(UTC)
        given_up = LostTransaction(LostKind.UNVERIFIED, row.prepared_state, row.prepared_generation, now, row.delivery)
        log.error("%s: %s is given up on cluster %s", row.transactional_id, row.prepared_state, row.cluster_id)
    store.settle(claim, Settlement(clear_state=True, lost=given_up, settled_generation=row.generation, cluster_id=seen))
    return Move(row.transactional_id, row.cluster_id, seen, given_up)
