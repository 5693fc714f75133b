"""Reading a broker's log: its end, and what is added while one looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL = 0.2


def tail(log_file: Path, lines: int | None) -> str:
    """The last lines of a log; all of it for None; empty when there is no such file yet."""
    try:
        text = log_file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    if lines is None:
        return text
    return "\n".join(text.splitlines()[-lines:] if lines else [])


def follow(log_file: Path, lines: int, *, until: Callable[[], bool]) -> Iterator[str]:
    """The last lines of a log, and each further line as it comes.

    Args:
        log_file: The log.
        lines: How many lines that are there already.
        until: Asked when nothing new is there; True ends the iteration.
    """
    with log_file.open(encoding="utf-8", errors="replace") as log:
        yield from log.read().splitlines()[-lines:] if lines else []
        rest = ""
        while True:
            ended = until()
            rest += log.read()
            *whole, rest = rest.split("\n")
            yield from whole
            if ended:
                return
            time.sleep(_POLL)
