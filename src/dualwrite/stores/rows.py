"""What each change does to a row: pure, the same for every store.

A store reads the row, gets the new row from here, and writes it on the condition that the row has not changed since: by a
lock, a version or a mutex.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime

from dualwrite.delivery import Delivery
from dualwrite.errors import ClusterMismatchError, FencedError, NotResolvedError
from dualwrite.producer_kind import ProducerKind
from dualwrite.shell import shell_word
from dualwrite.state import PreparedTxnState, TransactionDescription, names
from dualwrite.stores.state_row import MAX_OWNER_LENGTH, Claim, LostTransaction, Resolution, StateRow

# --- claims -------------------------------------------------------------------------------------------------------------------


def claimed(
    row: StateRow | None, transactional_id: str, owner: str, *, token: str, expected_fence: int | None = None
) -> StateRow:
    """The row after a claim: see `TxnStateStore.claim`. If its newest claim already has this token, the row itself.

    Args:
        row: The current row, or None if there is none.
        transactional_id: The logical id.
        owner: Who claims; truncated to MAX_OWNER_LENGTH characters.
        token: Unique to this claim, to recognize it if the commit gets no response (`is_claim_of`).
        expected_fence: The fence that the row must have.

    Raises:
        FencedError: The row does not have the expected fence, or is gone.
    """
    if row is not None and is_claim_of(row, token):
        return row
    owner = owner[:MAX_OWNER_LENGTH]
    if expected_fence is not None:
        check_fence(row, Claim(transactional_id, expected_fence, owner))
    if row is None:
        return StateRow(
            transactional_id=transactional_id,
            fence=1,
            generation=0,
            prepared_state=None,
            prepared_generation=0,
            resolved_generation=0,
            transaction_number=0,
            lost=(),
            owner=owner,
            updated_at=datetime.now(UTC),
            claim_token=token,
        )
    return changed(
        row,
        fence=row.fence + 1,
        owner=owner,
        claim_token=token,
        transaction_number=0 if expected_fence is None else row.transaction_number,
        forgotten=False if expected_fence is None else row.forgotten,
        cluster_id="" if expected_fence is None and row.forgotten else row.cluster_id,
    )


def new_token() -> str:
    """A token for a claim, unique to it."""
    return uuid.uuid4().hex


def is_claim_of(row: StateRow | None, token: str, *, expected_fence: int | None = None) -> bool:
    """Whether the row's newest claim is the one made with this token: its commit got no response, but succeeded."""
    return row is not None and row.claim_token == token and (expected_fence is None or row.fence == expected_fence + 1)


def check_fence(row: StateRow | None, claim: Claim) -> StateRow:
    """The row, checked to have the claim's fence.

    Raises:
        FencedError: The row has another fence, or is gone.
    """
    if row is None:
        raise fenced(claim, None, None)
    if row.fence != claim.fence:
        raise fenced(claim, row.fence, row.owner)
    return row


def fenced(claim: Claim, current_fence: int | None, current_owner: str | None) -> FencedError:
    """The error for a claim whose fence is no longer the row's; no current fence means that the row is gone."""
    if current_fence is None:
        what = f"Our claim {claim.fence} is no longer valid: the row of the id is gone."
        cause = "it was deleted manually, or the transaction does not see it (a temporary table of the same name, for example)"
    else:
        what = f"Our claim {claim.fence} was replaced by claim {current_fence} of {current_owner!r}."
        cause = "another process opened or recovered the same transactional id after us"
    return FencedError(
        what,
        transactional_id=claim.transactional_id,
        cause=cause,
        next_step="run one writer for each transactional id; opening a new one here acquires the id again",
        fence=claim.fence,
        current_fence=current_fence,
        current_owner=current_owner,
    )


# --- under a claim ------------------------------------------------------------------------------------------------------------


def recorded(
    row: StateRow,
    state: PreparedTxnState | None,
    *,
    generation: int,
    transaction_number: int,
    delivery: Delivery | None = None,
) -> StateRow:
    """The row after `StoreTransaction.record`."""
    return changed(
        row,
        prepared_state=state,
        prepared_generation=generation,
        transaction_number=transaction_number,
        delivery=delivery,
    )


def with_resolution(row: StateRow, resolution: Resolution) -> StateRow:
    """The row after `TxnStateStore.record_resolution`; applying a resolution twice has the same effect as once."""
    kept = () if resolution.clear_lost else row.lost
    left = tuple(entry for entry in kept if resolution.resolved_entry is None or not _is_same(entry, resolution.resolved_entry))
    is_meant = resolution.clear_only is not None and row.prepared_state == resolution.clear_only
    clears = resolution.clear_state or is_meant
    return changed(
        row,
        prepared_state=None if clears else row.prepared_state,
        delivery=None if clears else row.delivery,
        lost=left if resolution.lost is None else with_lost(left, resolution.lost),
        cluster_id=row.cluster_id if resolution.cluster_id is None else resolution.cluster_id,
        resolved_generation=(
            row.resolved_generation if resolution.resolved_generation is None else resolution.resolved_generation
        ),
    )


