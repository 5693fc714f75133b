"""`atomic()`: a block of Django's that commits messages with its rows.

Django has no hook before COMMIT. None is needed: at the end of our block, which is the outermost one, both sides are committed
as one on Django's own connection. When Django then sends its COMMIT, there is no transaction any more; it only goes on with the
callbacks of `on_commit`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from types import TracebackType
from typing import Any, Final, TypeVar, overload
from weakref import WeakKeyDictionary

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from dualwrite.deadline import check_may_block
from dualwrite.django.asynchronous import NEXT_STEP
from dualwrite.django.pools import pool
from dualwrite.django.savepoints import Connection
from dualwrite.django.units import FakeUnit, RealUnit, Unit, is_of_test, unit_of, unit_of_any_block
from dualwrite.errors import UsageError
from dualwrite.transaction import Transaction

F = TypeVar("F", bound=Callable[..., Any])

_COMMITTED: Final = "dualwrite: the block had committed on both sides before this error was raised; don't repeat it"

_entered: Final[WeakKeyDictionary[Connection, list[AbstractContextManager[Transaction[Any]]]]] = WeakKeyDictionary()


class Atomic(ContextDecorator):
    """See `atomic`. Like Django's, one object can be used many times, also inside itself and in several threads.

    Args:
        using: The alias.
        savepoint: See `atomic`.
    """

    def __init__(self, using: str | None, *, savepoint: bool) -> None:
        self._using = DEFAULT_DB_ALIAS if using is None else using
        self._savepoint = savepoint

    def __call__(self, func: F) -> F:
        """Run each call of a function in a block.

        Raises:
            UsageError: It is a coroutine function.
        """
        if inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            raise UsageError(
                f"dualwrite.django.atomic can't decorate the coroutine function {func.__qualname__}.", next_step=NEXT_STEP
            )
        decorated: F = super().__call__(func)
        return decorated

    def __enter__(self) -> Transaction[Any]:
        check_may_block("dualwrite.django.atomic()", "", next_step=NEXT_STEP)
        connection = connections[self._using]
        unit = unit_of(connection) or unit_of_any_block(connection)
        block = _outermost(connection) if unit is None else _joined(unit, savepoint=self._savepoint)
        tx = block.__enter__()
        _entered.setdefault(connection, []).append(block)
        return tx

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _entered[connections[self._using]].pop().__exit__(kind, error, trace)


@overload
def atomic(using: F) -> F: ...


@overload
def atomic(using: str | None = None, savepoint: bool = True) -> Atomic: ...


def atomic(using: Any = None, savepoint: bool = True) -> Any:
    """Begin a block whose rows and messages commit together, or not at all. A context manager, and a decorator.

    `with atomic() as tx` is `django.db.transaction.atomic(durable=True)`: the outermost block. Inside it, Django's blocks and
    others of this kind are savepoints, and what was sent in one that is rolled back is not sent. `tx.send` keeps the messages;
    the end of the block sends them and commits both sides. If Django rolls back without an error, after `set_rollback(True)` or
    an error that code inside has caught, nothing is sent either, and `tx.outcome` stays None.

    Under TestCase, whose transaction never commits, the block is a FakeTransaction: see `capture_messages`.

    Args:
        using: The alias of the database; None: `default`. Or the function to decorate, which sends by `dualwrite.django.send`.
        savepoint: False: a block inside another one makes no savepoint, and its error rolls back the outermost block.

    Raises:
        UsageError: Inside a block that is not of this kind (also of ATOMIC_REQUESTS), without autocommit, or in an event loop.
        ConfigurationError: As for `pool`.
        DualWriteError: At the end of the block; as for `WriterPool.transaction`. Both sides were rolled back, unless it is
            InDoubtTransactionError, LostTransactionError or UnverifiedTransactionError.
        django.db.Error: The database has refused the COMMIT, and both sides were rolled back.
    """
    if callable(using):
        return Atomic(None, savepoint=savepoint)(using)
    return Atomic(using, savepoint=savepoint)


@contextmanager
def _joined(unit: Unit, *, savepoint: bool) -> Iterator[Transaction[Any]]:
    with transaction.atomic(unit.connection.alias, savepoint=savepoint):
        yield unit.tx


@contextmanager
def _outermost(connection: Connection) -> Iterator[Transaction[Any]]:
    is_in_test = _check_may_begin(connection)
    if not is_in_test:
        pool(connection.alias)  # it may have to be made, which takes time and locks
    tx: Transaction[Any] | None = None
    try:
        with transaction.atomic(connection.alias, durable=True):
            unit = FakeUnit(connection) if is_in_test else RealUnit(connection)
            tx = unit.tx
            try:
                yield tx
                unit.commit()
            finally:
                unit.end()
    except BaseException as error:
        if tx is not None and tx.outcome is not None:
            error.add_note(_COMMITTED)
        raise


def _check_may_begin(connection: Connection) -> bool:
    """Whether the block is one of a test whose transaction never commits.

    Raises:
        UsageError: It can't be the outermost block.
    """
    if connection.in_atomic_block:
        if connection.atomic_blocks and is_of_test(connection.atomic_blocks[-1]):
            return True
        by_requests = connection.settings_dict.get("ATOMIC_REQUESTS")
        raise UsageError(
            "dualwrite.django.atomic() must be the outermost block: another atomic() would commit without its messages.",
            cause="ATOMIC_REQUESTS wraps each view into a block" if by_requests else None,
            next_step="mark the view with @transaction.non_atomic_requests"
            if by_requests
            else "begin with this block; blocks of Django's may be inside it",
        )
    if not connection.get_autocommit():
        raise UsageError(
            "dualwrite.django.atomic() needs a connection in autocommit mode: without it, a transaction may have begun.",
            next_step="leave out AUTOCOMMIT=False and transaction.set_autocommit(False)",
        )
    return False
