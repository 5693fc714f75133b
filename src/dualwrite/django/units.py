"""The messages of a transaction of Django's: real ones of a pool, or those of a test whose transaction never commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

from django.db import DEFAULT_DB_ALIAS, connections, utils

from dualwrite.django.captures import note
from dualwrite.django.pools import pool
from dualwrite.django.savepoints import Connection, Savepoints
from dualwrite.errors import StoreCommitFailedError, UsageError, causes_of
from dualwrite.kafka.base import Headers
from dualwrite.testing.fakes import FakeTransaction
from dualwrite.testing.sent import SentMessage
from dualwrite.transaction import Transaction

_units: Final[WeakKeyDictionary[Connection, Unit]] = WeakKeyDictionary()


class Unit(ABC):
    """What is sent in one transaction of a connection.

    Attributes:
        tx: What the user's code sends with.

    Args:
        connection: Django's, in a transaction.
        whole: In a test, the savepoint that is the transaction of the code that is tested.
    """

    tx: Transaction[Any]

    def __init__(self, connection: Connection, whole: str | None = None) -> None:
        self.connection = connection
        self.savepoints = Savepoints(connection, self.forget_since, whole=whole, ended=self._ended)
        _units[connection] = self

    @abstractmethod
    def forget_since(self, savepoint: Hashable) -> None:
        """Forget what was sent inside a savepoint, which was rolled back."""

    @abstractmethod
    def commit(self) -> None:
        """Commit both sides, unless Django will roll back: by `set_rollback(True)`, or for an error that a block has caught.

        Raises:
            DualWriteError: As for `WriterPool.transaction`.
            django.db.Error: The database has refused the COMMIT: what Django would raise.
        """

    def _ended(self, is_released: bool) -> None:
        if is_released:
            self.commit()
        self.end()

    def end(self) -> None:
        """End the unit; what was not committed is forgotten. Idempotent."""
        if _units.get(self.connection) is self:
            del _units[self.connection]
            self.savepoints.end()


class RealUnit(Unit):
    """Messages that a pool sends."""

    def __init__(self, connection: Connection) -> None:
        given = {"savepoints": lambda: self.savepoints.now(), "handle": lambda: connection}  # noqa: PLW0108  (made below)
        self._users = pool(connection.alias).unit_on(connection.connection, **given)
        self.tx = self._users.tx
        super().__init__(connection)

    def forget_since(self, savepoint: Hashable) -> None:
        self._users.forget_since(savepoint)

    def commit(self) -> None:
        if self.connection.needs_rollback or not self._users.has_content:
            return
        sent = [SentMessage.of(message) for message in self._users.messages]
        try:
            self._users.commit()
        except BaseException as error:
            if not self.connection.is_usable():  # it was closed: the outcome of its COMMIT is unknown
                with suppress(utils.Error):
                    self.connection.close()
            if isinstance(error, StoreCommitFailedError):
                self._raise_as_django(error)
            raise
        note(self.connection.alias, sent)

    def _raise_as_django(self, refused: StoreCommitFailedError) -> None:
        """What Django raises for the driver's error, such as the IntegrityError of a constraint that is checked at COMMIT."""
        for cause in causes_of(refused):
            if isinstance(cause, self.connection.Database.Error):
                with self.connection.wrap_database_errors:
                    raise cause

    def end(self) -> None:
        super().end()
        self._users.end()


class FakeUnit(Unit):
    """Messages of a test whose transaction never commits (TestCase): they are kept, and nothing connects to Kafka."""

    def __init__(self, connection: Connection, whole: str | None = None) -> None:
        super().__init__(connection, whole)
        self.tx = self._fake = FakeTransaction(connection, savepoints=self.savepoints.now)
        self._error: Exception | None = UsageError("The block was rolled back.")

    def forget_since(self, savepoint: Hashable) -> None:
        self._fake.forget_since(savepoint)

    def commit(self) -> None:
        if not self.connection.needs_rollback:
            self._error = None
            note(self.connection.alias, self._fake.sent)

    def end(self) -> None:
        super().end()
        self._fake.__exit__(None, self._error, None)


def unit_of(connection: Connection) -> Unit | None:
    """The unit of the transaction that the connection is in, if it has one."""
    return _units.get(connection)


def is_of_test(block: Any) -> bool:
    """Whether a block is one of a TestCase, which never commits."""
    return bool(block._from_testcase)  # noqa: SLF001  (as Django's own `durable` does; there is no public way)


def unit_of_any_block(connection: Connection) -> Unit | None:
    """A new unit of the block that the connection is in, if the ENGINE is ours, with which every block commits messages."""
    if not (getattr(connection, "dualwrite_joins", False) and connection.in_atomic_block):
        return None
    of_test = sum(map(is_of_test, connection.atomic_blocks))
    if not of_test:
        return RealUnit(connection)
    inside = connection.savepoint_ids[of_test - 1 :]
    return FakeUnit(connection, inside[0]) if inside else None


def current(using: str | None = None) -> Transaction[Any]:
    """The transaction of the block that the caller is in.

    Args:
        using: The alias of the database; None: `default`.

    Raises:
        UsageError: There is no such block.
    """
    alias = DEFAULT_DB_ALIAS if using is None else using
    found = unit_of(connections[alias]) or unit_of_any_block(connections[alias])
    if found is not None:
        return found.tx
    raise UsageError(
        f"There is no block of dualwrite.django.atomic() on the database {alias!r}.",
        next_step="send inside the block whose rows the message belongs to: with dualwrite.django.atomic() as tx: …; "
        "for a block on another database, send(…, using=…)",
    )


def send(
    topic: str,
    value: bytes | str | None,
    *,
    key: bytes | str | None = None,
    headers: Headers | None = None,
    partition: int | None = None,
    timestamp: int | None = None,
    using: str | None = None,
) -> None:
    """Send a message with the block that the caller is in: `tx.send` for code that does not get the `tx`.

    Args:
        topic: This and the following: see `Transaction.send`.
        value: As above.
        key: As above.
        headers: As above.
        partition: As above.
        timestamp: As above.
        using: The alias of the block's database; None: `default`.

    Raises:
        UsageError: There is no such block.
        DualWriteError: As for `Transaction.send`.
    """
    current(using).send(topic, value, key=key, headers=headers, partition=partition, timestamp=timestamp)
