"""Measures what a measurement costs: the database's transactions, rows and log, and all participants' processor time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import psutil
from sqlalchemy import Engine, text

_COUNTERS: Final = text(
    "SELECT xact_commit, tup_inserted + tup_updated + tup_deleted FROM pg_stat_database WHERE datname = current_database()"
)
_LOG: Final = text("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
_NANO: Final = 1e9
_LOCAL: Final = ("127.0.0.1", "localhost", "::1", "", None)


@dataclass(frozen=True)
class Counters:
    """PostgreSQL's own counters; they are complete only once the connections that did the work are closed."""

    transactions: int
    rows: int

    @classmethod
    def of(cls, database: Engine) -> Self:
        """The current counters."""
        with database.connect() as connection:
            transactions, rows = connection.execute(_COUNTERS).one()
        return cls(int(transactions), int(rows))


@dataclass(frozen=True)
class Window:
    """What can be read at any time: the end of the write-ahead log, and processor time in seconds (None if unknown)."""

    log: int
    writers: float | None
    relay: float | None
    database: float | None
    kafka: float | None


class Watch:
    """Reads a Window.

    Args:
        database: The database; its processes are measured if it runs on this machine.
        writers: Process ids of the writers.
        relay: Process id of the relay.
        kafka: Process ids of the brokers; empty if we did not start them.
    """

    def __init__(self, database: Engine, *, writers: set[int], relay: int, kafka: set[int]) -> None:
        self._database = database
        self._writers = [psutil.Process(pid) for pid in writers]
        self._relay = psutil.Process(relay)
        self._kafka = [psutil.Process(pid) for pid in kafka]
        self._server = _server(database)

    def window(self) -> Window:
        """The current values."""
        with self._database.connect() as connection:
            log = int(connection.scalar(_LOG) or 0)
        return Window(
            log,
            sum(map(_own_seconds, self._writers)),
            _own_seconds(self._relay),
            None if self._server is None else _tree_seconds(self._server),
            sum(map(_own_seconds, self._kafka)) if self._kafka else None,
        )


def _server(database: Engine) -> psutil.Process | None:
    if database.url.host not in _LOCAL:
        return None
    with database.connect() as connection:
        backend = int(connection.scalar(text("SELECT pg_backend_pid()")) or 0)
        try:
            parent = psutil.Process(backend).parent()
        except psutil.Error:  # the server is not on this machine: a tunnel, a container
            return None
    return parent if parent is not None and parent.name().startswith("postgres") else None


def _own_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _tree_seconds(server: psutil.Process) -> float:
    """Processor time of the server and its backends, including backends that have ended."""
    while True:
        ended = _ended_seconds(server)
        running = 0.0
        for child in server.children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                running += _backend_seconds(child)
        if _ended_seconds(server) == ended:  # otherwise a backend has just ended, and is counted twice or not at all
            return _own_seconds(server) + running + ended


def _backend_seconds(backend: psutil.Process) -> float:
    """As `_own_seconds`, but from nanoseconds: many backends that each use less than a clock tick add up."""
    try:
        return int(Path(f"/proc/{backend.pid}/schedstat").read_text().split()[0]) / _NANO
    except (OSError, ValueError, IndexError):  # not on Linux, or without the kernel's statistics
        return _own_seconds(backend)


def _ended_seconds(server: psutil.Process) -> float:
    times = server.cpu_times()
    return float(times.children_user + times.children_system)
