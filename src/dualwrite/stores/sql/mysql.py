"""MariaDB and MySQL, using PyMySQL."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

from pymysql import Connection as PyMySQLConnection
from pymysql import Error as PyMySQLError
from pymysql import InterfaceError
from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS
from sqlalchemy import URL, Connection, bindparam, text
from sqlalchemy.exc import DBAPIError

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.dialect import TRANSACTION, WORK_TIME, ErrorClass, StoreDialect, driver_connection, driver_error
from dualwrite.stores.sql.home import home_of
from dualwrite.stores.sql.rights import Right
from dualwrite.stores.sql.tables import TABLE_NAME

_NO_SUCH_SAVEPOINT: Final = 1305
_LOCK_TIMEOUT: Final = 1205
_PREVENTED: Final = 1290
"""An option prevents the statement: `--read-only`, but also `--secure-file-priv` and others, which are permanent."""
_LOST_CONNECTION: Final = "08"  # SQLSTATE; also from a node of a Galera cluster that is not ready
_CODES: Final[Mapping[ErrorClass, tuple[int, ...]]] = {
    ErrorClass.CONNECTION: (
        *(0, 1077, 1079, 1152, 1184, 2002, 2003, 2006, 2013, 2014, 2027, 2055),  # 0: PyMySQL's own for a closed connection
        *(1040, 1203, 1226),  # too many connections
        *(1047, 1053, 1927, 3032, 3168, 3169, 4031),  # Galera is not ready; shutdown; killed; offline; idle for too long
    ),
    ErrorClass.REFUSED: (
        *(1044, 1045, 1046, 1049, 1251, 1698, 1820, 1862, 2059, 3118, 4151),  # user, password or database
        *(1129, 1130, 2026),  # the host; TLS
    ),
    ErrorClass.LOCKED: (_LOCK_TIMEOUT, 1969, 3024, 3572),  # max_statement_time, max_execution_time, NOWAIT
    ErrorClass.CONFLICT: (
        *(1020, 1213, 3101),  # innodb_snapshot_isolation; deadlock; group replication
        *(1412, 1615),  # a migration has changed the table
    ),
    ErrorClass.DUPLICATE: (1062, 1586),
    ErrorClass.NO_TABLE: (1146,),
    ErrorClass.OLD_TABLE: (1054,),
    ErrorClass.DENIED: (1142, 1143, 1227, 1370),
    ErrorClass.READ_ONLY: (
        *(_PREVENTED, 1792, 1836),
        *(1036, 1874, 1881),  # innodb_read_only, innodb_force_recovery
    ),
    ErrorClass.EXHAUSTED: (
        *(1021, 1114),  # the disk is full, of which InnoDB says "the table is full"
        *(1037, 1041, 1206),  # memory, also for locks
    ),
}
_ERROR_CLASSES: Final = {code: found for found, codes in _CODES.items() for code in codes}
_OF_FILES: Final = frozenset({3, 1026, 1030})
"""Errors of the storage engine, or of writing a file, for any reason."""
_NO_SPACE: Final = re.compile(r"(?:error|errno:|Errcode:) (?:28|122)\b")
"""ENOSPC and EDQUOT as the reason."""
_OPTION_OF_READ_ONLY: Final = re.compile("read[-_]only")
_ROLLED_BACK: Final = frozenset({_LOCK_TIMEOUT, 1213, _PREVENTED})
"""Errors that COMMIT returns before it has begun to commit, and after rolling back: FLUSH TABLES WITH READ LOCK made it wait
longer than `lock_wait_timeout`; Galera's certification failed; the server has become `read_only`."""

_EXPLAINED: Final = {
    "SELECT": "EXPLAIN SELECT 1 FROM {}",
    "INSERT": "EXPLAIN INSERT INTO {} VALUES ()",
    "UPDATE": "EXPLAIN UPDATE {} SET dualwrite_asks = 1",
    "DELETE": "EXPLAIN DELETE FROM {}",
}
"""What needs a privilege on a table. Nothing is executed; errors about columns come after those about privileges."""

