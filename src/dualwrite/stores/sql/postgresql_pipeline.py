"""Our own statements sent with BEGIN and with COMMIT, each pair in one round trip to PostgreSQL.

SQLAlchemy and psycopg send BEGIN, the fence's SELECT, record's UPDATE and COMMIT one by one. Here two are one message of the
simple query protocol, of which the server executes nothing more after an error. So a COMMIT that follows a failed UPDATE is
not executed, and the UPDATE fails if it finds no row: it divides by the number of rows. If the transaction is not the marked
one, it takes the root of a negative number.
"""

from __future__ import annotations

import re
import select
import time
from collections import deque
from collections.abc import Callable, Generator, MutableMapping, Sequence
from types import GeneratorType
from typing import Any, Final, Literal

import psycopg
from psycopg import generators
from psycopg.errors import error_from_result
from psycopg.pq import Escaping, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from sqlalchemy import Connection

from dualwrite.stores.sql.dialect import NEXT_UNIT, Fence, MergedStatements, QueuedStatements, Record, driver_connection
from dualwrite.stores.sql.home import Home
from dualwrite.stores.sql.psycopg_sources import ConnectionView, RecipeConnection
from dualwrite.stores.sql.tables import GATE_TABLE_NAME

MARKER: Final = "dualwrite.transaction"
"""The setting, local to a transaction, that marks it."""

_KNOWN_TO_WORK: Final = 10.0
"""Seconds after a commit in which a connection needs no other proof that it still works."""
_NEXT_UNIT: Final = [statement.encode() for statement in NEXT_UNIT]
_NEEDS_NO_QUOTING: Final = re.compile(r"[\w .,:;#~+{}\[\]\"-]*", re.ASCII).fullmatch
_COPY: Final = re.compile(r"\bcopy\b", re.IGNORECASE).search
"""COPY breaks a pipeline."""
_EXECUTE: Final = "_execute_gen"
"""Psycopg's generator behind `Cursor.execute`."""
_FAILED: Final = ExecStatus.FATAL_ERROR

raw_connection: Final[Callable[[Connection], psycopg.Connection[Any]]] = driver_connection
"""The driver's connection under SQLAlchemy's."""


class PostgresqlQueuedStatements(QueuedStatements):
    """Statements of ours, without parameters, that wait for the next use of a connection, which is in no pipeline.

    Args:
        answered: Called with the responses of all; may raise.
        translated: The error to raise if one of ours fails in a call of the user's, for the driver's error.
    """

    def __init__(
        self,
        raw: psycopg.Connection[Any],
        statements: Sequence[bytes],
        *,
        answered: Callable[[Sequence[PGresult]], None],
        translated: Callable[[BaseException], Exception],
    ) -> None:
        self._raw = raw
        self._statements = list(statements)
        self._answered = answered
        self._translated = translated
        self._is_answered = False
        self.error = None
        self.is_waiting = True
        self._raw.__dict__["wait"] = self._wait  # the views of the connection share it

    def add(self, statement: bytes) -> None:
        """Queue another one behind them."""
        self._statements.append(statement)

    def send(self) -> None:
        if not self.is_waiting:
            if self.error is not None:
                raise self.error
            return
        try:
            with self._raw.lock:
                self._send_alone()
        except BaseException as error:
            self._keep(error)
            raise

    def drop(self) -> None:
        self._raw.__dict__.pop("wait", None)

    # --- the next use of the connection -----------------------------------------------------------------------------------

    def _wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the connection's `wait`, which is called with its lock held."""
        if self.error is not None:
            raise self.error
        cursor, may_follow = _cursor_of(gen)
        connection = self._raw if cursor is None else cursor.connection  # the latter may be another view
        if isinstance(connection, ConnectionView):
            connection.check_use(gen)
        try:
            if may_follow:
                self.drop()
                self.is_waiting = False
                return connection.wait(self._together(gen), *args, **kwargs)
            self._send_alone()
        except BaseException as error:
            if self._is_answered:  # the error is the statement's own
                raise
            kept = self._keep(error)
            if isinstance(error, psycopg.Error):
                raise kept from error
            raise
        return connection.wait(gen, *args, **kwargs)

    def _keep(self, error: BaseException) -> Exception:
        """Unless all of ours have succeeded, every later use of the connection raises their error."""
        if not isinstance(error, Exception):
            self.error = self._translated(psycopg.OperationalError("interrupted before the database had answered"))
        else:
            self.error = self._translated(error) if isinstance(error, psycopg.Error) else error
        self._raw.__dict__["wait"] = self._wait
        return self.error

    def _send_alone(self) -> None:
        self.drop()
        self.is_waiting = False
        self._raw.pgconn.send_query(b"; ".join(self._statements))
        self._check(self._raw.wait(generators.execute(self._raw.pgconn)))

    def _together(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, None]:
        """Send ours and those of psycopg's generator, wait for all responses, and hand over its own."""
        raw, pgconn = self._raw, self._raw.pgconn
        pipeline = _Collecting(raw)
        try:
            pgconn.enter_pipeline_mode()
            for statement in self._statements:
                pgconn.send_query_params(statement, None)
            yield from pipeline.collect(gen)
            for command in pipeline.command_queue:
                command()
            pgconn.pipeline_sync()
            if pgconn.flush():
                yield from generators.send(pgconn)
            ours: list[PGresult] = []
            theirs: list[list[PGresult]] = []
            for _ in self._statements:
                ours += yield from generators.fetch_many(pgconn)
            try:
                for _ in pipeline.result_queue:
                    theirs += [(yield from generators.fetch_many(pgconn))]
                yield from generators.fetch_many(pgconn)  # of the sync
                pgconn.exit_pipeline_mode()
            finally:
                self._check(ours)
            pipeline.hand_over(theirs)
        except BaseException:
            if pgconn.pipeline_status != PipelineStatus.OFF:
                _leave_pipeline(pgconn)
            raise

    def _check(self, results: Sequence[PGresult]) -> None:
        for result in results:
            if result.status == _FAILED:
                raise error_from_result(result, encoding=self._raw.info.encoding)
        self._answered(results)
        self._is_answered = True


