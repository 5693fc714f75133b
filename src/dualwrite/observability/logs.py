"""Log records about an id, a group or a message: what a record is about begins its text, and is a field of it.

See docs/operations/monitoring.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from dualwrite.errors import DualWriteError

SUBJECTS: Final = ("transactional_id", "kafka_transactional_id", "job", "prefix", "group_id")
"""Fields for what a record is about. The first one that is given begins the text."""

FIELDS: Final = (*SUBJECTS, "topic", "partition", "offset")
"""All fields. Each is an attribute of the record if it was given; none has the name of an attribute that every record has."""


class SubjectLogger(logging.LoggerAdapter[logging.Logger]):
    """Takes fields as keyword arguments: `log.info("recovered", transactional_id="shop.1")` logs `shop.1: recovered`.

    Args:
        name: The logger's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record; see `Logger.log`. All other methods call this one."""
        if not self.isEnabledFor(level):
            return
        args = tuple(f"{each}" if isinstance(each, DualWriteError) else each for each in args)  # on one line
        extra: dict[str, Any] = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        subject = next((extra[name] for name in SUBJECTS if name in extra), None)
        if subject is not None:
            text = msg if args else str(msg).replace("%", "%%")  # it has no arguments of its own
            msg, args = f"%s: {text}", (subject, *args)
        stacklevel = kwargs.pop("stacklevel", 1) + 1  # the record's place is the caller's
        self.logger.log(level, msg, *args, extra=extra, stacklevel=stacklevel, **kwargs)


def if_unexpected(error: BaseException) -> BaseException | None:
    """For `exc_info`: the error, unless it is one of ours, whose text says what failed, why, and what to do."""
    return None if isinstance(error, DualWriteError) else error


@contextmanager
def unheard(*names: str) -> Iterator[None]:
    """Drop what this thread logs below WARNING to the loggers of a library that we use: a service did not ask for it."""
    thread = threading.get_ident()

    def is_heard(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.WARNING

    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(is_heard)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_heard)


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
