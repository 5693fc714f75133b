"""Waiting for new rows: until it is time to look again, or until PostgreSQL has notified the relay of an INSERT."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final, Protocol

from sqlalchemy import Engine

from dualwrite.errors import ConfigurationError
from dualwrite.logs import SubjectLogger, if_unexpected

log = SubjectLogger(__name__)

_STEP: Final = 0.1
"""Seconds between two looks at whether to stop."""

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
"""Seconds before the next attempt to connect; doubled after each failure."""

_JOIN: Final = 2.0


class Ending(Protocol):
    """Something that may be told to stop."""

    def is_set(self) -> bool:
        """Whether it was."""


class WakeUp:
    """Where the thread of a shard waits for new rows."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        """There may be new rows."""
        self._event.set()

    def wait(self, seconds: float, ending: Ending) -> bool:
        """Wait for that, for at most so many seconds, or until `ending`; return whether there may be new rows."""
        until = time.monotonic() + seconds
        while not ending.is_set() and (left := until - time.monotonic()) > 0:
            if self._event.wait(min(_STEP, left)):
                self._event.clear()
                return True
        return False


class Listener:
    """A thread with a connection of its own that listens on a channel, and rings for each notification.

    A notification can be lost, for example while the connection is replaced, so whoever waits looks without one as well.

    Args:
        engine: The database; its pool lends the connection, which is never returned.
        channel: The channel.
        relay: The relay's name, for logs.

    Raises:
        ConfigurationError: The database is not PostgreSQL.
    """

    def __init__(self, engine: Engine, channel: str, relay: str) -> None:
        if engine.dialect.name != "postgresql":
            raise ConfigurationError(
                f"Only PostgreSQL has LISTEN, but the database is {engine.dialect.name}.",
                next_step="leave `listen` out: the relay polls, at most every `longest_poll` seconds",
            )
        self._engine = engine
        self._channel = channel
        self._relay = relay
        self._rung: list[WakeUp] = []
        self._stopping = threading.Event()
        self._pause = _FIRST_PAUSE
        self._thread = threading.Thread(target=self._run, name=f"dualwrite listen {channel}", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def add(self, wake_up: WakeUp) -> None:
        """Ring here as well."""
        self._rung = [*self._rung, wake_up]

    def remove(self, wake_up: WakeUp) -> None:
        """Don't ring here any more."""
        self._rung = [each for each in self._rung if each is not wake_up]

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN)

    def _ring(self) -> None:
        for each in self._rung:
            each.ring()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as error:
                level = logging.WARNING if self._pause == _FIRST_PAUSE else logging.INFO
                text = "can't listen on %r, so the relay polls; trying again: %s"
                log.log(level, text, self._channel, error, exc_info=if_unexpected(error), prefix=self._relay)
                self._stopping.wait(self._pause)
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _listen(self) -> None:
        pooled = self._engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()  # from now on it is not the pool's
        try:
            connection.autocommit = True
            connection.execute(f"LISTEN {self._engine.dialect.identifier_preparer.quote_identifier(self._channel)}")
            self._pause = _FIRST_PAUSE
            self._ring()  # for what was inserted before
            while not self._stopping.is_set():
                for _ in connection.notifies(timeout=5 * _STEP, stop_after=1):
                    self._ring()
        finally:
            connection.close()  # also if it is broken
