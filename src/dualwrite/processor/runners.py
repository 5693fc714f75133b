"""How a processor runs a transaction: on a writer, in units of a pool, in transactions of their own on a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from dualwrite.errors import FencedError, StoreError
from dualwrite.pool.pool import WriterPool
from dualwrite.processor.work import Finish, handling
from dualwrite.stores.base import TxnStateStore
from dualwrite.transaction import Transaction
from dualwrite.writer import DualWriter

_NOTHING: Final = "?"
"""A prefix of no id: only the answer counts."""

Handle = Callable[[Sequence[Any], Transaction[Any]], None]


class Runner(ABC):
    """Runs transactions, one at a time."""

    @abstractmethod
    def run(self, messages: Sequence[Any], finish: Finish) -> None:
        """Run one transaction; when it returns, it has committed.

        Args:
            messages: For the handler; none for a transaction without it.
            finish: Called after the handler.

        Raises:
            UnprocessableError: The handler raised an exception.
            Exception: What the transaction, or `finish`, raises.
        """

    @abstractmethod
    def is_passing(self, error: Exception) -> bool:
        """Whether the same transaction may succeed later after this error, which `retriable` does not say."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether the database can be read now."""


class ThreadRunner(Runner):
    """Runs a plain handler in the processor's thread, or in the pool's.

    Args:
        runner: A writer or a pool.
        handle: Called with the messages and the transaction.
        alone: Not in a unit that shares its commit: what a unit may not do comes in `finish`.
    """

    def __init__(self, runner: DualWriter[Any] | WriterPool[Any], handle: Handle, *, alone: bool) -> None:
        self._runner = runner
        self._handle = handle
        self._alone = alone

    def run(self, messages: Sequence[Any], finish: Finish) -> None:
        """See Runner."""

        def work(tx: Transaction[Any]) -> None:
            if messages:
                with handling(self._runner.store.is_conflict):
                    self._handle(messages, tx)
            finish(tx)

        if isinstance(self._runner, WriterPool) and not self._alone:
            self._runner.run(work)
            return
        block: AbstractContextManager[Transaction[Any]] = self._runner.transaction()
        with block as tx:
            work(tx)

    def is_passing(self, error: Exception) -> bool:
        """See Runner."""
        if isinstance(error, FencedError):
            return isinstance(self._runner, WriterPool)  # it uses another id
        return self._runner.store.is_conflict(error)

    def answers(self) -> bool:
        """See Runner."""
        return database_answers(self._runner.store)


def database_answers(store: TxnStateStore) -> bool:
    """Whether a store can be read now, or will not be able to by waiting."""
    try:
        store.list(_NOTHING)
    except StoreError as error:
        return not error.retriable
    return True
