"""The headers of a dead letter: they say where the message that could not be processed came from, and why. No I/O."""

from __future__ import annotations

from typing import Any, Final

PREFIX: Final = "dualwrite."
_LONGEST: Final = 1000


def dead_letter_headers(message: Any, error: BaseException, *, group_id: str, attempts: int) -> list[tuple[str, bytes]]:
    """The headers of the message, followed by ours.

    Args:
        message: The message.
        error: The exception of the last attempt to process it.
        group_id: The consumer group.
        attempts: The number of attempts.
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
    return [
        *(message.headers() or ()),
        *((f"{PREFIX}{name}", str(value).encode(errors="backslashreplace")) for name, value in ours.items()),
    ]
