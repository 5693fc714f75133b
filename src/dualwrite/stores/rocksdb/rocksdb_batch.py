"""What users write with: changes in any column family, buffered until the commit and visible to the transaction's reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from dualwrite.errors import UsageError
from dualwrite.stores.key_values import Batch
from dualwrite.stores.rocksdb.database import Changes, OpenDatabase
from dualwrite.stores.rocksdb.encoding import Encoding, Key, Pickled, SortKey
from dualwrite.stores.rocksdb.locks import LockRequest
from dualwrite.stores.rocksdb.opening import DEFAULT_FAMILY, STATE_FAMILY, is_undecodable

Entry = tuple[Key, Key | Pickled | None]
"""A changed key and its new value; None if it was deleted."""

_MISSING: Final = object()


def merged(
    stored: Iterator[tuple[Any, Any]],
    entries: Mapping[SortKey, Entry],
    encoding: Encoding,
    *,
    start: SortKey | None = None,
    backwards: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """The database's items from `start` on, with the changes applied, in the database's order.

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


class ColumnFamilyBatch:
    """One column family inside the transaction: a dict whose changes are written when the transaction commits.

    Keys and values are those the database accepts: bytes in rocksdict's raw mode, otherwise bytes, str, int, float and bool for
    keys, and anything that can be pickled for values. Reads see this transaction's changes, and otherwise what is committed at
    that moment: there is no snapshot, and no check for concurrent writes of the same keys.

    Args:
        name: The column family.
        batch: The transaction's batch, which this belongs to.
    """

    def __init__(self, name: str, batch: TransactionBatch) -> None:
        self.name = name
        self._batch = batch
        self._entries: dict[SortKey, Entry] = {}
        self._before_unit: dict[SortKey, Entry | None] = {}  # what `undo_unit` restores

    def put(self, key: Key, value: Any) -> None:
        """Set a key to a value; the value is copied now, so later changes to a list, for example, have no effect.

        Raises:
            UsageError: The database can't store the key or the value.
            Exception: What pickling the value raises.
        """
        self._batch.check_open()
        plain, place = self._encoding.key(key)
        self._set(place, (plain, self._encoding.value(value)))

    def delete(self, key: Key) -> None:
        """Delete a key; a missing key is not an error.

        Raises:
            UsageError: The database can't store such a key.
        """
        self._batch.check_open()
        plain, place = self._encoding.key(key)
        self._set(place, (plain, None))

    def _set(self, place: SortKey, entry: Entry) -> None:
        self._before_unit.setdefault(place, self._entries.get(place))
        self._entries[place] = entry

    def get(self, key: Key, default: Any = None) -> Any:
        """The value of a key, or `default`."""
        self._batch.check_open()
        plain, place = self._encoding.key(key)
        entry = self._entries.get(place)
        if entry is not None:
            return default if entry[1] is None else self._encoding.loaded(entry[1])
        return self._batch.stored(self.name, plain, default)

    def items(self, *, from_key: Key | None = None, backwards: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys and values in RocksDB's order, with the changes that the transaction had made when the iteration began.

        Args:
            from_key: Where to begin: at this key, or at the next one if it is missing.
            backwards: From the last key to the first; begins at `from_key`, or at the one before it if it is missing.
        """
        self._batch.check_open()
        first, start = (None, None) if from_key is None else self._encoding.key(from_key)
        stored = self._batch.stored_items(self.name, first, backwards=backwards)
        return merged(stored, dict(self._entries), self._encoding, start=start, backwards=backwards)

    def keys(self, *, from_key: Key | None = None, backwards: bool = False) -> Iterator[Any]:
        """The keys; see `items`."""
        return (key for key, _ in self.items(from_key=from_key, backwards=backwards))

    def values(self, *, from_key: Key | None = None, backwards: bool = False) -> Iterator[Any]:
        """The values; see `items`."""
        return (value for _, value in self.items(from_key=from_key, backwards=backwards))

    def changes(self) -> list[Entry]:
        """What the commit writes."""
        return list(self._entries.values())

    def begin_unit(self) -> None:
        """Begin a unit: `undo_unit` does not undo the changes made so far."""
        self._before_unit.clear()

    def undo_unit(self) -> None:
        """Undo the changes since `begin_unit`."""
        for place, entry in self._before_unit.items():
            if entry is None:
                del self._entries[place]
            else:
                self._entries[place] = entry
        self._before_unit.clear()

    @property
    def _encoding(self) -> Encoding:
        return self._batch.encoding

    def __getitem__(self, key: Key) -> Any:
        value = self.get(key, _MISSING)
        if value is _MISSING:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Key, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: Key) -> None:
        self.delete(key)

    def __contains__(self, key: Key) -> bool:
        return self.get(key, _MISSING) is not _MISSING

    def __iter__(self) -> Iterator[Any]:
        return self.keys()


class TransactionBatch(Batch):
    """The transaction as its user sees it: `tx.db`.

    `tx.db[key]` and the other methods use the column family `default`; `cf="orders"` selects another one, and
    `column_family("orders")` returns one family with the same methods. See ColumnFamilyBatch. Nothing is in the database before
    the writer commits.

    Args:
        database: Where it will be written.
        encoding: Which keys and values the database accepts.
        transactional_id: For the errors.
    """

    def __init__(self, database: OpenDatabase, encoding: Encoding, transactional_id: str) -> None:
        super().__init__(transactional_id)
        self.encoding = encoding
        self._database = database
        self._families: dict[str, ColumnFamilyBatch] = {}
        self._requests: dict[str, LockRequest] = {}

    def column_family(self, name: str) -> ColumnFamilyBatch:
        """One column family.

        Raises:
            UsageError: There is no such column family, or it is the one with the rows of the store.
        """
        self.check_open()
        found = self._families.get(name)
        if found is None:
            if name == STATE_FAMILY:
                raise UsageError(
                    f"The column family {STATE_FAMILY} belongs to dualwrite, which writes to it itself.",
                    transactional_id=self._transactional_id,
                    next_step="`dualwrite status` shows what is in it",
                )
            self._database.family(name)
            found = self._families[name] = ColumnFamilyBatch(name, self)
        return found

    def put(self, key: Key, value: Any, cf: str = DEFAULT_FAMILY) -> None:
        self.column_family(cf).put(key, value)

    def delete(self, key: Key, cf: str = DEFAULT_FAMILY) -> None:
        self.column_family(cf).delete(key)

    def get(self, key: Key, default: Any = None, cf: str = DEFAULT_FAMILY) -> Any:
        return self.column_family(cf).get(key, default)

    def items(
        self, cf: str = DEFAULT_FAMILY, *, from_key: Key | None = None, backwards: bool = False
    ) -> Iterator[tuple[Any, Any]]:
        return self.column_family(cf).items(from_key=from_key, backwards=backwards)

    def __getitem__(self, key: Key) -> Any:
        return self.column_family(DEFAULT_FAMILY)[key]

    def __setitem__(self, key: Key, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: Key) -> None:
        self.delete(key)

    def __contains__(self, key: Key) -> bool:
        return key in self.column_family(DEFAULT_FAMILY)

    # --- what only the writer may do --------------------------------------------------------------------------------------

    def rollback(self) -> NoReturn:
        """Refused."""
        self._refuse("rollback()")

    def write(self, *_: Any, **__: Any) -> NoReturn:
        """Refused."""
        self._refuse("write()")

    def clear(self) -> NoReturn:
        """Refused."""
        self._refuse("clear()")

    def close(self) -> NoReturn:
        """Refused."""
        self._refuse("close()")

    # --- for the transaction and its column families ----------------------------------------------------------------------

    def lock(self, name: str, doing: str, timeout: float) -> None:
        """Lock a name that is no id until the transaction ends; locking it again has no effect.

        Raises:
            ClaimTimeoutError: Another transaction of this process held it for that long.
        """
        self.check_open()
        if name not in self._requests:
            self._requests[name] = request = LockRequest(name, doing, is_id=False)
            self._database.locks.acquire(request, timeout)

    def end(self) -> None:
        """Also releases its locks."""
        super().end()
        for request in self._requests.values():
            request.release()

    def begin_unit(self) -> None:
        for family in self._families.values():
            family.begin_unit()

    def undo_unit(self) -> None:
        for family in self._families.values():
            family.undo_unit()

    def changes(self) -> Changes:
        """All changes, by column family."""
        return {name: family.changes() for name, family in self._families.items()}

    def stored(self, family: str, key: Key, default: Any) -> Any:
        """The value in the database."""
        handle = self._database.family(family)
        with self._reading(family):
            return handle.get(key, default)

    def stored_items(self, family: str, start: Key | None, *, backwards: bool) -> Iterator[tuple[Any, Any]]:
        """The items in the database, as of the first step."""
        rows = self._database.family(family).items(backwards=backwards, from_key=start)
        while True:
            self.check_open()
            with self._reading(family):
                row = next(rows, None)
            if row is None:
                return
            yield row

    @contextmanager
    def _reading(self, family: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_undecodable(error):  # among others, what unpickling raises
                raise
            doing = f"reading the column family {family!r}"
            raise self._database.failed(doing, error, self._transactional_id) from error
