"""Listening for PostgreSQL's notifications of new rows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Engine, Select, func, select

from dualwrite.deadline import Pauses
from dualwrite.errors import ConfigurationError
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.stores.sql.home import quoted

log = SubjectLogger(__name__)

NOTIFY_PAUSE_SECONDS: Final = 0.005
"""Seconds before a notification: one is enough for all that is committed meanwhile."""

_LOOK_SECONDS: Final = 0.5
"""Seconds between two looks at whether to stop."""

_PAUSES: Final = 0.5, 30.0
"""Seconds before the second attempt to connect, and the limit up to which they are doubled."""

_JOIN_SECONDS: Final = 2.0
_ARRIVAL_SECONDS: Final = 5.0
"""Seconds within which the relay's own notification must arrive."""

_SILENT: Final = (
    "LISTEN: no notification arrives on %r, so the relay polls, and a row may wait for `longest_poll`: a pooler in transaction "
    "mode, such as PgBouncer's, forwards none; connect to PostgreSQL itself, or by a pool in session mode"
)


def notification(channel: str) -> Select[Any]:
    """The statement that notifies whoever listens on a channel."""
    return select(func.pg_notify(channel, ""))


class Listener:
    """A `with` block in which a thread, with a connection of its own, listens on a channel, and calls `ring` for what comes.

    A notification can be lost, for example while the connection is replaced, so whoever waits looks without one as well.

    Args:
        engine: The database; its pool lends the connection, which is never returned.
        channel: The channel.
        relay: The relay's name, for logs.
        ring: Called in the thread when there may be new rows.

    Raises:
        ConfigurationError: The database is not PostgreSQL.
    """

    def __init__(self, engine: Engine, channel: str, relay: str, ring: Callable[[], None]) -> None:
        if engine.dialect.name != "postgresql":
            raise ConfigurationError(
                f"Only PostgreSQL has LISTEN, but the database is {engine.dialect.name}.",
                next_step="leave `listen` out: the relay polls, at most every `longest_poll` seconds",
            )
        self._engine = engine
        self._channel = channel
        self._relay = relay
        self._ring = ring
        self._stopping = threading.Event()
        self._pauses = Pauses(*_PAUSES, spread=0.0)
        self._thread = threading.Thread(target=self._run, name=f"dualwrite listen {channel}", daemon=True)

    def __enter__(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as error:
                level = logging.INFO if self._pauses.taken else logging.WARNING
                text = "can't listen on %r, so the relay polls; trying again: %s"
                log.log(level, text, self._channel, error, exc_info=if_unexpected(error), prefix=self._relay)
                self._stopping.wait(next(self._pauses))

    def _listen(self) -> None:
        pooled = self._engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()  # from now on it is not the pool's
        try:
            connection.autocommit = True
            connection.execute(f"LISTEN {quoted(self._engine.dialect.name, self._channel)}")
            self._pauses.reset()
            self._ring()  # for what was inserted before
            with self._engine.begin() as another:  # a pooler may forward what the same connection has sent
                another.execute(notification(self._channel))
            waits_until: float | None = time.monotonic() + _ARRIVAL_SECONDS
            while not self._stopping.is_set():
                for _ in connection.notifies(timeout=_LOOK_SECONDS, stop_after=1):
                    waits_until = None
                    self._ring()
                if waits_until is not None and time.monotonic() > waits_until:
                    waits_until = None
                    log.warning(_SILENT, self._channel, prefix=self._relay)
        finally:
            connection.close()  # also if it is broken