_LIMITS: Final = ("innodb_lock_wait_timeout", "lock_wait_timeout", "wait_timeout")
"""Session variables for our short transactions: the wait for a row, the wait for the table, the time a claimer may pause."""
_PAUSED: Final = 10  # seconds; our own statements follow each other within microseconds
_SOCKET_OPTIONS: Final = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,  # milliseconds; then a COMMIT whose peer is gone is unknown, instead of hanging forever
}
_OWN_FUNCTIONS: Final = text(
    "SELECT 1 FROM information_schema.ROUTINES WHERE LOWER(ROUTINE_NAME) IN :names LIMIT 1"
).bindparams(bindparam("names", expanding=True))
_AUTOCOMMIT_WAS_ON: Final = "dualwrite.autocommit"
_SAVED_LIMITS: Final = "dualwrite.limits"
_MAY_READ_COMMITTED: Final = "dualwrite.may_read_committed"


class MysqlDialect(StoreDialect):
    """MySQL from 8.0.17 on, and MariaDB from 10.5 on with a `mysql://` URL.

    A transaction is marked by a savepoint set right after START TRANSACTION. Whatever ends the transaction destroys it, also
    implicitly: statements such as DDL, which commit, and a deadlock, which rolls back. Releasing the savepoint then fails.
    """

    name: ClassVar[str] = "mysql"
    driver: ClassVar[str] = "pymysql"
    family: ClassVar[str] = "mysql"
    read_only_by: ClassVar[str] = (
        "SET SESSION TRANSACTION READ ONLY or transaction_read_only, or the server is a replica (read_only)"
    )
    time_limit: ClassVar[str] = "max_statement_time (MySQL: max_execution_time)"

    def engine_options(self, url: URL, *, connect_timeout: float, lock_timeout: float) -> dict[str, Any]:
        """Time limits: for connecting including the server's greeting, for a lock on the table, and for a peer that is gone."""
        if not url.database:
            raise ConfigurationError(
                "The URL has no database name.", next_step=f"{self.name}+{self.driver}://user@host/database"
            )
        wanted = {
            "connect_timeout": max(1, math.ceil(connect_timeout)),
            "read_timeout": _UntilConnected(max(1.0, connect_timeout)),
            "program_name": "dualwrite",
            # the server's default is a day (MySQL: a year)
            "init_command": f"SET SESSION lock_wait_timeout = {_seconds(lock_timeout)}",
        }
        return {
            "connect_args": {name: value for name, value in wanted.items() if name not in url.query},
            "pool_events": [(_connected, "connect")],
        }

    # --- transactions -----------------------------------------------------------------------------------------------------

    def schemas_of_tables(self, connection: Connection, *, is_new: bool) -> Mapping[str, str]:
        """All are in the connection's database."""
        del is_new
        database = connection.exec_driver_sql("SELECT DATABASE()").scalar()
        return {} if database is None else {TABLE_NAME: database}

    def schemas_with(self, connection: Connection, table: str) -> Sequence[str]:
        query = "SELECT TABLE_SCHEMA FROM information_schema.TABLES WHERE TABLE_NAME = %s ORDER BY 1"
        return connection.exec_driver_sql(query, (table,)).scalars().all()

    def missing_rights(self, connection: Connection, rights: Sequence[Right]) -> tuple[str, Sequence[Right]]:
        """Asked one by one, by statements that are only explained: rights come from roles and patterns of names, too."""
        missing = []
        for right in rights:
            place = ".".join(f"`{name.replace('`', '``')}`" for name in (right.schema, right.name) if name)
            try:
                connection.exec_driver_sql(_EXPLAINED[right.privilege].format(place).replace("%", "%%"))
            except DBAPIError as error:
                if self.classify(error) is ErrorClass.CONNECTION:
                    raise
                if self.classify(error) is ErrorClass.DENIED:
                    missing.append(right)
        return (connection.exec_driver_sql("SELECT CURRENT_USER()").scalar_one() if missing else ""), missing

    def begin(self, connection: Connection) -> None:
        _start(connection)
        connection.exec_driver_sql(f"SAVEPOINT {TRANSACTION}")

    def begin_short(self, connection: Connection, timeout: float, *, work_time: float = WORK_TIME) -> None:
        """See StoreDialect. The limits are whole seconds, rounded up; `finish` restores the user's own.

        It uses READ COMMITTED: with InnoDB's default it would also wait for neighboring rows: for example, the decision about
        one job would wait for a task of another that is loading rows.
        """
        del work_time
        connection.begin()
        _save_limits(connection)
        try:
            connection.exec_driver_sql(_set_limits((_seconds(timeout), _seconds(timeout), _PAUSED)))
            _start(connection, "READ COMMITTED" if _may_read_committed(connection) else None)
        except BaseException:
            if not connection.invalidated:
                _restore_session(connection)
            raise

    def limit_pause(self, connection: Connection) -> None:
        rows, table, _ = _save_limits(connection)
        connection.exec_driver_sql(_set_limits((rows, table, _PAUSED)))

    def still_marked(self, connection: Connection) -> bool:
        try:
            connection.exec_driver_sql(f"RELEASE SAVEPOINT {TRANSACTION}")
        except DBAPIError as error:
            if _code(error) == _NO_SUCH_SAVEPOINT:
                return False
            raise
        return True

    # --- commit -----------------------------------------------------------------------------------------------------------

    def commit_blocker(self, connection: Connection) -> str | None:
        """Found from the status in the server's last response that was not an error."""
        if connection.invalidated or not _raw(connection).open:
            return "the connection was lost before COMMIT was sent"
        if not _raw(connection).server_status & SERVER_STATUS_IN_TRANS:
            return "the connection has no transaction any more"
        return None

    def finish(self, connection: Connection, command: Literal["COMMIT", "ROLLBACK"]) -> None:
        """Restores the session variables that `begin` and `begin_short` have set."""
        super().finish(connection, command)
        _restore_session(connection)

    def commit_surely_failed(self, error: BaseException, connection: Connection) -> bool:
        """One of the few errors that come before anything is committed, over a connection that stays open.

        All others are treated as unknown, among them 1180 (error during COMMIT), 1053 (shutdown) and 1317 (killed): they may
        occur while a commit that is already in the log waits for the binary log or a replica.
        """
        return _code(error) in _ROLLED_BACK and not connection.invalidated and _raw(connection).open

    detects_copies = False  # a promoted replica has its own server id

    def database_marks(self, connection: Connection) -> frozenset[str]:
        """MySQL's `server_uuid`, MariaDB's `server_uid` if it has one, and the database of our tables."""
        query = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('server_uuid', 'server_uid')"
        servers = [f"server {row[1]}" for row in connection.exec_driver_sql(query)]
        return frozenset(f"{server}, schema {home_of(connection.engine).schema()}" for server in servers)

    def has_own_functions(self, connection: Connection, names: frozenset[str]) -> bool:
        return connection.scalar(_OWN_FUNCTIONS, {"names": list(names)}) is not None

    # --- errors -----------------------------------------------------------------------------------------------------------

    def wrong_encoding(self, connection: Connection) -> str | None:
        client = connection.exec_driver_sql("SELECT @@character_set_client").scalar()
        driver = _raw(connection).charset
        return None if client == driver else f"SET NAMES or character_set_client: it is {client}, and PyMySQL sends {driver}"

    def may_have_rolled_back(self, error: BaseException) -> bool:
        """After a lock timeout it has done so if `innodb_rollback_on_timeout` is on."""
        return _code(error) == _LOCK_TIMEOUT or super().may_have_rolled_back(error)

    def has_lost_savepoint(self, error: BaseException) -> bool:
        return _code(error) == _NO_SUCH_SAVEPOINT

    def classify(self, error: BaseException) -> ErrorClass:
        lost = getattr(error, "connection_invalidated", False)
        error = driver_error(error)
        if not isinstance(error, PyMySQLError) and type(error).__module__.partition(".")[0] not in _LIKE_PYMYSQL:
            return ErrorClass.OTHER
        code = _code(error)
        text = str(error)
        if code in _OF_FILES and _NO_SPACE.search(text):
            return ErrorClass.EXHAUSTED
        if code in _ERROR_CLASSES and (code != _PREVENTED or _OPTION_OF_READ_ONLY.search(text)):
            return _ERROR_CLASSES[code]
        sqlstate = getattr(error, "sqlstate", None)  # from PyMySQL 1.2 on
        if lost or isinstance(error, InterfaceError) or (sqlstate is not None and sqlstate.startswith(_LOST_CONNECTION)):
            return ErrorClass.CONNECTION
        return ErrorClass.OTHER


