"""Compression of a batch's records, in the formats that Kafka's brokers and consumers read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, TypeAlias

from dualwrite.errors import ConfigurationError, MissingDependencyError

Data: TypeAlias = bytes | bytearray | memoryview

NAMES: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""The values of `compression.type`, indexed by their code in a batch's attributes."""

_LOWEST_LEVEL: Final = -1
_HIGHEST_LEVELS: Final = {"none": 12, "gzip": 9, "snappy": 0, "lz4": 12, "zstd": 12}  # from librdkafka's CONFIGURATION.md
_DEFAULT_LEVELS: Final = {"gzip": zlib.Z_DEFAULT_COMPRESSION, "lz4": 0, "zstd": 3}

_GZIP: Final = 31  # zlib's window of 15 bits, plus 16 for a gzip header

# Java's snappy uses its own framing (xerial's snappy-java): magic, version 1, readable since version 1; then blocks, each
# preceded by its length. Java writes blocks of 32 KiB by default and reads any size. Ours are larger: the GIL is released for
# each block, and another busy thread then keeps it for 5 ms.
_SNAPPY_MAGIC: Final = b"\x82SNAPPY\0"
_SNAPPY_START: Final = _SNAPPY_MAGIC + b"\0\0\0\x01\0\0\0\x01"
_SNAPPY_BLOCK: Final = 1 << 20
_SNAPPY_LENGTH: Final = 4

_Functions: TypeAlias = tuple[Callable[[Data], bytes], Callable[[Data], bytes]]


@dataclass(frozen=True, slots=True)
class Compression:
    """One of `NAMES`, at one level, with its code in a batch's attributes; for all records of a batch at once."""

    name: str
    code: int
    compress: Callable[[Data], bytes] = field(repr=False, compare=False)
    decompress: Callable[[Data], bytes] = field(repr=False, compare=False)


def compression_by_name(name: str, level: int | str | None = None) -> Compression:
    """The compression for librdkafka's settings `compression.type` and `compression.level`.

    The level must be in the range from CONFIGURATION.md; -1 and None mean the codec's default.

    Raises:
        ConfigurationError: The name is unknown, or the codec does not have the level.
        MissingDependencyError: The package for the codec is not installed.
    """
    known = name.lower() if isinstance(name, str) else name  # librdkafka ignores the case
    if known not in NAMES:
        raise ConfigurationError(f"Unknown compression.type {name!r}.", next_step=f"use one of {', '.join(NAMES)}")
    number = _checked_level(known, level)
    if number == _LOWEST_LEVEL:
        number = _DEFAULT_LEVELS.get(known, number)
    return Compression(known, NAMES.index(known), *_MAKERS[known](number))


def _checked_level(name: str, level: Any) -> int:
    if level is None:
        return _LOWEST_LEVEL
    try:
        number = int(level)
    except (TypeError, ValueError):
        raise ConfigurationError(f"compression.level is {level!r}; it must be an integer.") from None
    highest = _HIGHEST_LEVELS[name]
    if not _LOWEST_LEVEL <= number <= highest:
        raise ConfigurationError(
            f"compression.level is {level!r}, which {name} does not support.",
            next_step="remove compression.level" if not highest else f"use -1 (the default), or 0 to {highest}",
        )
    return number


# --- one pair of functions per codec ----------------------------------------------------------------------------------


def _none(_level: int) -> _Functions:
    return bytes, bytes


def _gzip(level: int) -> _Functions:
    return lambda data: zlib.compress(data, level, _GZIP), lambda data: zlib.decompress(data, _GZIP)


def _snappy(_level: int) -> _Functions:
    codec = _cramjam("snappy").snappy

    def compress(data: Data) -> bytes:
        parts = [_SNAPPY_START]
        with memoryview(data) as whole:
            for at in range(0, len(whole), _SNAPPY_BLOCK):
                block = bytes(codec.compress_raw(whole[at : at + _SNAPPY_BLOCK]))
                parts += (len(block).to_bytes(_SNAPPY_LENGTH), block)
        return b"".join(parts)

    def decompress(data: Data) -> bytes:
        if bytes(data[: len(_SNAPPY_MAGIC)]) != _SNAPPY_MAGIC:  # librdkafka writes one block without Java's framing
            return bytes(codec.decompress_raw(bytes(data)))
        parts = []
        with memoryview(data) as whole:
            at = len(_SNAPPY_START)
            while at < len(whole):
                begin = at + _SNAPPY_LENGTH
                at = begin + int.from_bytes(whole[at:begin])
                parts.append(bytes(codec.decompress_raw(whole[begin:at])))
        return b"".join(parts)

    return compress, decompress


def _lz4(level: int) -> _Functions:
    codec = _cramjam("lz4").lz4

    def compress(data: Data) -> bytes:
        # Java's KafkaLZ4BlockInputStream refuses blocks that depend on earlier ones.
        compressor = codec.Compressor(level=level, content_checksum=False, block_linked=False)
        compressor.compress(bytes(data))  # before cramjam 2.14 it accepts only bytes
        return bytes(compressor.finish())

    return compress, lambda data: bytes(codec.decompress(data))


def _zstd(level: int) -> _Functions:
    codec = _cramjam("zstd").zstd
    return lambda data: bytes(codec.compress(data, level)), lambda data: bytes(codec.decompress(data))


def _cramjam(name: str) -> ModuleType:
    try:
        import cramjam  # noqa: PLC0415  (optional: most users compress nothing)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"compression.type {name!r} requires the Python package 'cramjam', which is not installed.",
            next_step="pip install 'dualwrite[compression]'",
        ) from error
    return cramjam


_MAKERS: Final[dict[str, Callable[[int], _Functions]]] = {
    "none": _none,
    "gzip": _gzip,
    "snappy": _snappy,
    "lz4": _lz4,
    "zstd": _zstd,
}
