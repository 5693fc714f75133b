"""Lanes: transactions rotate over several ids of one writer, in order; how many there may be, and their ids."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import sqlalchemy as sa

from dualwrite import (
    ConfigurationError,
    InvalidTransactionalIdError,
)
from dualwrite.transactional_id import TransactionalId
from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended
from fixtures.tiers import thinned
from writer import ordered
from writer.cases import (
    DATABASES,
    LIBRDKAFKA,
    PRODUCERS,
    SQLITE,
    both_databases,
    mostly_native,
    native_on_postgresql,
    producers_and_databases,
    three_lanes,
)
from writer.lane_scene import BEFORE_COMMIT_POINT, PAST_COMMIT_POINT
from writer.scene import Scene

pytestmark = three_lanes


# --- rotating -----------------------------------------------------------------------------------------------------------


@native_on_postgresql
def test_transactions_take_turns(scene: Scene) -> None:
    states = []
    with scene.connect() as writer:
        for number in range(7):
            with writer.transaction() as tx:
                scene.both(tx, number)
            assert tx.state is not None
            states.append(tx.state)
        assert [row.transactional_id for row in scene.state_rows()] == [
            TransactionalId(scene.transactional_id, lane).row for lane in range(3)
        ]
        assert [row.transaction_number for row in scene.state_rows()] == [3, 2, 2]
        assert [row.prepared_state for row in scene.state_rows()] == [states[6], states[4], states[5]]
        assert scene.agree() == list(range(7))
    producer_ids = [state.producer_id for state in states]
    assert producer_ids == [producer_ids[number % 3] for number in range(7)]
    assert len(set(producer_ids)) == 3
    scene.assert_resolved()


@mostly_native
def test_a_rolled_back_transaction_uses_up_its_turn(sqlite_scene: Scene) -> None:
    scene = sqlite_scene
    with scene.connect() as writer:
        for number in range(5):
            if number % 2:
                with pytest.raises(ValueError, match="mine"), writer.transaction() as tx:
                    scene.both(tx, number)
                    raise ValueError("mine")
            else:
                scene.write(writer, number)
        assert [row.transaction_number for row in scene.state_rows()] == [1, 2, 1]  # 3: lane 0's second, not recorded
    assert scene.agree() == [0, 2, 4]
    scene.assert_resolved()


@pytest.mark.slow
@producers_and_databases
def test_messages_are_in_the_order_of_the_transactions(scene: Scene) -> None:
    with scene.connect() as writer:
        for number in range(60):
            ordered.write(writer, scene.topic, number)
    assert_ordered(scene, list(range(60)))


def assert_ordered(scene: Scene, numbers: list[int]) -> None:
    assert scene.rows() == numbers
    assert [m.value for m in scene.raw_messages()] == [f"{n}{part}".encode() for n in numbers for part in "ab"]


@pytest.mark.parametrize(
    ("producer", "database"),
    thinned(product(PRODUCERS, DATABASES), kept=[(LIBRDKAFKA, SQLITE)], quick=[]),
)
def test_messages_are_in_the_order_of_the_transactions_over_crashes(scene: Scene) -> None:
    """Processes are killed one after another, each at another point and lane; the next one recovers and continues.

    CI runs the other producer and database in test_a_writer_may_have_another_number_of_lanes_each_time.
    """
    expected = []
    for run, point in enumerate([*BEFORE_COMMIT_POINT, *PAST_COMMIT_POINT]):
        first, dies_at = 10 * run, 3 + run % 3
        passage = 2 * dies_at if point == "after_send" else dies_at
        with ForkedProcess(
            "writer.ordered",
            [scene.url, scene.servers, scene.transactional_id, scene.topic, str(first), "9"],
            failpoints=f"{point}#{passage}=kill",
            environment={**os.environ, "DUALWRITE_LANES": str(1 + run % 4)},
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            errors = process.stderr.read()
            assert ended(process) == -signal.SIGKILL, errors[-3000:]
        expected += range(first, first + dies_at - (point in BEFORE_COMMIT_POINT))
    with scene.connect() as writer:
        ordered.write(writer, scene.topic, 1000)
    assert_ordered(scene, [*expected, 1000])
    scene.assert_resolved()


# --- number of lanes ----------------------------------------------------------------------------------------------------


def test_an_invalid_number_of_lanes_is_refused_before_any_claim(sqlite_scene: Scene) -> None:
    scene = sqlite_scene
    wrong: tuple[Any, ...] = (0, -1, 101, "3", 2.0, True)
    with scene.connect() as writer:
        before = scene.state_rows()
        for lanes in wrong:
            with pytest.raises(ConfigurationError, match="lanes must be") as caught:
                scene.connect(lanes=lanes)
            assert repr(lanes) in str(caught.value)
            assert scene.state_rows() == before
        scene.write(writer, 1)


def test_an_id_must_leave_room_for_the_numbers_of_its_lanes(new_scene: Callable[..., Scene]) -> None:
    longest = "w" * 253
    with pytest.raises(InvalidTransactionalIdError, match="253 is the limit with 3 lanes"):
        new_scene("sqlite", transactional_id=longest + "w").connect()
    scene = new_scene("postgresql", transactional_id=longest)
    with scene.connect() as writer:
        for _ in range(3):
            with writer.transaction() as tx:
                tx.db.execute(sa.text("SELECT 1"))
    scene.assert_resolved()


@both_databases
def test_a_single_lane_uses_the_logical_id_for_its_row_and_in_kafka(scene: Scene) -> None:
    with scene.connect(lanes=1) as writer:
        scene.write(writer, 1, 2, 3)
        assert [row.transactional_id for row in scene.state_rows()] == [scene.transactional_id]
        assert [one.transactional_id for one in writer.recovery_report.ids] == [scene.transactional_id]
        assert scene.state_row().transaction_number == 3
