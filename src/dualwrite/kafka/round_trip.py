"""Compares a model with what its own JSON is read back as: the first place at which the two differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

from dualwrite.kafka.model_types import fields_of

_MISSING: Final = type("Missing", (), {"__slots__": (), "__repr__": lambda _: "nothing"})()
_TRUSTED: Final = frozenset({str, bytes, int, bool, float, Decimal, type(None), UUID, date, datetime, time, timedelta})
"""Two values of the same one of these types are the same if `==` says so. (If it does not, they may be, too: NaN.)"""


class Difference(NamedTuple):
    """Where a value differs from what is read back.

    Args:
        path: The place, such as `.lines[0].price`.
        sent: The value there.
        read: The value that is read back, or an object that is shown as "nothing".
    """

    path: str
    sent: Any
    read: Any


class Comparison:
    """Compares values field by field, whatever the `==` of their classes leaves out or adds.

    Not compared: private attributes and fields with `exclude=True`, which are by their definition no part of the JSON. The same
    are also: NaN and NaN, moments that are the same instant, and numbers that are equal (1 and 1.0, but not 1 and True).

    It remembers the fields of each class that it has seen.
    """

    def __init__(self) -> None:
        self._names: dict[type, tuple[str, ...]] = {}

    def difference(self, sent: Any, read: Any) -> Difference | None:
        """The first difference, or None if the values are the same."""
        return self._first([("", sent, read)], "{}")

    def _first(self, pairs: Iterable[tuple[Any, Any, Any]], place: str) -> Difference | None:
        """The first difference in pairs of values, each with its name, key or number, which `place` makes part of the path."""
        for part, sent, read in pairs:
            kind = type(sent)
            if sent is read or (kind is type(read) and kind in _TRUSTED and sent == read):
                continue
            found = self._within(sent, read)
            if found is not None:
                return found._replace(path=place.format(part) + found.path)
        return None

    def _within(self, sent: Any, read: Any) -> Difference | None:
        kind = type(sent)
        names = self._names.get(kind)
        if names is None:
            names = self._names[kind] = _names_of(kind)
        if names:
            is_alike = _class_of(sent) is _class_of(read)
            pairs, place = _of_objects(sent, read, names), ".{}"
        elif isinstance(sent, list | tuple) and isinstance(read, list | tuple):
            is_alike = len(sent) == len(read) and isinstance(sent, list) is isinstance(read, list)
            pairs, place = zip(itertools.count(), sent, read), "[{}]"
        elif isinstance(sent, Mapping) and isinstance(read, Mapping):
            is_alike = True
            pairs, place = _of_mappings(sent, read), "[{!r}]"
        else:
            return None if _is_same(sent, read) else Difference("", sent, read)
        return self._first(pairs, place) if is_alike else Difference("", sent, read)


def _of_objects(sent: Any, read: Any, names: Iterable[str]) -> Iterable[tuple[Any, Any, Any]]:
    """The fields of two objects of the same class."""
    pairs = [(name, getattr(sent, name, _MISSING), getattr(read, name, _MISSING)) for name in names]
    extra, extra_read = getattr(sent, "__pydantic_extra__", None) or {}, getattr(read, "__pydantic_extra__", None) or {}
    return [*pairs, *_of_mappings(extra, extra_read)] if extra or extra_read else pairs


def _of_mappings(sent: Mapping[Any, Any], read: Mapping[Any, Any]) -> Iterable[tuple[Any, Any, Any]]:
    keys = sent if sent.keys() == read.keys() else {**sent, **read}
    return [(key, sent.get(key, _MISSING), read.get(key, _MISSING)) for key in keys]


def _names_of(kind: type) -> tuple[str, ...]:
    """The fields of a model or a dataclass that are part of its JSON; none for any other class."""
    known = fields_of(kind) if is_dataclass(kind) or hasattr(kind, "__pydantic_fields__") else {}
    excluded = {name for name, field in known.items() if field.exclude}
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(known)
    return tuple(name for name in names if name not in excluded)


def _class_of(content: Any) -> Any:
    """The class; `Box[int](…)` and `Box(…)` are of the same generic one, as for Pydantic's own `==`."""
    kind = type(content)
    generic: Mapping[str, Any] = getattr(kind, "__pydantic_generic_metadata__", {})
    return generic.get("origin") or kind


def _is_same(sent: Any, read: Any) -> bool:
    if isinstance(sent, datetime) and isinstance(read, datetime):
        return _instant(sent) == _instant(read)
    if isinstance(sent, time) and isinstance(read, time):
        return (sent.replace(tzinfo=None), sent.utcoffset()) == (read.replace(tzinfo=None), read.utcoffset())
    if isinstance(sent, bool) is not isinstance(read, bool):
        return False
    try:
        if isinstance(sent, float | Decimal) and type(sent) is type(read) and sent != sent:  # noqa: PLR0124  (NaN)
            return bool(read != read)  # noqa: PLR0124
        return bool(sent == read)
    except Exception:  # noqa: BLE001  (a class that can't compare can't show that nothing was lost)
        return False


def _instant(moment: datetime) -> tuple[bool, timedelta]:
    """Whether a moment has a time zone, and the moment itself, in UTC if so.

    Between two zones, Python's `==` is False for each moment in an hour that a change of clocks skips or repeats.
    """
    offset = moment.utcoffset()
    since = moment.replace(tzinfo=None) - datetime.min  # noqa: DTZ901  (both without a time zone)
    return offset is not None, since if offset is None else since - offset
