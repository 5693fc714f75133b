"""Telling relays that rows were committed: after the commits, and once for all of a moment."""

from __future__ import annotations

import threading
from typing import Final, Self

from sqlalchemy import URL, Engine

from dualwrite import process
from dualwrite.errors import ConfigurationError
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.relay.listener import NOTIFY_PAUSE_SECONDS, notification
from dualwrite.stores.sql.engines import make_engine, parse_url

log = SubjectLogger(__name__)

_JOIN_SECONDS: Final = 2.0


class Notifier:
    """Wakes relays that listen on a channel of PostgreSQL (`RelayOptions.listen`), from any process that writes rows.

    A trigger (`create_table(channel=…)`) notifies in the transactions of the rows, and PostgreSQL commits transactions with a
    notification one after another. This does so after them, in a thread and on a connection of its own. A notification that is
    lost, since the database does not answer, is no loss of rows: a relay looks without one, too.

    ::

        notifier = Notifier("postgresql://…", "outbox")
        sqlalchemy.event.listen(Session, "after_commit", lambda session: notifier.notify())

    Use it in any thread, and in a forked child, too. `close` it, or use it in a `with` block.

    Args:
        database: A URL, or an Engine of SQLAlchemy, whose pool then lends a connection for each notification.
        channel: The channel.

    Raises:
        ConfigurationError: The database is not PostgreSQL.
    """

    def __init__(self, database: str | URL | Engine, channel: str) -> None:
        self._is_users = isinstance(database, Engine)
        self._engine = database if isinstance(database, Engine) else make_engine(*parse_url(database))
        if self._engine.dialect.name != "postgresql":
            raise ConfigurationError(
                f"Only PostgreSQL has NOTIFY, but the database is {self._engine.dialect.name}.",
                next_step="leave the notifier out: a relay polls, at most every `longest_poll` seconds",
            )
        self._ring = notification(channel)
        self._channel = channel
        self._begin_again()

    def _begin_again(self) -> None:
        self._pid = process.pid
        self._asked, self._stopping = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def notify(self) -> None:
        """Say that rows were committed. Never blocks, and raises nothing; after `close` it does nothing."""
        if self._pid != process.pid:  # the thread and the connection are the parent's
            if not self._is_users:
                self._engine.dispose(close=False)
            self._begin_again()
        self._asked.set()
        if self._thread is None and not self._stopping.is_set():
            self._start()

    def close(self) -> None:
        """Send what was asked for, and end."""
        with self._lock:
            self._stopping.set()
            thread = self._thread
        if thread is not None:
            self._asked.set()
            thread.join(_JOIN_SECONDS)
        if not self._is_users:
            self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._stopping.is_set():
                return
            thread = threading.Thread(target=self._run, name=f"dualwrite notify {self._channel}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter is ending
                log.info("relays are not notified on %r: %s", self._channel, error)
            else:
                self._thread = thread

    def _run(self) -> None:
        is_known = is_last = False
        while not is_last:
            self._asked.wait()
            is_last = self._stopping.wait(NOTIFY_PAUSE_SECONDS)
            self._asked.clear()
            try:
                with self._engine.begin() as connection:
                    connection.execute(self._ring)
                is_known = False
            except Exception as error:
                if not is_known:
                    text = "can't notify relays on %r, which poll meanwhile: %s"
                    log.warning(text, self._channel, error, exc_info=if_unexpected(error))
                is_known = True
