"""Closing what was opened, if a later step of its opening fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class SupportsClose(Protocol):
    """A socket, a connection, a producer."""

    def close(self) -> object:
        """Release its resources."""


@contextmanager
def closed_on_error(made: SupportsClose) -> Iterator[None]:
    """Close it if the block raises anything, KeyboardInterrupt included; otherwise it stays open."""
    try:
        yield
    except BaseException:
        made.close()
        raise
