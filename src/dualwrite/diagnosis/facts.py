"""Facts about a subject, each declared once: its name in JSON, the heading of its column, and where its value is. No I/O.

Commands print a list of facts as JSON or as a table; the console's pages show the same records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

Record = Mapping[str, Any]
"""What programs get of a subject. The values may be times, states, errors and enums; docs/reference/json.md describes them."""

Place = str | Callable[[Any], Any]
"""Where a value is: the name of an attribute, with dots for one of an attribute's; or a function of the subject."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact.

    Args:
        name: Its name in JSON.
        column: The heading of its column in a table; None if no table shows it.
        value: Where it is, if that is not its name. A part that is None makes it None.
        words: What a table shows, as a function of the value, if that is not the value.
        shown: What a table shows, as a function of the subject, if the value is not enough for it.
    """

    name: str
    column: str | None = None
    value: Place = ""
    words: Callable[[Any], Any] | None = None
    shown: Callable[[Any], Any] | None = None

    def of(self, subject: Any) -> Any:
        """Its value."""
        return _at(subject, self.value or self.name)

    def cell(self, subject: Any) -> Any:
        """What a table shows of it."""
        if self.shown is not None:
            return self.shown(subject)
        value = self.of(subject)
        return value if self.words is None else self.words(value)


class Facts:
    """The facts about one kind of subject.

    Args:
        facts: The facts, in the order of JSON.
        columns: The names of those that tables show, if their order is another one.
    """

    def __init__(self, *facts: Fact, columns: Sequence[str] = ()) -> None:
        self._facts = {fact.name: fact for fact in facts}
        self.columns = columns or [fact.name for fact in facts if fact.column is not None]

    def __iter__(self) -> Iterator[Fact]:
        return iter(self._facts.values())

    def record(self, subject: Any) -> dict[str, Any]:
        """The facts about a subject, by their names."""
        return {name: fact.of(subject) for name, fact in self._facts.items()}

    def records(self, subjects: Iterable[Any]) -> list[dict[str, Any]]:
        """The same for several."""
        return [self.record(one) for one in subjects]

    def table(self, subjects: Iterable[Any], columns: Sequence[str] = ()) -> tuple[list[str], list[list[Any]]]:
        """The headings of a table, and its cells; of all columns, or of those with these names."""
        chosen = [self._facts[name] for name in columns or self.columns]
        return [fact.column or "" for fact in chosen], [[fact.cell(one) for fact in chosen] for one in subjects]

    def at(self, place: Place) -> Facts:
        """The same facts, of a part of a larger subject. If the part is None, each is None."""
        facts = (
            replace(fact, value=_part(place, fact.of), shown=None if fact.shown is None else _part(place, fact.shown))
            for fact in self
        )
        return Facts(*facts, columns=self.columns)

    def nested(self, place: Place) -> Callable[[Any], Any]:
        """The record of a part of a subject, as the value of a fact; None if there is no such part."""
        return _part(place, self.record)


def _part(place: Place, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def found(subject: Any) -> Any:
        part = _at(subject, place)
        return None if part is None else read(part)

    return found


def _at(subject: Any, place: Place) -> Any:
    return place(subject) if callable(place) else reduce(_attribute, place.split("."), subject)


def _attribute(subject: Any, name: str) -> Any:
    return None if subject is None else getattr(subject, name)
