"""A column family's items merged with a transaction's changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dualwrite.errors import UsageError
from dualwrite.stores.rocksdb.keys import Encoding, Key, Pickled, SortKey

Entry = tuple[Key, Key | Pickled | None]
"""A changed key and its new value; None if it was deleted."""


def merged(
    stored: Iterator[tuple[Any, Any]],
    entries: Mapping[SortKey, Entry],
    encoding: Encoding,
    *,
    start: SortKey | None = None,
    backwards: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """The stored items with the changes applied, in the database's order.

    Args:
        stored: The database's items from `start` on, in its order.
        entries: The changes, by place in the order.
        encoding: Gives the place of a stored key, and the value of a changed one.
        start: Where the iteration begins.
        backwards: Whether it goes from the last key to the first.

    Raises:
        UsageError: The database's keys come in another order: the column family has a custom comparator.
    """
    changed = [place for place in entries if start is None or (place <= start if backwards else place >= start)]
    changed.sort(reverse=not backwards)  # the next one is at the end
    previous: SortKey | None = None
    for key, value in stored:
        place = encoding.key(key)[1]
        if previous is not None and (place > previous if backwards else place < previous):
            raise UsageError(
                "The column family has a custom order, so a transaction's changes can't be merged into an iteration over it.",
                next_step="iterate over the Rdict itself, which shows committed data only; get() works as usual",
            )
        previous = place
        while changed and (changed[-1] > place if backwards else changed[-1] < place):
            yield from _shown(entries[changed.pop()], encoding)
        if changed and changed[-1] == place:
            yield from _shown(entries[changed.pop()], encoding)
        else:
            yield key, value
    while changed:
        yield from _shown(entries[changed.pop()], encoding)


def _shown(entry: Entry, encoding: Encoding) -> Iterator[tuple[Any, Any]]:
    key, value = entry
    if value is not None:
        yield key, encoding.loaded(value)