class _Collecting(psycopg.Pipeline):
    """A pipeline that sends nothing by itself: it keeps what a cursor puts into it."""

    _refused: Exception | None = None

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self._conn = raw
        self.pgconn = raw.pgconn
        self.command_queue = deque()
        self.result_queue = deque()

    def collect(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, None]:
        """Run psycopg's generator. If it can't make a statement of the user's values, nothing of it is sent."""
        self._conn._pipeline = self  # noqa: SLF001  (psycopg's own method for a caller with the lock is private, too, and newer)
        try:
            yield from gen
        except Exception as error:  # noqa: BLE001  (`hand_over` raises it)
            self._refused = error
            self.command_queue.clear()
            self.result_queue.clear()
        finally:
            self._conn._pipeline = None  # noqa: SLF001  (as above)

    def _communicate_gen(self) -> Any:
        return ()

    def hand_over(self, theirs: Sequence[list[PGresult]]) -> None:
        """Give the responses to those who wait for them.

        Raises:
            psycopg.Error: The statement has failed. So may have its preparation, which psycopg must forget then.
            Exception: It could not be made.
        """
        if self._refused is not None:
            raise self._refused
        try:
            for queued, results in zip(self.result_queue, theirs, strict=True):
                self._process_results(queued, results)
        except psycopg.Error:
            if len(theirs) > 1:
                self._conn._prepared.clear()  # noqa: SLF001  (psycopg does this after a ROLLBACK only)
            raise


def _cursor_of(gen: Any) -> tuple[psycopg.Cursor[Any] | None, bool]:
    """The cursor that a generator of psycopg's belongs to, and whether it executes what can be sent through a pipeline."""
    frame = gen.gi_frame if isinstance(gen, GeneratorType) else None
    if frame is None:
        return None, False
    given = frame.f_locals
    cursor = given.get("self")
    if not isinstance(cursor, psycopg.Cursor):
        return None, False
    if gen.__name__ != _EXECUTE or isinstance(cursor, psycopg.ClientCursor):
        return cursor, False
    query, params = given["query"], given["params"]
    if not isinstance(query, str):
        return cursor, bool(params)
    is_copy = "copy" in query.lower() and _COPY(query)
    return cursor, not is_copy and (bool(params) or ";" not in query)  # without parameters, it may be several statements


