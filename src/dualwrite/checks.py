"""Checks of numbers that users pass as options."""

from __future__ import annotations

from typing import Any

from dualwrite.errors import ConfigurationError


def check_count(name: str, number: Any, *, most: int | None = None, next_step: str | None = None) -> None:
    """Check that an option is an integer from 1 to `most`.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or (most is not None and number > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise ConfigurationError(f"{name} must be an integer {allowed}, not {number!r}.", next_step=next_step)


def check_seconds(name: str, seconds: Any) -> None:
    """Check that an option is a number above 0.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigurationError(f"{name} must be a number of seconds above 0, not {seconds!r}.")
