"""What the operator says of a database that is a copy, or that has moved: a store of its own, or the original that goes on.

Original and copy have one store id, and so the same ids at Kafka. Fences hold within one database only: each would take what
the other has prepared for a transaction of nobody, and abort it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dualwrite.errors import StoreError
from dualwrite.recovery.recoverer import describe_owner, ids_with_lanes
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostTransaction, Settlement, TxnStateStore
from dualwrite.stores.identity import StoreIdentity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeftToOriginal:
    """What a row of the copy said that is the original's to settle; it was cleared here.

    Args:
        transactional_id: The id of the row.
        prepared: The state that was stored.
        lost: What stood as lost or unverified.
    """

    transactional_id: str
    prepared: PreparedTxnState | None
    lost: tuple[LostTransaction, ...]


def keep_store_id(store: TxnStateStore) -> StoreIdentity | None:
    """This database is the original, in another place: a restored backup, an upgraded or moved server, a new primary.

    Returns:
        Its identity as it is now, or None where it has none yet.

    Raises:
        StoreError: Somebody else has changed it at the same time, or the database can't be read or written.
    """
    before = store.identity()
    if before is None:
        return None
    after = StoreIdentity(before.store_id, store.marks())
    _replace(store, before, after)
    return after


def new_store_id(store: TxnStateStore, *, timeout: float) -> tuple[StoreIdentity, tuple[LeftToOriginal, ...]]:
    """This database is a copy whose original goes on: make it a store of its own, with other ids at Kafka.

    What is prepared belongs to the original. It is cleared here, and Kafka is not asked: the original settles it. Fences are
    raised. It may be done again where it broke off: until it is done, the copy has its original's id.

    Args:
        store: The copy.
        timeout: Seconds that each claim may wait.

    Returns:
        The new identity, and what the rows said.

    Raises:
        StoreError: The database can't be read or written.
        FencedError: Somebody else claims an id of the copy at the same time.
    """
    before = store.identity()
    left = _cleared(store, timeout)
    after = StoreIdentity.new(store.marks())
    _replace(store, before, after)
    left += _cleared(store, timeout)  # what a writer did meanwhile, who had the original's id
    return after, tuple(left)


def _cleared(store: TxnStateStore, timeout: float) -> list[LeftToOriginal]:
    left = []
    for name in ids_with_lanes(store):
        claim = store.claim(name, describe_owner("new store id"), timeout=timeout)
        row = store.read_claimed(claim)
        if row.prepared_state is not None or row.lost:
            left.append(LeftToOriginal(name, row.prepared_state, row.lost))
            log.warning("%s: left to the original database: %s, %s", name, row.prepared_state, row.lost)
        store.settle(claim, Settlement(clear_state=True, clear_lost=True, settled_generation=row.generation))
    return left


def _replace(store: TxnStateStore, before: StoreIdentity | None, after: StoreIdentity) -> None:
    if not store.set_identity(after, expected=before):
        raise StoreError(
            f"The id of {store.description} was changed by somebody else at the same time.",
            next_step="look at it by `dualwrite doctor`, and run the command again",
        )
