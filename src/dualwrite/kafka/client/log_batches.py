"""Record batches, as a Fetch returns them (record batch version 2): their producers, and the outcome in a marker. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# base offset, length, partition leader epoch, magic, checksum, attributes, last offset delta, first and greatest timestamp,
# producer id and epoch (record batch version 2)
_BATCH_HEADER: Final = struct.Struct(">qiibIhiqqqh")
_RECORDS_AT: Final = 61  # after the base sequence and the number of records
_LENGTH_AT: Final = 12  # the first byte that the length counts
_MAGIC: Final = 2
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_COMMIT: Final = 1
_MARKER_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """The header of a record batch, and the first bytes of its content.

    Args:
        base_offset: The offset of its first record.
        last_offset: The offset of its last record.
        first_timestamp_ms: The timestamp of its first record.
        producer_id: The producer that wrote it; -1 for one without an id.
        epoch: The producer's epoch.
        is_transactional: Whether it is part of a transaction, or a marker.
        is_control: Whether it is a marker.
        content: The first bytes of its records.
    """

    base_offset: int
    last_offset: int
    first_timestamp_ms: int
    producer_id: int
    epoch: int
    is_transactional: bool
    is_control: bool
    content: bytes

    @property
    def commits(self) -> bool:
        """Whether it is a COMMIT marker. A control record's key: version and type, 16 bits each; type 0 is ABORT, 1 COMMIT."""
        at = _after_varint(self.content, 0) + 1  # the record's length, its attributes
        for _ in range(3):  # the deltas of time and offset, the length of the key
            at = _after_varint(self.content, at)
        return bool(struct.unpack_from(">hh", self.content, at)[1] == _COMMIT)


def batches(records: bytes | None) -> Iterator[Batch]:
    """The batches of a Fetch response that have a complete header; the last one may be truncated."""
    data = records or b""
    at = 0
    while len(data) - at >= _RECORDS_AT:
        base, length, _, magic, _, attributes, last_delta, first_ms, _, producer_id, epoch = _BATCH_HEADER.unpack_from(data, at)
        if magic != _MAGIC:
            return
        content = bytes(data[at + _RECORDS_AT : at + _RECORDS_AT + _MARKER_BYTES])
        kinds = bool(attributes & _TRANSACTIONAL), bool(attributes & _CONTROL)
        yield Batch(base, base + last_delta, first_ms, producer_id, epoch, *kinds, content)
        at += _LENGTH_AT + length


def _after_varint(content: bytes, at: int) -> int:
    while content[at] & 0x80:
        at += 1
    return at + 1
