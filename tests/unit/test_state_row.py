"""What a row says of its generations, without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dualwrite.errors import NotResolvedError, StoredStateError
from dualwrite.state import Delivery, PreparedTxnState, ProducerKind
from dualwrite.stores.base import LostKind, LostTransaction, Resolution, StateRow
from dualwrite.stores.rows import document, forgotten, parse_document, with_generation, with_resolution
from dualwrite.stores.sql.tables import columns_of, state_row
from fixtures.tables import table

NOW = datetime(2026, 11, 23, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


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


def test_what_is_lost_later_has_a_later_time_whatever_the_clocks_say() -> None:
    """Rule RP: another host's clock may be behind; a copy keeps the time of its original, and so its place."""

    def lost(epoch: int, minutes: int, copy_of: str = "") -> LostTransaction:
        delivery = Delivery(1, (), NOW + minutes * MINUTE, copy_of=copy_of)
        return LostTransaction(LostKind.LOST, PreparedTxnState(1, epoch), 6, NOW, delivery)

    def times(*entries: LostTransaction) -> list[datetime]:
        found = row(generation=6, resolved=5)
        for each in entries:
            stored = replace(found, prepared_state=each.state, prepared_generation=6)
            found = with_resolution(stored, Resolution(clear_state=True, lost=each))
        return [each.delivery.prepared_at for each in found.lost if each.delivery is not None]

    hour, later = NOW + timedelta(hours=1), timedelta(milliseconds=1)
    assert times(lost(1, 60), lost(2, 0), lost(3, 60), lost(4, 61)) == [hour, hour + later, hour + 2 * later, NOW + 61 * MINUTE]
    assert times(lost(1, 60), lost(2, 0, "6 1:0")) == [hour, NOW]


def test_a_generation_with_an_unverified_entry_is_not_used_again() -> None:
    """Rule UG: a new transaction on it could be mistaken for the unverified one."""

    def next_generation(*lost: LostTransaction) -> int:
        used = replace(row(generation=6, resolved=6, lost=lost), generation_kind=ProducerKind.NATIVE, store_id="s")
        return with_generation(used, ProducerKind.NATIVE, reuse=True, store_id="s").generation

    assert next_generation() == next_generation(entry(LostKind.LOST, 6), entry(LostKind.UNVERIFIED, 5)) == 6
    assert next_generation(entry(LostKind.UNVERIFIED, 6)) == 7


def entry(kind: LostKind, generation: int) -> LostTransaction:
    return LostTransaction(kind, PreparedTxnState(1, 2), generation, NOW)


@pytest.mark.slow
def test_resolved_generations_are_not_examined_again() -> None:
    """Rule SG; rule UC looks again where something is UNVERIFIED."""
    assert row(generation=1000, resolved=998).generations_to_recover == (999, 1000)
    assert row(generation=1000, resolved=1000).generations_to_recover == ()
    unverified, lost = entry(LostKind.UNVERIFIED, 5), entry(LostKind.LOST, 6)
    assert row(generation=1000, resolved=998, lost=(unverified, lost)).generations_to_recover == (5, 999, 1000)


# --- as it is stored ----------------------------------------------------------------------------------------------------------


def test_a_row_is_read_as_it_was_stored() -> None:
    full = replace(
        row(generation=2, resolved=1, lost=(entry(LostKind.LOST, 1),)),
        prepared_state=PreparedTxnState(1, 2, 3),
        generation_kind=ProducerKind.NATIVE,
        cluster_id="größe",
    )
    assert parse_document("orders", document(full)) == full
    assert state_row({"transactional_id": "orders", **columns_of(full)}) == full


@table("text", [b"", b"\xff\xfe", b"[]", b"{}", b"null", b"1:2", b'{"fence": "one"}'])
def test_a_text_that_is_no_row(text: bytes) -> None:
    with pytest.raises(StoredStateError, match="can't be read") as caught:
        parse_document("orders", text)
    assert caught.value.transactional_id == "orders"


LOST = '[{{"kind": "{}", "state": "{}", "generation": 0, "recorded_at": "2026-11-21T10:00:00+00:00"}}]'


@table(
    ("column", "text"),
    [
        ("prepared_transaction_state", "4711"),
        ("prepared_transaction_state", "1:2:3"),
        ("generation_kind", "quantum"),
        *(("lost", text) for text in ("[", '{"kind": 1}', "[null]")),
        *(("lost", LOST.format(*fields)) for fields in (("LOST", "x"), ("GONE", "1:2"), ("LOST", ""))),
    ],
)
def test_a_column_that_can_not_be_read(column: str, text: str) -> None:
    columns = {"transactional_id": "orders", **columns_of(row(generation=1, resolved=1)), column: text}
    with pytest.raises(StoredStateError) as caught:
        state_row(columns)
    assert (caught.value.transactional_id, caught.value.text) == ("orders", text)


@table(
    ("changes", "next_step"),
    [
        ({"prepared_state": PreparedTxnState(1, 2)}, "`dualwrite recover --id orders` first"),
        ({"generation": 2}, "`dualwrite recover --id orders` first"),
        ({"lost": (entry(LostKind.LOST, 1),)}, "`dualwrite recover --id orders --republish` first"),
        ({"lost": (entry(LostKind.UNVERIFIED, 1),)}, "`dualwrite recover --id orders --acknowledge` first"),
    ],
)
def test_what_is_not_resolved_is_not_forgotten(changes: dict[str, object], next_step: str) -> None:
    with pytest.raises(NotResolvedError, match=next_step):
        forgotten(replace(row(generation=1, resolved=1), **changes))  # type: ignore[arg-type]  # each case names fields
