"""PostgreSQL, using psycopg 3."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final, cast
from weakref import WeakKeyDictionary

from psycopg import Connection as PsycopgConnection
from psycopg import Cursor as PsycopgCursor
from psycopg import Error as PsycopgError
from psycopg import InterfaceError, OperationalError
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import URL, ColumnElement, Connection, Engine, Select, bindparam, event, func, literal_column, select, text

from dualwrite.errors import StoreError
from dualwrite.stores.sql.dialect import WORK_TIME, Blocker, ErrorClass, StoreDialect, driver_error
from dualwrite.stores.sql.home import Home, OwnConnection, full_name, home_of, schema_of
from dualwrite.stores.sql.postgresql_catalog import routines, schemas_as_connected, schemas_in_search_path
from dualwrite.stores.sql.postgresql_pipeline import (
    MARKER,
    PostgresqlMergedStatements,
    begun_with,
    has_listeners,
    is_idle,
    raw_connection,
)
from dualwrite.stores.sql.psycopg_sources import RecipeConnection, has_no_encoding
from dualwrite.stores.sql.session_text import Routine
from dualwrite.stores.sql.sql_errors import address
from dualwrite.stores.sql.tables import TABLE_NAME, Words, decoded
from dualwrite.stores.sql.tables import state_table as t

log = logging.getLogger(__name__)

_SERVICES: Final[Mapping[str, str]] = {
    "rds": "Amazon RDS",
    "cloudsql": "Google Cloud SQL",
    "alloydb": "Google AlloyDB",
    "azure": "Azure Database",
    "neon": "Neon",
}
"""By the first part of the names of their own settings."""

_SETTINGS: Final = text(
    "SELECT name, setting FROM pg_catalog.pg_settings WHERE name IN "
    "('fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names', 'transaction_read_only')"
)
_PRODUCT: Final = text(
    "SELECT pg_catalog.version() AS version, "
    "EXISTS (SELECT 1 FROM pg_catalog.pg_proc WHERE proname = 'aurora_version') AS is_aurora, "
    "(SELECT pg_catalog.min(pg_catalog.split_part(name, '.', 1)) FROM pg_catalog.pg_settings "
    "WHERE name LIKE '%.%' AND pg_catalog.split_part(name, '.', 1) IN :services) AS service"
).bindparams(bindparam("services", list(_SERVICES), expanding=True))
_PERSISTENCE: Final = text(
    "SELECT c.relpersistence::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relname = :name AND n.nspname = COALESCE(:schema, pg_catalog.current_schema())"
)
_STANDBYS: Final = text(  # sync_state is hidden from users without pg_read_all_stats
    "SELECT pg_catalog.count(*) AS attached, pg_catalog.count(sync_state) AS visible, "
    "pg_catalog.count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) AS synchronous FROM pg_catalog.pg_stat_replication "
    "WHERE state IS DISTINCT FROM 'backup' "
    "AND pid NOT IN (SELECT active_pid FROM pg_catalog.pg_replication_slots "
    "WHERE slot_type = 'logical' AND active_pid IS NOT NULL)"
)


_LOST_CONNECTION: Final = ("08", "57P0")
_INVALID_AUTHORIZATION: Final = "28"
# With these the server may have ended the session at any moment of COMMIT, or reports that the outcome is unknown (40003).
_UNKNOWN: Final = ("08", "57P0", "40003", "58", "XX")
_ERROR_CLASSES: Final = {
    "55P03": ErrorClass.LOCKED,  # lock_not_available: lock_timeout
    "57014": ErrorClass.LOCKED,  # query_canceled: statement_timeout
    "25P03": ErrorClass.CONNECTION,  # idle_in_transaction_session_timeout
    "25P04": ErrorClass.CONNECTION,  # transaction_timeout
    "40001": ErrorClass.CONFLICT,
    "40P01": ErrorClass.CONFLICT,
    "23505": ErrorClass.DUPLICATE,
    "42P01": ErrorClass.NO_TABLE,
    "3F000": ErrorClass.NO_TABLE,  # no schema in search_path
    "42703": ErrorClass.OLD_TABLE,
    "42501": ErrorClass.DENIED,
    "25006": ErrorClass.READ_ONLY,
    "25P02": ErrorClass.ABORTED,
    "26000": ErrorClass.PREPARED,  # invalid_sql_statement_name
    "42P05": ErrorClass.PREPARED,  # duplicate_prepared_statement
    "53300": ErrorClass.CONNECTION,  # too many connections
}
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
    package: ClassVar[str | None] = "psycopg"
    extra: ClassVar[str | None] = "postgres"
    family: ClassVar[str] = "postgresql"
    read_only_by: ClassVar[str] = (
        "SET TRANSACTION READ ONLY in the block, default_transaction_read_only (of the session, the role or the database), or "
        "the server is a standby"
    )
    time_limit: ClassVar[str] = "statement_timeout"

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
                found = schemas_as_connected(connection, pid_at_login=pid)
            if found is not None:
                return found
        return schemas_in_search_path(connection)

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

    def merged_statements(self, engine: Engine) -> Callable[[Connection], PostgresqlMergedStatements]:
        used_at: WeakKeyDictionary[PsycopgConnection[Any], float] = WeakKeyDictionary()
        return partial(PostgresqlMergedStatements, cast("Home", home_of(engine)), used_at)

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

    next_unit = ("; ".join(StoreDialect.next_unit),)  # in one round trip

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

    def durability(self, connection: Connection) -> Mapping[str, str]:
        """Settings by their names, and what else decides about an acknowledged commit.

        `transaction_read_only` is on in a standby, `persistence` is our table's: `u` for an unlogged one. `product` is there if
        the server is not a plain PostgreSQL; its settings then don't show how it stores a commit. Otherwise there are
        `attached standbys`, and if the user may see it, how many of them are `synchronous standbys`.
        """
        found = {decoded(row.name): decoded(row.setting) for row in connection.execute(_SETTINGS)}
        where = {"name": TABLE_NAME, "schema": schema_of(connection.engine)}
        if persistence := connection.scalar(_PERSISTENCE, where):
            found["persistence"] = decoded(persistence)
        server = connection.execute(_PRODUCT).one()
        version = decoded(server.version)
        if not version.startswith("PostgreSQL ") or "-YB-" in version:
            found["product"] = "YugabyteDB" if "-YB-" in version else " ".join(version.split()[:2])
        elif server.is_aurora or server.service:
            found["product"] = "Amazon Aurora" if server.is_aurora else _SERVICES[decoded(server.service)]
        else:
            standbys = connection.execute(_STANDBYS).one()
            found["attached standbys"] = str(standbys.attached)
            if standbys.visible == standbys.attached:
                found["synchronous standbys"] = str(standbys.synchronous)
        return found

    def routines(self, connection: Connection, names: frozenset[str]) -> list[Routine]:
        return routines(connection, names)

    def session_reports(self, connection: Connection) -> tuple[object, ...]:
        return tuple(map(raw_connection(connection).pgconn.parameter_status, _REPORTED))

    def classify(self, error: BaseException) -> ErrorClass:
        invalidated = getattr(error, "connection_invalidated", False)
        error = driver_error(error)
        if not isinstance(error, PsycopgError):
            return ErrorClass.OTHER
        if _STATEMENT_POOLING in str(error):
            return ErrorClass.REFUSED
        if error.sqlstate is None:
            return _without_sqlstate(error, invalidated=invalidated)
        if error.sqlstate.startswith(_LOST_CONNECTION):
            return ErrorClass.CONNECTION
        if error.sqlstate.startswith(_INVALID_AUTHORIZATION):
            return ErrorClass.REFUSED
        return _ERROR_CLASSES.get(error.sqlstate, ErrorClass.OTHER)

    def find_blocker(self, engine: Engine, transactional_id: str) -> Blocker | None:
        with OwnConnection(engine) as connection:
            self.begin_short(connection, 1.0)
            pid = connection.scalar(_TABLE_LOCKS, {"name": full_name(engine)})
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
