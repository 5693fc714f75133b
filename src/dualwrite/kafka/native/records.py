"""Transactional record batches of version 2 (KIP-98) with the producer's timestamps, encoded when a batch is full."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from crc32c import crc32c
from kafka.record.default_records import DefaultRecordBatch

from dualwrite.errors import UsageError
from dualwrite.kafka.native.compression import NAMES, Compression, compression_by_name


def unsigned_varint(number: int) -> bytes:
    """Encode a non-negative number, as flexible requests do for lengths (KIP-482)."""
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004  (what fits seven bits)
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def signed_varint(number: int) -> bytes:
    """Encode a signed 64-bit number, as records do for lengths, counts and deltas (KIP-98)."""
    return unsigned_varint(number << 1 ^ number >> 63)


SMALL: Final = 1 << 14
"""`SIGNED` contains the numbers below this: most lengths, and every offset in a batch of librdkafka's default size."""

SIGNED: Final = tuple(map(signed_varint, range(SMALL)))
"""`SIGNED[number] == signed_varint(number)`, ten times as fast."""


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
_HEADER_NAMES: Final = 1 << 10  # cached in encoded form: producers reuse a few names
_join: Final = b"".join

RECORD_OVERHEAD: Final = 40
"""Maximum bytes of a record in addition to key, value and headers: attributes, time delta, offset, four lengths."""

HEADER_OVERHEAD: Final = 10
"""Maximum bytes of a header in addition to name and value."""

Headers = Sequence[tuple[str, bytes | None]]

Record = tuple[bytes | None, bytes | None, Headers | None, int]
"""Key, value, headers, timestamp in milliseconds."""


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
        self.size += size_bound(key, value, headers)
        self.records.append((key, value, headers, timestamp_ms))

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
    """The records of one batch, already encoded; replaces a BatchBuilder when the batch is built.

    Args:
        content: The concatenated records.
        count: The number of records.
        timestamp_ms: The timestamp of all records.
        size: See BatchBuilder.
    """

    __slots__ = ("_content", "_timestamp_ms", "count", "size")

    def __init__(self, content: bytes, count: int, timestamp_ms: int, size: int) -> None:
        self._content = content
        self._timestamp_ms = timestamp_ms
        self.count = count
        self.size = size

    def build(self, *, producer_id: int, epoch: int, base_sequence: int, compression: Compression) -> bytes:
        """See BatchBuilder."""
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


def split(batch: bytes, into: int) -> list[BatchBuilder]:
    """Split a batch that `build` made into up to `into` non-empty builders of about equal size, in order.

    For a batch that a broker rejects as too large: several records are split into at least two builders, if `into` allows it.
    """
    attributes, *others = _AFTER_CHECKSUM.unpack_from(batch, _UP_TO_CHECKSUM.size)
    records = compression_by_name(NAMES[attributes & _COMPRESSION_BITS]).decompress(batch[BATCH_OVERHEAD:])
    rest = _AFTER_CHECKSUM.pack(attributes & ~_COMPRESSION_BITS, *others)
    read = [
        (r.key, r.value, r.headers, r.timestamp)
        for r in DefaultRecordBatch(_join((batch[: _UP_TO_CHECKSUM.size], rest, records)))
    ]
    sizes = [size_bound(key, value, headers) for key, value, headers, _ in read]
    share = sum(sizes) / into
    builders = [BatchBuilder()]
    for record, size in zip(read, sizes, strict=True):
        if builders[-1].records and builders[-1].size + size > share and len(builders) < into:
            builders.append(BatchBuilder())
        builders[-1].append(*record)
    return builders


def size_bound(key: bytes | None, value: bytes | None, headers: Headers | None) -> int:
    """An upper bound for the bytes of an encoded record."""
    size = RECORD_OVERHEAD + len(key or b"") + len(value or b"")
    if headers:  # a character of a name needs at most four bytes
        size += sum(HEADER_OVERHEAD + 4 * len(name) + len(content or b"") for name, content in headers)
    return size


def _encoded_records(records: list[Record]) -> tuple[bytes, int]:
    """The concatenated records, and the greatest timestamp; takes under half a microsecond per record without headers."""
    first_timestamp = greatest = previous = records[0][3]
    start = _NO_ATTRIBUTES + _varint(0)
    parts: list[bytes] = []
    alike = (-1, -1, -1)  # timestamp, length of value and encoded offset: the key of `before` and `between`
    before = between = b""
    alike_keyed = (-1, -1, -1, -1)
    before_keyed = key_part = value_part = b""
    for offset, (key, value, headers, timestamp) in enumerate(records):
        if key is None and value is not None and not headers and timestamp == previous:
            encoded_offset = SIGNED[offset] if offset < SMALL else signed_varint(offset)
            this = (timestamp, len(value), len(encoded_offset))
            if this != alike:
                alike = this
                between = NULL + _varint(len(value))
                length = len(start) + len(encoded_offset) + len(between) + len(value) + len(NO_HEADERS)
                before = _varint(length) + start
            parts += (before, encoded_offset, between, value, NO_HEADERS)
            continue
        if key is not None and value is not None and not headers and timestamp == previous:
            encoded_offset = SIGNED[offset] if offset < SMALL else signed_varint(offset)
            these = (len(key), len(value), len(encoded_offset), timestamp)
            if these != alike_keyed:
                alike_keyed = these
                key_part = _varint(len(key))
                value_part = _varint(len(value))
                length = len(start) + len(encoded_offset) + len(key_part) + len(key) + len(value_part) + len(value)
                before_keyed = _varint(length + len(NO_HEADERS)) + start
            parts += (before_keyed, encoded_offset, key_part, key, value_part, value, NO_HEADERS)
            continue
        if timestamp != previous:
            previous = timestamp
            greatest = max(greatest, timestamp)
            start = _NO_ATTRIBUTES + _varint(timestamp - first_timestamp)
        encoded_offset = SIGNED[offset] if offset < SMALL else signed_varint(offset)
        if key is None:
            key_length, content = NULL, b""
        else:
            key_length, content = (SIGNED[len(key)] if len(key) < SMALL else signed_varint(len(key))), key
        if value is None:
            value_length, value = NULL, b""  # noqa: PLW2901  (no bytes, after a length that means null)
        else:
            value_length = SIGNED[len(value)] if len(value) < SMALL else signed_varint(len(value))
        encoded_headers = _encoded_headers(headers) if headers else NO_HEADERS
        length = len(start) + len(encoded_offset) + len(key_length) + len(content) + len(value_length) + len(value)
        length += len(encoded_headers)
        record_length = SIGNED[length] if length < SMALL else signed_varint(length)
        parts += (record_length, start, encoded_offset, key_length, content, value_length, value, encoded_headers)
    return _join(parts), greatest


def _varint(number: int) -> bytes:
    return SIGNED[number] if 0 <= number < SMALL else signed_varint(number)


def _encoded_headers(headers: Headers) -> bytes:
    parts = [_varint(len(headers))]
    for name, content in headers:
        if content is None:
            parts += (_header_name(name), NULL)
        else:
            parts += (_header_name(name), _varint(len(content)), content)
    return _join(parts)


@lru_cache(_HEADER_NAMES)
def _header_name(name: str) -> bytes:
    encoded = name.encode()
    return signed_varint(len(encoded)) + encoded
