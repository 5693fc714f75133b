"""PostgreSQL, using psycopg 3."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from psycopg import Connection as PsycopgConnection
from psycopg import Cursor as PsycopgCursor
from psycopg import Error as PsycopgError
from psycopg import InterfaceError, OperationalError
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import (
    URL,
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Select,
    bindparam,
    event,
    func,
    literal_column,
    select,
    text,
)

from dualwrite.errors import ConfigurationError, StoreError
from dualwrite.stores.sql.dialect import WORK_TIME, Blocker, ErrorClass, Outgoing, StoreDialect, driver_error
from dualwrite.stores.sql.home import OwnConnection, home_of
from dualwrite.stores.sql.postgresql_outgoing import (
    MARKER,
    PostgresqlOutgoing,
    begun_with,
    has_listeners,
    is_idle,
    raw_connection,
)
from dualwrite.stores.sql.psycopg_sources import RecipeConnection, has_no_encoding
from dualwrite.stores.sql.rights import Right
from dualwrite.stores.sql.sql_errors import address
from dualwrite.stores.sql.tables import TABLE_NAME, Words, decoded
from dualwrite.stores.sql.tables import state_table as t

log = logging.getLogger(__name__)

_LOST_CONNECTION: Final = ("08", "57P0")
_INVALID_AUTHORIZATION: Final = "28"
# With these the server may have ended the session at any moment of COMMIT, or reports that the outcome is unknown (40003).
_UNKNOWN: Final = ("08", "57P0", "40003", "58", "XX")
_CODES: Final[Mapping[ErrorClass, tuple[str, ...]]] = {
    ErrorClass.LOCKED: ("55P03", "57014"),  # lock_timeout, statement_timeout
    ErrorClass.CONNECTION: (
        *("25P03", "25P04"),  # idle_in_transaction_session_timeout, transaction_timeout
        "53300",  # too many connections
    ),
    ErrorClass.CONFLICT: ("40001", "40P01"),
    ErrorClass.DUPLICATE: ("23505",),
    ErrorClass.NO_TABLE: ("42P01", "3F000"),  # 3F000: no schema in search_path
    ErrorClass.OLD_TABLE: ("42703",),
    ErrorClass.DENIED: ("42501",),
    ErrorClass.READ_ONLY: ("25006",),
    ErrorClass.ABORTED: ("25P02",),
    ErrorClass.PREPARED: ("26000", "42P05"),  # invalid_sql_statement_name, duplicate_prepared_statement
    ErrorClass.EXHAUSTED: ("53000", "53100", "53200", "58030"),  # file descriptors, disk_full, out_of_memory, io_error
}
_ERROR_CLASSES: Final = {code: found for found, codes in _CODES.items() for code in codes}
_OF_ROUTINES: Final = {
    ("0A000", "RevalidateCachedQuery"): ErrorClass.CONFLICT,  # cached plan must not change result type: a migration came
    ("54000", "GetNewTransactionId"): ErrorClass.EXHAUSTED,  # until a VACUUM, there are no more transaction ids
    ("54000", "GetNewMultiXactId"): ErrorClass.EXHAUSTED,
}
"""By the server's routine too, as the code alone means other things; the text depends on lc_messages."""
_REFUSALS: Final = (
    "authentication failed",
    "no pg_hba.conf entry",
    "does not exist",
    "no password supplied",
    "not permitted",
    "no such user",  # this and the following are PgBouncer's
    "no such database",
    "unsupported startup parameter",
)
_STATEMENT_POOLING: Final = "not allowed in statement pooling mode"
_PREPARED: Final = "prepare_threshold"

