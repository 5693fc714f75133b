"""A data source that writes nothing and prints which step it has reached in which process; for the tests of SparkJob.

An option with the name of a step (`write`, `commit`) is the path of a file: the step waits until the file exists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Rows(WriterCommitMessage):
    count: int


class SlowSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return "slow"

    def writer(self, schema: StructType, overwrite: bool) -> SlowWriter:  # noqa: ARG002  (Spark's contract)
        return SlowWriter(dict(self.options))


class SlowWriter(DataSourceArrowWriter):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options
        self._at("planner")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Rows:
        self._at("write")
        return Rows(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._at("commit")
        say("rows", sum(message.count for message in messages if isinstance(message, Rows)))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002  (Spark's contract)
        self._at("abort")

    def _at(self, place: str) -> None:
        say(place, os.getpid())
        gate = self.options.get(place)
        while gate is not None and not Path(gate).exists():
            time.sleep(0.02)


def say(*words: object) -> None:
    """Print one line with a single write."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
