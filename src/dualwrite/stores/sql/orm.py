"""`tx.session`: an ORM session of the user's class on the writer's transaction. Loaded only when it is used, as is the ORM."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import InstanceState, Session, SessionTransaction, make_transient, scoped_session, sessionmaker

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.guard import GuardedConnection
from dualwrite.stores.store_transaction import refused

SessionSource = sessionmaker[Any] | scoped_session[Any] | type[Session]
"""What sessions may be created from: a sessionmaker (scoped or not), or a Session class."""

_REFUSED: Final = ("binds", "twophase", "join_transaction_mode")


class AttachedObjects:
    """What a session's objects were like when they were attached to it; objects that it has loaded itself are not included."""

    def __init__(self) -> None:
        # no strong references, as in the session
        self._before: WeakKeyDictionary[InstanceState[Any], _Before] = WeakKeyDictionary()

    def note(self, state: InstanceState[Any]) -> None:
        """Remember an object that is about to be attached. Only the first time counts."""
        if state not in self._before:
            self._before[state] = _Before(state)

    def restore(self) -> None:
        """After a rollback, once the session is closed: make each object as it was before."""
        for state, before in list(self._before.items()):
            if state.session is None and state.obj() is not None:  # not if the block has given it to another session
                before.restore(state)


class _Before:
    """The state of an object: its identity, the values of its mapped attributes, and which of them are yet to be written."""

    __slots__ = ("_changes", "_expired", "_is_expired", "_is_modified", "_items", "_key", "_values")

    def __init__(self, state: InstanceState[Any]) -> None:
        self._key = state.key
        self._values = {name: value for name, value in state.dict.items() if name in state.manager}
        self._items = {name: list(adapter) for name, adapter in _collections(self._values)}
        self._changes = dict(state.committed_state)
        self._expired = set(state.expired_attributes)
        self._is_expired, self._is_modified = state.expired, state.modified

    def restore(self, state: InstanceState[Any]) -> None:
        if self._key is None or state._deleted:  # noqa: SLF001  (`deleted` and `was_deleted` don't show it once it is detached)
            make_transient(state.obj())
            state.key = self._key
        for name in state.manager:
            if name in self._values:
                state.dict[name] = self._values[name]
            else:
                state.dict.pop(name, None)
        for name, adapter in _collections(self._values):
            adapter.clear_without_event()
            for item in self._items[name]:
                adapter.append_without_event(item)
        state.committed_state = dict(self._changes)
        state.expired_attributes = set(self._expired)
        state.expired, state.modified = self._is_expired, self._is_modified


def _collections(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """The adapters of the relationships whose collections are loaded; a write-only relationship has none."""
    found = [(name, getattr(value, "_sa_adapter", None)) for name, value in values.items()]
    return [(name, adapter) for name, adapter in found if adapter is not None]


class GuardedSession(Session):
    """A SQLAlchemy ORM Session on the guarded connection; only the writer can end its transaction."""

    def __init__(self, connection: GuardedConnection, **options: Any) -> None:
        # rollback_only: the session joins the transaction as it is; create_savepoint would cost two more round trips
        self._attached = AttachedObjects()
        super().__init__(bind=connection, join_transaction_mode="rollback_only", **options)
        self._guard = connection.guard
        self._only_bind = connection
        connection.guard.session = self

    def get_bind(self, *_args: Any, **_options: Any) -> Connection:
        """The transaction's connection, even if the user's class would choose among several."""
        return self._only_bind

    def begin(self, nested: bool = False) -> SessionTransaction:
        """Begin a savepoint; refused without `nested`."""
        if not nested:
            self._guard.refuse("session.begin()")
        return super().begin(nested=True)

    commit = refused("session.commit()", "_guard.refuse")
    rollback = refused("session.rollback()", "_guard.refuse")
    prepare = refused("session.prepare()", "_guard.refuse")
    reset = refused("session.reset()", "_guard.refuse")
    invalidate = refused("session.invalidate()", "_guard.refuse")
    get_transaction = refused("session.get_transaction()", "_guard.refuse")  # could only be used to commit or roll back
    __enter__ = refused("`with` on the session (it would close it)", "_guard.refuse")

    def close(self) -> None:
        """Only the writer may call this."""
        if not self._guard.lifted:
            self._guard.refuse("session.close()")
        super().close()

    def close_undone(self) -> None:
        """Close after a rollback, and make the objects that the block has added what they were: its next run may add them."""
        try:
            self.close()
        finally:
            self._attached.restore()

    def _autobegin_t(self, begin: bool = False) -> SessionTransaction:
        # called at every use of a session, including `add`
        self._guard.check_open()
        return super()._autobegin_t(begin)

    # --- the writer's side: the events that SQLAlchemy would send from commit() and rollback() --------------------------------

    def dispatch_before_commit(self) -> None:
        """Send `before_commit`; what listeners add is flushed with the rest."""
        self.dispatch.before_commit(self)

    def dispatch_after_commit(self) -> None:
        """Send `after_commit`, and expire the session's objects if it has `expire_on_commit`."""
        self.dispatch.after_commit(self)
        if self.expire_on_commit:
            self.expire_all()

    def dispatch_after_rollback(self) -> None:
        """Send `after_rollback`."""
        self.dispatch.after_rollback(self)


@event.listens_for(GuardedSession, "before_attach", raw=True)
def _note_attached(session: GuardedSession, state: InstanceState[Any]) -> None:
    session._attached.note(state)  # noqa: SLF001  (of this module)


class SessionFactory:
    """Creates the sessions of one store.

    Args:
        source: What the user creates sessions from; None for SQLAlchemy's Session with `expire_on_commit=False`, whose objects
            stay readable after the block.

    Raises:
        ConfigurationError: `source` has another type, or a setting that would bypass the transaction.
    """

    def __init__(self, source: SessionSource | None = None) -> None:
        options: dict[str, Any] = {"expire_on_commit": False}
        kind: type[Session] = GuardedSession
        if isinstance(source, scoped_session):
            source = source.session_factory
        if isinstance(source, sessionmaker):
            options = {name: value for name, value in source.kw.items() if value is not None}
            kind = _guarded(source.class_)
        elif isinstance(source, type) and issubclass(source, Session):
            options, kind = {}, _guarded(source)
        elif source is not None:
            raise ConfigurationError(
                f"session is a {type(source).__name__}.", next_step="pass a sessionmaker, a scoped_session or a Session class"
            )
        wrong = [name for name in _REFUSED if options.pop(name, False) not in (False, "conditional_savepoint")]
        if wrong:
            raise ConfigurationError(
                f"The sessionmaker has {' and '.join(wrong)}, which would bypass the writer's transaction.",
                next_step="create one without it for the writer: its session has one connection, the transaction's",
            )
        # the session is bound to the transaction's connection, and joins its transaction at the first use
        self._options = {name: value for name, value in options.items() if name not in ("bind", "autobegin")}
        self._kind: Any = kind

    def __call__(self, connection: GuardedConnection) -> GuardedSession:
        """A session on the connection."""
        session: GuardedSession = self._kind(connection, **self._options)
        return session


def _guarded(kind: type[Session]) -> type[Session]:
    """The user's class with the guard mixed in; listeners on the class and on its sessionmaker still get its events."""
    return type(f"Guarded{kind.__name__}", (GuardedSession, kind), {})
