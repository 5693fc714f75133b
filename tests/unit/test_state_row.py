"""What a row says of its generations, without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, Resolution, StateRow
from dualwrite.stores.rows import with_resolution

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


def test_a_repeated_resolution_does_not_add_an_acknowledged_entry_again() -> None:
    """Rule RS: the store may repeat a resolution after a broken connection."""
    found = entry(LostKind.LOST, 6)
    resolution = Resolution(clear_state=True, lost=found)
    once = with_resolution(
        replace(row(generation=6, resolved=5), prepared_state=found.state, prepared_generation=6), resolution
    )
    assert once.lost == (found,)
    assert with_resolution(once, resolution).lost == (found,)
    assert with_resolution(replace(once, lost=()), resolution).lost == ()
    unverified = entry(LostKind.UNVERIFIED, 6)
    proven = Resolution(resolved_entry=unverified, lost=found)
    once = with_resolution(row(generation=6, resolved=6, lost=(unverified,)), proven)
    assert once.lost == (found,)
    assert with_resolution(once, proven).lost == (found,)
    assert with_resolution(replace(once, lost=()), proven).lost == ()


def entry(kind: LostKind, generation: int) -> LostTransaction:
    return LostTransaction(kind, PreparedTxnState(1, 2), generation, NOW)


@pytest.mark.slow
def test_resolved_generations_are_not_examined_again() -> None:
    """Rule SG; rule UC looks again where something is UNVERIFIED."""
    assert row(generation=1000, resolved=998).generations_to_recover == (999, 1000)
    assert row(generation=1000, resolved=1000).generations_to_recover == ()
    unverified, lost = entry(LostKind.UNVERIFIED, 5), entry(LostKind.LOST, 6)
    assert row(generation=1000, resolved=998, lost=(unverified, lost)).generations_to_recover == (5, 999, 1000)
