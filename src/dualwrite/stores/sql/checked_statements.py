"""Checks each statement of the user's right before it is sent: one that would end the transaction is refused, all are watched.

SQLAlchemy's events of the dialect come last: after the user's own listeners, which may have changed the text, and before each
execution with the cursor, whatever the statement was. They also come for connections that are not ours, which costs those a
microsecond a statement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Engine, event

from dualwrite.stores.sql.control_text import control_statement, implicit_commit
from dualwrite.stores.sql.guard import Guard, GuardedConnection

_COMMITS_BY_ITSELF: Final = ("mysql", "mariadb")  # SQLAlchemy's names


def check_statements(engine: Engine) -> None:
    """Check the statements of this engine's guarded connections; a second call for its dialect adds nothing."""
    for name, check in _CHECKS.items():
        if not event.contains(engine.dialect, name, check):
            event.listen(engine.dialect, name, check)


def _check(cursor: Any, statement: str, parameters: Any, context: Any) -> None:
    connection = context.root_connection
    if not isinstance(connection, GuardedConnection) or connection.guard.lifted:
        return
    guard = connection.guard
    watch = guard.watch
    if watch is not None:
        if guard.executing is not context and _has_run(cursor):  # the rows of one INSERT may take several executions
            watch.see_past("a listener that executes something with the cursor")
        guard.executing = context
        if watch.is_harmless(statement):
            return
    _refuse_control(guard, statement, connection.dialect.name)
    if watch is not None:
        watch.see(statement, parameters)


def _check_without_parameters(cursor: Any, statement: str, context: Any) -> None:
    _check(cursor, statement, (), context)


_CHECKS: Final[dict[str, Callable[..., None]]] = {
    "do_execute": _check,
    "do_executemany": _check,
    "do_execute_no_params": _check_without_parameters,
}


def _has_run(cursor: Any) -> bool:
    """Whether something was executed with a cursor, of any driver."""
    return cursor.rowcount != -1 or getattr(cursor, "statusmessage", None) is not None


def _refuse_control(guard: Guard, statement: str, dialect: str) -> None:
    control = control_statement(statement)
    if control is not None:
        guard.refuse(control)
    if dialect in _COMMITS_BY_ITSELF:
        implicit = implicit_commit(statement)
        if implicit is not None:
            guard.refuse_implicit_commit(implicit)
