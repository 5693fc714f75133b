"""Reads a broker's log: its last lines, and new ones as they are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL = 0.2


def tail(log_file: Path, lines: int | None) -> str:
    """The last lines of a log, or all of it for None; empty if the file does not exist yet."""
    try:
        text = log_file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    if lines is None:
        return text
    return "\n".join(text.splitlines()[-lines:] if lines else [])


def follow(log_file: Path, lines: int, *, until: Callable[[], bool]) -> Iterator[str]:
    """The last lines of a log, then each new line as it is written; nothing if there is no log.

    Args:
        log_file: The log.
        lines: How many of the existing lines.
        until: Called before each read; after it returns True, the rest of the log is read and the iteration ends.
    """
    if not log_file.exists():
        return
    with log_file.open(encoding="utf-8", errors="replace") as log:
        yield from log.read().splitlines()[-lines:] if lines else []
        rest = ""
        while True:
            ended = until()
            rest += log.read()
            *complete, rest = rest.split("\n")
            yield from complete
            if ended:
                return
            time.sleep(_POLL)
