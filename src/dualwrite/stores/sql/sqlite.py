"""SQLite, using Python's sqlite3: one writer at a time, from BEGIN IMMEDIATE on."""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, cast

from sqlalchemy import URL, Connection, Engine, event

from dualwrite.errors import ConfigurationError
from dualwrite.stores.identity import file_marks
from dualwrite.stores.sql.dialect import (
    TRANSACTION,
    WORK_TIME,
    Blocker,
    ErrorClass,
    StoreDialect,
    driver_connection,
    driver_error,
)
from dualwrite.stores.sql.tables import TABLE_NAME

_WAIT_SLICE: Final = 0.2  # seconds: SQLite's busy handler sleeps in C, where Ctrl-C is not handled
_LOCKED: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_SURELY_FAILED: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CONSTRAINT})
_CODES: Final[Mapping[ErrorClass, tuple[int, ...]]] = {
    ErrorClass.LOCKED: (*_LOCKED, sqlite3.SQLITE_PROTOCOL),  # PROTOCOL: WAL's locks, after many attempts
    ErrorClass.CONFLICT: (sqlite3.SQLITE_SCHEMA,),
    ErrorClass.DUPLICATE: (sqlite3.SQLITE_CONSTRAINT,),
    ErrorClass.READ_ONLY: (sqlite3.SQLITE_READONLY,),
    ErrorClass.EXHAUSTED: (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM),
    ErrorClass.DENIED: (sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH),
    ErrorClass.REFUSED: (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT),
}
_ERROR_CLASSES: Final = {code: found for found, codes in _CODES.items() for code in codes}


