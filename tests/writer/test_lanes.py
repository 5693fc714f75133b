"""Lanes: transactions rotate over several ids of one writer, in order; how many there may be, and their ids."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from dualwrite import (
    ConfigurationError,
    InvalidTransactionalIdError,
)
from dualwrite.transactional_id import TransactionalId
from writer.cases import (
    both_databases,
    native_on_postgresql,
    producers_and_databases,
    three_lanes,
)
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
        with pytest.raises(ValueError, match="mine"), writer.transaction() as tx:  # uses up its turn, on lane 1
            scene.both(tx, 7)
            raise ValueError("mine")
        scene.write(writer, 8)
        assert [row.transaction_number for row in scene.state_rows()] == [3, 2, 3]
    assert scene.agree() == [*range(7), 8]
    producer_ids = [state.producer_id for state in states]
    assert producer_ids == [producer_ids[number % 3] for number in range(7)]
    assert len(set(producer_ids)) == 3
    scene.assert_resolved()


@pytest.mark.slow
@producers_and_databases
def test_messages_are_in_the_order_of_the_transactions(scene: Scene) -> None:
    """Each transaction sends a message before it writes its row, and one after it."""
    with scene.connect() as writer:
        for number in range(60):
            with writer.transaction() as tx:
                tx.send(scene.topic, f"{number}a", partition=0)
                scene.insert(tx, number)
                tx.send(scene.topic, f"{number}b", partition=0)
    assert scene.rows() == [*range(60)]
    assert [m.value for m in scene.raw_messages()] == [f"{number}{part}".encode() for number in range(60) for part in "ab"]


# --- number of lanes ----------------------------------------------------------------------------------------------------


def test_an_invalid_number_of_lanes_is_refused_before_any_claim(scene: Scene) -> None:
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