def _leave_pipeline(pgconn: PGconn) -> None:
    """After an error or an interrupt: a connection that can't leave it is closed."""
    try:
        pgconn.exit_pipeline_mode()
    except psycopg.Error:
        pgconn.finish()


class PostgresqlMergedStatements(MergedStatements):
    """The statements of one transaction, over psycopg.

    `home` knows the schema of the table, `used_at` when each of the store's connections has last committed.
    """

    def __init__(self, home: Home, used_at: MutableMapping[Any, float], connection: Connection) -> None:
        self._home = home
        self._used_at = used_at
        self._connection = connection
        self._raw = raw = raw_connection(connection)
        self._original = raw.original if isinstance(raw, RecipeConnection) else raw  # it outlives the views of it

    # --- BEGIN with the fence's SELECT ----------------------------------------------------------------------------------------

    def can_begin(self) -> bool:
        return is_idle(self._raw)

    def begin(
        self,
        transactional_id: str,
        token: str,
        *,
        begun: Callable[[Fence | None], None],
        translated: Callable[[BaseException], Exception],
        with_unit: bool = False,
        gate: str | None = None,
    ) -> PostgresqlQueuedStatements:
        text = _Text(self._raw)
        epoch = "NULL" if gate is None else self._epoch(text, gate)
        check = (
            f"SELECT fence, owner, store_id, {epoch}, pg_catalog.set_config('{MARKER}', '{token}', true) "  # noqa: S608
            f"FROM {self._home.name()} WHERE transactional_id = {text.of(transactional_id)}"
        )
        statements = [_begin(self._raw), check.encode(text.encoding), *(_NEXT_UNIT[-1:] if with_unit else ())]

        def answered(results: Sequence[PGresult]) -> None:
            found = results[1]
            if not found.ntuples:
                begun(None)
                return
            fence, owner, store_id, epoch = [found.get_value(0, column) or b"" for column in range(4)]
            gate = int(epoch) if epoch else None
            begun(Fence(int(fence), owner.decode(text.encoding), store_id.decode(text.encoding), gate))

        return PostgresqlQueuedStatements(self._raw, statements, answered=answered, translated=translated)

    def _epoch(self, text: _Text, gate: str) -> str:
        return f"(SELECT epoch FROM {self._home.name(GATE_TABLE_NAME)} WHERE prefix = {text.of(gate)})"  # noqa: S608

    def may_wait(self) -> bool:
        """False behind a pooler, where psycopg prepares no statements: not all of them know pipelines."""
        used_at = self._used_at.get(self._original)
        is_known = used_at is not None and time.monotonic() - used_at < _KNOWN_TO_WORK
        return is_known and self._raw.prepare_threshold is not None and not _has_something_to_read(self._raw)

    def begin_unit(
        self, queued: QueuedStatements | None, translated: Callable[[BaseException], Exception], *, is_first: bool
    ) -> QueuedStatements | None:
        if isinstance(queued, PostgresqlQueuedStatements) and queued.is_waiting:
            if is_first:
                queued.add(_NEXT_UNIT[-1])
            return queued
        if self._raw.pgconn.pipeline_status != PipelineStatus.OFF:  # it waits for no statement anyway
            return None
        statements = _NEXT_UNIT[-1:] if is_first else _NEXT_UNIT
        return PostgresqlQueuedStatements(self._raw, statements, answered=lambda _: None, translated=translated)

    # --- record with COMMIT ---------------------------------------------------------------------------------------------------

    def can_commit(self) -> bool:
        """Also false in a pipeline, and in a transaction that has failed."""
        pgconn = self._raw.pgconn
        is_open = pgconn.transaction_status == TransactionStatus.INTRANS
        return is_open and pgconn.pipeline_status == PipelineStatus.OFF and not has_listeners(self._connection, "commit")

    def commit(self, record: Record) -> None:
        text = _Text(self._raw)
        gate = "" if record.gate is None else f" AND {self._epoch(text, record.gate)} = {record.epoch:d}"
        answers = text.execute(
            f"WITH recorded AS (UPDATE {self._home.name()} SET prepared_transaction_state = {text.of(record.state)}, "  # noqa: S608
            f"prepared_generation = {record.generation:d}, transaction_number = {record.number:d}, "
            f"delivery = {'NULL' if record.delivery is None else text.of(record.delivery)}, updated_at = '{record.now}' "
            f"WHERE transactional_id = {text.of(record.transactional_id)} AND fence = {record.fence:d} "
            f"AND store_id = {text.of(record.store_id)}{gate} RETURNING 1) "
            f"SELECT CASE WHEN pg_catalog.current_setting('{MARKER}', true) = '{record.token}' "
            "THEN 1 / pg_catalog.count(*) ELSE pg_catalog.sqrt(-1 - pg_catalog.count(*)) END FROM recorded; COMMIT"
        )
        if answers[-1].command_status != b"COMMIT":
            raise psycopg.OperationalError(f"COMMIT was answered by {answers[-1].command_status!r}")
        self._used_at[self._original] = time.monotonic()

    def was_not_executed(self) -> bool:
        """True if the server has responded, and the transaction is still there, in a failed state."""
        return self._raw.pgconn.transaction_status == TransactionStatus.INERROR

    def found_no_row(self, error: BaseException) -> bool:
        return isinstance(error, psycopg.errors.DivisionByZero)

    def found_no_mark(self, error: BaseException) -> bool:
        return isinstance(error, psycopg.errors.InvalidArgumentForPowerFunction)


