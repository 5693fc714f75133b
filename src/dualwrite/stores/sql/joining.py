"""Units that join a transaction of the user's: what SQLAlchemy's sessions and connections report about it.

SQLAlchemy has no event after the driver's COMMIT, and its sessions report a commit also when a savepoint is released. So a unit
listens to the connection, whose event `commit` comes once, before the driver's COMMIT. There the recipe runs whole, with COMMIT
in it; SQLAlchemy's own COMMIT finds no transaction any more. A unit that can't commit has rolled back when its error is raised,
since a connection whose transaction is open would go back into its pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, TwoPhaseTransaction, event

from dualwrite.errors import AfterCommitError, UsageError
from dualwrite.stores.sql.greenlets import in_thread
from dualwrite.stores.sql.joined_transaction import UsersConnection, in_autocommit
from dualwrite.stores.store_transaction import JoinedUnit

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction

U = TypeVar("U", bound=JoinedUnit)

_on_connections: Final[WeakKeyDictionary[Connection, _OnConnection]] = WeakKeyDictionary()
_on_sessions: Final[WeakKeyDictionary[Any, _OnSession]] = WeakKeyDictionary()
_listened_to: Final[WeakSet[Any]] = WeakSet()
_listening: Final = threading.Lock()

_SESSION_EVENTS: Final = ("after_begin", "before_commit", "after_soft_rollback", "after_transaction_end")


def joined(target: Any, owner: object, new: Callable[[Callable[[], frozenset[Hashable]]], U]) -> U:
    """See `TxnStateStore.join`."""
    found = _sync(target)
    reference = ref(found)  # a unit must not keep a session that nobody uses any more

    def savepoints() -> frozenset[Hashable]:
        target = reference()
        return frozenset() if target is None else _savepoints_of(target)

    if isinstance(found, Connection):
        return cast("U", _on_connection(found).joined(owner, lambda: new(savepoints)))
    place = _on_sessions.get(found)
    if place is None:
        _listen_to(_class_of_sessions(), _on_sessions, *_SESSION_EVENTS)
        place = _on_sessions[found] = _OnSession()
    return cast("U", place.joined(found, owner, lambda: new(savepoints)))


def _class_of_sessions() -> type[Session]:
    from sqlalchemy.orm import Session  # noqa: PLC0415  (the ORM, only when it is used)

    return Session


def _sync(target: Any) -> Session | Connection:
    """The synchronous session or connection: the target, or behind it."""
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session  # noqa: PLC0415  (the ORM)
    from sqlalchemy.orm import Session, scoped_session  # noqa: PLC0415  (the ORM, only when it is used)

    if isinstance(target, scoped_session | async_scoped_session):
        target = target()
    if isinstance(target, AsyncSession):
        return target.sync_session
    if isinstance(target, AsyncConnection):
        if target.sync_connection is None:
            raise UsageError("The AsyncConnection has not been started.", next_step="async with engine.connect() as connection")
        return target.sync_connection
    if isinstance(target, Session | Connection):
        return target
    raise UsageError(
        f"A {type(target).__module__}.{type(target).__qualname__} can't be joined.",
        next_step="pass SQLAlchemy's Session, AsyncSession, Connection or AsyncConnection; for a driver's own connection use "
        "`with pool.transaction(connection=…) as tx`",
    )


def _on_connection(connection: Connection) -> _OnConnection:
    """Where the units of a connection are, if it can have some."""
    _check(connection)
    found = _on_connections.get(connection)
    if found is None:
        _listen_to(connection.engine, _on_connections, "commit", "rollback", "rollback_savepoint")
        found = _on_connections[connection] = _OnConnection()
    return found


def _listen_to(source: Any, places: Mapping[Any, Any], *names: str) -> None:
    """Have the events of an engine's connections, or of all sessions, passed on to those of them that have a place."""
    if source in _listened_to:
        return
    with _listening:  # a transaction of another thread must not commit unheard between the two
        if source not in _listened_to:
            for name in names:
                event.listen(source, name, partial(_pass_on, places, name))
            _listened_to.add(source)


def _pass_on(places: Mapping[Any, Any], name: str, target: Any, *details: Any) -> None:
    place = places.get(target)
    if place is not None:
        getattr(place, name)(target, *details)


def _check(connection: Connection) -> None:
    """Check that the connection's transactions can be joined."""
    if isinstance(connection.get_transaction(), TwoPhaseTransaction):
        raise UsageError(
            "A two-phase transaction can't be joined.",
            cause="it is prepared and committed by two commands, and its outcome is decided elsewhere",
            next_step="leave out begin_twophase() and twophase=True",
        )
    if _is_in_autocommit(connection):
        raise in_autocommit()


class _OnConnection:
    """Listens to a connection; it has no reference to it, which would keep both alive."""

    def __init__(self) -> None:
        self._unit: JoinedUnit | None = None
        self._owner: object = None

    def joined(self, owner: object, new: Callable[[], JoinedUnit]) -> JoinedUnit:
        unit = self.unit
        if unit is None:
            unit, self._owner = new(), owner
            self._unit = unit
        elif self._owner is not owner:
            raise _of_another_pool()
        return unit

    @property
    def unit(self) -> JoinedUnit | None:
        """That of the current transaction."""
        return self._unit if self._unit is not None and self._unit.is_open else None

    def commit(self, connection: Connection) -> None:
        unit = self.unit
        if unit is None:
            return
        try:
            if unit.has_content:
                _commit(connection, unit)
        finally:
            unit.end()

    def rollback(self, _connection: Connection) -> None:
        if self._unit is not None:
            self._unit.end()

    def rollback_savepoint(self, _connection: Connection, name: str, _context: object) -> None:
        if self._unit is not None:
            self._unit.forget_since(name)


