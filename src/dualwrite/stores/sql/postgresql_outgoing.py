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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators
from psycopg.errors import error_from_result
from psycopg.pq import Escaping, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import tuple_row
from sqlalchemy import Connection

from dualwrite.stores.sql.dialect import (
    NEXT_UNIT,
    EntriesRecord,
    ErrorClass,
    Fence,
    Mark,
    NotRecorded,
    Outgoing,
    StateRecord,
    driver_connection,
)
from dualwrite.stores.sql.engines import replace_others
from dualwrite.stores.sql.home import Home
from dualwrite.stores.sql.local_settings import InForce, change
from dualwrite.stores.sql.psycopg_sources import ConnectionView, RecipeConnection
from dualwrite.stores.sql.tables import GATE_TABLE_NAME, JOURNAL_TABLE_NAME

if TYPE_CHECKING:
    from dualwrite.stores.sql.sql_context import StoreContext

MARKER: Final = "dualwrite.transaction"
"""The setting, local to a transaction, that marks it."""

_KNOWN_TO_WORK: Final = 10.0
"""Seconds after a commit in which a connection needs no other proof that it still works."""
_JUST_USED: Final = 0.05
"""Seconds after a commit in which it needs no proof at all."""
_NEXT_UNIT: Final = [statement.encode() for statement in NEXT_UNIT]
_NEEDS_NO_QUOTING: Final = re.compile(r"[\w .,:;#~+{}\[\]\"-]*", re.ASCII).fullmatch
_COPY: Final = re.compile(r"\bcopy\b", re.IGNORECASE).search
"""COPY breaks a pipeline."""
_EXECUTE: Final = "_execute_gen"
"""Psycopg's generator behind `Cursor.execute`."""
_MOST_TEXTS: Final = 500
"""Texts of INSERT that are kept."""
_CONTENT: Final = ("topic", "message_key", "message_value", "headers", "partition_number", "sent_at_ms", "size")
"""Columns of an entry in the journal."""
_MISSING: Final = {"prefix": NotRecorded.NO_ROW, "has_own_time": NotRecorded.NO_MARK}
"""Why one of its columns has no value."""
_FAILED: Final = ExecStatus.FATAL_ERROR

_used_at: Final[WeakKeyDictionary[psycopg.Connection[Any], float]] = WeakKeyDictionary()
"""When each of the stores' connections has last committed."""

raw_connection: Final[Callable[[Connection], psycopg.Connection[Any]]] = driver_connection
"""The driver's connection under SQLAlchemy's."""


class _Taken(NamedTuple):
    """What is sent before a statement of the user's: statements of ours, and what changes settings."""

    statements: Sequence[bytes]
    settings: Sequence[bytes]

    @property
    def all(self) -> tuple[bytes, ...]:
        return (*self.statements, *self.settings)


