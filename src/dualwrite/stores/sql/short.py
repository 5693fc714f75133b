"""Our own short transactions, such as a claim or a resolution, each with a limit for its waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Delete, Engine, Select, literal_column, select

from dualwrite.deadline import Deadline, Pauses
from dualwrite.errors import StoreError
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.rows import Acquiring, ClaimedLanes, StateRow, claimed, none_elsewhere, with_generation
from dualwrite.stores.sql.dialect import WORK_TIME, ErrorClass, StoreDialect
from dualwrite.stores.sql.engines import note_error
from dualwrite.stores.sql.home import OwnConnection, home_of
from dualwrite.stores.sql.rights import Right, rights_for, rights_words
from dualwrite.stores.sql.sql_errors import ErrorMap, address, locked_too_long
from dualwrite.stores.sql.tables import identity_or_first, lock_rows, locked_identity, look_around, write_rows
from dualwrite.transactional_id import further_lanes

T = TypeVar("T")

_ATTEMPTS: Final = 3
_RETRIED: Final = frozenset({ErrorClass.CONNECTION, ErrorClass.CONFLICT})
_PAUSES: Final = 0.02, 0.5
"""Seconds before the second attempt, and the limit up to which they are doubled."""
_RETRIED_CLAIMS: Final = frozenset({ErrorClass.CONNECTION, ErrorClass.CONFLICT, ErrorClass.DUPLICATE})

# unix_timestamp() of a local time would go back by an hour at the end of the session's daylight saving time
_MYSQL: Final = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) / 1e6"
_CLOCKS: Final = {
    "postgresql": "extract(epoch FROM pg_catalog.clock_timestamp())",
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
}


@dataclass(frozen=True)
class ShortTransactions:
    """Runs short transactions, and repeats them where that is harmless.

    Attributes:
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
        with self._ended(self._begun(timeout)) as connection:
            yield connection

    @contextmanager
    def begin_long(self) -> Iterator[Connection]:
        """A transaction without limits, for loading rows; committed at the end of the `with` block."""
        with self._ended(OwnConnection(self.engine)) as connection:
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
        connection = OwnConnection(self.engine)
        try:
            self.dialect.begin_short(connection, max(0.001, timeout), work_time=self.work_time)
        except Exception as error:
            note_error(connection, error)
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
        """Run `work` in a transaction, up to three times, or for `patience` seconds, after a broken connection or a conflict.

        `work` must return the same when it runs again after its own commit: the response to COMMIT may have been lost. `doing`
        says what it does, to complete "… failed while <doing>".

        Raises:
            ClaimTimeoutError: The row stayed locked.
            StoreError: The database's own errors, translated.
        """

        def once() -> T:
            with self.begin(self.lock_timeout) as connection:
                return work(connection)

        try:
            return self.repeated(once, _RETRIED, _pause_unless_last if patience is None else Deadline.after(patience).pause)
        except self.driver_errors as error:
            if transactional_id is not None and self.dialect.classify(error) is ErrorClass.LOCKED:
                raise locked_too_long(self.errors, [transactional_id], self.lock_timeout, error, doing) from error
            raise self.errors.translated(error, doing, transactional_id) from error

    def run_inserting(self, work: Callable[[Connection], T], doing: str, transactional_id: str) -> T:
        """As `run`, for work that may insert a row: once more if another transaction has just inserted the same one."""
        try:
            return self.run(work, doing, transactional_id)
        except StoreError as error:
            if not self.is_caused_by(error, ErrorClass.DUPLICATE):
                raise
            return self.run(work, doing, transactional_id)

    def repeated(self, once: Callable[[], T], retried: Collection[ErrorClass], pause: Callable[[Pauses], bool]) -> T:
        """Call until it raises no driver's error of these classes, or `pause` says that there should be no other attempt.

        Once more if the database was read-only: then the pool has replaced its connections, see `note_error`.
        """
        pauses = Pauses(*_PAUSES)
        while True:
            try:
                return once()
            except self.driver_errors as error:
                found = self.dialect.classify(error)
                may_pass = found in retried or (found is ErrorClass.READ_ONLY and not pauses.taken)
                if not (may_pass and pause(pauses)):
                    raise

    def delete(self, count: Select[Any], delete: Delete, values: Mapping[str, Any], doing: str) -> int:
        """Delete what the values select, as by `run`; return how much it was: a COMMIT without response may have succeeded."""
        counted = 0  # the maximum over all attempts

        def work(connection: Connection) -> None:
            nonlocal counted
            counted = max(counted, connection.execute(count, values).scalar_one())
            connection.execute(delete, values)

        self.run(work, doing)
        return counted

    def is_caused_by(self, error: BaseException, error_class: ErrorClass) -> bool:
        """Whether an error of `run` or `query`, or the driver's error that caused it, is of this class."""
        behind = error.__cause__ or error
        return isinstance(behind, self.driver_errors) and self.dialect.classify(behind) is error_class

    def query(self, work: Callable[[Connection], T], doing: str, transactional_id: str | None = None) -> T:
        """Run read-only `work`, and repeat it once if the pool's connection turns out to be dead.

        Raises:
            StoreError: The database's own errors, translated.
        """
        try:
            try:
                return self._queried(work)
            except self.driver_errors as error:
                if self.dialect.classify(error) is not ErrorClass.CONNECTION:
                    raise
            return self._queried(work)
        except self.driver_errors as error:
            raise self.errors.translated(error, doing, transactional_id, reads=True) from error

    def missing_rights(self, *uses: str, outbox: str | None = None) -> tuple[str, Sequence[Right]]:
        """Which of the privileges for these uses (`RIGHTS`) the connection's role lacks, and the role.

        Raises:
            StoreError: The database's own errors, translated.
        """

        def work(connection: Connection) -> tuple[str, Sequence[Right]]:
            home = home_of(self.engine)
            if home.schema() is None:  # there are no tables, as the next statement says
                return "", ()
            return self.dialect.missing_rights(connection, rights_for(uses, home.schema, self.dialect.name, outbox))

        return self.query(work, "checking what the role may do")

    def check_rights(self, *uses: str, outbox: str | None = None) -> None:
        """Check that the connection's role has all privileges that these uses need; `outbox` is the user's table of a relay.

        Raises:
            StoreError: It has not; the error names all that are missing, and the command that prints the GRANT statements.
        """
        role, missing = self.missing_rights(*uses, outbox=outbox) if uses else ("", ())
        if missing:
            raise StoreError(
                f"The role {role!r} lacks privileges in the database {address(self.engine.url)}.",
                cause=f"it needs {rights_words(missing)}",
                next_step=f"as the tables' owner, run what this prints: {self.errors.grants_command(role, uses, outbox)}",
            )

    def _queried(self, work: Callable[[Connection], T]) -> T:
        with OwnConnection(self.engine) as connection, self.dialect.reading(connection):
            return work(connection)


