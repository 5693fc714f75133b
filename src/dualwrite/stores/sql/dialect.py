"""What differs between SQL databases: how to begin, how to wait, how to mark a transaction, what an error means.

A new database needs one file with a `StoreDialect`, and a case in `engines.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, ClassVar, Final, Literal, NamedTuple

from sqlalchemy import URL, ColumnElement, Connection, Engine
from sqlalchemy.exc import DBAPIError

from dualwrite.stores.sql.session_text import Routine

UNIT: Final = "dualwrite_unit"
"""The savepoint before a unit of a group."""

NEXT_UNIT: Final = (f"RELEASE SAVEPOINT {UNIT}", f"SAVEPOINT {UNIT}")
"""The statements between two units of a group. The first fails if the unit has ended the transaction."""

WORK_TIME: Final = 5.0
"""Seconds that one of our own statements may run besides waiting for locks; on a single row it needs under a millisecond."""


class ErrorClass(Enum):
    """What an error of the database means to us."""

    CONNECTION = "the connection could not be made, or broke"
    REFUSED = "the database refused the connection; a retry will be refused as well"
    LOCKED = "a lock was not released within the limit"
    CONFLICT = "the database aborted our transaction because of a conflict; running it again may succeed"
    DUPLICATE = "the row already exists"
    NO_TABLE = "the table is missing"
    OLD_TABLE = "the table lacks a column"
    DENIED = "a privilege is missing"
    READ_ONLY = "the transaction or the server is read-only"
    ABORTED = "the transaction had already failed"
    PREPARED = "a prepared statement is missing or was replaced by another"
    OTHER = "anything else"


@dataclass(frozen=True, slots=True)
class Blocker:
    """The holder of the lock that we wait for; `text` completes "… is held by <text>"."""

    text: str
    next_step: str
    pid: int | None = None


class Fence(NamedTuple):
    """The newest claim of an id: its fencing token, who claimed, and the store that the row belongs to.

    `epoch` is that of the gate that was asked for.
    """

    fence: int
    owner: str
    store_id: str
    epoch: int | None = None


class Record(NamedTuple):
    """What `record` writes; see StoreTransaction.

    The row must still have `fence`, and belong to the store `store_id`; the transaction must still have the mark `token`; and
    the gate of the prefix `gate`, if there is one, must have `epoch`.
    """

    transactional_id: str
    fence: int
    store_id: str
    token: str
    state: str
    generation: int
    number: int
    delivery: str | None
    now: datetime
    gate: str | None = None
    epoch: int | None = None


class QueuedStatements(ABC):
    """Statements of ours that are sent with the next statement on their connection, in one round trip.

    Attributes:
        is_waiting: Whether they were not sent yet.
        error: Why one of them has failed, or None. Every later use of the connection raises it.
    """

    is_waiting: bool
    error: Exception | None

    @abstractmethod
    def send(self) -> None:
        """Send them now, unless they were sent, and wait for the responses.

        Raises:
            Exception: The driver's error of one of them; or `error`.
        """

    @abstractmethod
    def drop(self) -> None:
        """Forget them, and `error`; before the connection is rolled back."""


class MergedStatements(ABC):
    """Our statements on one connection, sent together with BEGIN and COMMIT, in one round trip each."""

    @abstractmethod
    def can_begin(self) -> bool:
        """Whether SQLAlchemy's transaction has begun, but not the database's: a listener for `begin` may have done that."""

    @abstractmethod
    def begin(
        self,
        transactional_id: str,
        token: str,
        *,
        begun: Callable[[Fence | None], None],
        translated: Callable[[BaseException], Exception],
        with_unit: bool = False,
        gate: str | None = None,
    ) -> QueuedStatements:
        """Begin the transaction, mark it with `token`, and read the newest claim; then set the savepoint UNIT, if `with_unit`.

        With a prefix as `gate`, the epoch of its gate is read by the same statement.

        `token` needs no quoting. `begun` is called with the newest claim, or None if the id has no row; it may raise.
        `translated` gives the error to raise for the driver's if these statements fail in a call of the user's.
        """

    @abstractmethod
    def may_wait(self) -> bool:
        """Whether `begin` may wait for the next statement: it was just shown that the connection works, and this saves time."""

    @abstractmethod
    def begin_unit(
        self, queued: QueuedStatements | None, translated: Callable[[BaseException], Exception], *, is_first: bool
    ) -> QueuedStatements | None:
        """Set the savepoint UNIT, which replaces that of the unit before unless it `is_first`, with the next statement.

        `queued` is what was queued on the connection last: if it still waits, no unit has executed anything since. Returns
        what is queued now; None if waiting for the next statement saves no time.
        """

    @abstractmethod
    def can_commit(self) -> bool:
        """Whether there is a transaction to commit, and no listener for SQLAlchemy's `commit`, which would run too late."""

    @abstractmethod
    def commit(self, record: Record) -> None:
        """Write the record if the fence is still the claim's and the transaction is still the marked one, and commit.

        Raises:
            Exception: The driver's error. Nothing was committed if `was_not_executed`.
        """

    @abstractmethod
    def was_not_executed(self) -> bool:
        """After an error of `commit`: whether the database reported that the record failed, so that COMMIT was not executed."""

    @abstractmethod
    def found_no_row(self, error: BaseException) -> bool:
        """Whether the record failed because no row has the id, the fence and the store's id, or the gate has changed."""

    @abstractmethod
    def found_no_mark(self, error: BaseException) -> bool:
        """Whether the record failed because the transaction is not the marked one."""


