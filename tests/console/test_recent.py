"""What the observer counts and keeps, which is bounded."""

from __future__ import annotations

from collections import Counter

import pytest

from dualwrite.console import recent as module
from dualwrite.console.recent import DatabaseRates, Recent, duration_class, quantile
from dualwrite.errors import InDoubtTransactionError
from dualwrite.observability import (
    Steps,
    TransactionCommitted,
    TransactionInDoubt,
    TransactionRecovered,
    TransactionRolledBack,
    UnitEnded,
)
from fixtures.tables import table

STEPS = Steps(0.001, 0.004, 0.0, 0.002, 0.003)


def committed(lane: str, seconds: float = 0.01) -> TransactionCommitted:
    return TransactionCommitted(lane.partition("~")[0], lane, 1, "published", 3, seconds, STEPS, was_in_doubt=False)


def test_quantiles_are_close() -> None:
    found = Counter(duration_class(number / 1000) for number in range(1, 1001))
    for part, expected in ((0.5, 0.5), (0.99, 0.99)):
        assert quantile(found, part) == pytest.approx(expected, rel=0.05)
    assert quantile(Counter(), 0.5) is None


@table("seconds", [0.0, 1e-9, 1e-5, 1e9])
def test_any_duration_can_be_counted(seconds: float) -> None:
    assert quantile(Counter([duration_class(seconds)]), 0.99) is not None


def test_outcomes_and_steps() -> None:
    recent = Recent()
    recent(committed("shop.1"))
    recent(committed("shop.1~1"))
    recent(TransactionRolledBack("shop.1", "shop.1", 2, ValueError("of the user: secret"), 0.1))
    recent(TransactionInDoubt("shop.2", "shop.2", 3, InDoubtTransactionError("Nobody knows."), 0.1))
    recent(TransactionRecovered("shop.2", 4, "COMMITTED"))
    recent(UnitEnded("shop", "place_order", 0.0, 0.02, None))
    recent(UnitEnded("shop", "place_order", 0.0, 0.02, ValueError()))
    assert recent.counts() == {"committed": 2, "rolled back": 1, "in doubt": 1, "units": 1, "failed units": 1}
    times = {each.name: each.count for each in recent.times()}
    assert times["Delivery to Kafka"] == 2
    assert "Recording the state" not in times, "it had no time of its own"
    of_lanes = ["shop.1: committed", "shop.1: rolled back: ValueError", "shop.1~1: committed"]
    assert sorted(each.text for each in recent.of_id("shop.1")) == of_lanes, "not the text of a user's error"
    of_recovered = ["shop.2: recovered, generation 4: COMMITTED", "shop.2: in doubt: Nobody knows."]
    assert [each.text for each in recent.of_id("shop.2")] == of_recovered


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = Recent()
    now = 0
    monkeypatch.setattr(module, "_number", lambda: now)
    for now in range(3 * module.POINTS):
        for each in range(10):
            recent(committed(f"id-{now}-{each}"))
    assert len(recent._points) == module.POINTS
    assert len(recent._by_id) == module._MAX_IDS
    for _ in range(100):
        recent(committed("one"))
    assert len(recent._by_id["one"]) == module._MAX_ENTRIES_OF_ID


def test_the_series_has_a_point_for_each_span(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 999
    monkeypatch.setattr(module, "_number", lambda: now)
    recent = Recent()
    now = 1000
    for _ in range(5):
        recent(committed("shop.1"))
    now = 1002
    series = recent.series()
    assert {len(points) for points in series.values()} == {module.POINTS - 1}
    assert series["transactions"][-4:] == [None, None, 5 / module.SPAN_SECONDS, 0.0], "nothing is known of the time before"
    assert series["p99"][-1] is None


def test_the_rows_count_transactions_and_each_claim_counts_anew() -> None:
    rates = DatabaseRates()
    now = module.time.time()
    rates.observe({"a": (1, 10)}, now - 30)
    rates.observe({"a": (1, 30), "b": (1, 5)}, now - 20)
    rates.observe({"a": (2, 7), "b": (1, 5)}, now - 10)
    assert rates.series()["transactions"] == pytest.approx([2.0, 0.7], abs=0.01)
