"""Which keys and values a RocksDB database accepts, and how they are ordered: in rocksdict's raw mode, and otherwise."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.errors import UsageError

Key = bytes | str | int | float | bool
SortKey = tuple[int, bytes | int]
"""Compares as RocksDB's keys do."""

_BYTES, _STR, _INT, _FLOAT, _BOOL = range(1, 6)
_DOUBLE: Final = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class Pickled:
    """A value that rocksdict stores as a pickle, pickled at the `put`: later changes to the object have no effect."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Encoding:
    """Which keys and values a database accepts, and how they are encoded.

    `dumps` turns a value that rocksdict can't encode itself into bytes, and `loads` turns these into the value again.
    """

    raw: bool
    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]

    def key(self, key: Any) -> tuple[Key, SortKey]:
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

    def value(self, value: Any) -> Key | Pickled:
        """The value as it is buffered until the commit.

        Raises:
            UsageError: Its type can't be a value.
            Exception: What `dumps` raises.
        """
        if self.raw:
            return self._bytes(value, "value")
        scalar = _scalar(value)
        if scalar is None:
            data = self.dumps(value)
            if not isinstance(data, bytes):
                raise UsageError(f"`dumps` returned a {type(data).__name__} for a value, not bytes.")
            return Pickled(data)
        if isinstance(scalar, str):
            _utf8(scalar)
        return scalar

    def loaded(self, value: Key | Pickled) -> Any:
        """What a read of a buffered value returns."""
        return self.loads(value.data) if isinstance(value, Pickled) else value

    def _bytes(self, given: Any, what: str) -> bytes:
        if isinstance(given, bytes):
            return given if type(given) is bytes else bytes(memoryview(given))
        raise UsageError(
            f"A {what} of this database must be bytes, not {type(given).__name__}: it is in rocksdict's raw mode.",
            next_step=f"encode the {what}; or create a new database with Options(raw_mode=False), which accepts Python types "
            "but can't be read by RocksDB clients in other languages",
        )


def _scalar(given: Any) -> Key | None:
    """The value, if rocksdict has a type for it: bool before int, and the plain value of a subclass; None if it has none."""
    if isinstance(given, bool):
        return given
    if isinstance(given, bytes):
        return given if type(given) is bytes else bytes(memoryview(given))
    for kind in (str, int, float):
        if isinstance(given, kind):
            plain: Key = given if type(given) is kind else getattr(kind, f"__{kind.__name__}__")(given)
            return plain
    return None


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text[:100]!r} can't be stored: it can't be encoded in UTF-8.", cause=str(error)) from error
