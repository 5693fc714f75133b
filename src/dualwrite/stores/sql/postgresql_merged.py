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
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from psycopg import generators
from psycopg.errors import error_from_result
from psycopg.pq import Escaping, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from sqlalchemy import Connection, Engine

from dualwrite.stores.sql.dialect import NEXT_UNIT, UNIT, Fence, MergedStatements, QueuedStatements, Record, driver_connection
from dualwrite.stores.sql.home import full_name
from dualwrite.stores.sql.postgresql_queue import PostgresqlQueuedStatements
from dualwrite.stores.sql.psycopg_view import RecipeConnection

MARKER: Final = "dualwrite.transaction"
"""The setting, local to a transaction, that marks it."""


_KNOWN_TO_WORK: Final = 10.0
"""Seconds after a commit in which a connection needs no other proof that it still works."""

_NEXT_UNIT: Final = [statement.encode() for statement in NEXT_UNIT]
_NEEDS_NO_QUOTING: Final = re.compile(r"[\w .,:;#~+{}\[\]\"-]*", re.ASCII).fullmatch


class PostgresqlMergedStatements(MergedStatements):
    """The statements of one store, over psycopg.

    Args:
        engine: The store's engine, which knows the schema of the table.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._used_at: WeakKeyDictionary[psycopg.Connection[Any], float] = WeakKeyDictionary()  # when one has last committed

    # --- BEGIN with the fence's SELECT ----------------------------------------------------------------------------------------

    def can_begin(self, connection: Connection) -> bool:
        """See MergedStatements."""
        raw = raw_connection(connection)
        return not raw.autocommit and raw.pgconn.transaction_status == TransactionStatus.IDLE

    def begin(
        self,
        connection: Connection,
        transactional_id: str,
        token: str,
        *,
        begun: Callable[[Fence | None], None],
        translated: Callable[[BaseException], Exception],
        with_unit: bool = False,
    ) -> PostgresqlQueuedStatements:
        """See MergedStatements."""
        raw = raw_connection(connection)
        text = _Text(raw)
        check = (
            f"SELECT fence, owner, store_id, pg_catalog.set_config('{MARKER}', {text.of(token)}, true) "  # noqa: S608
            f"FROM {full_name(self._engine)} WHERE transactional_id = {text.of(transactional_id)}"
        )
        statements = [_begin(raw), check, *([f"SAVEPOINT {UNIT}"] if with_unit else [])]

        def answered(results: Sequence[PGresult]) -> None:
            found = results[1]
            if not found.ntuples:
                begun(None)
                return
            fence, owner, store_id = (text.decoded(found.get_value(0, column) or b"") for column in range(3))
            begun(Fence(int(fence), owner, store_id))

        encoded = [text.encoded(statement) for statement in statements]
        return PostgresqlQueuedStatements(raw, encoded, answered=answered, translated=translated)

    def may_wait(self, connection: Connection) -> bool:
        """See MergedStatements; false behind a pooler, where psycopg prepares no statements: not all of them know pipelines."""
        raw = raw_connection(connection)
        used_at = self._used_at.get(_original(raw))
        is_known = used_at is not None and time.monotonic() - used_at < _KNOWN_TO_WORK
        return is_known and raw.prepare_threshold is not None and not _has_something_to_read(raw)

    def begin_unit(
        self,
        connection: Connection,
        queued: QueuedStatements | None,
        translated: Callable[[BaseException], Exception],
        *,
        is_first: bool,
    ) -> QueuedStatements | None:
        """See MergedStatements."""
        if isinstance(queued, PostgresqlQueuedStatements) and queued.is_waiting:
            if is_first:
                queued.add(_NEXT_UNIT[-1])
            return queued
        raw = raw_connection(connection)
        if raw.pgconn.pipeline_status != PipelineStatus.OFF:  # it waits for no statement anyway
            return None
        statements = _NEXT_UNIT[-1:] if is_first else _NEXT_UNIT
        return PostgresqlQueuedStatements(raw, statements, answered=lambda _: None, translated=translated)

    # --- record with COMMIT ---------------------------------------------------------------------------------------------------

    def can_commit(self, connection: Connection) -> bool:
        """See MergedStatements; also false in a pipeline, and in a transaction that has failed."""
        pgconn = raw_connection(connection).pgconn
        is_open = pgconn.transaction_status == TransactionStatus.INTRANS
        return is_open and pgconn.pipeline_status == PipelineStatus.OFF and not _has_commit_listeners(connection)

    def commit(self, connection: Connection, record: Record) -> None:
        """See MergedStatements."""
        text = _Text(raw_connection(connection))
        answers = text.execute(
            f"WITH recorded AS (UPDATE {full_name(self._engine)} SET prepared_transaction_state = {text.of(record.state)}, "  # noqa: S608
            f"prepared_generation = {record.generation:d}, transaction_number = {record.number:d}, "
            f"delivery = {'NULL' if record.delivery is None else text.of(record.delivery)}, updated_at = '{record.now}' "
            f"WHERE transactional_id = {text.of(record.transactional_id)} AND fence = {record.fence:d} "
            f"AND store_id = {text.of(record.store_id)} RETURNING 1) "
            f"SELECT CASE WHEN pg_catalog.current_setting('{MARKER}', true) = {text.of(record.token)} "
            "THEN 1 / pg_catalog.count(*) ELSE pg_catalog.sqrt(-1 - pg_catalog.count(*)) END FROM recorded; COMMIT"
        )
        if answers[-1].command_status != b"COMMIT":
            raise psycopg.OperationalError(f"COMMIT was answered by {answers[-1].command_status!r}")
        self._used_at[_original(text.raw)] = time.monotonic()

    def was_not_executed(self, connection: Connection) -> bool:
        """See MergedStatements; true if the server has responded, and the transaction is still there, in a failed state."""
        return raw_connection(connection).pgconn.transaction_status == TransactionStatus.INERROR

    def found_no_row(self, error: BaseException) -> bool:
        """See MergedStatements."""
        return isinstance(error, psycopg.errors.DivisionByZero)

    def found_no_mark(self, error: BaseException) -> bool:
        """See MergedStatements."""
        return isinstance(error, psycopg.errors.InvalidArgumentForPowerFunction)


def raw_connection(connection: Connection) -> psycopg.Connection[Any]:
    """The driver's connection under SQLAlchemy's."""
    raw = driver_connection(connection)
    assert isinstance(raw, psycopg.Connection)
    return raw


def _original(raw: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """The connection itself, which outlives the views of it."""
    return raw.original if isinstance(raw, RecipeConnection) else raw


def _has_something_to_read(raw: psycopg.Connection[Any]) -> bool:
    """Whether the server has sent something without being asked, such as that it has ended the session; true if in doubt."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(raw.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _has_commit_listeners(connection: Connection) -> bool:
    has_any = connection._has_events or connection.engine._has_events  # noqa: SLF001  (a collection of none takes 10 us to make)
    return has_any and len(connection.dispatch.commit) > 0