_PAUSED: Final = 10_000  # milliseconds; our own statements follow each other within one round trip
_LIMIT_PAUSE: Final = f"pg_catalog.set_config('idle_in_transaction_session_timeout', '{_PAUSED}', true)"
_WAITING: Final = (
    "SELECT pg_catalog.pg_backend_pid(), pg_catalog.set_config('lock_timeout', '{lock:d}', true), "
    "pg_catalog.set_config('statement_timeout', '{statement:d}', true), " + _LIMIT_PAUSE
    # a claimer that is paused between its UPDATE and its COMMIT must not block all others
)
_TABLE_LOCKS: Final = text(
    "SELECT pid FROM pg_catalog.pg_locks WHERE locktype = 'relation' AND granted AND pid <> pg_catalog.pg_backend_pid() "
    "AND relation = pg_catalog.to_regclass(:name) "
    "AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"
)
# The lock on a row is the lock on the transaction in the row's xmax. pg_blocking_pids would need a second connection while we
# wait, which a pool of one does not have.
_XMAX: Final[Select[Any]] = select(literal_column("xmax::text")).select_from(t).where(t.c.transactional_id == bindparam("id"))
_ROW_LOCK: Final = text(
    "SELECT pid FROM pg_catalog.pg_locks WHERE locktype = 'transactionid' AND granted AND pid <> pg_catalog.pg_backend_pid() "
    "AND transactionid::text = :xmax"
)
_BACKEND: Final = text(
    "SELECT pid, usename, application_name, client_addr::text AS client, state, query_start::text, xact_start::text "
    "FROM pg_catalog.pg_stat_activity WHERE pid = :pid"
)
_WHEREABOUTS: Final[ColumnElement[str]] = literal_column(
    "(SELECT 'system ' || s.system_identifier || ', database ' || d.oid "
    "FROM pg_catalog.pg_control_system() s, pg_catalog.pg_database d "
    "WHERE d.datname = pg_catalog.current_database())",
    Words,
)
# --- catalogs: which functions users have made, where our tables are, and what a role may do with them ------------------------

_OWN_FUNCTIONS: Final = text(
    "SELECT EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.proname = ANY(CAST(CAST(:names AS text[]) AS name[])) "
    "AND p.oid >= 16384 AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d "
    "WHERE d.classid = CAST('pg_catalog.pg_proc' AS pg_catalog.regclass) AND d.objid = p.oid AND d.deptype = 'e'))"
)
"""PostgreSQL's own objects have an oid below 16384; `e` is a part of an extension. The cast cuts names as PostgreSQL does."""
_DEFERRED_TRIGGERS: Final = text("SELECT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgdeferrable AND NOT tgisinternal)")
"""A trigger may defer those that are initially immediate."""
_TABLES: Final = text(
    "SELECT c.relname, n.nspname, pg_catalog.pg_backend_pid() AS pid FROM pg_catalog.pg_class c "
    "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind IN ('r', 'p', 'v', 'f') AND pg_catalog.left(c.relname::text, 6) = 'kafka_' "
    "AND n.nspname = ANY (pg_catalog.current_schemas(false)) AND pg_catalog.left(n.nspname::text, 8) <> 'pg_temp_' "
    "ORDER BY pg_catalog.array_position(pg_catalog.current_schemas(false), n.nspname) DESC"
)
"""The tables that unqualified names may mean, the first schema of the search_path last; no temporary ones."""
_STATUS: Final = text("SELECT pg_catalog.txid_status(:own_id)").bindparams(bindparam("own_id", type_=BigInteger))
_PID: Final = text("SELECT pg_catalog.pg_backend_pid()")
_AS_CONNECTED: Final = text(
    "SELECT pg_catalog.set_config('search_path', reset_val, true) FROM pg_catalog.pg_settings WHERE name = 'search_path'"
)

_SCHEMAS_WITH: Final = text(
    "SELECT n.nspname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relname = :name AND c.relkind IN ('r', 'p') AND pg_catalog.left(n.nspname::text, 8) <> 'pg_temp_' ORDER BY 1"
)
_MISSING_RIGHTS: Final = text(
    """
    SELECT w.number, CAST(current_user AS text) AS role
    FROM ROWS FROM (pg_catalog.unnest(CAST(:schemas AS text[])), pg_catalog.unnest(CAST(:names AS text[])),
        pg_catalog.unnest(CAST(:privileges AS text[]))) WITH ORDINALITY w(schema, name, privilege, number)
    LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = w.schema
    LEFT JOIN pg_catalog.pg_class c ON c.relname = w.name
        AND (c.relnamespace = n.oid OR (w.schema IS NULL AND pg_catalog.pg_table_is_visible(c.oid)))
    WHERE NOT CASE
        WHEN w.name = '' THEN pg_catalog.has_schema_privilege(n.oid, w.privilege)
        WHEN c.relkind = 'S' THEN pg_catalog.has_sequence_privilege(c.oid, w.privilege)
        ELSE pg_catalog.has_table_privilege(c.oid, w.privilege) END
    ORDER BY w.number
    """
)
"""What does not exist is left out: its privileges are NULL."""

_REPORTED: Final = (
    b"TimeZone",
    b"DateStyle",
    b"IntervalStyle",
    b"client_encoding",
    b"standard_conforming_strings",
    b"application_name",
    b"default_transaction_read_only",
    b"is_superuser",
    b"session_authorization",
    b"search_path",  # from PostgreSQL 18 on
)


