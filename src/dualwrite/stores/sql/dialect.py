"""What differs between SQL databases: how to begin, how to wait, how to mark a transaction, what an error means.

A new database needs one file with a `StoreDialect`, and a case in `engines.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from sqlalchemy import URL, ColumnElement, Connection, Engine
from sqlalchemy.exc import DBAPIError

from dualwrite.stores.journal import JournalEntry
from dualwrite.stores.sql.rights import Right

if TYPE_CHECKING:
    from dualwrite.stores.sql.sql_context import StoreContext

TRANSACTION: Final = "dualwrite_transaction"
"""The savepoint by which some dialects recognize their transactions: see `StoreDialect.still_marked`."""

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
    CONFLICT = "another transaction, perhaps a migration, got in the way of ours; running ours again may succeed"
    DUPLICATE = "the row already exists"
    NO_TABLE = "the table is missing"
    OLD_TABLE = "the table lacks a column"
    DENIED = "a privilege is missing"
    READ_ONLY = "the transaction, the session or the server is read-only; on another connection it may not be"
    EXHAUSTED = "the server lacks disk space, memory or another resource; later it may have it"
    ABORTED = "the transaction had already failed"
    PREPARED = "a prepared statement is missing or was replaced by another"
    POOLED = "a connection pooler permits no transactions"
    OTHER = "anything else"


TAKES_NO_WRITES: Final = frozenset({ErrorClass.READ_ONLY, ErrorClass.EXHAUSTED})
"""An outage of a database that answers: see `engines.note_error`."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """The holder of the lock that we wait for; `text` completes "… is held by <text>"."""

    text: str
    next_step: str
    pid: int | None = None


class Fence(NamedTuple):
    """The newest claim of an id: its fencing token, who claimed, the store that the row belongs to, and the last transaction.

    `epoch` is that of the gate that was asked for.
    """

    fence: int
    owner: str
    store_id: str
    transaction_number: int
    epoch: int | None = None


NO_CLAIM: Final = Fence(0, "", "", 0)
"""What a transaction without an id begins with, if the database does not number its transactions."""


class Mark(NamedTuple):
    """Whose claim is read at the beginning, the token that marks the transaction, and the prefix whose gate is read, if any.

    `token` needs no quoting. Without an `id`, the transaction's `own_id` is read in place of the fence.
    """

    id: str
    token: str
    gate: str | None


class StateRecord(NamedTuple):
    """What `record` writes; see StoreTransaction. The names are those of the parameters in SQL: no column has one of them.

    The row `id` must still have the fence `held_fence`, and belong to the store `held_store`; the transaction must still have
    the mark `token`; and the gate of the prefix `gate`, if there is one, must have the epoch `seen_epoch`.
    """

    id: str
    held_fence: int
    held_store: str
    token: str
    state: str
    of_generation: int
    number: int
    delivered: str | None
    now: datetime
    gate: str | None
    seen_epoch: int | None


class EntriesRecord(NamedTuple):
    """What a transaction without an id writes: entries, if the gate is open. It must still have the mark `token`."""

    token: str
    gate: str
    entries: Sequence[JournalEntry]


class NotRecorded(Enum):
    """Why a record was not written that was sent with COMMIT, so that COMMIT was not executed."""

    NO_MARK = "the transaction is not the marked one"
    NO_ROW = "no row has the id, the fence and the store's id, or the gate has changed"
    ERROR = "any other error"


class Outgoing:
    """Our own statements in one transaction of the user's, on its connection: each is sent now.

    A subclass saves round trips: it sends some of them with the next statement on the connection, and the record with COMMIT.

    Args:
        context: Of the store.
        connection: Of the transaction.
        begun: Called with the newest claim, or None if the id has no row; it may raise.
        failed: Gives the error to raise for the driver's, if a statement fails that has waited for another.

    Attributes:
        error: Why a statement that has waited for the next one failed, or None. Every later use of the connection raises it.
        is_waiting: Whether some wait.
        record: What is written with COMMIT, or None.
    """

    error: Exception | None = None
    is_waiting: bool = False
    record: StateRecord | EntriesRecord | None = None

    def __init__(
        self,
        context: StoreContext,
        connection: Connection,
        begun: Callable[[Fence | None], None],
        failed: Callable[[BaseException], Exception],
    ) -> None:
        self._context = context
        self._connection = connection
        self._begun = begun
        self._failed = failed

    def begin(self, mark: Mark, *, may_wait: bool) -> None:
        """Mark the transaction, and read the newest claim; called when SQLAlchemy's transaction has begun.

        `may_wait`: this may be sent with the next statement, if that saves a round trip.
        """
        del may_wait
        if not mark.id:
            query = self._context.begin_unclaimed
        else:
            query = self._context.check_fence if mark.gate is None else self._context.check_fence_and_gate
        found: Any = NO_CLAIM if query is None else self._connection.execute(query, mark._asdict()).first()
        self._begun(found)

    def lock(self, mark: Mark) -> None:
        """In a transaction that the user has begun: lock the row of the id, and read the newest claim under that lock.

        So it is newer than what the user's transaction sees otherwise. The transaction is marked only if `record_at_commit`
        needs that.
        """
        query = self._context.lock if mark.gate is None else self._context.lock_with_gate
        found: Any = self._connection.execute(query, mark._asdict()).first()
        self._begun(found)

    def begin_unit(self, *, is_first: bool) -> bool:
        """Set the savepoint UNIT with the next statement; it replaces that of the unit before unless it `is_first`.

        Returns:
            False if that saves no round trip: the caller sends it now.
        """
        del is_first
        return False

    def set_local(self, settings: Mapping[str, str]) -> None:
        """See `StoreTransaction.set_local`."""

    def without_settings(self) -> AbstractContextManager[None]:
        """A block for statements of ours: settings wait for the unit's own, whose error it is if one of them is refused."""
        return nullcontext()

    def unit_undone(self) -> None:
        """Note that the savepoint UNIT was rolled back to, or is about to be."""

    def send(self) -> None:
        """Send what waits, apart from settings, and wait for the responses.

        Raises:
            Exception: `error`, from the driver's.
        """

    def send_last(self) -> None:
        """As `send`, when the user's statements have ended: without what waits for those of a unit that executed nothing."""

    def drop(self) -> None:
        """Forget what waits; before the connection is rolled back."""

    def record_at_commit(self, record: StateRecord | EntriesRecord) -> bool:
        """Have `commit` write the record; False if that is not possible: the caller writes it now."""
        del record
        return False

    def commit(self) -> None:
        """Commit if there is a record: write it, if the fence is still the claim's and the transaction is still the marked one.

        Raises:
            Exception: The driver's error. Nothing was committed if `why_not_recorded` knows a reason.
        """

    def why_not_recorded(self, error: BaseException) -> NotRecorded | None:
        """Why the record has failed, after an error of `commit`; None if the database has not reported that."""
        del error
        return None


