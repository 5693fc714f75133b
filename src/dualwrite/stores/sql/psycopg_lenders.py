"""Whose psycopg connections they are: one of the user's, a pool's, or made for the store by a function of the user's."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from dualwrite.errors import ConcurrentUseError, ConfigurationError, StoreError, UsageError

Psycopg = psycopg.Connection[Any]
CONNECT_AGAIN: Final = (
    "connect again and open a writer with the new connection; a callable or a psycopg_pool.ConnectionPool instead of a "
    "connection brings new ones by itself"
)


class PsycopgPool(Protocol):
    """What is used of a `psycopg_pool.ConnectionPool`."""

    def check(self) -> None:
        """Look at all idle connections, and replace the broken ones."""

    def getconn(self) -> Psycopg:
        """A connection that nobody else has meanwhile."""

    def putconn(self, conn: Psycopg) -> None:
        """Take it back."""


class Lender(ABC):
    """Hands out connections that are fit for a transaction."""

    @abstractmethod
    def lend(self) -> Psycopg:
        """A connection without a transaction, out of autocommit, and of use to nobody else meanwhile."""

    @abstractmethod
    def take_back(self, connection: Psycopg) -> None:
        """Receive it after its transaction, open or closed. Raises nothing."""

    def broken(self, error: BaseException | None) -> None:  # noqa: B027  (a function's connections are simply made anew)
        """Learn that the connection that was lent is being closed, because of an error, or since its end is unknown."""


class OneConnection(Lender):
    """A connection that the user has open; it stays theirs, and open.

    Args:
        connection: It.
    """

    def __init__(self, connection: Psycopg) -> None:
        self._connection = connection
        self._lent = threading.Lock()
        self._process = os.getpid()
        self._autocommit = False
        self._reason = "it was closed, or broke, outside of the writer's transactions"

    def lend(self) -> Psycopg:
        """See Lender.

        Raises:
            StoreError: The connection is closed.
            ConcurrentUseError: Another transaction, or another thread, is using it.
            UsageError: It is in a transaction or a pipeline, or belongs to another process.
        """
        if os.getpid() != self._process:
            raise UsageError(
                "The psycopg connection was opened in another process, which goes on using it.",
                next_step="open a connection, and a writer with it, in the process that uses them",
            )
        if not self._lent.acquire(blocking=False):
            raise ConcurrentUseError(
                "The psycopg connection is in use by another transaction of this store.",
                next_step="end that one first; a psycopg_pool.ConnectionPool serves several threads",
            )
        try:
            self._check()
            self._autocommit = self._connection.autocommit
            if self._autocommit:
                self._connection.autocommit = False
        except BaseException:
            self._lent.release()
            raise
        return self._connection

    def _check(self) -> None:
        connection = self._connection
        if connection.closed:
            raise StoreError("The psycopg connection is closed.", cause=self._reason, next_step=CONNECT_AGAIN)
        if connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise UsageError(
                "The psycopg connection is in pipeline mode.", next_step="leave `with connection.pipeline()` first"
            )
        match connection.info.transaction_status:
            case TransactionStatus.IDLE:
                return
            case TransactionStatus.ACTIVE:
                raise ConcurrentUseError(
                    "The psycopg connection is running a statement, or a COPY or stream() that was not read to its end.",
                    next_step="use it from one thread at a time, and finish what runs before the writer's transaction",
                )
            case _:
                raise UsageError(
                    "The psycopg connection is in a transaction already.",
                    cause="a statement ran on it outside of the writer's transaction: psycopg begins a transaction with the "
                    "first statement, a SELECT too, unless the connection is in autocommit",
                    next_step="commit() or rollback() before the writer's transaction begins, or set autocommit=True: the "
                    "writer begins and ends its own transactions all the same",
                )

    def take_back(self, connection: Psycopg) -> None:
        """See Lender; autocommit is put back."""
        try:
            if self._autocommit and not connection.closed:
                with suppress(psycopg.Error):
                    connection.autocommit = True
        finally:
            self._lent.release()

    def broken(self, error: BaseException | None) -> None:
        """See Lender."""
        if error is None:
            self._reason = "the answer to its last COMMIT never came, or its last rollback failed, so it was closed"
        else:
            self._reason = f"it broke: {type(error).__name__} {' '.join(str(error).split())}".rstrip()


class FromPool(Lender):
    """A `psycopg_pool.ConnectionPool`; it stays the user's, and open.

    Args:
        pool: It.
    """

    def __init__(self, pool: PsycopgPool) -> None:
        self._pool = pool
        self._in_autocommit: set[int] = set()

    def lend(self) -> Psycopg:
        """See Lender."""
        connection = checked_connection(self._pool.getconn())
        try:
            if connection.autocommit:
                connection.autocommit = False
                self._in_autocommit.add(id(connection))
        except BaseException:
            self._pool.putconn(connection)
            raise
        return connection

    def take_back(self, connection: Psycopg) -> None:
        """See Lender; the pool replaces it where it is closed."""
        if id(connection) in self._in_autocommit:
            self._in_autocommit.discard(id(connection))
            with suppress(psycopg.Error):
                connection.autocommit = True
        self._pool.putconn(connection)

    def broken(self, error: BaseException | None) -> None:
        """See Lender; where one broke, a restarted server has ended them all: the next attempt must not meet the next one."""
        if isinstance(error, psycopg.Error):
            with suppress(psycopg.Error):
                self._pool.check()


class MadeOnDemand(Lender):
    """A function that makes connections; they are the store's, which keeps them for the next transactions.

    Args:
        make: It.
        first: One that it has made already.
    """

    def __init__(self, make: Callable[[], Psycopg], first: Psycopg) -> None:
        self._make = make
        self._made = [first]

    def lend(self) -> Psycopg:
        """See Lender."""
        with suppress(IndexError):
            return self._fit(self._made.pop())
        return self._fit(checked_connection(self._make()))

    def _fit(self, connection: Psycopg) -> Psycopg:
        if not connection.closed:
            connection.rollback()  # what the function ran on it; nothing of that is ours to commit
            connection.autocommit = False
        return connection

    def take_back(self, connection: Psycopg) -> None:
        """See Lender: the pool of the engine has no use for it any more."""
        connection.close()

    def close(self) -> None:
        """Close what was never lent."""
        while self._made:
            self._made.pop().close()


def checked_connection(made: object) -> Psycopg:
    """What a function or a pool of the user's gave, if it is a connection.

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(made, psycopg.Connection):
        raise ConfigurationError(
            f"The function or pool gave a {type(made).__name__}, not a psycopg.Connection.",
            next_step="for example: lambda: psycopg.connect('host=… dbname=…'); the asynchronous ones are no use here",
        )
    return made
