"""What has passed through the delay proxy, for both of its programs in Python: the one that starts it, and the proxy itself."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Final

NANO: Final = 1e9


@dataclass
class Counts:
    """What has passed to a server and back.

    Args:
        connections: How many connections there were.
        exchanges: How often a client sent something first or after an answer: round trips, but for what did not wait for it.
        sent: Bytes from clients.
        received: Bytes to clients.
        delivered: How many writes there were, in both directions.
        late: By how many nanoseconds they were later than due, in total.
    """

    connections: int = 0
    exchanges: int = 0
    sent: int = 0
    received: int = 0
    delivered: int = 0
    late: int = 0

    @property
    def lateness(self) -> float:
        """By how many seconds a write was later than due, in the mean."""
        return self.late / NANO / max(1, self.delivered)

    def since(self, before: Counts) -> Counts:
        """What has passed since then."""
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))
