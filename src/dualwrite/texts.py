"""Texts for people: times in UTC, counts, names of transactions, errors, and texts that may contain control characters."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Final

from dualwrite.errors import DualWriteError
from dualwrite.state import PreparedTxnState, TransactionDescription

_NUMBER: Final = re.compile(r"([0-9]+)")


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


def time_text(at: datetime | int | None) -> str | None:
    """A time, or milliseconds since 1970, in ISO 8601 format."""
    if at is None:
        return None
    try:
        found = at if isinstance(at, datetime) else datetime.fromtimestamp(at / 1000, UTC)
    except (OverflowError, ValueError):  # a user may send any timestamp
        return str(at)
    return f"{found.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def counted(number: int, noun: str) -> str:
    """The number with its noun, such as `1 id` or `2 ids`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds_text(milliseconds: int | None) -> int | None:
    """Whole seconds of a duration."""
    return None if milliseconds is None else milliseconds // 1000


def state_words(state: PreparedTxnState | None) -> str | None:
    """A transaction's producer id and epoch, and when it began if that belongs to its name."""
    if state is None or state.start_time_ms is None:
        return None if state is None else str(state)
    return f"{state.producer_id}:{state.epoch} of {time_text(state.start_time_ms)}"


def description_words(found: TransactionDescription | None) -> str:
    """What a coordinator reports about an id."""
    if found is None:
        return "unknown to Kafka"
    began = f" since {time_text(found.start_time_ms)}" if found.start_time_ms >= 0 else ""
    return f"{found.status.value}{began}, producer {found.producer_id}:{found.epoch}"


def printable(text: str) -> str:
    r"""The text with each character that is not printable, such as a newline or ESC, as its escape sequence (`\n`, `\x1b`)."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def printable_lines(text: str) -> str:
    """The same for a text that may have several lines, such as a database's error message."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))


def in_natural_order(text: str) -> tuple[tuple[str | int, ...], str]:
    """The sort key of a text: its numbers count as numbers."""
    parts = _NUMBER.split(text)  # texts and numbers take turns, so that like is compared with like
    return tuple(int(part) if at % 2 else part for at, part in enumerate(parts)), text


def error_text(error: DualWriteError) -> str:
    """The error with its cause and next step, on lines of their own."""
    return printable_lines(f"Error: {error!s}")
