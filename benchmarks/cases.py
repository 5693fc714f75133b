"""What one measurement measures, and the order of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One alternative with a number of writers.

    Args:
        alternative: The alternative's name.
        writers: How many write at once.
        agents: How many agents these are.
        sends: Whether it sends messages.
        needs_relay: Whether the outbox's relay also runs.
        round_trip: Seconds that a round trip to the servers takes; 0: there is no network in between.
    """

    alternative: str
    writers: int
    agents: int
    sends: bool = True
    needs_relay: bool = False
    round_trip: float = 0.0


def rotated(names: Sequence[str], by: int) -> Iterator[str]:
    """The names in turn, starting with a different one each time, so that none is always measured first."""
    for place in range(len(names)):
        yield names[(place + by) % len(names)]