def with_lost(entries: tuple[LostTransaction, ...], added: LostTransaction) -> tuple[LostTransaction, ...]:
    """The list with `added`, unless it has the same transaction already: a resolution may be sent twice."""
    return entries if any(_is_same(entry, added) for entry in entries) else (*entries, added)


def _is_same(one: LostTransaction, other: LostTransaction) -> bool:
    return (one.kind, one.state, one.generation) == (other.kind, other.state, other.generation)


def with_generation(row: StateRow, kind: ProducerKind, *, reuse: bool, store_id: str, cluster_id: str = "") -> StateRow:
    """The row after `TxnStateStore.acquire_generation`; its `generation` is the one acquired.

    Args:
        row: The row.
        kind: See `acquire_generation`.
        reuse: See `acquire_generation`.
        store_id: The store's own id, by which a new generation is named.
        cluster_id: See `acquire_generation`.

    Raises:
        ClusterMismatchError: The row belongs to another cluster.
    """
    if cluster_id:
        row = changed(on_cluster(row, cluster_id), cluster_id=cluster_id)
    has_unverified = any(entry.generation == row.generation for entry in row.unverified)  # rule UG
    if row.store_id != store_id:  # rule ST
        row = changed(row, store_id=store_id)
    elif reuse and kind.takes_over and row.generation_kind is kind and not has_unverified:
        return changed(row, resolved_generation=min(row.resolved_generation, row.generation - 1))
    return changed(row, generation=row.generation + 1, generation_kind=kind)


def found_again(row: StateRow, generation: int, described: TransactionDescription | None) -> LostTransaction | None:
    """The UNVERIFIED entry of a generation that is the described transaction (rule UC), if there is one."""
    entries = (entry for entry in row.unverified if entry.generation == generation)
    return next((entry for entry in entries if names(entry.state, described)), None)


def on_cluster(row: StateRow, cluster_id: str) -> StateRow:
    """The row, checked to belong to this cluster, or to none yet (rule CL); a tombstone belongs to none: nothing is open.

    Raises:
        ClusterMismatchError: The row belongs to another cluster.
    """
    if row.forgotten or row.cluster_id in ("", cluster_id):
        return row
    raise ClusterMismatchError(
        f"This is Kafka cluster {cluster_id!r}, and the id is in use on cluster {row.cluster_id!r}. Nothing was changed.",
        transactional_id=row.transactional_id,
        cause="bootstrap.servers (environment: DUALWRITE_KAFKA_BOOTSTRAP_SERVERS) names another cluster, its name resolves to "
        "another one, or the cluster was created again",
        next_step="connect to the right cluster; if you have moved to this one permanently, recover on the old cluster first, "
        "then run `dualwrite db move-cluster`",
        stored_cluster_id=row.cluster_id,
        seen_cluster_id=cluster_id,
    )


# --- without a claim ----------------------------------------------------------------------------------------------------------


def acknowledged(row: StateRow, only: Collection[LostTransaction] | None = None) -> StateRow:
    """The row after `TxnStateStore.acknowledge`."""
    left = () if only is None else tuple(entry for entry in row.lost if not any(_is_same(entry, one) for one in only))
    return changed(row, lost=left)


def forgotten(row: StateRow) -> StateRow:
    """The row after `TxnStateStore.forget`; a tombstone is unchanged.

    Raises:
        NotResolvedError: The id still has something to recover or acknowledge.
    """
    if row.forgotten:
        return row
    if row.prepared_state is not None or row.unresolved_generations or row.lost:
        raise _not_resolved(row)
    return changed(row, forgotten=True, fence=row.fence + 1, owner="", claim_token="", cluster_id="")


def _not_resolved(row: StateRow) -> NotResolvedError:
    if row.lost:
        why, flag = f"{len(row.lost)} lost or unverified transactions are not acknowledged", " --acknowledge"
    elif row.prepared_state is not None:
        why, flag = f"the state {row.prepared_state} is not resolved", ""
    else:
        why, flag = f"generations {row.resolved_generation + 1} to {row.generation} are not resolved", ""
    return NotResolvedError(
        "The id can't be forgotten: it is not fully recovered or acknowledged.",
        transactional_id=row.transactional_id,
        cause=why,
        next_step=f"run `dualwrite recover --id {shell_word(row.transactional_id)}{flag}` first",
    )


def changed(row: StateRow, **changes: object) -> StateRow:
    """The row with these fields changed, and the current time."""
    return replace(row, updated_at=datetime.now(UTC), **changes)  # type: ignore[arg-type]  # each caller names fields
