"""What a producer's error means in a transaction that is older than its timeout."""

from __future__ import annotations

import pytest

from dualwrite.errors import BrokerError, DeliveryError, MessageRefusedError, PrepareError, ProducerFencedError
from dualwrite.errors import TransactionTimeoutError as TimedOut
from dualwrite.kafka.client import time_budget
from dualwrite.kafka.client.time_budget import TimeBudget
from fixtures.tables import table

FOLLOWS = [ProducerFencedError("fenced"), DeliveryError("fatal"), PrepareError("not ongoing")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time_budget, "_now", lambda: now[0])
    return now


@table("error", FOLLOWS)
def test_a_producer_that_is_refused_after_the_timeout_has_timed_out(clock: list[float], error: BrokerError) -> None:
    budget = TimeBudget(2)
    budget.start()
    clock[0] += 2.5
    explained = budget.explained(error, "shop#1")
    assert isinstance(explained, TimedOut)
    assert (explained.elapsed, explained.timeout, explained.transactional_id) == (2.5, 2, "shop#1")
    assert explained.__cause__ is error
    assert str(error) in str(explained)


@table(("timeout", "age"), [(2, 1.9), (None, 1000)], ids=["in time", "two-phase commit"])
@table("error", FOLLOWS)
def test_a_producer_that_is_refused_before_the_timeout_has_not_timed_out(
    clock: list[float], timeout: float | None, age: float, error: BrokerError
) -> None:
    budget = TimeBudget(timeout)
    budget.start()
    clock[0] += age
    assert budget.explained(error, "shop#1") is error


def test_other_errors_are_not_explained_by_the_timeout(clock: list[float]) -> None:
    budget = TimeBudget(2)
    assert budget.explained(FOLLOWS[0], "shop#1") is FOLLOWS[0], "nothing was sent yet"
    budget.start()
    clock[0] += 2.5
    refused = MessageRefusedError("no key")
    assert budget.explained(refused, "shop#1") is refused
