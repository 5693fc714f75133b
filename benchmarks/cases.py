"""What one measurement measures."""

from __future__ import annotations

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
    """

    alternative: str
    writers: int
    agents: int
    sends: bool = True
    needs_relay: bool = False
