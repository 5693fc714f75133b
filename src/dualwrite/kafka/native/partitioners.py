"""Partitioners: the functions of librdkafka's setting `partitioner` (rdkafka_msg.c), with identical results.

In a topic written by librdkafka, the Java client (`murmur2_random`) or Sarama (`fnv1a_random`), keys keep their partitions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeAlias
from zlib import crc32

from dualwrite.deadline import CHANCE
from dualwrite.errors import ConfigurationError

Partitioner: TypeAlias = Callable[[bytes | None, int], int | None]
"""Maps a key and the number of partitions to a partition; None means any: the producer picks one and keeps it for a while."""

_WORD: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF

_CACHED_KEYS: Final = 1 << 15
_MAX_CACHED_KEY_BYTES: Final = 128  # bytes: limits a full cache to a few megabytes


def partitioner_by_name(name: Any) -> Partitioner:
    """The function for a value of `partitioner`; librdkafka's default is `consistent_random`.

    Raises:
        ConfigurationError: The name is unknown.
    """
    found = _PARTITIONERS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigurationError(f"Unknown partitioner {name!r}.", next_step=f"use one of {', '.join(_PARTITIONERS)}")
    return found


def murmur2(key: bytes) -> int:
    """The hash of Java's default partitioner, before its top bit is cleared."""
    factor = 0x5BD1E995
    length = len(key)
    whole = length // 4
    found = 0x9747B28C ^ length
    for word in struct.unpack_from(f"<{whole}I", key):
        mixed = word * factor & _WORD
        found = found * factor & _WORD ^ (mixed ^ mixed >> 24) * factor & _WORD
    if length % 4:
        found = (found ^ int.from_bytes(key[whole * 4 :], "little")) * factor & _WORD
    found = (found ^ found >> 13) * factor & _WORD
    return found ^ found >> 15


def fnv1a(key: bytes) -> int:
    """FNV-1a as Sarama uses it: the absolute value of the signed 32-bit hash."""
    found = 0x811C9DC5
    for byte in key:
        found = (found ^ byte) * 0x01000193 & _WORD
    return found if found <= _POSITIVE else -found & _WORD


# Hashing ten bytes in Python takes a microsecond, twice as long as encoding the record; in most topics keys repeat.
_known_murmur2: Final = lru_cache(_CACHED_KEYS)(murmur2)
_known_fnv1a: Final = lru_cache(_CACHED_KEYS)(fnv1a)


def _random(key: bytes | None, partitions: int) -> int | None:
    return None if key is None else CHANCE.randrange(partitions)


def _consistent(key: bytes | None, partitions: int) -> int:
    return crc32(key or b"") % partitions


def _consistent_random(key: bytes | None, partitions: int) -> int | None:
    return crc32(key) % partitions if key else None  # the only one that treats an empty key as no key


def _murmur2(key: bytes | None, partitions: int) -> int:
    key = key or b""
    found = _known_murmur2(key) if len(key) <= _MAX_CACHED_KEY_BYTES else murmur2(key)
    return (found & _POSITIVE) % partitions


def _murmur2_random(key: bytes | None, partitions: int) -> int | None:
    return None if key is None else _murmur2(key, partitions)


def _fnv1a(key: bytes | None, partitions: int) -> int:
    key = key or b""
    return (_known_fnv1a(key) if len(key) <= _MAX_CACHED_KEY_BYTES else fnv1a(key)) % partitions


def _fnv1a_random(key: bytes | None, partitions: int) -> int | None:
    return None if key is None else _fnv1a(key, partitions)


_PARTITIONERS: Final[dict[str, Partitioner]] = {
    "random": _random,
    "consistent": _consistent,
    "consistent_random": _consistent_random,
    "murmur2": _murmur2,
    "murmur2_random": _murmur2_random,
    "fnv1a": _fnv1a,
    "fnv1a_random": _fnv1a_random,
}
