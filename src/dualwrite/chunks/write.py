"""One partition of a job, chunk by chunk: each a transaction of its own, written once however often the job runs.

A *chunk* is what one transaction writes: the rows of a partition, or some of them. Its marker is written in its database
transaction, so a later attempt sees which chunks are committed and passes them over. What that rests on:

- Opening the writer claims the partition's transactional id and settles what an earlier attempt left, an unknown outcome
  included. From then on no earlier attempt can commit, so the markers that are read afterwards are all that there will ever be.
- Chunks are committed in order. Those with a marker are the first ones.
- A committed chunk must hold the same rows when it comes again (its marker has their digest, see `digest`), and the job must
  be cut as it was (see JobPlan). Otherwise rows would be lost or doubled: the attempt ends with an error and writes nothing.

Needs no Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from dualwrite.chunks.markers import WHOLE_JOB, ChunkMarker, ChunkMarkers, JobPlan
from dualwrite.chunks.registry import markers_of
from dualwrite.errors import ChunkChangedError, DualWriteError, FencedError, JobPlanChangedError, UsageError
from dualwrite.transaction import Transaction
from dualwrite.writer import DualWriter

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_ATTEMPTS: Final = 3

_PLAN_ATTEMPTS: Final = 5
_WAIT: Final = wait_exponential(multiplier=0.02, max=1.0) + wait_random(0, 0.05)
_FOR_NOW: Final = (
    "materialize the rows before a job's first run (as files, or a table that no longer changes), and keep the number of "
    "partitions; with rows_per_transaction also their order in each"
)
_ANEW: Final = "To begin anew, undo what was committed and call forget_job, or take another job id"


@dataclass(frozen=True)
class Chunk(Generic[T]):
    """Rows for one transaction.

    Args:
        rows: How many.
        digest: The same for the same rows, and another for others.
        content: Makes what the job's function gets.
    """

    rows: int
    digest: str
    content: Callable[[], T]


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What one attempt did to its partition.

    Args:
        partition: Number of the partition.
        rows: Rows that it wrote.
        chunks: Chunks that it wrote, each in a transaction.
        rows_before: Rows of the chunks that had been committed before.
        chunks_before: How many these were.
    """

    partition: int
    rows: int = 0
    chunks: int = 0
    rows_before: int = 0
    chunks_before: int = 0


def write_chunks(
    writer: DualWriter,
    chunks: Iterable[Chunk[T]],
    fn: Callable[[Transaction, T], object],
    *,
    plan: JobPlan,
    partition: int,
    markers: ChunkMarkers | None = None,
    attempts: int = DEFAULT_ATTEMPTS,
) -> PartitionReport:
    """Write the chunks of a partition that have not been committed yet, each in a transaction.

    Args:
        writer: Open, under an id that is this partition's alone: the same for all attempts, and for all runs of the job that
            may overlap.
        chunks: The whole partition's, from the first on, in the same order at each attempt.
        fn: Writes one chunk, with the transaction and the chunk's content.
        plan: How the job is cut.
        partition: Number of the partition, from 0.
        markers: Where the markers are kept, instead of what suits the writer's store.
        attempts: How often one chunk's transaction is tried at most, after errors that leave nothing behind (conflicts).

    Raises:
        JobPlanChangedError: The job was cut in another way before.
        ChunkChangedError: A committed chunk has other rows now, or is gone.
        UsageError: The partition is none of the plan's.
        FencedError: Another attempt of this partition has begun since. What is committed stays, and is passed over there.
        DualWriteError: As `DualWriter.transaction`. A later attempt goes on rightly after any of them; after
            LostTransactionError once it was acknowledged, but then the messages of that chunk are gone.
    """
    if plan.partitions is not None and not 0 <= partition < plan.partitions:
        raise UsageError(
            f"Partition {partition} of the job {plan.job_id!r}, which was said to have {plan.partitions}.",
            transactional_id=writer.transactional_id,
            next_step="give the frame's own number of partitions",
        )
    kept = markers_of(writer.store) if markers is None else markers
    return _Attempt(writer, kept, plan, partition, attempts).run(chunks, fn)


