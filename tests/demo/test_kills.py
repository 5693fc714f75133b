"""The plan of the demo's kills."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from dualwrite.demo.supervisor import MAX_DELAY_SECONDS, MAX_OPENING_DELAY_SECONDS, Kill, Supervisor, WorkerProcess, plan_kills
from dualwrite.demo.worker import WorkerEvent


@given(kills=st.integers(0, 60), transactions=st.integers(0, 100_000), seed=st.integers())
def test_plan_of_kills(kills: int, transactions: int, seed: int) -> None:
    plan = plan_kills(kills, transactions, seed, max_delay=MAX_DELAY_SECONDS)
    assert len(plan) == kills
    assert plan == plan_kills(kills, transactions, seed, max_delay=MAX_DELAY_SECONDS)
    assert [kill.after for kill in plan] == sorted(kill.after for kill in plan)
    assert all(0 <= kill.after <= transactions and 0 <= kill.choice < 1 for kill in plan)
    assert all(0 <= kill.delay <= (MAX_OPENING_DELAY_SECONDS if kill.while_opening else MAX_DELAY_SECONDS) for kill in plan)
    assert sum(kill.while_opening for kill in plan) == (0 if kills < 2 else max(1, kills // 4))
    assert not any(kill.while_opening for kill in plan[:1])


def test_kills_are_spread_over_the_run_as_the_seed_says() -> None:
    plan = plan_kills(10, 1000, 1, max_delay=MAX_DELAY_SECONDS)
    assert all(100 * place <= kill.after <= 100 * (place + 1) for place, kill in enumerate(plan))
    assert plan != plan_kills(10, 1000, 2, max_delay=MAX_DELAY_SECONDS)


def test_a_second_kill_of_a_worker_that_has_ended_hits_another_one(tmp_path: Path) -> None:
    """The demo waited in vain for the ended one, until it gave up: the others hold their last flights until all are killed."""
    kill = Kill(after=0, delay=0.0, choice=0.0, while_opening=True)
    supervisor = Supervisor([], [kill], tmp_path, lambda _: None)
    ended = SimpleNamespace(stage=WorkerEvent.CLOSED, ended=True, killed=False, exit_code=0)
    holding = SimpleNamespace(stage=WorkerEvent.OPEN, ended=False, killed=False, exit_code=None, kill=Mock())
    supervisor._workers = cast("dict[int, WorkerProcess]", {0: ended, 1: holding})
    supervisor._last_killed = 0
    supervisor._kill_if_due()
    holding.kill.assert_called_once_with()
