"""A job in chunks on one database and one topic: runs attempts of its partitions, and reads what both sides have afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

import dualwrite
from crash.events import Events
from dualwrite import DualWriter, Transaction
from dualwrite.spark.chunks import JobPlan, PartitionAttempt, PartitionReport, arrow_chunks, forget_job
from dualwrite.testing.topics import read_committed

Write = Callable[[Transaction, Any], object]


class WorkerDiedError(Exception):
    """The error with which a task of these tests fails."""


@dataclass
class ChunkScene:
    """Rows are numbers: each becomes an event in the database and a message."""

    events: Events
    servers: str
    job_id: str
    topic: str
    rows_per_transaction: int | None = 10
    partitions: int | None = 1

    def __post_init__(self) -> None:
        self.name = self.job_id  # the events keep this name even if a test changes job_id

    @property
    def plan(self) -> JobPlan:
        return JobPlan(self.job_id, self.partitions, self.rows_per_transaction)

    def writer(self, partition: int = 0, database: Any = None, prefix: str | None = None) -> DualWriter:
        database = self.events.database if database is None else database
        return dualwrite.connect(database, kafka=self.servers, transactional_id=f"{prefix or self.job_id}.{partition}")

    def attempt(
        self,
        rows: Sequence[int],
        fn: Write | None = None,
        *,
        partition: int = 0,
        database: Any = None,
        prefix: str | None = None,
        content: Callable[[pa.Table], Any] = lambda rows: rows,
    ) -> PartitionReport:
        """One attempt of a partition's task, in batches of 7 rows as Spark would cut them at random."""
        with self.writer(partition, database, prefix) as writer:
            batches = [pa.record_batch({"n": list(rows[start : start + 7])}) for start in range(0, len(rows), 7)]
            chunks = arrow_chunks(batches, self.rows_per_transaction, content)
            return PartitionAttempt(writer, self.plan, partition).write(chunks, fn or self.put)

    def put(self, transaction: Transaction, rows: pa.Table) -> None:
        for number in rows["n"].to_pylist():
            self.events.write(transaction.db, self.name, number)
            transaction.send(self.topic, str(number))

    def put_until(self, chunk: int) -> Write:
        """Writes chunks up to this one, and fails in the middle of it."""
        left = chunk

        def put(transaction: Transaction, rows: pa.Table) -> None:
            nonlocal left
            self.put(transaction, rows)
            if left == 0:
                raise WorkerDiedError
            left -= 1

        return put

    def found(self) -> tuple[list[int], list[int]]:
        """What the database and a read_committed consumer see."""
        messages = read_committed(self.servers, self.topic)
        return self.events.numbers(self.name), sorted(int(message.value or b"") for message in messages)

    def forget(self) -> int:
        with self.writer() as writer:
            return forget_job(writer.store, self.job_id)
