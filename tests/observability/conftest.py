"""Scenes as the pool's tests have them, and a list that gets every event of a test."""

import gc
from collections.abc import Iterator

import pytest

from dualwrite.observability import Event, observing, outages
from pool.conftest import scene

__all__ = ["events", "scene"]


@pytest.fixture
def no_outage() -> None:
    """The brokers that earlier tests of this process have left down are not looked at any more."""
    gc.collect()
    for side in list(outages._watch._sides.values()):
        if side.is_out:
            side.forget_all()


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """The events of this process from here on, in their order."""
    seen: list[Event] = []
    with observing(seen.append):
        yield seen
