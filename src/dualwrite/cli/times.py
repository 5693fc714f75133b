"""Times as commands print them, in one format and in UTC, and the names of transactions that contain one."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from dualwrite.state import PreparedTxnState, TransactionDescription


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
