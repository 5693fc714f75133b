"""Steps of a cleanup whose own errors don't matter: the database rolls back when the connection is closed."""

from __future__ import annotations

from collections.abc import Callable


def quietly(step: Callable[[], object]) -> bool:
    """Run a step of the cleanup, and return whether it succeeded."""
    try:
        step()
    except Exception:  # noqa: BLE001  (rollback's contract: it raises no Exception)
        return False
    return True
