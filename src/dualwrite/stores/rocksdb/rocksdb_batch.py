"""What users write with: changes in any column family, buffered until the commit and visible to the transaction's reads."""

from __future__ import annotations

import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.errors import UsageError
from dualwrite.stores.key_values import ChangeBatch
from dualwrite.stores.rocksdb.database import OUR_FAMILIES, Changes, OpenDatabase, Pickled, Scalar
from dualwrite.stores.rocksdb.opening import DEFAULT_FAMILY, is_undecodable
from dualwrite.stores.store_transaction import refused

SortKey = tuple[int, bytes | int]
"""Compares as RocksDB's keys do."""

Entry = tuple[Scalar, Scalar | Pickled | None]
"""A changed key and its new value; None if it was deleted."""

_MISSING: Final = object()
_BYTES, _STR, _INT, _FLOAT, _BOOL = range(1, 6)
_DOUBLE: Final = struct.Struct(">d")


# --- keys and values in rocksdict's raw mode, and otherwise --------------------------------------------------------------


def loaded(value: Scalar | Pickled) -> Any:
    """What a read of a buffered value returns."""
    return pickle.loads(value.data) if isinstance(value, Pickled) else value  # noqa: S301  (pickled by `Encoding.value`)


@dataclass(frozen=True, slots=True)
class Encoding:
    """Which keys and values a database accepts, and how they are encoded."""

    raw: bool

    def key(self, key: Any) -> tuple[Scalar, SortKey]:
        """The key as the database returns it, and its place in the order.

        Raises:
            UsageError: Its type can't be a key.
        """
        if self.raw:
            plain = self._bytes(key, "key")
            return plain, (_BYTES, plain)
        scalar = _scalar(key)
        match scalar:
            case None:
                raise UsageError(
                    f"A key of this database can't be a {type(key).__name__}.", next_step="use bytes, str, int, float or bool"
                )
            case bool():
                return scalar, (_BOOL, bytes([scalar]))
            case bytes():
                return scalar, (_BYTES, scalar)
            case str():
                return scalar, (_STR, _utf8(scalar))
            case int():
                return scalar, (_INT, scalar)
            case _:
                return scalar, (_FLOAT, _DOUBLE.pack(scalar))

    def value(self, value: Any) -> Scalar | Pickled:
        """The value as it is buffered until the commit.

        Raises:
            UsageError: Its type can't be a value.
            Exception: What pickling the value raises.
        """
        if self.raw:
            return self._bytes(value, "value")
        scalar = _scalar(value)
        if scalar is None:
            return Pickled(pickle.dumps(value))
        if isinstance(scalar, str):
            _utf8(scalar)
        return scalar

    def _bytes(self, given: Any, what: str) -> bytes:
        if isinstance(given, bytes):
            return given if type(given) is bytes else bytes(memoryview(given))
        raise UsageError(
            f"A {what} of this database must be bytes, not {type(given).__name__}: it is in rocksdict's raw mode.",
            next_step=f"encode the {what}; or create a new database with Options(raw_mode=False), which accepts Python types "
            "but can't be read by RocksDB clients in other languages",
        )


def _scalar(given: Any) -> Scalar | None:
    """The value, if rocksdict has a type for it: bool before int, and the plain value of a subclass; None if it has none."""
    if isinstance(given, bool):
        return given
    if isinstance(given, bytes):
        return given if type(given) is bytes else bytes(memoryview(given))
    for kind in (str, int, float):
        if isinstance(given, kind):
            plain: Scalar = given if type(given) is kind else getattr(kind, f"__{kind.__name__}__")(given)
            return plain
    return None


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text[:100]!r} can't be stored: it can't be encoded in UTF-8.", cause=str(error)) from error


# --- the batch ----------------------------------------------------------------------------------------------------------------


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
            yield from _shown(entries[changed.pop()])
        if changed and changed[-1] == place:
            yield from _shown(entries[changed.pop()])
        else:
            yield key, value
    while changed:
        yield from _shown(entries[changed.pop()])


def _shown(entry: Entry) -> Iterator[tuple[Any, Any]]:
    key, value = entry
    if value is not None:
        yield key, loaded(value)


class _LikeADict(ABC):
    """`d[key]`, `d[key] = value`, `del d[key]` and `key in d`."""

    @abstractmethod
    def put(self, key: Scalar, value: Any) -> None: ...

    @abstractmethod
    def delete(self, key: Scalar) -> None: ...

    @abstractmethod
    def get(self, key: Scalar, default: Any = None) -> Any: ...

    def __getitem__(self, key: Scalar) -> Any:
        value = self.get(key, _MISSING)
        if value is _MISSING:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Scalar, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: Scalar) -> None:
        self.delete(key)

    def __contains__(self, key: Scalar) -> bool:
        return self.get(key, _MISSING) is not _MISSING