@dataclass(frozen=True)
class WithLanes:
    """What a claim of an id with all its lanes does besides; see `TxnStateStore.claim_lanes`."""

    cluster_id: str | None
    acquiring: Acquiring | None
    first: StoreIdentity


@dataclass(frozen=True)
class ClaimAttempt:
    """One claim of one or several ids in one transaction, with as many attempts as it needs.

    Attributes:
        token: Written with the claim, to recognize it if its COMMIT got no response.
        expected_fence: Claim only if the fence of the first id still is this number.
        condition: Called first in each of the claim's transactions; if it raises, the claim raises that error.
        lanes: If the first id is claimed with all its lanes.
    """

    short: ShortTransactions
    ids: Sequence[str]
    owner: str
    timeout: float
    token: str
    expected_fence: int | None = None
    condition: Callable[[Connection], None] | None = None
    lanes: WithLanes | None = None

    def make(self) -> ClaimedLanes:
        """Claim.

        Raises:
            FencedError: The expected fence is no longer the row's.
            ClusterMismatchError: A row names another Kafka cluster.
            ClaimTimeoutError: A row stayed locked.
            StoreUnavailableError: The database was unreachable until the timeout.
        """
        deadline, errors = Deadline.after(self.timeout), self.short.errors

        def once() -> ClaimedLanes:
            with self.short.begin(deadline.left) as connection:
                if self.condition is not None:
                    self.condition(connection)
                return self._claim(connection)

        doing = "claiming the id"
        try:
            return self.short.repeated(once, _RETRIED_CLAIMS, deadline.pause)
        except self.short.driver_errors as error:
            if errors.dialect.classify(error) is ErrorClass.LOCKED:
                raise locked_too_long(errors, self.ids, self.timeout, error, doing) from error
            raise errors.translated(error, doing, self.ids[0]) from error

    def _claim(self, connection: Connection) -> ClaimedLanes:
        """Lock the rows, and write them as claimed.

        If a row is missing, two processes may both try to insert it; the second one's INSERT waits for the first one's COMMIT
        and fails, and the second one starts again.
        """
        found, identity = lock_rows(connection, self.ids)
        ids = list(self.ids)
        if self.lanes is not None:  # in a statement of its own, which begins when the first id is locked
            cluster_id = self.lanes.cluster_id
            if cluster_id and not all(each in found and found[each].cluster_id for each in self.ids):
                identity = locked_identity(connection, self.lanes.first)
            lanes, elsewhere = look_around(connection, self.ids[0], cluster_id)
            if cluster_id is not None:
                none_elsewhere(self.ids[0], elsewhere, cluster_id)
            further = further_lanes(lanes, self.ids)
            if further:
                found |= lock_rows(connection, further).rows
            ids += [name for name in further if name in found]
        rows = [self._claimed(name, found.get(name)) for name in ids]
        have_generations = False
        acquiring = None if self.lanes is None else self.lanes.acquiring
        if self.lanes is not None and acquiring is not None and all(row.is_clean for row in rows):
            store_id = (identity or identity_or_first(connection, self.lanes.first)).store_id
            rows = [acquired(row, acquiring, store_id) for row in rows]
            have_generations = True
        changed = [row for row in rows if row is not found.get(row.transactional_id)]
        write_rows(connection, changed, existing=found)
        return ClaimedLanes(tuple(rows), have_generations)

    def _claimed(self, name: str, row: StateRow | None) -> StateRow:
        expected = self.expected_fence if name == self.ids[0] else None
        return claimed(row, name, self.owner, token=self.token, expected_fence=expected)


def _pause_unless_last(pauses: Pauses) -> bool:
    """As `Deadline.pause`, for a number of attempts: sleep until the next one; False after the last one."""
    is_last = pauses.taken + 1 == _ATTEMPTS
    if not is_last:
        time.sleep(next(pauses))
    return not is_last


def acquired(row: StateRow, acquiring: Acquiring, store_id: str) -> StateRow:
    """The row after `acquire_generation`, if its lane is one of those that acquire one."""
    name = row.transactional_id
    if name not in acquiring.lanes:
        return row
    return with_generation(
        row, acquiring.kind, reuse=name in acquiring.reuse, store_id=store_id, cluster_id=acquiring.cluster_id
    )


def clock_column(dialect: str) -> ColumnElement[Any]:
    """The clock as the column `clock` of a query: seconds since 1970, perhaps at the time before a wait for a lock."""
    return literal_column(_CLOCKS[dialect]).label("clock")


def database_clock(connection: Connection) -> float:
    """Seconds since 1970 by the database's clock, at the time of the call, not at the start of the transaction."""
    return float(connection.scalar(_reading(connection.dialect.name)) or 0.0)


@cache
def _reading(dialect: str) -> Select[Any]:
    return select(clock_column(dialect))
