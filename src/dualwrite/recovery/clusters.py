"""Which Kafka cluster ids are on (rule CL), checked before anything is claimed; and moving ids to another cluster.

Recovery on the wrong cluster would not find the prepared transactions, and would report them as lost; and what is published
there is missing on the right one. So each row stores Kafka's `cluster.id`, written when a generation is acquired: for a new id,
only if no row of the same name (`name_of`: a prefix, a relay's name, a job) names another cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from dualwrite.deadline import Limit
from dualwrite.errors import ClusterMismatchError, NotResolvedError, StoreError, shell_word
from dualwrite.kafka.base import TransactionCoordinator
from dualwrite.observability.logs import SubjectLogger
from dualwrite.recovery.recoverer import describe_owner, existing_row, ids_with_lanes
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, Resolution, StateRow, TxnStateStore
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.rows import none_elsewhere
from dualwrite.transactional_id import name_of

log = SubjectLogger(__name__)


def check_cluster(
    store: TxnStateStore, coordinator: TransactionCoordinator, ids: Iterable[str], *, timeout: float | None = None
) -> str:
    """Check that the database is the original, and that Kafka is the cluster of these ids and of all ids of their names.

    Claims nothing.

    Returns:
        Its `cluster.id`.

    Raises:
        StoreCopiedError: The database is a copy, or has moved.
        ClusterMismatchError: A row names another cluster.
        BrokerUnavailableError: Kafka can't be reached.
        StoreError: The database can't be read.
    """
    store.check_original()
    seen = coordinator.cluster_id(timeout=timeout)
    for name, one in {name_of(each): each for each in ids}.items():
        none_elsewhere(one, store.elsewhere(name, seen), seen)
    return seen


def cluster_that_answers(coordinator: TransactionCoordinator, *, timeout: Limit | None = None) -> str:
    """The `cluster.id` of the cluster that answers now; the caller compares it with rows before it relies on it.

    A client keeps to the cluster of its first connections. If another one answers now, the first one may have been the wrong
    one, so the client forgets it.
    """
    try:
        return coordinator.cluster_id(timeout=timeout)
    except ClusterMismatchError:
        coordinator.forget_cluster()
        return coordinator.cluster_id(timeout=timeout)


def ids_to_move(store: TxnStateStore, ids: Iterable[str], seen: str) -> list[str]:
    """These ids, and all others of their names that are not on the cluster `seen`: a name is on one cluster."""
    chosen = list(ids)
    names = dict.fromkeys(map(name_of, chosen))
    return list(dict.fromkeys([*chosen, *(each for name in names for each in store.elsewhere(name, seen))]))


@dataclass(frozen=True, slots=True)
class MovedId:
    """One id, or one lane of it, that was moved.

    Args:
        transactional_id: The id of the row.
        from_cluster_id: The cluster that the row named before; empty if it named none.
        to_cluster_id: The cluster that it names now.
        given_up: The transaction that was prepared on the old cluster and given up, if any: it is in the row as UNVERIFIED.
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
) -> tuple[MovedId, ...]:
    """Make the rows of the ids, and of all ids of their names, name the cluster that answers now, after a permanent move to it.

    Transactions prepared on the old cluster can be committed or aborted only there: recover there first. With
    `give_up_prepared` they are given up instead: a committed state stays in the row as UNVERIFIED until it is acknowledged, and
    transactions that are open on the old cluster stay open there.

    The move claims each id: a writer that still runs on the old cluster gets FencedError.

    Args:
        store: The database.
        coordinator: The new cluster.
        ids: The ids of the rows, each lane by its own id. Others of their names are added (`ids_to_move`).
        give_up_prepared: See above.
        timeout: Seconds that each claim may wait.

    Returns:
        The ids that were moved; ids whose rows already name this cluster are not included.

    Raises:
        NotResolvedError: Something of an id must still be recovered on the old cluster. Nothing was changed, unless a writer
            has used the id during the call: then the ids before it have been moved, and this one was only claimed.
        StoreError: There is no such id, or the database can't be read or written.
        FencedError: An id was claimed in the meantime; the ids before it have been moved.
        BrokerUnavailableError: Kafka can't be reached.
    """
    store.check_original()
    seen = coordinator.cluster_id()
    rows = [row for row in (existing_row(store, name) for name in ids_to_move(store, ids, seen)) if row.cluster_id != seen]
    for row in rows:
        if not give_up_prepared:
            _require_resolved(row, seen)
    return tuple(_moved(store, row, seen, give_up_prepared=give_up_prepared, timeout=timeout) for row in rows)


