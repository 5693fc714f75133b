"""Scenes as the pool's tests have them, and a list that gets every event of a test."""

from collections.abc import Iterator

import pytest

from dualwrite.observability import Event, observing
from pool.conftest import scene

__all__ = ["events", "scene"]


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """The events of this process from here on, in their order."""
    seen: list[Event] = []
    with observing(seen.append):
        yield seen