class PostgresqlDialect(StoreDialect):
    """PostgreSQL. A transaction is marked by a setting that is local to it."""

    name: ClassVar[str] = "postgresql"
    driver: ClassVar[str] = "psycopg"
    family: ClassVar[str] = "postgresql"
    read_only_by: ClassVar[str] = (
        "SET TRANSACTION READ ONLY in the block, default_transaction_read_only (of the session, the role or the database), or "
        "the server is a standby"
    )
    time_limit: ClassVar[str] = "statement_timeout"
    outgoing: ClassVar[type[Outgoing]] = PostgresqlOutgoing
    own_id: ClassVar[ColumnElement[int] | None] = func.pg_catalog.txid_current(type_=BigInteger)

    def engine_options(self, url: URL, *, connect_timeout: float, lock_timeout: float) -> dict[str, Any]:
        """Time limits that the server can't enforce: for connecting, and for a peer that disappeared silently."""
        del lock_timeout
        wanted = {
            "connect_timeout": max(2, round(connect_timeout)),  # libpq treats less than 2 as 2
            "fallback_application_name": "dualwrite",
            "client_encoding": "utf8",  # otherwise the database's: with SQL_ASCII psycopg returns texts as bytes
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            "tcp_user_timeout": 60_000,  # milliseconds; then a COMMIT whose peer is gone is unknown, instead of hanging forever
        }
        return {"connect_args": {name: value for name, value in wanted.items() if name not in url.query}}

    def prepare_engine(self, engine: Engine) -> None:
        """No prepared statements behind a connection pooler, unless `prepare_threshold` is given in the engine's arguments."""

        def note(_dialect: Any, record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
            record.info[_PREPARED] = _PREPARED in parameters

        def decide(raw: Any, record: Any) -> None:
            if not record.info[_PREPARED] and is_behind_pooler(raw):
                raw.prepare_threshold = None

        event.listen(engine, "do_connect", note)
        event.listen(engine, "connect", decide)

    def watch_engine(self, engine: Engine) -> None:
        """Without an encoding SQLAlchemy can't even connect, since psycopg returns all texts as bytes."""
        if not event.contains(engine, "connect", _set_encoding):
            event.listen(engine, "connect", _set_encoding, insert=True)  # before SQLAlchemy's own first query

    def schemas_of_tables(self, connection: Connection, *, is_new: bool) -> Mapping[str, str]:
        pid = raw_connection(connection).info.backend_pid
        if is_new:
            with self.reading(connection):
                found = _schemas_as_connected(connection, pid_at_login=pid)
            if found is not None:
                return found
        return _schemas_in_search_path(connection)

    def schemas_with(self, connection: Connection, table: str) -> list[str]:
        return [decoded(name) for name in connection.scalars(_SCHEMAS_WITH, {"name": table})]

    def missing_rights(self, connection: Connection, rights: Sequence[Right]) -> tuple[str, Sequence[Right]]:
        columns = zip(("schemas", "names", "privileges"), map(list, zip(*rights, strict=True)), strict=True)
        rows: Any = connection.execute(_MISSING_RIGHTS, dict(columns)).all()
        return (decoded(rows[0].role) if rows else ""), [rights[row.number - 1] for row in rows]

    def begin(self, connection: Connection) -> None:
        """Psycopg sends BEGIN with the first statement."""
        raw = raw_connection(connection)
        if raw.autocommit:  # a user's engine; SQLAlchemy restores it when the connection returns to its pool
            connection.execution_options(isolation_level=connection.default_isolation_level or "READ COMMITTED")
        connection.begin()

    def begin_short(self, connection: Connection, timeout: float, *, work_time: float = WORK_TIME) -> None:
        self.begin(connection)
        lock, statement = (max(1, int(seconds * 1000)) for seconds in (timeout, timeout + work_time))
        pid = _begun_waiting(connection, _WAITING.format(lock=lock, statement=statement))
        raw = raw_connection(connection)
        if pid != raw.info.backend_pid and raw.prepare_threshold is not None:
            log.warning(
                "%s: the database is behind a connection pooler, and psycopg prepares statements on connections to it: in "
                "transaction mode one client's statement may run instead of another's. Set prepare_threshold to None "
                "(create_engine: connect_args={'prepare_threshold': None}), unless the pooler supports prepared statements "
                "(PgBouncer 1.22 or later with max_prepared_statements, and libpq 17).",
                address(connection.engine.url),
            )

    def limit_pause(self, connection: Connection) -> None:
        connection.exec_driver_sql(f"SELECT {_LIMIT_PAUSE}")

    @contextmanager
    def reading(self, connection: Connection) -> Iterator[None]:
        """In autocommit, without BEGIN and ROLLBACK, unless the user has a listener for `begin`."""
        raw = raw_connection(connection)
        if not is_idle(raw) or has_listeners(connection, "begin"):
            yield
            return
        raw.autocommit = True
        try:
            yield
        finally:
            if raw.pgconn.transaction_status == TransactionStatus.IDLE:  # otherwise it is broken, and not used again
                raw.autocommit = False

    def marking_column(self) -> ColumnElement[Any] | None:
        return func.pg_catalog.set_config(MARKER, bindparam("token"), True)

    def marked_condition(self) -> ColumnElement[bool] | None:
        return func.pg_catalog.current_setting(MARKER, True) == bindparam("token")

    def still_marked(self, connection: Connection) -> bool:
        """True, since the UPDATE checks it; but in a pipeline the number of updated rows would not be known yet.

        Raises:
            StoreError: The block left a pipeline open.
        """
        if raw_connection(connection).pgconn.pipeline_status != PipelineStatus.OFF:
            raise StoreError(
                "The block ended inside a pipeline of its psycopg connection, so it is unknown which statements succeeded.",
                next_step="leave `with connection.pipeline()` before the block ends",
            )
        return True

    def commit_blocker(self, connection: Connection) -> str | None:
        """The COMMIT of a failed transaction rolls back without an error (its command tag is ROLLBACK)."""
        match raw_connection(connection).pgconn.transaction_status:
            case TransactionStatus.INTRANS:
                return None
            case TransactionStatus.INERROR:
                return "an earlier statement of the transaction failed, and PostgreSQL rolls such a transaction back"
            case TransactionStatus.UNKNOWN:
                return "the connection was lost before COMMIT was sent"
            case status:
                return f"the connection has no transaction any more ({TransactionStatus(status).name})"

    def has_committed(self, connection: Connection, own_id: int) -> bool | None:
        status = connection.scalar(_STATUS, {"own_id": own_id})
        return None if status in (None, "in progress") else status == "committed"

    def commit_surely_failed(self, error: BaseException, connection: Connection) -> bool:
        """An ERROR that left the session open: the server has rolled back and waits for the next command."""
        error = driver_error(error)
        if not isinstance(error, PsycopgError) or error.sqlstate is None or error.sqlstate.startswith(_UNKNOWN):
            return False
        if error.diag.severity_nonlocalized != "ERROR" or connection.invalidated:
            return False
        return raw_connection(connection).info.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INERROR)

    def database_marks(self, connection: Connection) -> frozenset[str]:
        """A physical replica has its primary's identifier and oids, a restored dump does not."""
        return frozenset({connection.scalars(select(_WHEREABOUTS)).one()})

    def marks_column(self) -> ColumnElement[Any]:
        return _WHEREABOUTS

    def has_own_functions(self, connection: Connection, names: frozenset[str]) -> bool:
        """Those of extensions don't count: some overload `max` or `replace`."""
        return bool(connection.scalar(_OWN_FUNCTIONS, {"names": list(names)}))

    has_local_settings: ClassVar[bool] = True

    def has_deferred_triggers(self, connection: Connection) -> bool:
        """The checks of foreign keys and the like, which are internal, read no settings."""
        return bool(connection.scalar(_DEFERRED_TRIGGERS))

    def session_reports(self, connection: Connection) -> tuple[object, ...]:
        return tuple(map(raw_connection(connection).pgconn.parameter_status, _REPORTED))

    def classify(self, error: BaseException) -> ErrorClass:
        invalidated = getattr(error, "connection_invalidated", False)
        error = driver_error(error)
        if _STATEMENT_POOLING in str(error):
            return ErrorClass.POOLED
        sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg2: on the user's connection
        if sqlstate is None:
            return _without_sqlstate(error, invalidated=invalidated) if isinstance(error, PsycopgError) else ErrorClass.OTHER
        if sqlstate.startswith(_LOST_CONNECTION):
            return ErrorClass.CONNECTION
        if sqlstate.startswith(_INVALID_AUTHORIZATION):
            return ErrorClass.REFUSED
        routine = getattr(getattr(error, "diag", None), "source_function", None)
        return _ERROR_CLASSES.get(sqlstate, _OF_ROUTINES.get((sqlstate, routine or ""), ErrorClass.OTHER))

    def find_blocker(self, engine: Engine, transactional_id: str) -> Blocker | None:
        with OwnConnection(engine) as connection:
            self.begin_short(connection, 1.0)
            pid = connection.scalar(_TABLE_LOCKS, {"name": home_of(engine).name()})
            if pid is None:
                pid = connection.scalar(_ROW_LOCK, {"xmax": connection.scalar(_XMAX, {"id": transactional_id})})
            if pid is None:
                return None
            found = connection.execute(_BACKEND, {"pid": pid}).one_or_none()
        if found is None:
            return None
        return Blocker(
            f"PostgreSQL backend pid {found.pid} (application_name {found.application_name!r}, user {found.usename}, client "
            f"{found.client or 'local'}, state {found.state!r}, last query started {found.query_start}, transaction started "
            f"{found.xact_start})",
            f"end that process, or its connection: SELECT pg_terminate_backend({found.pid}); then try again",
            found.pid,
        )


