"""What an operator can do with a database that is a copy or has moved: make it a separate store, or keep it as the original.

The original and the copy have the same store id, and therefore the same ids at Kafka. Fencing works only within one database:
each would treat transactions prepared by the other as abandoned, and abort them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualwrite.errors import StoreError
from dualwrite.logs import SubjectLogger
from dualwrite.recovery.recoverer import describe_owner, ids_with_lanes
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostTransaction, Resolution, TxnStateStore
from dualwrite.stores.identity import StoreIdentity

log = SubjectLogger(__name__)


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
