"""What differs between SQL databases: how to begin, how to wait, how to mark a transaction, what an error means.

A new database is one file with a `StoreDialect`, and a case in `dialects.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final, Literal

from sqlalchemy import URL, ColumnElement, Connection, Engine
from sqlalchemy.exc import DBAPIError


class ErrorClass(Enum):
    """What an error of the database means to us."""

    CONNECTION = "the connection could not be made, or broke"
    REFUSED = "the database refuses us; the same attempt again will be refused as well"
    LOCKED = "a lock was not given up in time"
    CONFLICT = "the database gave up our transaction for another's sake; the same transaction again may succeed"
    DUPLICATE = "the row is there already"
    NO_TABLE = "the table is missing"
    OLD_TABLE = "the table lacks a column"
    DENIED = "a privilege is missing"
    ABORTED = "the transaction had failed before"
    PREPARED = "a prepared statement is not the one that it was"
    OTHER = "anything else"


@dataclass(frozen=True, slots=True)
class Blocker:
    """What holds the lock that we wait for.

    Args:
        text: For people, fit for "… is held by <text>".
        next_step: What to do about it.
        pid: The process id where the database tells it.
    """

    text: str
    next_step: str
    pid: int | None = None


class BlockerHiddenError(Exception):
    """The database does not show to us who holds a lock.

    Args:
        why: Fit for "its holder is not known: <why>".
        next_step: What to do about it.
    """

    def __init__(self, why: str, next_step: str) -> None:
        super().__init__(why)
        self.next_step = next_step


WORK_TIME: Final = 5.0
"""Seconds that a statement of our own may take, beside waiting for locks: those on single rows take less than a millisecond."""


class StoreDialect(ABC):
    """One SQL database. Stateless: every store and every transaction share one."""

    name: ClassVar[str]
    """SQLAlchemy's name of the dialect."""
    driver: ClassVar[str]
    """SQLAlchemy's name of the driver that this is written for."""
    package: ClassVar[str | None]
    """The Python package of the driver, or None where Python brings it."""
    extra: ClassVar[str | None]
    """The extra of dualwrite that installs it."""
    wait_slice: ClassVar[float | None] = None
    """Wait for a lock in slices of so many seconds, where the driver's wait can't be interrupted; None: in one go."""

    # --- engines of our own -----------------------------------------------------------------------------------------------

    @abstractmethod
    def engine_options(self, url: URL, *, connect_timeout: float, lock_timeout: float) -> dict[str, Any]:
        """Arguments of `create_engine` for an engine of ours.

        Raises:
            ConfigurationError: The URL names a database that can't keep the row.
        """

    def prepare_engine(self, engine: Engine) -> None:  # noqa: B027  (most databases need none)
        """Settings of each connection of an engine of ours."""

    def watch_engine(self, engine: Engine) -> None:  # noqa: B027  (most databases need nothing)
        """Listeners that every engine needs, the user's own included; a second call for an engine adds nothing."""

    # --- transactions -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Begin the transaction that the user's block runs in, on a connection that has none."""

    @abstractmethod
    def begin_short(self, connection: Connection, timeout: float, *, work_time: float = WORK_TIME) -> None:
        """Begin a transaction of our own that waits at most `timeout` seconds for each lock.

        No statement takes more than `work_time` seconds beside that, where the server can see to it.
        """

    def limit_pause(self, connection: Connection) -> None:  # noqa: B027  (SQLite has no server that could)
        """Have the server roll the rest of a transaction back when we are silent for ten seconds: paused, perhaps.

        To be called before a long transaction takes a lock that others wait for. `finish` puts the session's settings back.
        """

    @abstractmethod
    def marks(self) -> ColumnElement[Any] | None:
        """A column for the fence's SELECT that marks the transaction with the parameter `token`; None: `begin` has done it."""

    @abstractmethod
    def is_marked(self) -> ColumnElement[bool] | None:
        """A condition for `record`'s UPDATE: this is still the transaction marked with the parameter `token`."""

    def still_marked(self, connection: Connection) -> bool:
        """Where `is_marked` is None: whether it is still the transaction that `begin` began. Asked once, before the UPDATE."""
        del connection
        return True

    # --- commit -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def commit_blocker(self, connection: Connection) -> str | None:
        """Why COMMIT would not commit, asked right before it is sent, or None."""

    def finish(self, connection: Connection, command: Literal["COMMIT", "ROLLBACK"]) -> None:
        """Make sure of `command`, after SQLAlchemy has passed it on to the driver.

        SQLAlchemy sends no ROLLBACK after a COMMIT that failed; drivers send none where there is no transaction.
        """
        if command == "ROLLBACK":
            connection.connection.rollback()

    @abstractmethod
    def commit_surely_failed(self, error: BaseException, connection: Connection) -> bool:
        """Whether this error of COMMIT proves that nothing was committed; False means unknown."""

    # --- which database this is -------------------------------------------------------------------------------------------

    tells_copies: ClassVar[bool] = True
    """See TxnStateStore."""

    def whereabouts(self, connection: Connection) -> frozenset[str]:
        """The marks of the database that this connection is on; see `TxnStateStore.marks`."""
        del connection
        return frozenset()

    def durability(self, connection: Connection) -> Mapping[str, str]:
        """The settings that decide whether an acknowledged commit stays; see TxnStateStore."""
        del connection
        return {}

    # --- errors -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def classify(self, error: BaseException) -> ErrorClass:
        """What a driver's error means, outside COMMIT."""

    def known_blocker(self, engine: Engine) -> Blocker | None:
        """What can be said of the holder of a lock without asking the database."""
        del engine
        return None

    def find_blocker(self, engine: Engine, transactional_id: str) -> Blocker | None:
        """Who holds the lock on the row, asked right after a wait for it was given up; None where nobody does any more.

        Raises:
            BlockerHiddenError: We may not see it.
            Exception: Asking has failed.
        """
        del transactional_id
        return self.known_blocker(engine)


def driver_error(error: BaseException) -> BaseException:
    """The driver's own error inside SQLAlchemy's, or the error itself."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig
    return error
