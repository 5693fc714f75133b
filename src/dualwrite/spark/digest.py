"""A digest of rows that depends neither on their order nor on Arrow's memory layout.

After a shuffle, Spark may return a partition's rows in a different order: two chunks are the same if they have the same rows.
So each row is converted to one text, column by column in Arrow, and hashed; the digest is the sum of the hashes. This takes
about 1.5 µs for a row of a dozen columns.

Digests are stored: the result for the same rows must never change.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

_SIZE: Final = 16
_MODULUS: Final = 1 << (8 * _SIZE)
_BYTES: Final = pa.large_binary()


def table_digest(table: pa.Table) -> str:
    """The digest of a table's rows and column names, as 32 hexadecimal digits.

    Two values are equal here if their text is equal; times are compared as instants, regardless of their time zone.
    """
    total = _hash(repr(table.column_names).encode())
    for batch in table.to_batches():
        for row in _row_texts(batch):
            total += _hash(row)
    return f"{total % _MODULUS:0{2 * _SIZE}x}"


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=_SIZE).digest())


def _row_texts(batch: pa.RecordBatch) -> list[bytes]:
    """Each row as one text; different rows have different texts."""
    columns = [_texts(column) for column in batch.columns]
    if not columns:
        return [b""] * batch.num_rows
    texts: list[bytes] = pc.binary_join_element_wise(*columns, pa.scalar(b",", _BYTES)).to_pylist()
    return texts


def _texts(column: pa.Array) -> pa.Array:
    """Each value as a text that no other value has and whose end is unambiguous; the empty text for a null."""
    kind = column.type
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        column = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())  # noqa: PLR2004  (bits, not a setting)
    elif _is_bytes(kind):
        return _with_length(column.cast(_BYTES))
    elif not _has_text(kind):
        if (comparable := _with_instants(kind)) != kind:
            column = column.cast(comparable)
        values = [None if value is None else repr(value).encode() for value in column.to_pylist()]
        return _with_length(pa.array(values, _BYTES))
    return pc.fill_null(column.cast(pa.large_string()).cast(_BYTES), b"")


def _with_length(column: pa.Array) -> pa.Array:
    lengths = pc.binary_length(column).cast(pa.large_string()).cast(_BYTES)
    texts = pc.binary_join_element_wise(lengths, column, pa.scalar(b":", _BYTES), null_handling="emit_null")
    return pc.fill_null(texts, b"")


def _with_instants(kind: Any) -> Any:
    """The type, with integers for the timestamps in it that have a time zone, which Python's text would name."""
    types = pa.types
    if types.is_timestamp(kind):
        return kind if kind.tz is None else pa.int64()
    if types.is_struct(kind):
        return pa.struct([_field_with_instants(kind.field(place)) for place in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(_field_with_instants(kind.key_field), _field_with_instants(kind.item_field))
    if types.is_large_list(kind):
        return pa.large_list(_field_with_instants(kind.value_field))
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(_field_with_instants(kind.value_field), -1 if types.is_list(kind) else kind.list_size)
    return kind


def _field_with_instants(field: pa.Field) -> pa.Field:
    return field.with_type(_with_instants(field.type))


def _is_bytes(kind: Any) -> bool:
    types = pa.types
    return any(each(kind) for each in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


def _has_text(kind: Any) -> bool:
    """Whether Arrow can cast the type to text; it can't for lists, structs and maps."""
    types = pa.types
    checks = (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_null)
    return any(each(kind) for each in checks)
