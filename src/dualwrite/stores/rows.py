"""What each change does to a row: pure, the same for every store.

A store reads the row, asks here for the one that follows, and writes that on the condition that the row has not changed since:
by a lock, by a version, by a mutex.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from dualwrite.delivery import Delivery
from dualwrite.errors import FencedError, NotSettledError, shell_word
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import MAX_OWNER_LENGTH, Claim, LostTransaction, Settlement, StateRow

# --- claims -------------------------------------------------------------------------------------------------------------------


def claimed(
    row: StateRow | None, transactional_id: str, owner: str, *, token: str, expected_fence: int | None = None
) -> StateRow:
    """The row after a claim: see `TxnStateStore.claim`.

    Args:
        row: The row as it stands, or None where there is none.
        transactional_id: The logical id.
        owner: Who claims; cut to MAX_OWNER_LENGTH characters.
        token: A text of this very call, to know a claim again whose commit was not answered (`is_claim_of`).
        expected_fence: The fence that the row must have.

    Raises:
        FencedError: The row has not the expected fence, or is gone.
    """
    owner = owner[:MAX_OWNER_LENGTH]
    if expected_fence is not None:
        held(row, Claim(transactional_id, expected_fence, owner))
    if row is None:
        return StateRow(
            transactional_id=transactional_id,
            fence=1,
            generation=0,
            prepared_state=None,
            prepared_generation=0,
            settled_generation=-1,
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
    )


def is_claim_of(row: StateRow | None, token: str, *, expected_fence: int | None = None) -> bool:
    """Whether the row's newest claim is the one made with this token: its commit was not answered, and had worked."""
    return row is not None and row.claim_token == token and (expected_fence is None or row.fence == expected_fence + 1)


def held(row: StateRow | None, claim: Claim) -> StateRow:
    """The row, which has the claim's fence.

    Raises:
        FencedError: It has not.
    """
    if row is None:
        raise fenced(claim, None, None)
    if row.fence != claim.fence:
        raise fenced(claim, row.fence, row.owner)
    return row


def fenced(claim: Claim, current_fence: int | None, current_owner: str | None) -> FencedError:
    """The error of a claim whose fence is no longer the row's; no current fence means that the row is gone."""
    if current_fence is None:
        what = f"Our claim {claim.fence} is void: the row of the id is gone."
    else:
        what = f"Our claim {claim.fence} was replaced by claim {current_fence} of {current_owner!r}."
    return FencedError(
        what,
        transactional_id=claim.transactional_id,
        cause="another process opened or recovered the same transactional id after us",
        next_step="run one writer for each transactional id; opening a new one here takes the id back",
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


def settled(row: StateRow, settlement: Settlement) -> StateRow:
    """The row after `TxnStateStore.settle`; settled twice it is as settled once."""
    return changed(
        row,
        prepared_state=None if settlement.clear_state else row.prepared_state,
        delivery=None if settlement.clear_state else row.delivery,
        lost=row.lost if settlement.lost is None else with_lost(row.lost, settlement.lost),
        settled_generation=(row.settled_generation if settlement.settled_generation is None else settlement.settled_generation),
    )


def with_lost(entries: tuple[LostTransaction, ...], added: LostTransaction) -> tuple[LostTransaction, ...]:
    """The list with `added`, unless the same transaction stands in it already: a settlement may be sent twice."""
    name = (added.kind, added.state, added.generation)
    if any((entry.kind, entry.state, entry.generation) == name for entry in entries):
        return entries
    return (*entries, added)


def with_generation(row: StateRow, kind: ProducerKind, *, reuse: bool) -> StateRow:
    """The row after `TxnStateStore.take_generation`; its `generation` is the one taken."""
    if reuse and kind.takes_over and row.generation_kind is kind:
        return changed(row, settled_generation=min(row.settled_generation, row.generation - 1))
    return changed(row, generation=row.generation + 1, generation_kind=kind)


# --- without a claim ----------------------------------------------------------------------------------------------------------


def acknowledged(row: StateRow) -> StateRow:
    """The row after `TxnStateStore.acknowledge`."""
    return changed(row, lost=())


def forgotten(row: StateRow) -> StateRow:
    """The row after `TxnStateStore.forget`: a tombstone stays as it is.

    Raises:
        NotSettledError: Something of it is still to be recovered or acknowledged.
    """
    if row.forgotten:
        return row
    if row.prepared_state is not None or row.unsettled_generations or row.lost:
        raise _not_settled(row)
    return changed(row, forgotten=True, fence=row.fence + 1, owner="", claim_token="")


def _not_settled(row: StateRow) -> NotSettledError:
    if row.lost:
        why, flag = f"{len(row.lost)} lost or unverified transactions are not acknowledged", " --acknowledge"
    elif row.prepared_state is not None:
        why, flag = f"the state {row.prepared_state} is not settled", ""
    else:
        why, flag = f"generations {row.settled_generation + 1} to {row.generation} are not settled", ""
    return NotSettledError(
        "The id can't be forgotten: something of it is still open.",
        transactional_id=row.transactional_id,
        cause=why,
        next_step=f"run `dualwrite recover --id {shell_word(row.transactional_id)}{flag}` first",
    )


def changed(row: StateRow, **changes: object) -> StateRow:
    """The row with other fields, and the time of now."""
    return replace(row, updated_at=datetime.now(UTC), **changes)  # type: ignore[arg-type]  # each caller names fields