class PostgresqlOutgoing(Outgoing):
    """Ours on one connection, which is in no pipeline while some wait. Those that wait have no parameters."""

    def __init__(
        self,
        context: StoreContext,
        connection: Connection,
        begun: Callable[[Fence | None], None],
        failed: Callable[[BaseException], Exception],
    ) -> None:
        super().__init__(context, connection, begun, failed)
        self._raw = raw = raw_connection(connection)
        self._original = raw.original if isinstance(raw, RecipeConnection) else raw  # it outlives the views of it
        self._waiting: list[bytes] = []
        self._encoding = ""  # of those that wait
        self._has_begun = False
        self._is_answered = False  # those that have waited last
        self._in_force: InForce = {}
        self._in_force_before_unit: InForce = {}
        self._change: tuple[bytes, InForce] | None = None  # of settings; waits for the user's statement, too

    # --- BEGIN with the fence's SELECT, and a unit's savepoint, with the next statement -----------------------------------

    def begin(self, mark: Mark, *, may_wait: bool) -> None:
        if not is_idle(self._raw):  # a listener for `begin` has executed something
            self._has_begun = True
            super().begin(mark, may_wait=may_wait)
            return
        text = _Text(self._raw)
        self._encoding = text.encoding
        self._wait_with([_begin(self._raw), self._check_of(text, mark).encode(text.encoding)])
        if may_wait and self._may_wait():
            return
        try:
            with self._raw.lock:
                self._send_alone(self._taken())
        except psycopg.Error as error:
            if self._context.dialect.classify(error) is ErrorClass.CONNECTION:
                replace_others(self._connection, error)
                self._connection.invalidate(error)  # as SQLAlchemy does, so that the source of the connection gets the reason
            raise

    def lock(self, mark: Mark) -> None:
        text = _Text(self._raw)
        query = f"{self._check_of(text, mark)} FOR UPDATE"
        found = begun_with(self._raw, query) if is_idle(self._raw) else text.execute(query)[0]
        self._begun(_fence_in(found, text.encoding))

    def _check_of(self, text: _Text, mark: Mark) -> str:
        """Marks the transaction, and reads the newest claim; without an id, what PostgreSQL calls the transaction."""
        marked = f"pg_catalog.set_config('{MARKER}', '{mark.token}', true)"
        if not mark.id:
            return f"SELECT pg_catalog.txid_current(), '', '', 0, NULL, {marked}"
        epoch = "NULL" if mark.gate is None else self._epoch(text, mark.gate)
        return (
            f"SELECT fence, owner, store_id, transaction_number, {epoch}, "  # noqa: S608  (quoted by `_Text`)
            f"{marked} FROM {self._context.home.name()} WHERE transactional_id = {text.of(mark.id)}"
        )

    def _epoch(self, text: _Text, gate: str) -> str:
        return f"(SELECT epoch FROM {self._context.home.name(GATE_TABLE_NAME)} WHERE prefix = {text.of(gate)})"  # noqa: S608

    def _may_wait(self) -> bool:
        """Whether the connection was just shown to work; not behind a pooler, where psycopg prepares no statements.

        Not all poolers know pipelines.
        """
        used_at = _used_at.get(self._original)
        rested = _KNOWN_TO_WORK if used_at is None else time.monotonic() - used_at
        if rested >= _KNOWN_TO_WORK or self._raw.prepare_threshold is None:
            return False
        return rested < _JUST_USED or not _has_something_to_read(self._raw)

    def begin_unit(self, *, is_first: bool) -> bool:
        self._in_force_before_unit = self._in_force
        if self._waiting:  # no unit has executed anything since
            self._waiting += _NEXT_UNIT[-1:] if is_first else ()
            return True
        if self._raw.pgconn.pipeline_status != PipelineStatus.OFF:  # it waits for no statement anyway
            return False
        self._wait_with(_NEXT_UNIT[-1:] if is_first else _NEXT_UNIT)
        return True

    def _wait_with(self, statements: Sequence[bytes]) -> None:
        self._waiting = list(statements)
        self._hook()

    def _hook(self) -> None:
        """Take the place of the connection's `wait` while something waits; the views of the connection share it."""
        if self._waiting or self._change is not None or self.error is not None:
            self._raw.__dict__["wait"] = self._wait
        else:
            self._raw.__dict__.pop("wait", None)

    def set_local(self, settings: Mapping[str, str]) -> None:
        if not settings and not self._in_force and self._change is None:
            return
        found = change(self._in_force, settings)
        if found is None or self._raw.pgconn.pipeline_status == PipelineStatus.OFF:
            self._change = None if found is None else (_Text(self._raw).with_values(found.statement, found.values), found.then)
            self._hook()
            return
        self._in_force = found.then
        psycopg.Cursor(self._raw, row_factory=tuple_row).execute(found.statement, found.values)

    def unit_undone(self) -> None:
        self._change, self._in_force = None, self._in_force_before_unit
        self._hook()

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]  # a plain attribute where nothing waits
        return bool(self._waiting)

    def send(self) -> None:
        if self.error is not None:
            raise self.error
        if not self._waiting:
            return
        with self.without_settings():
            try:
                with self._raw.lock:
                    self._send_alone(self._taken())
            except BaseException as error:
                self._keep(error)
                raise

    @contextmanager
    def without_settings(self) -> Iterator[None]:
        kept, self._change = self._change, None
        self._hook()
        try:
            yield
        finally:
            self._change = kept
            self._hook()

    def send_last(self) -> None:
        if self._has_begun and self.error is None:
            self.drop()
        else:
            self._change = None
            self.send()

    def drop(self) -> None:
        self._waiting, self._change = [], None
        self._raw.__dict__.pop("wait", None)

    def _taken(self) -> _Taken:
        """What has waited; from here on nothing does."""
        statements, settings = self._waiting, list[bytes]()
        if self._change is not None:
            text, self._in_force = self._change
            settings.append(text)
        self._is_answered = not statements and not settings
        self.drop()
        return _Taken(statements, settings)

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
                taken = self._taken()  # first: it gives the connection its own `wait` back
                return connection.wait(self._together(taken, gen), *args, **kwargs)
            self._send_alone(self._taken())
        except BaseException as error:
            if not self._is_answered:  # otherwise the error is the statement's own
                self._keep(error)
            raise
        return connection.wait(gen, *args, **kwargs)

    def _keep(self, error: BaseException) -> None:
        """Unless all of ours have succeeded, every later use of the connection raises their error: ours for the driver's."""
        if not isinstance(error, Exception):
            self.error = self._failed(psycopg.OperationalError("interrupted before the database had answered"))
        else:
            self.error = self._failed(error) if isinstance(error, psycopg.Error) else error
        self._raw.__dict__["wait"] = self._wait
        if isinstance(error, psycopg.Error):
            raise self.error from error

    def _send_alone(self, taken: _Taken) -> None:
        self._raw.pgconn.send_query(b"; ".join(taken.all))
        results = self._raw.wait(generators.execute(self._raw.pgconn))
        count = len(taken.statements)
        self._check(results[:count])
        self._raise_failed(results[count:])

    def _together(self, taken: _Taken, gen: Generator[Any, Any, Any], then: Sequence[bytes] = ()) -> Generator[Any, Any, None]:
        """Send ours and those of psycopg's generator, wait for all responses, and hand over its own.

        `then`: more of ours, which are not executed if one before them fails.
        """
        raw, pgconn = self._raw, self._raw.pgconn
        pipeline = _Collecting(raw)
        try:
            pgconn.enter_pipeline_mode()
            for statement in taken.all:
                pgconn.send_query_params(statement, None)
            yield from pipeline.collect(gen)
            for command in pipeline.command_queue:
                command()
            then = () if pipeline.refused else then
            for statement in then:
                pgconn.send_query_params(statement, None)
            pgconn.pipeline_sync()
            if pgconn.flush():
                yield from generators.send(pgconn)
            ours = yield from _answers(pgconn, len(taken.statements))
            settings = yield from _answers(pgconn, len(taken.settings))
            try:
                theirs = yield from _answers(pgconn, len(pipeline.result_queue))
                last = yield from _answers(pgconn, len(then))
                yield from generators.fetch_many(pgconn)  # of the sync
                pgconn.exit_pipeline_mode()
            finally:
                self._check([result for results in ours for result in results])
            pipeline.hand_over(theirs, [result for results in settings for result in results])
            self._check_commit([result for results in last for result in results])
        except BaseException:
            if pgconn.pipeline_status != PipelineStatus.OFF:
                _leave_pipeline(pgconn)
            raise

    def _check_commit(self, results: Sequence[PGresult]) -> None:
        for result in results:
            if result.status == _FAILED:
                raise error_from_result(result, encoding=self._raw.info.encoding)
            if result.command_status != b"COMMIT":
                raise psycopg.OperationalError(f"COMMIT was answered by {result.command_status!r}")

    def _raise_failed(self, results: Sequence[PGresult]) -> None:
        for result in results:
            if result.status == _FAILED:
                raise error_from_result(result, encoding=self._raw.info.encoding)

    def _check(self, results: Sequence[PGresult]) -> None:
        self._raise_failed(results)
        if not self._has_begun:
            self._has_begun = True
            self._begun(_fence_in(results[1], self._encoding))
        self._is_answered = True

    # --- record with COMMIT ---------------------------------------------------------------------------------------------------

    def record_at_commit(self, record: StateRecord | EntriesRecord) -> bool:
        """False in a pipeline, in a transaction that has failed, or if a listener for `commit` would run too late."""
        pgconn = self._raw.pgconn
        is_open = pgconn.transaction_status == TransactionStatus.INTRANS
        if not is_open or pgconn.pipeline_status != PipelineStatus.OFF or has_listeners(self._connection, "commit"):
            return False
        self.record = record
        return True

    def commit(self) -> None:
        """The COMMIT that SQLAlchemy sends afterwards has no effect any more."""
        record = self.record
        if record is None:
            return
        if isinstance(record, EntriesRecord):
            self._commit_entries(record)
        else:
            self._commit_state(record)
        _used_at[self._original] = time.monotonic()

    def _commit_state(self, record: StateRecord) -> None:
        text = _Text(self._raw)
        gate = "" if record.gate is None else f" AND {self._epoch(text, record.gate)} = {record.seen_epoch:d}"
        answers = text.execute(
            f"WITH recorded AS (UPDATE {self._context.home.name()} SET prepared_transaction_state = {text.of(record.state)}, "  # noqa: S608
            f"prepared_generation = {record.of_generation:d}, transaction_number = {record.number:d}, "
            f"delivery = {text.of_optional(record.delivered)}, updated_at = '{record.now}' "
            f"WHERE transactional_id = {text.of(record.id)} AND fence = {record.held_fence:d} "
            f"AND store_id = {text.of(record.held_store)}{gate} RETURNING 1) "
            f"SELECT CASE WHEN pg_catalog.current_setting('{MARKER}', true) = '{record.token}' "
            "THEN 1 / pg_catalog.count(*) ELSE pg_catalog.sqrt(-1 - pg_catalog.count(*)) END FROM recorded; COMMIT"
        )
        if answers[-1].command_status != b"COMMIT":
            raise psycopg.OperationalError(f"COMMIT was answered by {answers[-1].command_status!r}")

    def _commit_entries(self, record: EntriesRecord) -> None:
        """By a statement that psycopg prepares: as text, its plan would take longer than all the rest of the transaction."""
        values = [each for one in record.entries for each in (one.has_own_time, record.gate, *one[:-1], one.size)]
        query = _insert_of(self._context.home, len(record.entries))
        cursor = psycopg.Cursor(self._raw, row_factory=tuple_row)
        gen = cursor._execute_gen(query, [record.token, *values])  # noqa: SLF001  (its own method waits for the answer)
        with self._raw.lock:
            self._raw.wait(self._together(_Taken((), ()), gen, (b"COMMIT",)))

    def why_not_recorded(self, error: BaseException) -> NotRecorded | None:
        """There is a reason if the server has responded, and the transaction is still there, in a failed state."""
        if self.record is None or self._raw.pgconn.transaction_status != TransactionStatus.INERROR:
            return None
        if isinstance(error, psycopg.errors.NotNullViolation):
            return _MISSING.get(error.diag.column_name or "", NotRecorded.ERROR)
        if isinstance(error, psycopg.errors.InvalidArgumentForPowerFunction):
            return NotRecorded.NO_MARK
        return NotRecorded.NO_ROW if isinstance(error, psycopg.errors.DivisionByZero) else NotRecorded.ERROR