def _require_resolved(row: StateRow, seen: str) -> None:
    if row.prepared_state is None and not row.unresolved_generations:
        return
    raise NotResolvedError(
        f"The id can't be moved to Kafka cluster {seen!r}: it is not resolved yet on cluster {row.cluster_id!r}.",
        transactional_id=row.transactional_id,
        cause="a writer is running, or has crashed; what it has prepared can be committed only on that cluster",
        next_step=f"stop the writers, run `dualwrite recover --id {shell_word(row.transactional_id)}` with the old cluster's "
        "address, then move the id. If the old cluster is permanently gone, use --give-up-prepared (library: "
        "give_up_prepared=True)",
    )


def _moved(store: TxnStateStore, row: StateRow, seen: str, *, give_up_prepared: bool, timeout: float) -> MovedId:
    claim = store.claim(row.transactional_id, describe_owner("mover"), timeout=timeout, expected_fence=row.fence)
    row = store.read_claimed(claim)
    if not give_up_prepared:
        _require_resolved(row, seen)  # again: until our claim, its owner may have acquired a generation and prepared
    given_up = None
    if row.prepared_state is not None:
        now = datetime.now(UTC)
        generation = row.prepared_generation
        given_up = LostTransaction(
            LostKind.UNVERIFIED, row.prepared_state, generation, now, row.delivery, row.kind_of(generation), row.cluster_id
        )
        log.error(
            "transaction %s on cluster %s is given up",
            row.prepared_state,
            row.cluster_id,
            transactional_id=row.transactional_id,
        )
    store.record_resolution(
        claim, Resolution(clear_state=True, lost=given_up, resolved_generation=row.generation, cluster_id=seen)
    )
    return MovedId(row.transactional_id, row.cluster_id, seen, given_up)


@dataclass(frozen=True, slots=True)
class LeftToOriginal:
    """What was cleared from a row of the copy, because the original database resolves it.

    Args:
        transactional_id: The id of the row.
        prepared: The prepared state in the row.
        lost: The lost and unverified transactions in the row.
    """

    transactional_id: str
    prepared: PreparedTxnState | None
    lost: tuple[LostTransaction, ...]


def keep_store_id(store: TxnStateStore) -> StoreIdentity | None:
    """Keep the store id: this database is the original in a new place (restored backup, moved or upgraded server, new primary).

    Returns:
        The new identity, or None if the database does not have one yet.

    Raises:
        StoreError: Another process changed it at the same time, or the database can't be read or written.
    """
    before = store.identity()
    if before is None:
        return None
    after = StoreIdentity(before.store_id, store.marks())
    _replace(store, before, after)
    return after


def new_store_id(store: TxnStateStore, *, timeout: float) -> tuple[StoreIdentity, tuple[LeftToOriginal, ...]]:
    """Give a copy, whose original stays in use, a store id of its own and thereby other ids at Kafka.

    Prepared transactions belong to the original, which resolves them: they are cleared from the copy without asking Kafka.
    Every id is claimed. If this fails halfway, run it again: until it has finished, the copy has its original's store id.

    Args:
        store: The copy.
        timeout: Seconds that each claim may wait.

    Returns:
        The new identity, and what was cleared from the rows.

    Raises:
        StoreError: The database can't be read or written.
        FencedError: Another process claims an id of the copy at the same time.
    """
    before = store.identity()
    left = _cleared(store, timeout)
    after = StoreIdentity.new(store.marks())
    _replace(store, before, after)
    left += _cleared(store, timeout)  # again: a writer may have used the original's id in the meantime
    return after, tuple(left)


def _cleared(store: TxnStateStore, timeout: float) -> list[LeftToOriginal]:
    left = []
    for name in ids_with_lanes(store):
        claim = store.claim(name, describe_owner("new store id"), timeout=timeout)
        row = store.read_claimed(claim)
        if row.prepared_state is not None or row.lost:
            left.append(LeftToOriginal(name, row.prepared_state, row.lost))
            log.warning("left to the original database: %s, %s", row.prepared_state, row.lost, transactional_id=name)
        store.record_resolution(claim, Resolution(clear_state=True, clear_lost=True, resolved_generation=row.generation))
    return left


def _replace(store: TxnStateStore, before: StoreIdentity | None, after: StoreIdentity) -> None:
    if not store.set_identity(after, expected=before):
        raise StoreError(
            f"Another process changed the store id of {store.description} at the same time.",
            next_step="check it with `dualwrite doctor`, and run the command again",
        )
