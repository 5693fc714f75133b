"""Our own short transactions, such as a claim or a resolution, each with a limit for its waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_exponential, wait_random

from dualwrite.stores.sql.dialect import WORK_TIME, ErrorClass, StoreDialect
from dualwrite.stores.sql.errors import ErrorMap, locked_too_long
from dualwrite.stores.sql.home import own_connection
from dualwrite.stores.sql.interrupts import InterruptsFirst

T = TypeVar("T")

_ATTEMPTS: Final = 3
_RETRIED: Final = frozenset({ErrorClass.CONNECTION, ErrorClass.CONFLICT})
_WAIT: Final = wait_exponential(multiplier=0.02, max=0.5) + wait_random(0, 0.02)


@dataclass(frozen=True)
class ShortTransactions:
    """Runs short transactions, and repeats them where that is harmless.

    Args:
        engine: Where connections come from.
        dialect: The database's dialect.
        errors: Translates its errors.
        lock_timeout: Seconds to wait for a lock if the caller gives no limit.
        driver_errors: What the driver and SQLAlchemy raise.
        work_time: Seconds that a statement may run besides waiting, if the server can enforce it.
    """

    engine: Engine
    dialect: StoreDialect
    errors: ErrorMap
    lock_timeout: float
    driver_errors: tuple[type[BaseException], ...]
    work_time: float = WORK_TIME

    @contextmanager
    def begin(self, timeout: float) -> Iterator[Connection]:
        """A transaction that waits at most `timeout` seconds for a lock; committed at the end of the `with` block."""
        with InterruptsFirst(), self._ended(self._begun(timeout)) as connection:
            yield connection

    @contextmanager
    def begin_long(self) -> Iterator[Connection]:
        """A transaction without limits, for loading rows; committed at the end of the `with` block."""
        with InterruptsFirst(), self._ended(own_connection(self.engine)) as connection:
            self.dialect.begin(connection)
            yield connection

    @contextmanager
    def _ended(self, connection: Connection) -> Iterator[Connection]:
        try:
            try:
                yield connection
                connection.commit()
                self.dialect.finish(connection, "COMMIT")
            except Exception:
                self._roll_back(connection)
                raise
            except BaseException:  # KeyboardInterrupt, at any point in the driver
                connection.invalidate()
                raise
        finally:
            connection.close()

    def _roll_back(self, connection: Connection) -> None:
        """Roll back, unless the connection is broken."""
        try:
            if not connection.invalidated:
                connection.rollback()
                self.dialect.finish(connection, "ROLLBACK")
        except self.driver_errors:
            connection.invalidate()

    def _begun(self, timeout: float) -> Connection:
        connection = own_connection(self.engine)
        try:
            self.dialect.begin_short(connection, max(0.001, timeout), work_time=self.work_time)
        except Exception:
            connection.close()  # the pool rolls back
            raise
        except BaseException:  # KeyboardInterrupt: the limits of this transaction may still be those of the connection
            connection.invalidate()
            connection.close()
            raise
        return connection

    def run(
        self, work: Callable[[Connection], T], doing: str, transactional_id: str | None = None, *, patience: float | None = None
    ) -> T:
        """Run `work` in a transaction, up to three times if the connection breaks or there is a conflict.

        `work` must return the same when it runs again after its own commit: the response to COMMIT may have been lost.

        Args:
            work: What to do.
            doing: What that is, to complete "… failed while <doing>".
            transactional_id: The id that it is done for.
            patience: Seconds to keep trying, instead of three times.

        Raises:
            ClaimTimeoutError: The row stayed locked.
            StoreError: The database's own errors, translated.
        """

        def once() -> T:
            with self.begin(self.lock_timeout) as connection:
                return work(connection)

        retrying = Retrying(
            retry=retry_if_exception(
                lambda error: isinstance(error, self.driver_errors) and self.errors.classify(error) in _RETRIED
            ),
            stop=stop_after_attempt(_ATTEMPTS) if patience is None else stop_after_delay(patience),
            wait=_WAIT,
            reraise=True,
        )
        try:
            return retrying(once)
        except self.driver_errors as error:
            if transactional_id is not None and self.errors.classify(error) is ErrorClass.LOCKED:
                raise locked_too_long(self.errors, [transactional_id], self.lock_timeout, error, doing) from error
            raise self.errors.translated(error, doing, transactional_id) from error

    def is_caused_by(self, error: BaseException, error_class: ErrorClass) -> bool:
        """Whether an error of `run` or `query`, or the driver's error that caused it, is of this class."""
        behind = error.__cause__ or error
        return isinstance(behind, self.driver_errors) and self.errors.classify(behind) is error_class

    def query(self, work: Callable[[Connection], T], doing: str, transactional_id: str | None = None) -> T:
        """Run read-only `work`, and repeat it once if the pool's connection turns out to be dead.

        Raises:
            StoreError: The database's own errors, translated.
        """
        try:
            try:
                return self._queried(work)
            except self.driver_errors as error:
                if self.errors.classify(error) is not ErrorClass.CONNECTION:
                    raise
            return self._queried(work)
        except self.driver_errors as error:
            raise self.errors.translated(error, doing, transactional_id) from error

    def _queried(self, work: Callable[[Connection], T]) -> T:
        with InterruptsFirst(), own_connection(self.engine) as connection, self.dialect.reading(connection):
            return work(connection)
