"""What a row says of its generations, without a database."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, StateRow

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def row(*, generation: int, resolved: int, lost: tuple[LostTransaction, ...] = ()) -> StateRow:
    return StateRow(
        transactional_id="orders",
        fence=7,
        generation=generation,
        prepared_state=None,
        prepared_generation=0,
        resolved_generation=resolved,
        transaction_number=0,
        lost=lost,
        owner="test",
        updated_at=NOW,
    )


def entry(kind: LostKind, generation: int) -> LostTransaction:
    return LostTransaction(kind, PreparedTxnState(1, 2), generation, NOW)


@pytest.mark.slow
def test_resolved_generations_are_not_examined_again() -> None:
    """Rule SG; rule UC looks again where something is UNVERIFIED."""
    assert row(generation=1000, resolved=998).generations_to_recover == (999, 1000)
    assert row(generation=1000, resolved=1000).generations_to_recover == ()
    unverified, lost = entry(LostKind.UNVERIFIED, 5), entry(LostKind.LOST, 6)
    assert row(generation=1000, resolved=998, lost=(unverified, lost)).generations_to_recover == (5, 999, 1000)
