"""Statements of ours whose response nobody has to wait for: they are sent with the next statement, in one round trip.

Whatever uses a psycopg connection calls its method `wait`: cursors, COPY, pipelines, `commit`, SQLAlchemy as well as users. So
while statements are queued, that method is replaced on this one connection. If the next use is a statement that can be sent
through libpq's pipeline, it follows ours there. Otherwise ours are executed first.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import GeneratorType
from typing import Any, Final

import psycopg
from psycopg import generators
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus
from psycopg.pq.abc import PGconn, PGresult

from dualwrite.stores.sql.dialect import QueuedStatements
from dualwrite.stores.sql.psycopg_view import ConnectionView

_COPY: Final = re.compile(r"\bcopy\b", re.IGNORECASE).search
"""COPY breaks a pipeline."""
_EXECUTE: Final = "_execute_gen"
"""Psycopg's generator behind `Cursor.execute`."""
_FAILED: Final = ExecStatus.FATAL_ERROR


class PostgresqlQueuedStatements(QueuedStatements):
    """Statements of ours that wait for the next use of a connection.

    Args:
        raw: The connection, in no pipeline.
        statements: Each a single statement, without parameters.
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
        self._intercept()

    def add(self, statement: bytes) -> None:
        """Queue another one behind them."""
        self._statements.append(statement)

    def send(self) -> None:
        """See QueuedStatements."""
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
        """See QueuedStatements."""
        self._raw.__dict__.pop("wait", None)

    # --- the next use of the connection -----------------------------------------------------------------------------------

    def _intercept(self) -> None:
        self._raw.__dict__["wait"] = self._wait  # the views of the connection share it

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
        self._intercept()
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
