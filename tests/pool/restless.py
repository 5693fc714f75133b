"""A pool whose number of writers, and of groups side by side, changes at random all the time."""

from __future__ import annotations

import random
from typing import Final

import pytest

from dualwrite.pool import scaling
from dualwrite.pool.scaling import SERIAL, Measured, Scaling

MOST: Final = 6


class Restless(Scaling):
    """Chooses the number of groups at random, whatever it sees."""

    def decide(self, seen: Measured) -> None:
        del seen
        self.groups = random.choice([level for level in scaling._LEVELS if level <= self._limit] or [SERIAL])


class RestlessScaler(scaling.Scaler):
    """Closes writers as soon as there are fewer groups."""

    def _ask_for_writers(self, *, may_shrink: bool = False) -> None:
        del may_shrink
        super()._ask_for_writers(may_shrink=True)


def make_restless(patch: pytest.MonkeyPatch) -> None:
    """Pools that are made from now on decide after every few groups."""
    patch.setattr(scaling, "Scaling", Restless)
    patch.setattr("dualwrite.pool.pool.Scaler", RestlessScaler)
    for name in ("_SETTLING_SECONDS", "_WINDOW_SECONDS"):
        patch.setattr(scaling, name, 0.0)