_LIKE_PYMYSQL: Final = ("MySQLdb", "asyncmy")
"""Drivers of users' connections whose errors have the same numbers."""


class MariadbDialect(MysqlDialect):
    """MariaDB, with a `mariadb://` URL."""

    name: ClassVar[str] = "mariadb"


class _UntilConnected(float):
    """Our read timeout, removed once the connection is made: later it would interrupt slow statements.

    Without it PyMySQL waits forever for the greeting of a server that accepted the connection and then hangs.
    """


def _connected(raw: Any, _record: object) -> None:
    """A pool's listener: remove the time limit for connecting, and have the system detect that a peer is gone."""
    if isinstance(raw._read_timeout, _UntilConnected):  # noqa: SLF001  (PyMySQL has no public way to change it)
        raw._read_timeout = None  # noqa: SLF001  (as above)
    if raw.unix_socket is None:
        for name, value in _SOCKET_OPTIONS.items():
            option = getattr(socket, name, None)  # not every system has each
            if option is not None:
                raw._sock.setsockopt(socket.IPPROTO_TCP, option, value)  # noqa: SLF001  (there is no public way)


def _start(connection: Connection, isolation: str | None = None) -> None:
    """Begin a transaction, with autocommit off: if a statement ends the transaction, later writes must not be committed."""
    if connection.get_transaction() is None:
        connection.begin()
    raw = _raw(connection)
    if raw.server_status & SERVER_STATUS_IN_TRANS:
        # begun by a user's `begin` listener, or chained; START TRANSACTION would commit it
        connection.exec_driver_sql("ROLLBACK AND NO CHAIN")
    if raw.get_autocommit():
        connection.info[_AUTOCOMMIT_WAS_ON] = True
        connection.exec_driver_sql("SET SESSION autocommit = 0")
    if isolation is not None:
        connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {isolation}")  # of this transaction only
    connection.exec_driver_sql("START TRANSACTION")


