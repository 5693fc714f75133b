"""Checks of numbers that users pass as options."""

from __future__ import annotations

from typing import Any, Final

from dualwrite.errors import ConfigurationError

MOST_SECONDS: Final = 1_000_000
"""Eleven days. In milliseconds it fits into 32 bits: more would be too large for poll, librdkafka, PostgreSQL or SQLite."""


def check_count(name: str, number: Any, *, most: int | None = None, next_step: str | None = None) -> None:
    """Check that an option is an integer from 1 to `most`.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or (most is not None and number > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise ConfigurationError(f"{name} must be an integer {allowed}, not {number!r}.", next_step=next_step)


def check_seconds(name: str, seconds: Any, *, may_be_zero: bool = False) -> None:
    """Check that an option is a number above 0, or also 0 if it may be, and at most `MOST_SECONDS`.

    Raises:
        ConfigurationError: It is not.
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not (0 < seconds <= MOST_SECONDS or (may_be_zero and seconds == 0)):
        least = "from 0" if may_be_zero else "above 0 and"
        raise ConfigurationError(f"{name} must be a number of seconds {least} up to {MOST_SECONDS}, not {seconds!r}.")
