"""Transactional record batches of version 2 (KIP-98) with the producer's timestamps, encoded when a batch is full."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

from crc32c import crc32c

from dualwrite.errors import UsageError
from dualwrite.kafka.base import Headers
from dualwrite.kafka.client.compression import NAMES, Compression, compression_by_name
from dualwrite.kafka.client.record_batches import RawRecord, read_records
from dualwrite.kafka.messages import header_list


def unsigned_varint(number: int) -> bytes:
    """Encode a non-negative number, as flexible requests do for lengths (KIP-482)."""
    if number < 1 << 7:
        return bytes((number,))
    if number < 1 << 14:
        return bytes((number & 0x7F | 0x80, number >> 7))
    if number < 1 << 21:
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))
    if number < 1 << 28:
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14 & 0x7F | 0x80, number >> 21))
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80)) + unsigned_varint(number >> 14)


def signed_varint(number: int) -> bytes:
    """Encode a signed 64-bit number, as records do for lengths, counts and deltas (KIP-98)."""
    return unsigned_varint(number << 1 ^ number >> 63)


SMALL: Final = 1 << 14
"""`SIGNED` contains the numbers below this: most lengths, and every offset in a batch of librdkafka's default size."""

SIGNED: Final[tuple[bytes, ...]] = tuple(map(signed_varint, range(SMALL)))
"""`SIGNED[number] == signed_varint(number)`, ten times as fast."""

_SIZES: Final[tuple[int, ...]] = tuple(number + len(encoded) for number, encoded in enumerate(SIGNED))
"""The bytes of a key or a value of each length, including its encoded length."""


# The header has two parts, since the checksum covers what follows it:
# base offset, length of what follows, partition leader epoch, version, checksum
_UP_TO_CHECKSUM: Final = struct.Struct(">qiibI")
# attributes, last offset delta, first and greatest timestamp, producer id and epoch, base sequence, number of records
_AFTER_CHECKSUM: Final = struct.Struct(">hiqqqhii")

BATCH_OVERHEAD: Final = _UP_TO_CHECKSUM.size + _AFTER_CHECKSUM.size
"""Bytes of a batch in addition to its records."""

_COUNTED_LENGTH: Final = BATCH_OVERHEAD - 12  # the length does not include the base offset and itself
_NO_LEADER_EPOCH: Final = -1
_VERSION: Final = 2
_TRANSACTIONAL: Final = 0x10
_COMPRESSION_BITS: Final = 0x07
_GREATEST_SEQUENCE: Final = 2**31 - 1

_NO_ATTRIBUTES: Final = b"\0"
NULL: Final = signed_varint(-1)  # in place of a length
NO_HEADERS: Final = signed_varint(0)
_known_names: Final[dict[str, bytes]] = {}  # names of headers, encoded: producers reuse a few
_MAX_KNOWN_NAMES: Final = 1 << 10
_NOTHING: Final = b""
_join: Final = b"".join

RECORD_OVERHEAD: Final = 40
"""Maximum bytes of a record without headers, in addition to key and value: attributes, time delta, offset, four lengths."""

WITHOUT_HEADERS: Final = RECORD_OVERHEAD - len(NO_HEADERS)
"""Maximum bytes of a record in addition to key, value and encoded headers."""

Record = tuple[bytes | None, bytes | None, bytes, int]
"""Key, value, encoded headers, timestamp in milliseconds."""


