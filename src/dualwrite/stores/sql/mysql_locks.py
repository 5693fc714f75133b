"""Who holds the lock on a row of MariaDB or MySQL.

InnoDB (MariaDB) lists locks only while something waits for them, so one connection waits for the lock again while a second one
looks up who holds it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Final

from pymysql import Error as PyMySQLError
from sqlalchemy import Engine

from dualwrite.stores.sql.dialect import Blocker, BlockerHiddenError
from dualwrite.stores.sql.home import full_name

_SEARCH_LIMIT: Final = 3.0  # seconds
_PAUSE: Final = 0.15  # InnoDB refreshes its list only if it was not read for 0.1 s
_NO_PRIVILEGE: Final = 1227

_WAIT: Final = "SELECT transactional_id FROM {} WHERE transactional_id = %s FOR UPDATE"
_HOLDER: Final = (
    "SELECT holder.trx_mysql_thread_id, holder.trx_started FROM {waits} AS waits "
    "JOIN information_schema.INNODB_TRX AS waiter ON waiter.trx_id = waits.{requesting} "
    "JOIN information_schema.INNODB_TRX AS holder ON holder.trx_id = waits.{blocking} "
    "WHERE waiter.trx_mysql_thread_id = %s"
)
_HOLDER_MARIADB: Final = _HOLDER.format(
    waits="information_schema.INNODB_LOCK_WAITS", requesting="requesting_trx_id", blocking="blocking_trx_id"
)
_HOLDER_MYSQL: Final = _HOLDER.format(
    waits="performance_schema.data_lock_waits",
    requesting="REQUESTING_ENGINE_TRANSACTION_ID",
    blocking="BLOCKING_ENGINE_TRANSACTION_ID",
)
_STATE: Final = "SELECT STATE FROM information_schema.PROCESSLIST WHERE ID = %s"
_CONNECTION: Final = "SELECT USER, HOST, COMMAND, TIME, INFO FROM information_schema.PROCESSLIST WHERE ID = %s"


def holder_of_row(engine: Engine, transactional_id: str) -> Blocker | None:
    """Who holds the lock on the row of an id, or None if nobody does any more.

    Uses two connections outside the engine's pool, whose size may be one. Lasts about 0.2 s, at most 3 s.

    Raises:
        BlockerHiddenError: The database user may not see it.
        Exception: Any other error of the connections.
    """
    pools = [engine.pool.recreate() for _ in range(2)]
    try:
        waiter, watcher = (pool.connect() for pool in pools)
        with contextlib.closing(waiter), contextlib.closing(watcher):
            return _holder(
                waiter.dbapi_connection,
                watcher.dbapi_connection,
                (_WAIT.format(full_name(engine).replace("%", "%%")), (transactional_id,)),
                _holder_query(engine),
            )
    finally:
        for pool in pools:
            pool.dispose()


def _holder_query(engine: Engine) -> str:
    return _HOLDER_MARIADB if getattr(engine.dialect, "is_mariadb", False) else _HOLDER_MYSQL


def _holder(waiter: Any, watcher: Any, wait: tuple[str, tuple[str]], query: str) -> Blocker | None:
    limit = int(_SEARCH_LIMIT)
    with waiter.cursor() as cursor:
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {limit}, SESSION lock_wait_timeout = {limit}")
    waiting = threading.Thread(target=_wait, args=(waiter, *wait), name="dualwrite lock wait", daemon=True)
    deadline = time.monotonic() + _SEARCH_LIMIT
    with watcher.cursor() as cursor:
        waiting.start()
        try:
            while waiting.is_alive() and time.monotonic() < deadline:
                found = _found(cursor, query, waiter.thread_id())
                if found is not None:
                    return found
                waiting.join(_PAUSE)
        finally:
            with contextlib.suppress(PyMySQLError):
                cursor.execute("KILL QUERY %s", (waiter.thread_id(),))
            waiting.join(2 * _SEARCH_LIMIT)
    return None


def _wait(waiter: Any, query: str, parameters: tuple[str]) -> None:
    with contextlib.suppress(PyMySQLError), waiter.cursor() as cursor:  # the wait times out or is killed
        cursor.execute(query, parameters)


def _found(cursor: Any, query: str, waiter_id: int) -> Blocker | None:
    cursor.execute(_STATE, (waiter_id,))
    state = cursor.fetchone()
    if state is not None and state[0] is not None and "metadata lock" in state[0]:
        return _TABLE_LOCK
    try:
        cursor.execute(query, (waiter_id,))
    except PyMySQLError as error:
        if error.args[0] == _NO_PRIVILEGE:
            raise BlockerHiddenError(
                "the database shows it only to users with the PROCESS privilege",
                "try again, since the holder may have finished by now; to see the holder, GRANT PROCESS ON *.* TO the user",
            ) from error
        raise
    holder = cursor.fetchone()
    if holder is None:
        return None
    thread_id, started = holder
    cursor.execute(_CONNECTION, (thread_id,))
    connection = cursor.fetchone()
    if connection is None:  # it has just ended
        return None
    user, host, command, seconds, statement = connection
    doing = f"running {' '.join(statement.split())[:80]!r}" if statement else f"in {command} for {seconds} s"
    return Blocker(
        f"connection id {thread_id} of {user}@{host} ({doing}, transaction started {started})",
        f"end that connection: KILL {thread_id}; then try again",
        thread_id,
    )


_TABLE_LOCK: Final = Blocker(
    "a connection that has locked the whole table (LOCK TABLES, ALTER TABLE, FLUSH TABLES)",
    "find that connection with SHOW FULL PROCESSLIST and let it finish, or end it: KILL <id>; then try again",
)
