"""How a processor runs a transaction: on a writer, as a unit of a pool, or as a separate transaction of a pool."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dualwrite.errors import AfterCommitError, FencedError
from dualwrite.pool.pool import WriterPool
from dualwrite.processor.progress import Finish
from dualwrite.stores.base import TxnStateStore
from dualwrite.transaction import Transaction, opened
from dualwrite.transactional import check_has_run, name_of
from dualwrite.writer import DualWriter

log = logging.getLogger(__name__)

Handle = Callable[[list[Any], Transaction[Any]], object]
Content = Callable[[], list[Any]]
"""Returns the messages for a handler: with each call a list of its own, with new objects if they were deserialized."""


class Runner(ABC):
    """Runs transactions, one at a time."""

    @abstractmethod
    def run(self, content: Content | None, finish: Finish) -> None:
        """Run one transaction; when it returns, it has committed. If a listener of the commit has failed, that is logged.

        Args:
            content: Called for the handler's messages each time the handler is called; None for a transaction that does not
                call it.
            finish: Called after the handler.

        Raises:
            AfterCommitError: Another transaction's, raised by the handler; this one has not committed.
            Exception: What the handler, the transaction, or `finish` raises.
            StoppedError: The transaction was cancelled because the processor is being stopped.
        """

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether a retry may succeed after an error, or the cause of one, even if the error is not `retriable`."""


class ThreadRunner(Runner):
    """Runs a plain handler in the processor's thread, or in the pool's.

    Args:
        runner: A writer or a pool.
        handle: Called with the messages and the transaction.
        alone: Don't run in a unit that shares its commit, because `finish` does something that a unit may not do.
    """

    def __init__(self, runner: DualWriter[Any] | WriterPool[Any], handle: Handle, *, alone: bool) -> None:
        self._runner = runner
        self._handle = handle
        self._alone = alone

    def run(self, content: Content | None, finish: Finish) -> None:
        def work(tx: Transaction[Any]) -> None:
            if content is not None:
                check_has_run(self._handle(content(), tx), name_of(self._handle))
            finish(tx)

        work.__wrapped__ = self._handle  # type: ignore[attr-defined]  # as functools.wraps does; `pool.alone` looks for it
        if isinstance(self._runner, WriterPool) and not self._alone:
            self._runner.run(work)
            return
        block: AbstractContextManager[Transaction[Any]] = self._runner.transaction()
        try:
            with block as tx:
                opened(tx).watch(shares=False)
                work(tx)
        except AfterCommitError as error:
            log_failed_listener(error, opened(tx).after_commit_error)

    def is_transient(self, error: BaseException) -> bool:
        if isinstance(error, FencedError):
            return isinstance(self._runner, WriterPool)  # a pool uses another id
        return is_transient_in(self._runner.store, error)


def is_transient_in(store: TxnStateStore, error: BaseException) -> bool:
    """Whether an error of the store's driver is a conflict or an outage, and so says nothing about the messages."""
    return store.is_conflict(error) or store.is_outage(error)


def log_failed_listener(error: AfterCommitError, own: Exception | None) -> None:
    """Log that a transaction has committed, and a listener of the commit has failed.

    Args:
        error: What the transaction's block has raised.
        own: The transaction's `after_commit_error`.

    Raises:
        AfterCommitError: `error`, if it is another transaction's.
    """
    if own is None:
        raise error
    log.error("a transaction has committed, and a listener of the commit has failed", exc_info=error)