def _schemas_as_connected(connection: Connection, *, pid_at_login: int) -> Mapping[str, str] | None:
    """The schema of each table whose name begins like ours, on a connection that nobody has used before.

    None if a pooler is in between, which another process id than at login shows: another client's `SET search_path` may still
    be in force on the connection to the server.
    """
    rows: Any = connection.execute(_TABLES).all()
    pid = rows[0].pid if rows else connection.scalar(_PID)
    return _schemas(rows) if pid == pid_at_login else None


def _schemas_in_search_path(connection: Connection) -> Mapping[str, str]:
    """The schema of each table whose name begins like ours, as an unqualified name would be resolved.

    The connection may have been used before, and is in no transaction.

    Raises:
        ConfigurationError: Its search_path means another table than the one that it was made with.
    """
    found = _schemas(connection.execute(_TABLES))
    connection.execute(_AS_CONNECTED)
    as_connected = _schemas(connection.execute(_TABLES))
    connection.rollback()
    now, first = found.get(TABLE_NAME), as_connected.get(TABLE_NAME)
    if None not in (now, first) and now != first:
        raise ConfigurationError(
            f"There is a table {TABLE_NAME} in the schema {first!r} and one in {now!r}, and either may be meant.",
            cause="the connection comes from a pool or a pooler, and its search_path was changed after it was made",
            next_step=f"name the schema that recovery shall read, too: schema={first!r}, or DUALWRITE_SCHEMA",
        )
    return found if first is None else as_connected