@lru_cache(maxsize=_MOST_TEXTS)
def _insert_of(home: Home, count: int) -> str:
    """An INSERT of so many entries, in their order; it fails if the gate is not open, or the transaction not the marked one."""
    values = ", ".join(["%s"] * len(_CONTENT))
    gate = f"(SELECT prefix FROM {home.name(GATE_TABLE_NAME)} WHERE prefix = %s AND epoch %% 2 = 1 FOR SHARE)"  # noqa: S608  (its own name)
    mark = f"CASE WHEN pg_catalog.current_setting('{MARKER}', true) = %s THEN CAST(%s AS boolean) END"
    return "".join(
        (
            f"INSERT INTO {home.name(JOURNAL_TABLE_NAME)} (has_own_time, prefix, {', '.join(_CONTENT)}) VALUES ",  # noqa: S608  (as above)
            f"({mark}, {gate}, {values})",
            f", (%s, %s, {values})" * (count - 1),
        )
    )


def _fence_in(found: PGresult, encoding: str) -> Fence | None:
    if not found.ntuples:
        return None
    fence, owner, store_id, number, epoch = [found.get_value(0, column) or b"" for column in range(5)]
    return Fence(int(fence), owner.decode(encoding), store_id.decode(encoding), int(number), int(epoch) if epoch else None)