class SqliteDialect(StoreDialect):
    """SQLite.

    A transaction is marked by a savepoint opened right after BEGIN: COMMIT and ROLLBACK destroy it, so releasing it fails in
    any other transaction.
    """

    name: ClassVar[str] = "sqlite"
    driver: ClassVar[str] = "pysqlite"
    family: ClassVar[str] = "sqlite"
    refused_by: ClassVar[str] = "that its folder exists and you may write to it, and that the file is an SQLite database"
    read_only_by: ClassVar[str] = "PRAGMA query_only, or the file or its folder"

    def engine_options(self, url: URL, *, connect_timeout: float, lock_timeout: float) -> dict[str, Any]:
        """`lock_timeout` becomes the busy timeout."""
        del connect_timeout
        if url.database in (None, "", ":memory:") or url.query.get("mode") == "memory":
            raise ConfigurationError(
                "An in-memory SQLite database can't keep the state: it ends with the process, and each thread has its own.",
                next_step="sqlite:////absolute/path/to/file.db",
            )
        return {"connect_args": {"timeout": lock_timeout}}

    def prepare_engine(self, engine: Engine) -> None:
        """WAL, so that readers don't block a commit, and synchronous=FULL: in WAL, NORMAL may lose the last commits."""
        event.listen(engine, "connect", _make_durable)

    def watch_engine(self, engine: Engine) -> None:
        """Before a connection is closed or returned to the pool, end its transaction.

        An invalidated connection closes its cursors and rolls back first, since closing it keeps its locks while a cursor
        exists: after Ctrl-C the traceback references the cursor, and with it SQLite's connection, transaction and locks. And
        after a commit that Ctrl-C interrupted, SQLAlchemy considers the transaction ended and skips the rollback.
        """
        if not event.contains(engine, "invalidate", _roll_back_first):
            event.listen(engine, "invalidate", _roll_back_first)
            event.listen(engine, "checkin", _roll_back_left_over)

    def schemas_of_tables(self, connection: Connection, *, is_new: bool) -> Mapping[str, str]:
        """Not a temporary table, nor one of an attached database."""
        del connection, is_new
        return {TABLE_NAME: "main"}

    def begin(self, connection: Connection) -> None:
        """BEGIN IMMEDIATE acquires the write lock first: a later upgrade of a read lock fails at once with SQLITE_BUSY.

        It waits as long as the connection's busy timeout says.
        """
        self._begin(connection, None)

    def begin_short(self, connection: Connection, timeout: float, *, work_time: float = WORK_TIME) -> None:
        del work_time
        self._begin(connection, timeout)

    def _begin(self, connection: Connection, timeout: float | None) -> None:
        connection.begin()
        raw = _raw(connection)
        if raw.in_transaction:
            raw.rollback()  # begun by the user's `begin` listener, or by sqlite3's autocommit=False: it is empty
        if raw.in_transaction:
            raw.execute("COMMIT")  # with autocommit=False the next one begins at once; after this there is none
        _acquire_write_lock(raw, timeout)
        raw.execute(f"SAVEPOINT {TRANSACTION}")

    def still_marked(self, connection: Connection) -> bool:
        try:
            _raw(connection).execute(f"RELEASE SAVEPOINT {TRANSACTION}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # no such savepoint
                return False
            raise
        return True

    def commit_blocker(self, connection: Connection) -> str | None:
        return None if _raw(connection).in_transaction else "SQLite has already rolled the transaction back"

    def finish(self, connection: Connection, command: Literal["COMMIT", "ROLLBACK"]) -> None:
        """Sqlite3's commit() and rollback() do nothing with autocommit=True (Python 3.12)."""
        super().finish(connection, command)
        raw = _raw(connection)
        if raw.in_transaction and getattr(raw, "autocommit", None) is True:
            raw.execute(command)

    def commit_surely_failed(self, error: BaseException, connection: Connection) -> bool:
        """A COMMIT that met a lock or a deferred constraint leaves its transaction open; every other outcome is unknown."""
        code = _code(driver_error(error))
        return code in _SURELY_FAILED and not connection.invalidated and _raw(connection).in_transaction

    def database_marks(self, connection: Connection) -> frozenset[str]:
        """Path and inode of the file; empty for a database in memory."""
        path = next((row[2] for row in connection.exec_driver_sql("PRAGMA database_list") if row[1] == "main"), "")
        return file_marks(path) if path else frozenset()

    def classify(self, error: BaseException) -> ErrorClass:
        error = driver_error(error)
        code = _code(error)
        text = str(error)
        if code == sqlite3.SQLITE_ERROR:
            if "no such table" in text:
                return ErrorClass.NO_TABLE
            return ErrorClass.OLD_TABLE if "no such column" in text or "has no column" in text else ErrorClass.OTHER
        return _ERROR_CLASSES.get(code, ErrorClass.OTHER)

    def known_blocker(self, engine: Engine) -> Blocker | None:
        """SQLite does not show who holds the lock."""
        return Blocker(
            f"another connection that is in a transaction and perhaps paused (SQLite has one write lock for the whole file "
            f"{engine.url.database})",
            "let the other writer finish, or end its process (`fuser` or `lsof` lists the processes that have the file open); "
            "then try again",
        )


def _raw(connection: Connection) -> sqlite3.Connection:
    return cast("sqlite3.Connection", driver_connection(connection))


def _acquire_write_lock(raw: sqlite3.Connection, timeout: float | None) -> None:
    """BEGIN IMMEDIATE, waiting for at most `timeout` seconds, or the connection's busy timeout, in slices.

    The connection's busy timeout is restored: the connection may be one of the user's pool.
    """
    (before,) = raw.execute("PRAGMA busy_timeout").fetchone()
    deadline = time.monotonic() + (before / 1000 if timeout is None else timeout)
    try:
        while True:
            left = deadline - time.monotonic()
            raw.execute(f"PRAGMA busy_timeout = {max(0, int(min(left, _WAIT_SLICE) * 1000))}")
            try:
                raw.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if _code(error) not in _LOCKED or left <= _WAIT_SLICE:
                    raise
            else:
                return
            time.sleep(0.001)  # some locks are reported at once
    finally:
        raw.execute(f"PRAGMA busy_timeout = {before}")


def _code(error: BaseException) -> int:
    code: int = getattr(error, "sqlite_errorcode", -1)
    return code if code < 0 else code & 0xFF  # the primary result code


def _roll_back_first(raw: sqlite3.Connection, _record: object, _error: BaseException | None) -> None:
    with contextlib.suppress(sqlite3.Error):  # it is being closed anyway
        for cursor in gc.get_referrers(raw):  # sqlite3 has no list of cursors; this runs after errors only
            if isinstance(cursor, sqlite3.Cursor):
                cursor.close()
        if raw.in_transaction:
            raw.execute("ROLLBACK")


def _roll_back_left_over(raw: sqlite3.Connection | None, _record: object) -> None:
    if raw is not None and raw.in_transaction:
        raw.rollback()


def _make_durable(raw: sqlite3.Connection, _record: object) -> None:
    raw.execute("PRAGMA synchronous = FULL")
    (mode,) = raw.execute("PRAGMA journal_mode").fetchone()
    if mode == "wal":
        return
    for _ in range(50):
        # the change needs exclusive access to the file, and SQLite returns SQLITE_BUSY at once, without the busy timeout
        try:
            raw.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if _code(error) not in _LOCKED:
                raise
            time.sleep(0.02)
        else:
            return