def _commit(connection: Connection, unit: JoinedUnit) -> None:
    users = UsersConnection(connection.dialect, connection.connection, connection.invalidate)
    try:
        _check(connection)
        if connection.dialect.is_async:
            in_thread(lambda run: unit.commit(users.through(run)))
        else:
            unit.commit(users)
    except BaseException:
        users.roll_back()  # or else the next user of the connection would commit what is refused here
        raise
    if connection.invalidated:  # the outcome of COMMIT was unknown, and the row has told it
        raise _committed_and_closed()


def _committed_and_closed() -> AfterCommitError:
    """The error for a connection on which SQLAlchemy can't end its transaction any more."""
    return AfterCommitError(
        "The transaction has committed on both sides, and its connection was lost, or did not answer the COMMIT.",
        cause="SQLAlchemy can't go on with the connection, which is closed",
        next_step="don't repeat the transaction; call rollback() on the session, or close it, to go on with another connection",
    )


def _savepoints_of(found: Session | Connection) -> frozenset[Hashable]:
    """The savepoints that a session's or connection's transaction is in, as `JoinedUnit.forget_since` gets them."""
    if isinstance(found, Connection):
        return frozenset(_savepoints_on(found))
    return frozenset(_nested(found)).union(*map(_savepoints_on, _connections(found)))


def _savepoints_on(connection: Connection) -> Iterator[str]:
    nested = connection.get_nested_transaction()
    while nested is not None:
        yield nested._savepoint  # noqa: SLF001  (its name; there is no public way)
        nested = nested._previous_nested  # noqa: SLF001  (as above)


def _nested(session: Session) -> Iterator[SessionTransaction]:
    """The savepoints that a session is in: some are not known to its connection yet."""
    nested = session.get_nested_transaction()
    while nested is not None:
        if nested.nested:
            yield nested
        nested = nested.parent


def _is_in_autocommit(connection: Connection) -> bool:
    chosen = connection.get_execution_options().get("isolation_level")
    if chosen is not None:
        return bool(chosen == "AUTOCOMMIT")
    driver = connection.connection.driver_connection
    found = getattr(driver, "autocommit", False)
    get = getattr(driver, "get_autocommit", None)  # of PyMySQL and mysqlclient, without a round trip
    return bool(get()) if get is not None else found is True


class _OnSession:
    """Listens to a session, whose connection may begin later than the unit."""

    def __init__(self) -> None:
        self._unit: JoinedUnit | None = None  # of a transaction that may have no connection yet
        self._owner: object = None

    def joined(self, session: Session, owner: object, new: Callable[[], JoinedUnit]) -> JoinedUnit:
        begun = _connections(session)
        if len(begun) > 1:
            raise _several_connections()
        if self._unit is None or not self._unit.is_open:
            self._unit, self._owner = None, owner
            if begun:
                self._unit = _on_connection(begun[0]).joined(owner, new)
            elif session.twophase:
                raise UsageError("A session with twophase=True can't be joined.", next_step="leave out twophase=True")
            else:
                self._unit = new()
        elif self._owner is not owner:
            raise _of_another_pool()
        return self._unit

    def after_begin(self, session: Session, _transaction: object, connection: Connection) -> None:
        unit = self._unit
        if unit is None or not unit.is_open:
            return
        if any(each is not connection for each in _connections(session)):
            raise _several_connections()
        if _on_connection(connection).joined(self._owner, lambda: unit) is not unit:
            raise UsageError(
                "The session's connection was joined before the session.",
                next_step="join either of them; `pool.join` returns the same for both once the session has executed something",
            )

    def before_commit(self, session: Session) -> None:
        if self._unit is not None and self._unit.is_open and self._unit.has_content and not _connections(session):
            session.connection()  # or else there would be no COMMIT

    def after_soft_rollback(self, _session: Session, transaction: SessionTransaction) -> None:
        if self._unit is not None and transaction.nested:
            self._unit.forget_since(transaction)

    def after_transaction_end(self, _session: Session, transaction: SessionTransaction) -> None:
        """A unit that a connection has ends with the connection's transaction, which may be another one than the session's."""
        unit, self._unit = self._unit, self._unit if transaction.parent is not None else None
        if transaction.parent is None and unit is not None and not _has(transaction, unit):
            unit.end()


def _has(transaction: SessionTransaction, unit: JoinedUnit) -> bool:
    """Whether a connection of the transaction has the unit."""
    places = (_on_connections.get(each[0]) for each in transaction._connections.values())  # noqa: SLF001  (as below)
    return any(place is not None and place.unit is unit for place in places)


def _of_another_pool() -> UsageError:
    return UsageError(
        "Another pool has joined this transaction.",
        cause="each pool has a row of its own that decides about its messages",
        next_step="use one pool for all messages of a transaction",
    )


def _several_connections() -> UsageError:
    return UsageError(
        "The session uses several connections in one transaction, so it can't be joined.",
        cause="each of them is committed separately: only one could commit together with the messages",
        next_step="use a session of its own, with one bind, for what belongs to the messages",
    )


def _connections(session: Session) -> list[Connection]:
    """The connections that a session's transaction has begun."""
    transaction = session.get_transaction()
    return [] if transaction is None else [each[0] for each in set(transaction._connections.values())]  # noqa: SLF001  (there is no public way)