class BatchBuilder:
    """The records of one batch for one partition, encoded together when it is built. Not thread-safe.

    Attributes:
        records: The records; the producer's hot path appends to this list directly, and updates `size`.
        size: An upper bound for the bytes of the encoded records: the sum of `size_bound`.
    """

    __slots__ = ("records", "size")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.size = 0

    @property
    def count(self) -> int:
        """The number of records so far."""
        return len(self.records)

    def append(self, key: bytes | None, value: bytes | None, headers: Headers | None, timestamp_ms: int) -> None:
        """Add one record."""
        encoded = encoded_headers(headers) if headers else NO_HEADERS
        self.size += size_bound(key, value, encoded)
        self.records.append((key, value, encoded, timestamp_ms))

    def build(self, *, producer_id: int, epoch: int, base_sequence: int, compression: Compression) -> bytes:
        """The batch in the format of a Produce request. May be called again, for example with another epoch.

        Records that compression does not make smaller are sent uncompressed, as by librdkafka.

        Raises:
            UsageError: There are no records.
        """
        if not self.records:
            raise UsageError("A batch must have at least one record.")
        encoded, greatest = _encoded_records(self.records)
        times = (self.records[0][3], greatest)
        return _batch(encoded, times, len(self.records), producer_id, epoch, base_sequence, compression)


class EncodedRecords:
    """The concatenated records of one batch, with the same timestamp; replaces a BatchBuilder when the batch is built."""

    __slots__ = ("_content", "_timestamp_ms", "count", "size")

    def __init__(self, content: bytes, count: int, timestamp_ms: int, size: int) -> None:
        self._content = content
        self._timestamp_ms = timestamp_ms
        self.count = count
        self.size = size

    def build(self, *, producer_id: int, epoch: int, base_sequence: int, compression: Compression) -> bytes:
        times = (self._timestamp_ms, self._timestamp_ms)
        return _batch(self._content, times, self.count, producer_id, epoch, base_sequence, compression)


def _batch(
    encoded: bytes,
    times: tuple[int, int],
    count: int,
    producer_id: int,
    epoch: int,
    base_sequence: int,
    compression: Compression,
) -> bytes:
    """The records with the batch header; `times` are the first and the greatest timestamp."""
    attributes = _TRANSACTIONAL
    if compression.code:
        compressed = compression.compress(encoded)
        if len(compressed) < len(encoded):
            encoded = compressed
            attributes |= compression.code
    rest = _AFTER_CHECKSUM.pack(attributes, count - 1, *times, producer_id, epoch, base_sequence, count)
    # Keep the GIL: the checksum of a megabyte takes 50 µs, reacquiring the GIL up to 5 ms.
    checksum = crc32c(encoded, crc32c(rest), gil_release_mode=0)
    first = _UP_TO_CHECKSUM.pack(0, _COUNTED_LENGTH + len(encoded), _NO_LEADER_EPOCH, _VERSION, checksum)
    return _join((first, rest, encoded))


def next_sequence(base: int, count: int) -> int:
    """The sequence number `count` records after `base`; wraps from 2^31-1 to 0, as in Java's DefaultRecordBatch."""
    return (base + count) & _GREATEST_SEQUENCE


def split(batch: bytes) -> list[BatchBuilder]:
    """Split a batch that `build` made, and a broker rejects as too large, into two of about equal size, in order.

    A batch of one record stays whole.
    """
    read = _read(batch)
    sizes = [size_bound(key, value, headers) for key, value, headers, _ in read]
    half = sum(sizes) / 2
    builders = [BatchBuilder()]
    for record, size in zip(read, sizes, strict=True):
        if len(builders) == 1 and builders[0].records and builders[0].size + size > half:
            builders.append(BatchBuilder())
        builders[-1].records.append(record)
        builders[-1].size += size
    return builders


def timestamps(batch: bytes, indices: Sequence[int]) -> list[int]:
    """The timestamps of these records of a batch that `build` made; those of all if there are no indices."""
    found = [timestamp for *_, timestamp in _read(batch)]
    return [found[index] for index in indices] or found


def _read(batch: bytes) -> list[RawRecord]:
    attributes, _, first_timestamp, *_, count = _AFTER_CHECKSUM.unpack_from(batch, _UP_TO_CHECKSUM.size)
    records = compression_by_name(NAMES[attributes & _COMPRESSION_BITS]).decompress(batch[BATCH_OVERHEAD:])
    return read_records(records, count, first_timestamp)


