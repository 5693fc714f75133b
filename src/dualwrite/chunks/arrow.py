"""A partition's Arrow batches, cut into chunks of as many rows as a transaction is to have."""

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
    """Chunks in the order of the batches; none where there is no row.

    A chunk's rows are in memory, as Arrow has them, until those of the next are.

    Args:
        batches: The partition's, all of one schema.
        rows_per_transaction: Rows of a chunk (the last has what is left), or None: one chunk of all.
        content: Makes what the job's function gets of a chunk's table; called only for chunks that are to be written.
    """
    for table in cut(batches, rows_per_transaction):
        yield Chunk(table.num_rows, table_digest(table), partial(content, table))


def cut(batches: Iterable[pa.RecordBatch], rows: int | None) -> Iterator[pa.Table]:
    """Tables of `rows` rows, and one of what is left; nothing is copied."""
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        rest = batch
        while rows is not None and count + rest.num_rows >= rows:
            take = rows - count
            held.append(rest.slice(0, take))
            yield pa.Table.from_batches(held)
            held, count, rest = [], 0, rest.slice(take)
        if rest.num_rows:
            held.append(rest)
            count += rest.num_rows
    if held:
        yield pa.Table.from_batches(held)