class _Collecting(psycopg.Pipeline):
    """A pipeline that sends nothing by itself: it keeps what a cursor puts into it."""

    refused: Exception | None = None
    """Why the cursor could not make a statement of its values."""

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
            self.refused = error
            self.command_queue.clear()
            self.result_queue.clear()
        finally:
            self._conn._pipeline = None  # noqa: SLF001  (as above)

    def _communicate_gen(self) -> Any:
        return ()

    def hand_over(self, theirs: Sequence[list[PGresult]], settings: Sequence[PGresult]) -> None:
        """Give the responses to those who wait for them.

        Raises:
            psycopg.Error: The statement has failed, or the settings before it have. So may have its preparation, which psycopg
                must forget then.
            Exception: It could not be made.
        """
        if self.refused is not None:
            raise self.refused
        try:
            for result in settings:
                if result.status == _FAILED:
                    raise error_from_result(result, encoding=self._conn.info.encoding)
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


def _answers(pgconn: PGconn, count: int) -> Generator[Any, Any, list[list[PGresult]]]:
    """The results of so many statements of a pipeline."""
    found: list[list[PGresult]] = []
    while len(found) < count:
        found += [(yield from generators.fetch_many(pgconn))]
    return found


def _leave_pipeline(pgconn: PGconn) -> None:
    """After an error or an interrupt: a connection that can't leave it is closed."""
    try:
        pgconn.exit_pipeline_mode()
    except psycopg.Error:
        pgconn.finish()


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

    def with_values(self, statement: str, values: Sequence[str]) -> bytes:
        """A statement, with values in place of its `%s`."""
        return (statement % tuple(map(self.of, values))).encode(self.encoding)

    def of_optional(self, value: str | None) -> str:
        """The same, or NULL."""
        return "NULL" if value is None else self.of(value)

    def execute(self, statements: str) -> Sequence[PGresult]:
        """Execute statements in one round trip, and return the results of all; after an error the rest is not executed."""
        raw = self._raw
        with raw.lock:
            raw.pgconn.send_query(statements.encode(self.encoding))
            answers: Sequence[PGresult] = raw.wait(generators.execute(raw.pgconn))
        if answers[-1].error_message:
            raise error_from_result(answers[-1], encoding=self.encoding)
        return answers
