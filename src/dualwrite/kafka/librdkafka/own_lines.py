"""librdkafka's own log lines, as records of ours: through `logging`, and not all of those that repeat.

confluent-kafka passes them to an object with a `log` method, its setting `logger`, while the client is polled; without that
setting librdkafka writes them to stderr. While Kafka is down there are some twenty a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from dualwrite.logs import SubjectLogger

log = SubjectLogger(__name__)

INTERVAL: Final = 60.0
"""Seconds after which a line that repeats is logged again."""

_BEFORE_TEXT: Final = "]: "


class OwnLines:
    """What a client logs.

    Of warnings and errors, the first of each kind and thread of librdkafka is logged, then one in a minute, with the number of
    those left out. They are logged as warnings: librdkafka goes on after what it calls errors, and what does fail raises one of
    ours. Its lines below that level, such as those that the setting `debug` turns on, are all passed on.

    Args:
        fields: What the client is for, as fields of the records (`dualwrite.logs`).
    """

    def __init__(self, **fields: str) -> None:
        self._fields: dict[str, Any] = fields
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}  # by kind: when, and how many since

    def log(self, level: int, message: str, *parts: Any) -> None:
        """Called by confluent-kafka: the parts are librdkafka's facility, the client's name, and the text."""
        if level < logging.WARNING or not parts:
            log.log(level, message, *parts, **self._fields)
            return
        facility, text = str(parts[0]), str(parts[-1])
        kind = (facility, text.partition(_BEFORE_TEXT)[0])  # the thread, which is that of one broker
        logged_at, left_out = self._logged.get(kind, (-INTERVAL, 0))
        now = time.monotonic()
        if now - logged_at < INTERVAL:
            self._logged[kind] = (logged_at, left_out + 1)
            return
        self._logged[kind] = (now, 0)
        more = f" ({left_out} more since the last such line)" if left_out else ""
        log.warning("librdkafka: %s: %s%s", facility, text, more, **self._fields)


def with_own_lines(settings: Mapping[str, Any], **fields: str) -> dict[str, Any]:
    """The settings of a client, with `logger` unless the user has set one.

    Args:
        settings: The settings.
        fields: See OwnLines.
    """
    return {"logger": OwnLines(**fields), **settings}