def _schemas(rows: Any) -> dict[str, str]:
    return {decoded(row.relname): decoded(row.nspname) for row in rows}


def is_behind_pooler(raw: PsycopgConnection[Any]) -> bool:
    """Whether a pooler such as PgBouncer is in between: then the process id reported at login is not the backend's.

    The connection must have no open transaction. In transaction mode each transaction may run on another connection to the
    server, with other prepared statements: those of another client have the same names.
    """
    with _in_autocommit(raw) as cursor:
        found = cursor.execute("SELECT pg_catalog.pg_backend_pid()", prepare=False).fetchone()
    return found is not None and int(found[0]) != raw.info.backend_pid


def _begun_waiting(connection: Connection, limits: str) -> int:
    """Begin the database's transaction with its limits, in one round trip; return the process id of the server's backend."""
    raw = raw_connection(connection)
    if is_idle(raw):
        try:
            return int(begun_with(raw, limits).get_value(0, 0) or 0)
        except PsycopgError:
            if not raw.broken:
                raise
    # SQLAlchemy replaces the other connections of its pool, too, if this raises since the connection is broken
    return int(connection.exec_driver_sql(limits).scalar_one())


@contextmanager
def _in_autocommit(raw: PsycopgConnection[Any]) -> Iterator[PsycopgCursor[Any]]:
    autocommit = raw.autocommit
    raw.autocommit = True
    try:
        with PsycopgCursor(raw, row_factory=tuple_row) as cursor:
            yield cursor
    finally:
        if not raw.closed:
            raw.autocommit = autocommit


def _set_encoding(raw: PsycopgConnection[Any], _record: object) -> None:
    """A pool's listener. The user's own psycopg connections keep theirs: their view for SQLAlchemy decodes texts."""
    if has_no_encoding(raw) and not isinstance(raw, RecipeConnection):
        with _in_autocommit(raw) as cursor:
            cursor.execute("SET client_encoding TO UTF8", prepare=False)


def _without_sqlstate(error: PsycopgError, *, invalidated: bool) -> ErrorClass:
    """Classify an error that libpq raised itself, or that it passes on as text only from a failed attempt to connect."""
    if not invalidated and any(refusal in str(error) for refusal in _REFUSALS):
        return ErrorClass.REFUSED
    return ErrorClass.CONNECTION if invalidated or isinstance(error, OperationalError | InterfaceError) else ErrorClass.OTHER