class StoreDialect(ABC):
    """One SQL database. Stateless: every store and every transaction share one."""

    name: ClassVar[str]
    """SQLAlchemy's name of the dialect."""
    driver: ClassVar[str]
    """SQLAlchemy's name of the driver that this is written for."""

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

    def schemas_with(self, connection: Connection, table: str) -> Sequence[str]:
        """The schemas in which there is a table of this name, wherever an unqualified name would be looked up."""
        del connection, table
        return ()

    def missing_rights(self, connection: Connection, rights: Sequence[Right]) -> tuple[str, Sequence[Right]]:
        """The role that the connection has, and those of the rights that it lacks; of tables that don't exist, none."""
        del connection, rights
        return "", ()

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

    outgoing: ClassVar[type[Outgoing]] = Outgoing
    """Sends our statements in a transaction of the user's."""

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

    own_id: ClassVar[ColumnElement[int] | None] = None
    """What the database calls the current transaction, if it tells later what has become of it."""

    def has_committed(self, connection: Connection, own_id: int) -> bool | None:
        """What has become of the transaction with this `own_id`; None: it has not ended, or that is not known any more."""
        del connection, own_id
        return None

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

    # --- what is left in a session ----------------------------------------------------------------------------------------

    family: ClassVar[str]
    """The SQL of the database; see `isolation.text_effect`."""

    def has_own_functions(self, connection: Connection, names: frozenset[str]) -> bool:
        """Whether users have made a function with one of these names, in any schema; see `isolation.OwnFunctions`."""
        del connection, names
        return False

    def session_reports(self, connection: Connection) -> tuple[object, ...]:
        """The settings that the server has reported to the driver by itself, without a round trip."""
        del connection
        return ()

    has_local_settings: ClassVar[bool] = False
    """See TxnStateStore."""

    def has_deferred_triggers(self, connection: Connection) -> bool:
        """Whether users have made triggers that may run at COMMIT; called only if it `has_local_settings`."""
        del connection
        return False

    # --- errors -----------------------------------------------------------------------------------------------------------

    refused_by: ClassVar[str] = "address, user, password and privileges"
    """What makes a database refuse a connection, for messages."""
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
        return self.classify(error) in (ErrorClass.CONFLICT, ErrorClass.EXHAUSTED)

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


pooled_connection: Final[Callable[[Connection], Any]] = Connection.connection.fget  # type: ignore[attr-defined]  # a property
"""The pool's connection under SQLAlchemy's, for our own use: the user's use of it would be watched."""


def driver_connection(connection: Connection) -> Any:
    """The driver's connection under that."""
    return pooled_connection(connection).dbapi_connection


def driver_error(error: BaseException) -> BaseException:
    """The driver's own error inside SQLAlchemy's, or the error itself."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig
    return error
