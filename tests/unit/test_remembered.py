"""What a writer remembers of its commits, and what a row has forgotten of it: also each case that must raise no alarm."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from dualwrite.recipe.remembered import RecordedTransaction, Remembered, entry_of
from dualwrite.state import MAX_PLACES, Delivery, Place, PreparedTxnState, ProducerKind
from dualwrite.stores.rows import LostKind, LostTransaction, Resolution, StateRow, claimed, recorded, with_resolution
from fixtures.tables import table

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FENCE = 5
"""That of our claim; the first of ours, which set the row's number to 0, was FENCE - 1."""


def decided(number: int, *, places: int = 1) -> RecordedTransaction:
    delivery = Delivery(places, tuple(Place("orders", each, number, 1) for each in range(places)), NOW)
    return RecordedTransaction(number, PreparedTxnState(1, number), 1, delivery)


def remembered(*numbers: int) -> Remembered:
    made = Remembered()
    made.start(FENCE - 1)
    for number in numbers:
        made.add(decided(number))
    return made


def row(number: int, *, fence: int = FENCE) -> StateRow:
    made = replace(claimed(None, "shop", "tests", token="t"), fence=fence)
    return recorded(made, PreparedTxnState(1, number), generation=1, transaction_number=number)


@table(
    ("found", "missing"),
    [
        (row(4), []),  # the newest
        (row(2), [4]),  # number 3 was rolled back
        (row(1), [2, 4]),
        (row(0), [1, 2, 4]),
        (row(9), []),  # another process has claimed it with the same fencing token, and has committed more than we have
        (row(1, fence=FENCE + 1), []),  # claimed by another process: it says nothing about us
        (row(0, fence=FENCE + 1), []),
        (row(2, fence=FENCE - 1), [4]),  # our last claim was forgotten, which had kept the number
        (row(7, fence=FENCE - 2), [1, 2, 4]),  # all of our claims were: the number is another process's
        (None, [1, 2, 4]),  # the id was new
    ],
)
def test_what_a_row_has_forgotten(found: StateRow | None, missing: list[int]) -> None:
    assert [each.number for each in remembered(1, 2, 4).missing_in(found, FENCE)] == missing


def test_after_a_claim_from_another_process_nothing_is_remembered() -> None:
    made = remembered(1, 2)
    made.start(FENCE)
    assert (made.number, made.missing_in(row(0), FENCE)) == (0, ())


def test_what_the_database_did_not_commit_is_not_missing() -> None:
    made = remembered(1, 2)
    made.settle(decided(2), is_committed=False)  # it had confirmed it, and has forgotten it: its caller is told
    made.settle(decided(3), is_committed=False)
    assert (made.number, made.missing_in(row(1), FENCE)) == (1, ())
    made.settle(decided(4), is_committed=True)
    made.settle(decided(4), is_committed=True)
    assert [each.number for each in made.missing_in(row(1), FENCE)] == [4]


def test_as_many_are_remembered_as_a_row_has_places_for() -> None:
    made = Remembered()
    for number in range(1, 2 * MAX_PLACES):
        made.add(decided(number))
    assert len(made.missing_in(None, FENCE)) == MAX_PLACES // 2
    made.add(decided(2 * MAX_PLACES, places=2 * MAX_PLACES))
    assert [each.number for each in made.missing_in(None, FENCE)] == [2 * MAX_PLACES]


def test_an_entry_names_all_messages_of_all_transactions() -> None:
    without = RecordedTransaction(3, None, 1, None)
    entry = entry_of((decided(1), without, decided(2, places=2)), ProducerKind.NATIVE, "cluster")
    assert entry is not None
    assert entry.delivery is not None
    assert (entry.transactions, entry.delivery.messages, str(entry.state), entry.kind) == (2, 3, "1:2", LostKind.FORGOTTEN)
    assert [place.first_offset for place in entry.delivery.places] == [1, 2, 2]
    assert entry_of((without,), ProducerKind.NATIVE, "cluster") is None


ENTRY = LostTransaction(LostKind.FORGOTTEN, PreparedTxnState(1, 4), 1, NOW)


@table(
    ("before", "resolution", "lost", "is_resolved"),
    [
        (row(2), Resolution(lost=ENTRY, behind=4), (ENTRY,), False),
        (row(4), Resolution(lost=ENTRY, behind=4), (), False),  # what was read before was not the newest row
        (row(2), Resolution(lost=ENTRY, clear_state=True), (ENTRY,), False),  # by recovery
        (replace(row(2), prepared_state=None), Resolution(lost=ENTRY, clear_state=True), (), False),  # sent again: rule RS
        (row(2), Resolution(clear_only=PreparedTxnState(1, 2), resolved_generation=1), (), True),
        (row(2), Resolution(clear_only=PreparedTxnState(1, 4), resolved_generation=1), (), False),  # it has gone back
        (replace(row(2), prepared_state=None), Resolution(clear_only=PreparedTxnState(1, 2), resolved_generation=1), (), True),
    ],
)
def test_what_a_resolution_does_to_a_row(
    before: StateRow, resolution: Resolution, lost: tuple[LostTransaction, ...], is_resolved: bool
) -> None:
    after = with_resolution(before, resolution)
    assert (after.lost, after.resolved_generation == 1) == (lost, is_resolved)