def _may_read_committed(connection: Connection) -> bool:
    """Whether READ COMMITTED works: not with statement-based binary logging (error 1665). Queried once per connection."""
    known = connection.info.get(_MAY_READ_COMMITTED)
    if known is None:
        rows = connection.exec_driver_sql("SHOW VARIABLES WHERE Variable_name IN ('log_bin', 'binlog_format')")
        known = {row[0]: row[1] for row in rows} != {"log_bin": "ON", "binlog_format": "STATEMENT"}
        connection.info[_MAY_READ_COMMITTED] = known
    return bool(known)


def _save_limits(connection: Connection) -> tuple[int, ...]:
    """The session's limits, saved for `_restore_session`."""
    before = tuple(connection.exec_driver_sql(f"SELECT {', '.join(f'@@SESSION.{name}' for name in _LIMITS)}").one())
    connection.info[_SAVED_LIMITS] = before
    return before


def _restore_session(connection: Connection) -> None:
    """Restore the session's variables; if that fails, the connection is closed.

    Uses the driver directly: SQLAlchemy would begin the next transaction.
    """
    autocommit, limits = (connection.info.pop(name, None) for name in (_AUTOCOMMIT_WAS_ON, _SAVED_LIMITS))
    try:
        with _raw(connection).cursor() as cursor:
            if limits is not None:
                cursor.execute(_set_limits(limits))
            if autocommit:
                cursor.execute("SET SESSION autocommit = 1")
    except PyMySQLError:
        connection.invalidate()


def _set_limits(values: tuple[int, ...]) -> str:
    return "SET " + ", ".join(f"SESSION {name} = {value}" for name, value in zip(_LIMITS, values, strict=True))


def _seconds(timeout: float) -> int:
    return max(1, math.ceil(timeout))


def _raw(connection: Connection) -> PyMySQLConnection[Any]:
    raw = driver_connection(connection)
    assert isinstance(raw, PyMySQLConnection)
    return raw


def _code(error: BaseException) -> int:
    code = next(iter(driver_error(error).args), None)
    return code if isinstance(code, int) else -1