def _has_something_to_read(raw: psycopg.Connection[Any]) -> bool:
    """Whether the server has sent something without being asked, such as that it has ended the session; true if in doubt."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def has_listeners(connection: Connection, name: Literal["begin", "commit"]) -> bool:
    """Whether the user has a listener for this event of SQLAlchemy's connections."""
    has_any = connection._has_events or connection.engine._has_events  # noqa: SLF001  (a collection of none takes 10 us to make)
    return has_any and len(getattr(connection.dispatch, name)) > 0


def is_idle(raw: psycopg.Connection[Any]) -> bool:
    """Whether psycopg would send BEGIN before the next statement."""
    return not raw.autocommit and raw.pgconn.transaction_status == TransactionStatus.IDLE


def begun_with(raw: psycopg.Connection[Any], query: str) -> PGresult:
    """Begin a transaction on an idle connection, together with a query in SQL text; return the result of the query."""
    return _Text(raw).execute(f"{_begin(raw).decode()}; {query}")[1]


def _begin(raw: psycopg.Connection[Any]) -> bytes:
    """BEGIN as psycopg sends it, with the characteristics that are set on the connection."""
    parts = ["BEGIN"]
    if raw.isolation_level is not None:
        parts.append(f"ISOLATION LEVEL {raw.isolation_level.name.replace('_', ' ')}")
    if raw.read_only is not None:
        parts.append("READ ONLY" if raw.read_only else "READ WRITE")
    if raw.deferrable is not None:
        parts.append("DEFERRABLE" if raw.deferrable else "NOT DEFERRABLE")
    return " ".join(parts).encode()


class _Text:
    """Statements with their values as literals, on one connection."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self._raw = raw
        encoding = raw.info.encoding
        self.encoding = "utf-8" if encoding == "ascii" else encoding  # SQL_ASCII: the server does not look at the bytes

    def of(self, value: str) -> str:
        """The literal of a text; libpq quotes what has to be."""
        if _NEEDS_NO_QUOTING(value):
            return f"'{value}'"
        try:
            return bytes(Escaping(self._raw.pgconn).escape_literal(value.encode(self.encoding))).decode(self.encoding)
        except UnicodeEncodeError:  # the block has set another client_encoding
            return f"pg_catalog.convert_from(pg_catalog.decode('{value.encode().hex()}', 'hex'), 'UTF8')"

    def execute(self, statements: str) -> Sequence[PGresult]:
        """Execute statements in one round trip, and return the results of all; after an error the rest is not executed."""
        raw = self._raw
        with raw.lock:
            raw.pgconn.send_query(statements.encode(self.encoding))
            answers: Sequence[PGresult] = raw.wait(generators.execute(raw.pgconn))
        if answers[-1].error_message:
            raise error_from_result(answers[-1], encoding=self.encoding)
        return answers
