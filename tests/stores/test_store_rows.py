"""Rows of the state on SQL databases: generations, resolutions, rows that cannot be read."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from store_scene import ID, STATE, assert_nothing_is_checked_out, commit

from dualwrite.errors import NotResolvedError, StoredStateError
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import Claim, LostKind, LostTransaction, Resolution
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import state_table

LOST = LostTransaction(LostKind.LOST, STATE, 0, datetime(2026, 11, 21, 10, 0, 0, 123456, tzinfo=UTC))
UNVERIFIED = LostTransaction(LostKind.UNVERIFIED, PreparedTxnState(1, 2, 3), 1, datetime(2026, 11, 21, 11, tzinfo=UTC))


@pytest.fixture
def recorded(store: SqlStateStore, claim: Claim) -> Claim:
    transaction = store.begin(claim)
    commit(transaction)
    return claim


def test_a_producer_kind_unknown_to_this_release(store: SqlStateStore, claim: Claim) -> None:
    with store.engine.begin() as connection:
        connection.execute(state_table.update().values(generation_kind="quantum"))
    with pytest.raises(StoredStateError, match="quantum"):
        store.read(ID)


def test_an_unresolved_id_is_not_forgotten(store: SqlStateStore, recorded: Claim) -> None:
    with pytest.raises(NotResolvedError, match="`dualwrite recover --id orders` first"):
        store.forget(ID)
    store.record_resolution(recorded, Resolution(clear_state=True))
    taken = store.acquire_generation(recorded, ProducerKind.NATIVE)
    with pytest.raises(NotResolvedError, match=f"generations {taken} to {taken}"):
        store.forget(ID)
    store.record_resolution(recorded, Resolution(resolved_generation=taken, lost=LOST))
    with pytest.raises(NotResolvedError, match="`dualwrite recover --id orders --republish` first"):
        store.forget(ID)
    assert store.read_claimed(recorded).forgotten is False
    store.acknowledge(ID)
    store.forget(ID)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("prepared_transaction_state", "4711"),
        ("prepared_transaction_state", "1:2:3"),
        ("lost", "["),
        ("lost", '{"kind": 1}'),
        ("lost", '[{"kind": "LOST", "state": "x", "generation": 0, "recorded_at": "2026-11-21T10:00:00+00:00"}]'),
        ("lost", '[{"kind": "GONE", "state": "1:2", "generation": 0, "recorded_at": "2026-11-21T10:00:00+00:00"}]'),
        ("lost", '[{"kind": "LOST", "state": "", "generation": 0, "recorded_at": "2026-11-21T10:00:00+00:00"}]'),
        ("lost", "[null]"),
    ],
)
def test_a_row_that_cannot_be_read(store: SqlStateStore, claim: Claim, column: str, text: str) -> None:
    with store.engine.begin() as connection:
        connection.execute(state_table.update().values({column: text}))
    with pytest.raises(StoredStateError) as caught:
        store.read_claimed(claim)
    assert caught.value.transactional_id == ID
    assert caught.value.text == text
    with pytest.raises(StoredStateError):
        store.forget(ID)
    assert_nothing_is_checked_out(store)
