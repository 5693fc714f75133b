"""How long each part of the recipe may take."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dualwrite.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits in seconds; each must be above 0.

    Args:
        claim: For claiming an id: how long to wait for the row's lock and for a broken database connection.
        kafka: For one call to a coordinator or one EndTxn, with all that it takes: name look-up, connecting, TLS, login,
            repetitions. Opening and recovery have it for each lane: once for what was left open, once for taking it over.
        delivery: For the flush at prepare, and for handing over one message when the queue is full.

    Raises:
        ConfigurationError: A limit is not a number above 0.
    """

    claim: float = 30.0
    kafka: float = 60.0
    delivery: float = 60.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            seconds = getattr(self, limit.name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise ConfigurationError(f"The time limit {limit.name!r} is {seconds!r}, not a number of seconds above 0.")