class ColumnFamilyBatch(_LikeADict):
    """One column family inside the transaction: a dict whose changes are written when the transaction commits.

    Keys and values are those the database accepts: bytes in rocksdict's raw mode, otherwise bytes, str, int, float and bool for
    keys, and anything that can be pickled for values (by `pickle`, also if the Rdict has another function for that). Reads see
    this transaction's changes, and otherwise what is committed at that moment: there is no snapshot, and no check for
    concurrent writes of the same keys.

    Args:
        name: The column family.
        batch: The transaction's batch, which this belongs to.
    """

    def __init__(self, name: str, batch: TransactionBatch) -> None:
        self.name = name
        self._batch = batch
        self._entries: dict[SortKey, Entry] = {}
        self._before_unit: dict[SortKey, Entry | None] = {}  # what `undo_unit` restores

    def put(self, key: Scalar, value: Any) -> None:
        """Set a key to a value; the value is copied now, so later changes to a list, for example, have no effect.

        Raises:
            UsageError: The database can't store the key or the value.
            Exception: What pickling the value raises.
        """
        self._batch.check_open()
        plain, place = self._encoding.key(key)
        self._set(place, (plain, self._encoding.value(value)))

    def delete(self, key: Scalar) -> None:
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

    def get(self, key: Scalar, default: Any = None) -> Any:
        """The value of a key, or `default`."""
        self._batch.check_open()
        plain, place = self._encoding.key(key)
        entry = self._entries.get(place)
        if entry is not None:
            return default if entry[1] is None else loaded(entry[1])
        return self._batch.stored(self.name, plain, default)

    def items(self, *, from_key: Scalar | None = None, backwards: bool = False) -> Iterator[tuple[Any, Any]]:
        """Keys and values in RocksDB's order, with the changes that the transaction had made when the iteration began.

        Args:
            from_key: Where to begin: at this key, or at the next one if it is missing.
            backwards: From the last key to the first; begins at `from_key`, or at the one before it if it is missing.
        """
        self._batch.check_open()
        first, start = (None, None) if from_key is None else self._encoding.key(from_key)
        stored = self._batch.stored_items(self.name, first, backwards=backwards)
        return merged(stored, dict(self._entries), self._encoding, start=start, backwards=backwards)

    def keys(self, *, from_key: Scalar | None = None, backwards: bool = False) -> Iterator[Any]:
        """The keys; see `items`."""
        return (key for key, _ in self.items(from_key=from_key, backwards=backwards))

    def values(self, *, from_key: Scalar | None = None, backwards: bool = False) -> Iterator[Any]:
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

    def __iter__(self) -> Iterator[Any]:
        return self.keys()


class TransactionBatch(ChangeBatch, _LikeADict):
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

    def column_family(self, name: str) -> ColumnFamilyBatch:
        """One column family.

        Raises:
            UsageError: There is no such column family, or it is one of dualwrite's own.
        """
        self.check_open()
        found = self._families.get(name)
        if found is None:
            if name in OUR_FAMILIES:
                raise UsageError(
                    f"The column family {name} belongs to dualwrite, which writes to it itself.",
                    transactional_id=self._transactional_id,
                    next_step="`dualwrite status` shows what is in it",
                )
            self._database.family(name)
            found = self._families[name] = ColumnFamilyBatch(name, self)
        return found

    def put(self, key: Scalar, value: Any, cf: str = DEFAULT_FAMILY) -> None:
        self.column_family(cf).put(key, value)

    def delete(self, key: Scalar, cf: str = DEFAULT_FAMILY) -> None:
        self.column_family(cf).delete(key)

    def get(self, key: Scalar, default: Any = None, cf: str = DEFAULT_FAMILY) -> Any:
        return self.column_family(cf).get(key, default)

    def items(
        self, cf: str = DEFAULT_FAMILY, *, from_key: Scalar | None = None, backwards: bool = False
    ) -> Iterator[tuple[Any, Any]]:
        return self.column_family(cf).items(from_key=from_key, backwards=backwards)

    # --- what only the writer may do --------------------------------------------------------------------------------------

    rollback = refused("rollback()")
    write = refused("write()")
    clear = refused("clear()")
    close = refused("close()")

    # --- for the transaction and its column families ----------------------------------------------------------------------

    def begin_unit(self) -> None:
        super().begin_unit()
        for family in self._families.values():
            family.begin_unit()

    def undo_unit(self) -> None:
        super().undo_unit()
        for family in self._families.values():
            family.undo_unit()

    def changes(self) -> Changes:
        """All changes, by column family."""
        return {name: family.changes() for name, family in self._families.items()}

    def stored(self, family: str, key: Scalar, default: Any) -> Any:
        """The value in the database."""
        handle = self._database.family(family)
        with self._reading(family):
            return handle.get(key, default)

    def stored_items(self, family: str, start: Scalar | None, *, backwards: bool) -> Iterator[tuple[Any, Any]]:
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
            raise self._database.translated(error, doing, self._transactional_id) from error