@dataclass(frozen=True)
class _Attempt:
    writer: DualWriter
    markers: ChunkMarkers
    plan: JobPlan
    partition: int
    attempts: int

    def run(self, chunks: Iterable[Chunk[T]], fn: Callable[[Transaction, T], object]) -> PartitionReport:
        self.markers.prepare()
        committed = self._committed()
        rows = rows_before = chunks_before = count = 0
        for number, chunk in enumerate(chunks):
            count = number + 1
            marker = committed.get(number)
            if marker is None:
                self._write(number, chunk, fn)
                rows += chunk.rows
            else:
                self._check_same(marker, chunk)
                rows_before += marker.rows
                chunks_before += 1
        gone = [marker for number, marker in sorted(committed.items()) if number >= count]
        if gone:
            raise self._changed(gone[0], None)
        done = PartitionReport(self.partition, rows, count - chunks_before, rows_before, chunks_before)
        log.info(
            "job %r, partition %d: %d rows written in %d transactions; %d rows in %d had been before",
            *(self.plan.job_id, self.partition, done.rows, done.chunks, rows_before, chunks_before),
        )
        return done

    # --- what was committed before ----------------------------------------------------------------------------------------

    def _committed(self) -> Mapping[int, ChunkMarker]:
        """The markers of the partition. The job's first transactions note the plan: of several at once, one succeeds."""
        retrying = Retrying(
            retry=retry_if_exception(_may_be_another_tasks), stop=stop_after_attempt(_PLAN_ATTEMPTS), wait=_WAIT, reraise=True
        )
        return retrying(self._committed_once)

    def _committed_once(self) -> Mapping[int, ChunkMarker]:
        job_id = self.plan.job_id
        with self.writer.transaction() as transaction:
            noted = self.markers.read(transaction, job_id, WHOLE_JOB).get(0)
            if noted is None:
                self.markers.write(transaction, job_id, WHOLE_JOB, self.plan.marker)
            else:
                self._check_plan(JobPlan.of(job_id, noted))
            return self.markers.read(transaction, job_id, self.partition)

    def _check_plan(self, before: JobPlan) -> None:
        if not self.plan.agrees_with(before):
            raise JobPlanChangedError(
                f"The job {self.plan.job_id!r} is cut in another way than before: {before} then, {self.plan} now.",
                transactional_id=self.writer.transactional_id,
                cause="rows would lie in other chunks than those that are committed, and be lost or doubled",
                next_step=f"run it as it was: repartition the frame by number, and give the same rows_per_transaction. {_ANEW}",
                job_id=self.plan.job_id,
                before=str(before),
                now=str(self.plan),
            )

    def _check_same(self, marker: ChunkMarker, chunk: Chunk[T]) -> None:
        if (marker.rows, marker.digest) != (chunk.rows, chunk.digest):
            raise self._changed(marker, chunk.rows)

    def _changed(self, marker: ChunkMarker, rows: int | None) -> ChunkChangedError:
        now = "is gone" if rows is None else f"has other rows now ({rows})"
        return ChunkChangedError(
            f"Chunk {marker.number} of partition {self.partition} of the job {self.plan.job_id!r}, which was committed with "
            f"{marker.rows} rows, {now}.",
            transactional_id=self.writer.transactional_id,
            cause="the frame is not deterministic, or what it reads has changed: rows that are committed may come again "
            "elsewhere, and others never",
            next_step=f"{_FOR_NOW}. {_ANEW}",
            job_id=self.plan.job_id,
            partition=self.partition,
            chunk=marker.number,
            committed_rows=marker.rows,
            rows=rows,
        )

    # --- what is not ------------------------------------------------------------------------------------------------------

    def _write(self, number: int, chunk: Chunk[T], fn: Callable[[Transaction, T], object]) -> None:
        content = chunk.content()
        marker = ChunkMarker(number, chunk.rows, chunk.digest)

        def write(transaction: Transaction) -> None:
            fn(transaction, content)
            # last: its lock would make a later attempt wait for one that was paused in the middle of `fn`
            self.markers.write(transaction, self.plan.job_id, self.partition, marker)

        try:
            self.writer.transactional(attempts=self.attempts)(write)()
        except FencedError as error:
            error.add_note(
                f"dualwrite: another attempt of partition {self.partition} has taken over (a speculative copy of the task, or "
                "the job runs twice at once). The chunks that this one committed stay, and are passed over there."
            )
            raise


def _may_be_another_tasks(error: BaseException) -> bool:
    """Whether the transaction that notes the plan may have failed since another task's noted it; a driver's own error can."""
    return error.retriable if isinstance(error, DualWriteError) else isinstance(error, Exception)
