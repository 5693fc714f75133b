"""Compression of a batch's records, in the forms that Kafka's brokers and consumers read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, TypeAlias

from dualwrite.errors import ConfigurationError, MissingDependencyError

Data: TypeAlias = bytes | bytearray | memoryview

NAMES: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""The values of `compression.type`, each at the place of its code in a batch's attributes."""

_LOWEST_LEVEL: Final = -1
_HIGHEST_LEVELS: Final = {"none": 12, "gzip": 9, "snappy": 0, "lz4": 12, "zstd": 12}  # by librdkafka's CONFIGURATION.md
_DEFAULT_LEVELS: Final = {"gzip": zlib.Z_DEFAULT_COMPRESSION, "lz4": 0, "zstd": 3}

_GZIP: Final = 31  # zlib's window of 15 bits, and 16 for gzip's header

# Java's snappy has a framing of its own (xerial's snappy-java): magic, version 1, readable from version 1 on; then blocks, each
# after its length. Its blocks are of 32 KiB by default; any size is read. Ours are larger: each hands over the interpreter's
# lock, which a busy thread keeps for 5 ms.
_SNAPPY_START: Final = b"\x82SNAPPY\0\0\0\0\x01\0\0\0\x01"
_SNAPPY_BLOCK: Final = 1 << 20
_SNAPPY_LENGTH: Final = 4


@dataclass(frozen=True, slots=True)
class Compression:
    """One of `NAMES`, at one level. Both functions take a batch's records as a whole.

    Args:
        name: The value of `compression.type`.
        code: Its code in a batch's attributes.
        compress: Records to what a broker takes.
        decompress: What `compress` made, of any level, to records.
    """

    name: str
    code: int
    compress: Callable[[Data], bytes] = field(repr=False, compare=False)
    decompress: Callable[[Data], bytes] = field(repr=False, compare=False)


def compression_by_name(name: str, level: int | str | None = None) -> Compression:
    """The compression that librdkafka's settings `compression.type` and `compression.level` name.

    The level is one of CONFIGURATION.md's usable range; -1 is the codec's default, as None is.

    Raises:
        ConfigurationError: Another name, or a level that the codec does not have.
        MissingDependencyError: The package for it is not installed.
    """
    known = name.lower() if isinstance(name, str) else name  # librdkafka takes these in either case
    if known not in NAMES:
        raise ConfigurationError(f"compression.type is {name!r}.", next_step=f"one of {', '.join(NAMES)}")
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
        raise ConfigurationError(f"compression.level is {level!r}, not a number.") from None
    highest = _HIGHEST_LEVELS[name]
    if not _LOWEST_LEVEL <= number <= highest:
        raise ConfigurationError(
            f"compression.level is {level!r}, which {name} does not have.",
            next_step="leave compression.level out" if not highest else f"-1 (the default), or 0 to {highest}",
        )
    return number


# --- one pair of functions each ---------------------------------------------------------------------------------------

_Functions: TypeAlias = tuple[Callable[[Data], bytes], Callable[[Data], bytes]]


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
        compressor.compress(bytes(data))  # before cramjam 2.14 it takes nothing but bytes
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
            f"The Python package 'cramjam', for compression.type {name!r}, is not installed.",
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
