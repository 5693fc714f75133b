"""The objects that a block has added to its session, and how they were before: a rollback makes them so again.

The next run of the block may add an object again that was made, or loaded, outside of it. After a flush and a rollback such an
object looks as if it were stored: the next run would not write it, and would raise no error. SQLAlchemy's own rollback makes a
new object transient again, but it keeps what the flush has put into it (its key, the values of defaults), and it forgets the
changes of an object that was loaded elsewhere.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy.orm import InstanceState, make_transient


class AttachedObjects:
    """What a session's objects were like when they were attached to it; objects that it has loaded itself are not included."""

    def __init__(self) -> None:
        self._before: WeakKeyDictionary[InstanceState[Any], _Before] = (
            WeakKeyDictionary()
        )  # as the session: no strong reference

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