def size_bound(key: bytes | None, value: bytes | None, headers: bytes) -> int:
    """An upper bound for the bytes of an encoded record; `headers` are encoded."""
    size = WITHOUT_HEADERS + len(headers)
    if key is not None:
        size += len(key)
    if value is not None:
        size += len(value)
    return size


def encoded_headers(headers: Headers) -> bytes:
    """The headers as they are in a record, preceded by their number.

    Raises:
        InvalidMessageError: See `header_list`.
    """
    kind = type(headers)
    if kind is list or kind is tuple:
        pairs: Any = headers
    elif kind is dict:
        pairs = headers.items()  # type: ignore[union-attr]  # it is a dict
    else:
        return _any_headers(headers)
    try:
        parts = [SIGNED[len(pairs)]]
        for name, content in pairs:
            if type(content) is bytes:
                parts += (_known_names[name], SIGNED[len(content)], content)
            elif type(content) is str:
                encoded = content.encode()
                parts += (_known_names[name], SIGNED[len(encoded)], encoded)
            else:
                return _any_headers(headers)
        return _join(parts)
    except (LookupError, TypeError, ValueError):  # a new name, a long value, or invalid
        return _any_headers(headers)


def _any_headers(headers: Headers) -> bytes:
    listed = header_list(headers) or []
    parts = [_varint(len(listed))]
    for name, content in listed:
        encoded_name = _known_names.get(name)
        if encoded_name is None:
            if len(_known_names) >= _MAX_KNOWN_NAMES:
                _known_names.clear()
            encoded = name.encode()
            encoded_name = _known_names[name] = _varint(len(encoded)) + encoded
        if content is None:
            parts += (encoded_name, NULL)
        else:
            parts += (encoded_name, _varint(len(content)), content)
    return _join(parts)


def _encoded_records(records: list[Record]) -> tuple[bytes, int]:
    """The concatenated records, and the greatest timestamp.

    A quarter to two fifths of a microsecond per record, also if each has another length, headers and time: the table has what
    is looked up for it.
    """
    first_timestamp = greatest = previous = records[0][3]
    time = _NO_ATTRIBUTES + SIGNED[0]
    parts: list[bytes] = []
    offsets: Iterable[bytes]
    key: bytes | None
    value: bytes | None
    offsets = SIGNED if len(records) <= SMALL else chain(SIGNED, map(signed_varint, range(SMALL, len(records))))
    for offset, (key, value, headers, timestamp) in zip(offsets, records, strict=False):
        if timestamp != previous:
            previous = timestamp
            if timestamp > greatest:  # noqa: PLR1730  (a call would cost as much as the rest)
                greatest = timestamp
            delta = timestamp - first_timestamp
            time = _NO_ATTRIBUTES + (SIGNED[delta] if 0 <= delta < SMALL else signed_varint(delta))
        try:
            if value is None:
                parts += _any_record(time, offset, key, value, headers)
            elif key is None:
                size = len(value)
                length = _SIZES[size] + len(time) + len(offset) + len(headers) + 1
                parts += (SIGNED[length], time, offset, NULL, SIGNED[size], value, headers)
            else:
                size, key_size = len(value), len(key)
                length = _SIZES[size] + _SIZES[key_size] + len(time) + len(offset) + len(headers)
                parts += (SIGNED[length], time, offset, SIGNED[key_size], key, SIGNED[size], value, headers)
        except IndexError:  # it is longer than the table
            parts += _any_record(time, offset, key, value, headers)
    return _join(parts), greatest


def _any_record(time: bytes, offset: bytes, key: bytes | None, value: bytes | None, headers: bytes) -> tuple[bytes, ...]:
    """The parts of a record with null, or of any length; `time` follows its attributes."""
    key_size = NULL if key is None else _varint(len(key))
    size = NULL if value is None else _varint(len(value))
    rest = (time, offset, key_size, key or _NOTHING, size, value or _NOTHING, headers)
    return (_varint(sum(map(len, rest))), *rest)


def _varint(number: int) -> bytes:
    return SIGNED[number] if 0 <= number < SMALL else signed_varint(number)
