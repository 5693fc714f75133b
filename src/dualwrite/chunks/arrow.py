"""Splits a partition's Arrow batches into chunks with the number of rows that a transaction should have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import pyarrow as pa

from dualwrite.chunks.digest import table_digest
from dualwrite.chunks.write import Chunk

T = TypeVar("T")


def arrow_chunks(
    batches: Iterable[pa.RecordBatch], rows_per_transaction: int | None, content: Callable[[pa.Table], T]
) -> Iterator[Chunk[T]]:
    """Chunks in the order of the batches; no chunk if there are no rows.

    A chunk's rows stay in memory, in Arrow's format, until the next chunk is complete.

    Args:
        batches: The partition's batches, all with the same schema.
        rows_per_transaction: Rows per chunk (the last chunk has the remainder), or None for a single chunk.
        content: Converts a chunk's table to what the job's function receives; called only for chunks that must be written,
            once for each attempt.
    """
    for table in cut(batches, rows_per_transaction):
        yield Chunk(table.num_rows, table_digest(table), partial(content, table))


def cut(batches: Iterable[pa.RecordBatch], rows: int | None) -> Iterator[pa.Table]:
    """Tables of `rows` rows, and one with the remainder; no data is copied."""
    pieces: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        rest = batch
        while rows is not None and count + rest.num_rows >= rows:
            missing = rows - count
            pieces.append(rest.slice(0, missing))
            yield pa.Table.from_batches(pieces)
            pieces, count, rest = [], 0, rest.slice(missing)
        if rest.num_rows:
            pieces.append(rest)
            count += rest.num_rows
    if pieces:
        yield pa.Table.from_batches(pieces)
