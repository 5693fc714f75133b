"""A message that could not be processed, as it goes to the dead-letter topic: with its origin and the error. No I/O."""

from __future__ import annotations

from typing import Any, Final

PREFIX: Final = "dualwrite."
_LONGEST: Final = 1000


def dead_letter_headers(message: Any, error: BaseException, *, group_id: str, attempts: int) -> list[tuple[str, bytes]]:
    """The message's headers, and ours.

    Args:
        message: The message.
        error: What its processing raised last.
        group_id: The consumer group.
        attempts: How often it was tried.
    """
    kind, timestamp = message.timestamp()
    ours = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": timestamp if kind else "",
        "group": group_id,
        "attempts": attempts,
        "error": type(error).__qualname__,
        "error.message": str(error)[:_LONGEST],
    }
    return [*(message.headers() or ()), *((f"{PREFIX}{name}", str(value).encode()) for name, value in ours.items())]
