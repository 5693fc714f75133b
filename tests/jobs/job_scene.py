"""A job on real servers with the simplest possible sink: batches are lists of numbers; each number is a row and a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from dualwrite.jobs.driver import JobCommitter
from dualwrite.jobs.job_context import JobSite
from dualwrite.jobs.rules import JobRun, TaskOutcome
from dualwrite.jobs.task import TaskAttempt
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from fixtures.broker import read_topic
from fixtures.job_evidence import open_at_kafka, staged_rows, unresolved

metadata = sa.MetaData()
numbers = sa.Table("numbers", metadata, sa.Column("number", sa.Integer, primary_key=True, autoincrement=False))
staged = sa.Table(
    "staged",
    metadata,
    sa.Column("dualwrite_id", sa.String(255)),
    sa.Column("dualwrite_fence", sa.BigInteger),
    sa.Column("number", sa.Integer),
    sa.Index("staged_by_id", "dualwrite_id", "dualwrite_fence"),
)


class NumberLoader(AbstractContextManager[Any]):
    def __init__(self, connection: sa.Connection, claim: Claim) -> None:
        self._connection, self._claim, self._count = connection, claim, 0

    def add(self, batch: Sequence[int]) -> None:
        key = {"dualwrite_id": self._claim.transactional_id, "dualwrite_fence": self._claim.fence}
        self._connection.execute(sa.insert(staged), [{**key, "number": number} for number in batch])
        self._count += len(batch)

    def finish(self) -> int:
        return self._count

    def __exit__(self, *_: object) -> None:
        pass


class NumberSink:
    staging_table = "staged"

    def __init__(self, topic: str) -> None:
        self.topic = topic

    def send(self, batch: Sequence[int], producer: TransactionalProducer) -> int:
        for number in batch:
            producer.send(self.topic, str(number))
        return len(batch)

    def loader(self, connection: sa.Connection, claim: Claim) -> NumberLoader:
        return NumberLoader(connection, claim)

    def move(self, connection: sa.Connection, keys: Sequence[tuple[str, int]]) -> int:
        moved = 0
        for name, fence in keys:
            chosen = sa.select(staged.c.number).where(staged.c.dualwrite_id == name, staged.c.dualwrite_fence == fence)
            insert = sa.insert(numbers).from_select(["number"], chosen).execution_options(preserve_rowcount=True)
            moved += connection.execute(insert).rowcount
        return moved


class JobScene:
    """Runs batches like a driver and its tasks, and compares table and topic afterwards."""

    def __init__(self, url: str, servers: str, name: str, **settings: Any) -> None:
        self.url, self.servers, self.prefix = url, servers, name
        self.site = JobSite(url, {"bootstrap.servers": servers}, **{"lease_timeout": 1.0, **settings})
        self.sink = NumberSink(f"topic-{name}")
        self.store = SqlStateStore.from_url(url)
        metadata.create_all(self.store.engine)

    def close(self) -> None:
        self.store.close()

    def run(self, batch_id: int = 0, job_id: str = "job", *, keeps_lease: bool = True, prefix: str | None = None) -> JobRun:
        return JobRun(prefix or self.prefix, job_id, batch_id, keeps_lease)

    def write(self, run: JobRun, parts: Sequence[Sequence[int]], *, attempt: int = 0) -> list[TaskOutcome]:
        """Run the tasks, two at a time."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda part: self.task(run, part[0], part[1], attempt=attempt), enumerate(parts)))

    def task(self, run: JobRun, partition: int, part: Sequence[int], *, attempt: int = 0) -> TaskOutcome:
        return self.task_of(run, partition, [part[i : i + 3] for i in range(0, len(part), 3)], attempt=attempt)

    def task_of(self, run: JobRun, partition: int, batches: Iterable[Sequence[int]], *, attempt: int = 0) -> TaskOutcome:
        """Run a task with these batches."""
        with self.site.opened() as opened:
            return TaskAttempt(opened, run, self.sink, partition=partition, attempt=attempt).write(batches)

    def commit(self, outcomes: Sequence[TaskOutcome | None]) -> int:
        with self.site.opened() as opened:
            return JobCommitter(opened, self.sink).commit(outcomes)

    def abort(self, outcomes: Sequence[TaskOutcome | None]) -> None:
        """Abort the run that these outcomes belong to."""
        self.abort_run(next(outcome.run for outcome in outcomes if outcome is not None))

    def abort_run(self, run: JobRun) -> None:
        """Abort a run, as Spark aborts a batch write, even if no task has reported."""
        with self.site.opened() as opened:
            JobCommitter(opened, self.sink).abort(run)

    def abort_unknown(self, batch_id: int = 0) -> None:
        """As Spark aborts a micro-batch of which no task has reported."""
        with self.site.opened() as opened:
            JobCommitter(opened, self.sink).abort_unknown(self.prefix, batch_id)

    # --- looking ----------------------------------------------------------------------------------------------------------

    def table(self) -> list[int]:
        with self.store.engine.connect() as connection:
            return sorted(connection.scalars(sa.select(numbers.c.number)))

    def staged(self) -> int:
        return staged_rows(self.store.engine, "staged")

    def topic(self) -> list[int]:
        return sorted(int(message.value()) for message in read_topic(self.servers, self.sink.topic))

    def open_ids(self) -> list[str]:
        return open_at_kafka(self.servers, self.prefix)

    def unresolved(self) -> list[str]:
        return unresolved(self.store, self.prefix)

    def assert_holds(self, expected: Sequence[int], *, may_be_staged: bool = False) -> None:
        """Assert that table and topic have exactly these numbers, and that nothing is left open, or staged unless allowed."""
        assert self.open_ids() == []
        assert self.table() == sorted(expected)
        assert self.topic() == sorted(expected)
        assert may_be_staged or self.staged() == 0
        assert self.unresolved() == []


def replaced(outcome: TaskOutcome, **changes: Any) -> TaskOutcome:
    """The outcome with another prepared transaction."""
    assert outcome.prepared is not None
    return replace(outcome, prepared=replace(outcome.prepared, **changes))


MakeScene = Callable[..., JobScene]
"""Makes a job on a database with settings of its site; the test's end closes it."""