def _begin(raw: psycopg.Connection[Any]) -> str:
    """BEGIN as psycopg sends it, with the characteristics that are set on the connection."""
    parts = ["BEGIN"]
    if raw.isolation_level is not None:
        parts.append(f"ISOLATION LEVEL {raw.isolation_level.name.replace('_', ' ')}")
    if raw.read_only is not None:
        parts.append("READ ONLY" if raw.read_only else "READ WRITE")
    if raw.deferrable is not None:
        parts.append("DEFERRABLE" if raw.deferrable else "NOT DEFERRABLE")
    return " ".join(parts)


class _Text:
    """Statements with their values as literals, on one connection."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw
        encoding = raw.info.encoding
        self._encoding = "utf-8" if encoding == "ascii" else encoding  # SQL_ASCII: the server does not look at the bytes

    def of(self, value: str) -> str:
        """The literal of a text; libpq quotes what has to be."""
        if _NEEDS_NO_QUOTING(value):
            return f"'{value}'"
        try:
            return bytes(Escaping(self.raw.pgconn).escape_literal(value.encode(self._encoding))).decode(self._encoding)
        except UnicodeEncodeError:  # the block has set another client_encoding
            return f"pg_catalog.convert_from(pg_catalog.decode('{value.encode().hex()}', 'hex'), 'UTF8')"

    def decoded(self, answer: bytes) -> str:
        """The text in a result."""
        return answer.decode(self._encoding)

    def encoded(self, statement: str) -> bytes:
        """The statement as it is sent."""
        return statement.encode(self._encoding)

    def execute(self, statements: str) -> Sequence[PGresult]:
        """Execute statements in one round trip, and return the results of all.

        Raises:
            psycopg.Error: One failed; those after it were not executed.
        """
        raw = self.raw
        with raw.lock:
            raw.pgconn.send_query(self.encoded(statements))
            answers: Sequence[PGresult] = raw.wait(generators.execute(raw.pgconn))
        if answers[-1].error_message:
            raise error_from_result(answers[-1], encoding=self._encoding)
        return answers
