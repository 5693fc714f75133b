"""Encodes Arrow arrays of keys and values as the records of batches, without a Python object for each message.

The bytes are the same as those of `records.BatchBuilder`, made in a third of the time. Requires pyarrow and numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualwrite.kafka.native.records import NO_HEADERS, NULL, RECORD_OVERHEAD, SIGNED, SMALL, EncodedRecords

_VARINTS: Final = pa.array(SIGNED, pa.binary())
_VARINT_SIZES: Final = np.array([len(encoded) for encoded in SIGNED], np.int32)
_ATTRIBUTES_AND_TIME: Final = b"\0\0"  # no attributes; all records have the batch's first timestamp
_MAX_RECORD_BYTES: Final = SMALL - RECORD_OVERHEAD


class RecordColumns:
    """The keys and values of messages without headers, all with the same timestamp.

    `longest` and `size` are upper bounds for the bytes of the longest record, and of all.
    """

    def __init__(self, values: pa.BinaryArray, keys: pa.BinaryArray | None, sizes: Any) -> None:
        self._values = values
        self._keys = keys
        self._sizes = sizes
        self.longest = int(sizes.max(initial=0))
        self.size = int(sizes.sum())

    @classmethod
    def of(cls, values: pa.Array, keys: pa.Array | None) -> Self | None:
        """The columns, or None if they are not of Arrow's type binary, or a message is too long to benefit."""
        if not isinstance(values, pa.BinaryArray) or not (keys is None or isinstance(keys, pa.BinaryArray)):
            return None
        sizes = _lengths(values).astype(np.int64) + RECORD_OVERHEAD
        if keys is not None:
            sizes += _lengths(keys)
        columns = cls(values, keys, sizes)
        return columns if columns.longest < _MAX_RECORD_BYTES else None

    def __len__(self) -> int:
        return len(self._values)

    @property
    def keys(self) -> Sequence[bytes | None] | None:
        """The keys, or None if there is no key column."""
        return None if self._keys is None else self._keys.to_pylist()

    def by_partition(self, indexes: Sequence[int]) -> Iterator[tuple[int, RecordColumns]]:
        """The messages of each partition, in their order; `indexes` has the partition of each message."""
        chosen = np.asarray(indexes, np.int32)
        order = np.argsort(chosen, kind="stable")
        positions = pa.array(order)
        values, sizes = self._values.take(positions), self._sizes[order]
        keys = None if self._keys is None else self._keys.take(positions)
        counts = np.bincount(chosen)
        begin = 0
        for index in np.flatnonzero(counts).tolist():
            count = int(counts[index])
            part = None if keys is None else keys.slice(begin, count)
            yield index, RecordColumns(values.slice(begin, count), part, sizes[begin : begin + count])
            begin += count

    def batches(self, limit: int) -> Iterator[tuple[int, int]]:
        """The begin and end of each batch, in order; a batch has at most `limit` bytes, which no message may exceed."""
        ends = np.cumsum(self._sizes)
        begin = 0
        while begin < len(ends):
            before = int(ends[begin - 1]) if begin else 0
            end = min(int(np.searchsorted(ends, before + limit, side="right")), begin + SMALL)
            yield begin, end
            begin = end

    def encoded(self, begin: int, end: int, timestamp_ms: int) -> EncodedRecords:
        """The messages from `begin` to `end` (exclusive) as the records of one batch."""
        count = end - begin
        size_of_rest, key_parts = _VARINT_SIZES[:count] + (len(_ATTRIBUTES_AND_TIME) + len(NO_HEADERS)), [NULL]
        value_parts, value_sizes = _with_lengths(self._values.slice(begin, count))
        if self._keys is None:
            key_sizes = np.full(count, len(NULL), np.int32)
        else:
            key_parts, key_sizes = _with_lengths(self._keys.slice(begin, count))
        records = pc.binary_join_element_wise(
            _VARINTS.take(pa.array(size_of_rest + key_sizes + value_sizes)),
            _ATTRIBUTES_AND_TIME,
            _VARINTS.slice(0, count),  # the offsets
            *key_parts,
            *value_parts,
            NO_HEADERS,
            b"",
        )
        content = records.buffers()[2].to_pybytes()  # the concatenated records
        return EncodedRecords(content, count, timestamp_ms, int(self._sizes[begin:end].sum()))


def _lengths(column: pa.BinaryArray) -> Any:
    lengths = pc.binary_length(column)
    return np.asarray(pc.fill_null(lengths, 0) if lengths.null_count else lengths)


def _with_lengths(column: pa.BinaryArray) -> tuple[list[Any], Any]:
    """A column preceded by its encoded lengths, and the bytes that both need; the length of a null is -1."""
    lengths = pc.binary_length(column)
    encoded = _VARINTS.take(lengths)
    if not column.null_count:
        plain = np.asarray(lengths)
        return [encoded, column], _VARINT_SIZES[plain] + plain
    plain = np.asarray(pc.fill_null(lengths, 0))
    sizes = np.where(np.asarray(column.is_null()), len(NULL), _VARINT_SIZES[plain] + plain)
    return [pc.fill_null(encoded, NULL), pc.fill_null(column, b"")], sizes