class StoreDialect(ABC):
    """One SQL database. Stateless: every store and every transaction share one."""

    name: ClassVar[str]
    """SQLAlchemy's name of the dialect."""
    driver: ClassVar[str]
    """SQLAlchemy's name of the driver that this is written for."""
    package: ClassVar[str | None]
    """The Python package of the driver, or None if it is part of Python."""
    extra: ClassVar[str | None]
    """The extra of dualwrite that installs it."""

    # --- engines of our own -----------------------------------------------------------------------------------------------

    @abstractmethod
    def engine_options(self, url: URL, *, connect_timeout: float, lock_timeout: float) -> dict[str, Any]:
        """Arguments of `create_engine` for an engine of ours.

        Raises:
            ConfigurationError: The URL names a database that can't keep the row.
        """

    def prepare_engine(self, engine: Engine) -> None:  # noqa: B027  (most databases need none)
        """Add settings to each connection of an engine that we created."""

    def watch_engine(self, engine: Engine) -> None:  # noqa: B027  (most databases need nothing)
        """Add the listeners that every engine needs, including the user's own; a second call for an engine adds nothing."""

    # --- our tables -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def schemas_of_tables(self, connection: Connection, *, is_new: bool) -> Mapping[str, str]:
        """The schema of each of our tables that exists, by the tables' names; see `Home`. May contain other tables, too.

        The connection is in no transaction, and `is_new` if nobody has used it before. Settings that are changed here must be
        local to a transaction.

        Raises:
            ConfigurationError: The connection's settings don't say which of several tables is meant.
            Exception: The driver's and SQLAlchemy's errors.
        """

    # --- transactions -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Begin the transaction that the user's block runs in, on a connection that has none."""

    @abstractmethod
    def begin_short(self, connection: Connection, timeout: float, *, work_time: float = WORK_TIME) -> None:
        """Begin a transaction of our own that waits at most `timeout` seconds for each lock.

        Besides that no statement runs for more than `work_time` seconds, if the server can enforce it.
        """

    @contextmanager
    def reading(self, connection: Connection) -> Iterator[None]:
        """In the block, our own queries run on a connection that has no transaction; each may see another snapshot.

        A database that can do without a transaction saves its BEGIN and ROLLBACK.
        """
        del connection
        yield

    def limit_pause(self, connection: Connection) -> None:  # noqa: B027  (SQLite has no server that could)
        """Have the server roll back the transaction if we send nothing for ten seconds: the process may be paused.

        To be called before a long transaction acquires a lock that others wait for. `finish` restores the session's settings.
        """

    def merged_statements(self, engine: Engine) -> Callable[[Connection], MergedStatements] | None:
        """How to send our statements on a connection with BEGIN and COMMIT; None if the database or its driver can't."""
        del engine
        return None

    def marking_column(self) -> ColumnElement[Any] | None:
        """A column for the fence's SELECT that marks the transaction with the parameter `token`; None: `begin` did that."""
        return None

    def marked_condition(self) -> ColumnElement[bool] | None:
        """A condition for `record`'s UPDATE: this is still the transaction marked with `token`; None: see `still_marked`."""
        return None

    def still_marked(self, connection: Connection) -> bool:
        """If `marked_condition` is None: whether this is still the transaction that `begin` began. Called before the UPDATE."""
        del connection
        return True

    next_unit: ClassVar[tuple[str, ...]] = NEXT_UNIT
    """NEXT_UNIT, in as few round trips as possible."""

    # --- commit -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def commit_blocker(self, connection: Connection) -> str | None:
        """Why COMMIT would not commit, or None; called right before it is sent."""

    def finish(self, connection: Connection, command: Literal["COMMIT", "ROLLBACK"]) -> None:
        """Make sure that `command` took effect, after SQLAlchemy has passed it on to the driver.

        SQLAlchemy sends no ROLLBACK after a COMMIT that failed; drivers send none if there is no transaction.
        """
        if command == "ROLLBACK":
            driver_connection(connection).rollback()

    @abstractmethod
    def commit_surely_failed(self, error: BaseException, connection: Connection) -> bool:
        """Whether this error of COMMIT proves that nothing was committed; False means unknown."""

    # --- which database this is -------------------------------------------------------------------------------------------

    detects_copies: ClassVar[bool] = True
    """See TxnStateStore."""

    def database_marks(self, connection: Connection) -> frozenset[str]:
        """The marks of the database that this connection is on; see `TxnStateStore.marks`."""
        del connection
        return frozenset()

    def marks_column(self) -> ColumnElement[Any] | None:
        """The only mark as a column of a query, always the same object; None: `database_marks` reads them."""
        return None

    def durability(self, connection: Connection) -> Mapping[str, str]:
        """The settings that decide whether an acknowledged commit is durable; see TxnStateStore."""
        del connection
        return {}

    # --- what is left in a session ----------------------------------------------------------------------------------------

    family: ClassVar[str]
    """The SQL of the database; see `session_text.examined`."""

    def routines(self, connection: Connection, names: frozenset[str]) -> Iterable[Routine]:
        """The routines that statements with these names may call; see `session_text.Routines`."""
        del connection, names
        return ()

    def session_reports(self, connection: Connection) -> tuple[object, ...]:
        """The settings that the server has reported to the driver by itself, without a round trip."""
        del connection
        return ()

    # --- errors -----------------------------------------------------------------------------------------------------------

    read_only_by: ClassVar[str]
    """What makes a transaction read-only, for messages."""
    time_limit: ClassVar[str] = "the limit for statements"
    """What limits the time of a statement, for messages."""

    def wrong_encoding(self, connection: Connection) -> str | None:
        """If the session's encoding is no longer the driver's, so that texts are not found: which setting has changed it."""
        del connection
        return None

    @abstractmethod
    def classify(self, error: BaseException) -> ErrorClass:
        """What a driver's error means, except during COMMIT."""

    def may_have_rolled_back(self, error: BaseException) -> bool:
        """Whether the database may have rolled back the whole transaction, with all savepoints, when it raised this error."""
        return self.classify(error) is ErrorClass.CONFLICT

    def has_lost_savepoint(self, error: BaseException) -> bool:
        """Whether the error says that a savepoint does not exist: an earlier error may have rolled back the whole transaction.

        Only databases that do that need it.
        """
        del error
        return False

    def known_blocker(self, engine: Engine) -> Blocker | None:
        """What is known about the holder of a lock without asking the database."""
        del engine
        return None

    def find_blocker(self, engine: Engine, transactional_id: str) -> Blocker | None:
        """Who holds the lock on the row, or None if that is not known; called right after a wait for it timed out.

        Raises:
            Exception: The query failed.
        """
        del transactional_id
        return self.known_blocker(engine)


def driver_connection(connection: Connection) -> Any:
    """The driver's connection under SQLAlchemy's, for our own use: the user's use of it would be watched."""
    pooled: Any = Connection.connection.fget(connection)  # type: ignore[attr-defined]  # a property
    return pooled.dbapi_connection


def driver_error(error: BaseException) -> BaseException:
    """The driver's own error inside SQLAlchemy's, or the error itself."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig
    return error
