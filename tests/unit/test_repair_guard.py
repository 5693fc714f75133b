"""Whether an operator may end a transaction (`dualwrite.admin.decisions`), and whether a plan still covers what is open."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from dualwrite.admin.decisions import (
    NEWER,
    NOT_OURS,
    NOT_READ,
    OTHER_DATABASE,
    RESOLVED,
    Decided,
    refusal_to_complete,
    refusal_to_terminate,
)
from dualwrite.admin.facts import DescribedTransaction
from dualwrite.errors import DualWriteError, StoreCopiedError, StoreUnavailableError
from dualwrite.recovery.decision import Decision
from dualwrite.recovery.plan import GenerationPlan
from dualwrite.state import PreparedTxnState, TransactionDescription, TransactionStatus
from dualwrite.stores.base import LostKind, LostTransaction, StateRow
from fixtures.tables import table

ID = "shop#0123456789ab.2"
OPEN = TransactionDescription(TransactionStatus.ONGOING, 7, 3, 60_000, 1_000, frozenset({("orders", 0)}))
ENDED = replace(OPEN, status=TransactionStatus.COMPLETE_COMMIT, epoch=4)
ROW = StateRow(
    transactional_id="shop",
    fence=5,
    generation=2,
    prepared_state=PreparedTxnState(7, 3),
    prepared_generation=2,
    resolved_generation=1,
    transaction_number=1,
    lost=(),
    owner="writer",
    updated_at=datetime(2026, 1, 1, tzinfo=UTC),
    store_id="0123456789ab",
)
OLDER = replace(ROW, prepared_state=PreparedTxnState(7, 2))
UNREACHABLE = StoreUnavailableError("The database is gone.")
COPIED = StoreCopiedError("The database is a copy.")


def planned(decision: Decision, *, stored: bool) -> GenerationPlan:
    return GenerationPlan("shop", 2, ID, decision, ROW.prepared_state if stored else None, OPEN)


def decided(decision: Decision, *, stored: bool = True) -> Decided:
    found = planned(decision, stored=stored)
    return Decided(ROW, 2, found, found.why)


def one(description: TransactionDescription | None = OPEN, name: str = ID) -> DescribedTransaction:
    return DescribedTransaction(name, 1, description)


@table(
    ("found", "waived"),
    [
        (None, None),
        (Decided(None, None, None, NOT_OURS), None),
        (Decided(None, None, None, OTHER_DATABASE), None),
        (Decided(OLDER, 3, None, NEWER), None),
        (Decided(OLDER, 1, None, RESOLVED), None),
        (Decided(None, None, None, NOT_READ, UNREACHABLE), None),
        (Decided(ROW, 2, None, "recovery would fail", COPIED), "a copy"),
        (decided(Decision.COMMIT), "not aborted"),
        (decided(Decision.LOST), "not aborted"),
        (decided(Decision.WAIT), "not aborted"),
    ],
)
def test_aborting_an_open_transaction_is_refused_unless_the_database_allows_it(
    found: Decided | None, waived: str | None
) -> None:
    """The option waives only what a database can't say."""
    assert refusal_to_terminate(one(), found) is not None
    left = refusal_to_terminate(one(), found, without_database=True)
    assert left is None if waived is None else waived in str(left)


LOST = LostTransaction(LostKind.LOST, PreparedTxnState(7, 3), 1, datetime(2026, 1, 1, tzinfo=UTC))


@table("row", [ROW, replace(ROW, prepared_state=None, lost=(LOST,))], ids=["prepared", "lost"])
@table(("why", "error"), [("recovery would fail", UNREACHABLE), (RESOLVED, None), (NEWER, None)])
def test_a_decision_that_was_read_is_not_waived(row: StateRow, why: str, error: DualWriteError | None) -> None:
    """The database may have been lost between the row and the plan."""
    found = Decided(row, 2, None, why, error)
    assert "has committed the transaction" in str(refusal_to_terminate(one(), found, without_database=True))
    other = one(replace(OPEN, epoch=4))
    assert refusal_to_terminate(other, found, without_database=True) is None


@pytest.mark.parametrize("without_database", [False, True])
def test_an_open_transaction_that_may_be_aborted(without_database: bool) -> None:
    # what a row has stored is an earlier transaction's
    for found in (decided(Decision.ABORT), decided(Decision.ABORT, stored=False), decided(Decision.ALREADY_COMMITTED)):
        assert refusal_to_terminate(one(), found, without_database=without_database) is None
    for plain in (None, Decided(None, None, None, NOT_OURS)):
        assert refusal_to_terminate(one(name="billing"), plain, without_database=without_database) is None


@pytest.mark.parametrize("found", [decided(Decision.COMMIT), decided(Decision.ABORT), decided(Decision.LOST)])
def test_a_transaction_that_the_database_decides_may_be_completed(found: Decided) -> None:
    assert refusal_to_complete(one(), found) is None


@table(
    ("found", "said"),
    [
        (Decided(None, None, None, NOT_OURS), "has no such id"),
        (Decided(None, None, None, OTHER_DATABASE), "belongs to another database"),
        (Decided(ROW, 3, None, NEWER), "does not know generation 3 of it (newest: 2)"),
        (Decided(ROW, 1, None, RESOLVED), "has resolved generation 1"),
        (Decided(None, None, None, NOT_READ, UNREACHABLE), "is gone"),
    ],
)
def test_a_transaction_that_the_database_does_not_decide_may_not_be_completed(found: Decided, said: str) -> None:
    assert said in str(refusal_to_complete(one(), found))


def test_nothing_open_on_a_resolved_generation_needs_no_refusal() -> None:
    resolved = Decided(ROW, 2, None, RESOLVED)
    for description in (ENDED, None):
        assert refusal_to_complete(one(description), resolved) is None
        assert refusal_to_terminate(one(description), resolved) is None


def test_an_id_that_could_not_be_described_is_not_reported_ended() -> None:
    problem = DualWriteError("no answer")
    for refusal in (refusal_to_complete, refusal_to_terminate):
        assert refusal(DescribedTransaction(ID, None, None, problem), Decided(ROW, 2, None, RESOLVED)) is problem


# --- GenerationPlan.covers --------------------------------------------------------------------------------------------


@table(
    "described",
    [None, ENDED, OPEN, replace(OPEN, partitions=frozenset()), replace(OPEN, status=TransactionStatus.PREPARE_ABORT)],
)
def test_a_plan_covers_the_same_transaction_open_or_ended(described: TransactionDescription | None) -> None:
    was = planned(Decision.COMMIT, stored=True)
    assert was.covers(replace(was, described=described))


@pytest.mark.parametrize("changes", [{"epoch": 4}, {"producer_id": 8}, {"start_time_ms": 2_000}])
def test_a_plan_does_not_cover_another_transaction(changes: dict[str, int]) -> None:
    was = planned(Decision.ABORT, stored=False)
    later = replace(was, described=replace(OPEN, **changes))  # type: ignore[arg-type]  # the cases name fields
    assert not was.covers(later)
    for before in (None, ENDED):
        assert not replace(was, described=before).covers(was)


def test_a_plan_does_not_cover_another_decision() -> None:
    assert not planned(Decision.ABORT, stored=False).covers(planned(Decision.COMMIT, stored=True))
