"""Record batches as they are in a partition's log: headers, checksums, markers, and the records (version 2, KIP-98)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from dualwrite.kafka.client.compression import NAMES, Compression, compression_by_name

# base offset, length, partition leader epoch, version, checksum, attributes, last offset delta, first and greatest timestamp,
# producer id and epoch, base sequence, number of records
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_LENGTH_AT: Final = 12  # the first byte that the length counts
_CHECKED_AT: Final = 21  # the first byte that the checksum covers
_VERSION_AT: Final = 16
_VERSION: Final = 2
_START: Final = struct.Struct(">qi")

_COMPRESSION: Final = 0x07
_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_COMMIT: Final = 1
_CONTROL_TYPE: Final = struct.Struct(">hh")  # the version of a control record's key, and its type
_GREATEST_SEQUENCE: Final = 2**31 - 1

RawRecord = tuple[bytes | None, bytes | None, bytes, int]
"""Key, value, encoded headers, timestamp in milliseconds."""

Headers = list[tuple[str, bytes | None]]


class DamagedBatchError(Exception):
    """The records of a batch can't be read: they do not have the form that its header describes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch. Those of a producer without an id have the producer id -1.

    Args:
        base_offset: The offset of its first record, even if compaction has removed that one.
        last_offset: The offset of its last record; likewise.
        attributes: Compression, kind of timestamps, transactional, control.
        first_timestamp_ms: The timestamp from which those of the records are counted.
        max_timestamp_ms: The greatest timestamp; with LogAppendTime, that of every record, by the leader's clock.
        producer_id: The producer.
        epoch: Its epoch.
        base_sequence: The number of its first record among those of the producer in the partition, also after compaction.
        count: How many records it has now.
        data: Its bytes from the header on; a batch at the end of a response may be truncated.
        length: How many bytes it has, if it is not truncated.
    """

    base_offset: int
    last_offset: int
    attributes: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    epoch: int
    base_sequence: int
    count: int
    data: memoryview
    length: int

    @property
    def is_transactional(self) -> bool:
        """Whether it is part of a transaction."""
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        """Whether it is a marker, which ends a transaction."""
        return bool(self.attributes & _CONTROL)

    @property
    def is_truncated(self) -> bool:
        """Whether the response ended within it."""
        return len(self.data) < self.length

    @property
    def commits(self) -> bool:
        """Whether it is a COMMIT marker. A control record's key: version and type, 16 bits each; type 0 is ABORT, 1 COMMIT."""
        at = _read_varint(self.data, _HEADER.size)[1] + 1  # the record's length, its attributes
        for _ in range(3):  # the deltas of time and offset, the length of the key
            at = _read_varint(self.data, at)[1]
        return bool(_CONTROL_TYPE.unpack_from(self.data, at)[1] == _COMMIT)

    @property
    def is_intact(self) -> bool:
        """Whether its checksum is right."""
        (expected,) = struct.unpack_from(">I", self.data, _VERSION_AT + 1)
        return bool(crc32c(self.data[_CHECKED_AT : self.length]) == expected)

    @property
    def last_sequence_end(self) -> int:
        """The sequence number of the producer's next record in the partition; wraps as in Java's DefaultRecordBatch."""
        return (self.base_sequence + self.last_offset - self.base_offset + 1) & _GREATEST_SEQUENCE

    @property
    def removed(self) -> int:
        """How many of its records compaction has removed."""
        return self.last_offset - self.base_offset + 1 - self.count

    @property
    def compression(self) -> Compression:
        """How its records are compressed.

        Raises:
            MissingDependencyError: The package for the codec is not installed.
        """
        return compression_by_name(NAMES[self.attributes & _COMPRESSION])

    def records(self) -> list[RawRecord]:
        """Its records, in order, with their own timestamps, or with that of the append if the topic has LogAppendTime.

        Raises:
            DamagedBatchError: They can't be read.
            MissingDependencyError: The package for the codec is not installed.
        """
        compression = self.compression
        try:
            data = compression.decompress(self.data[_HEADER.size : self.length])
            found = read_records(data, self.count, self.first_timestamp_ms)
        except Exception as error:  # each codec has its own exceptions
            raise DamagedBatchError(f"the batch at offset {self.base_offset} can't be decoded: {error}") from error
        if self.attributes & _APPEND_TIME:
            return [(key, value, headers, self.max_timestamp_ms) for key, value, headers, _ in found]
        return found


def batches(records: bytes | None) -> Iterator[Batch]:
    """The batches of a Fetch response that have a complete header; the last one may be truncated.

    Messages of the formats before version 2, which transactions can't have, are skipped.
    """
    data = memoryview(records or b"")
    at = 0
    while len(data) - at >= _HEADER.size:
        if data[at + _VERSION_AT] != _VERSION:
            at += _LENGTH_AT + max(_START.unpack_from(data, at)[1], 0)
            continue
        base, length, _, _, _, attributes, last_delta, first_ms, max_ms, producer_id, epoch, sequence, count = (
            _HEADER.unpack_from(data, at)
        )
        end = at + max(_LENGTH_AT + length, _HEADER.size)
        yield Batch(
            base,
            base + last_delta,
            attributes,
            first_ms,
            max_ms,
            producer_id,
            epoch,
            sequence,
            count,
            data[at:end],
            end - at,
        )
        at = end


def following_offset(records: bytes | None) -> int | None:
    """The offset from which to fetch what follows the complete batches of a response; None if it has none."""
    data = memoryview(records or b"")
    at, found = 0, None
    while len(data) - at > _VERSION_AT:
        offset, length = _START.unpack_from(data, at)
        end = at + _LENGTH_AT + max(length, 0)
        if end > len(data):
            break
        is_new = data[at + _VERSION_AT] == _VERSION and end - at >= _HEADER.size
        found = offset + 1 + (_HEADER.unpack_from(data, at)[6] if is_new else 0)
        at = end
    return found


def read_records(data: bytes, count: int, first_timestamp: int) -> list[RawRecord]:
    """The records of a batch, decompressed.

    Raises:
        IndexError, ValueError: They are not as many, or not in this form.
    """
    read: list[RawRecord] = []
    at = 0
    for _ in range(count):
        length, at = _read_varint(data, at)
        end = at + length
        delta, at = _read_varint(data, at + 1)  # after the attributes, which are not used
        _, at = _read_varint(data, at)  # the offset
        key, at = _read_bytes(data, at)
        value, at = _read_bytes(data, at)
        if not at <= end <= len(data):
            raise ValueError(f"a record of {length} bytes ends at byte {end} of {len(data)}")
        read.append((key, value, data[at:end], first_timestamp + delta))
        at = end
    return read


def read_headers(data: bytes) -> Headers | None:
    """The headers of a record, from their encoded form; None if there are none.

    Raises:
        IndexError, ValueError: They are not in this form.
    """
    count, at = _read_varint(data, 0)
    found: Headers = []
    for _ in range(count):
        name, at = _read_bytes(data, at)
        content, at = _read_bytes(data, at)
        found.append((bytes(name or b"").decode(), content))
    return found or None


def _read_bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    length, at = _read_varint(data, at)
    return (None, at) if length < 0 else (data[at : at + length], at + length)


def _read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """A signed number of variable length, and the place after it."""
    number = shift = 0
    while data[at] & 0x80:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    number |= data[at] << shift
    return number >> 1 ^ -(number & 1), at + 1
