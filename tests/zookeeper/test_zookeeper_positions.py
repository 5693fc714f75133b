"""Positions in ZooKeeper: a multi whose answer was lost."""

from __future__ import annotations

from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss

from dualwrite.errors import PositionMovedError
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.positions import ZooKeeperPositions

GROUP = "billing"
FIRST = [Move(None, Position("orders", number, 5, "id")) for number in range(2)]
SECOND = [Move(one.after, Position("orders", one.after.partition, 9, "id")) for one in FIRST]


def offsets(positions: ZooKeeperPositions) -> list[int]:
    return [one.offset for one in positions.read(GROUP).values()]


@pytest.mark.parametrize("others", [[], [Move(SECOND[0].after, Position("orders", 0, 7, "id"))]], ids=["alone", "and moved on"])
def test_a_reset_whose_answer_was_lost(store: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch, others: list[Move]) -> None:
    """It has taken effect, and is not an error; unless another process has moved a position since."""
    positions = store.positions
    assert isinstance(positions, ZooKeeperPositions)
    positions.prepare()
    positions.reset(GROUP, FIRST)
    commit, lost = ZooKeeperPositions._commit, iter([ConnectionLoss()])

    def committed(self: ZooKeeperPositions, request: Any, group: str, moves: list[Move]) -> None:
        commit(self, request, group, moves)
        for error in lost:
            if others:
                self.reset(GROUP, others)
            raise error

    monkeypatch.setattr(ZooKeeperPositions, "_commit", committed)
    if others:
        with pytest.raises(PositionMovedError):
            positions.reset(GROUP, SECOND)
        assert offsets(positions) == [7, 9]
    else:
        positions.reset(GROUP, SECOND)
        assert offsets(positions) == [9, 9]
    assert next(lost, None) is None
