"""Numbers, durations and times of day, as exact as people need them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final

_SMALL_SECONDS: Final = 0.001
_MINUTES_FROM_SECONDS: Final = 120.0
_HOURS_FROM_SECONDS: Final = 7200.0
_DAYS_FROM_SECONDS: Final = 2 * 86400.0
_EXACT_BELOW: Final = 100


def seconds_words(seconds: float) -> str:
    """A duration: `340 µs`, `12 ms`, `4.2 s`, `70 s`, `12 min`, `3 h`, `4 days`."""
    if seconds <= 0:
        return "0 s"
    if seconds < _SMALL_SECONDS:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < _MINUTES_FROM_SECONDS:
        return f"{seconds:.3g} s"
    if seconds < _HOURS_FROM_SECONDS:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < _DAYS_FROM_SECONDS else f"{seconds / 86400:.0f} days"


def number_words(number: float) -> str:
    """A number: `0`, `0.25`, `3`, `12,345`."""
    return f"{number:.2g}" if number % 1 and number < _EXACT_BELOW else f"{number:,.0f}"


def ago(at: float | datetime) -> str:
    """How long ago a time is, in words."""
    seconds = time.time() - (at.timestamp() if isinstance(at, datetime) else at)
    return f"{seconds_words(max(0.0, round(seconds)))} ago" if seconds >= 1 else "just now"


def clock(at: float) -> str:
    """The time of day in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"
