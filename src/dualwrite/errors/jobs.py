"""Jobs: runs that were replaced, batches that can't be committed, and jobs that changed since they ran."""

from __future__ import annotations

from dualwrite.errors.base import DualWriteError


class JobClosedError(DualWriteError):
    """The run of a task has ended, or was replaced by a newer one; the task's writes were discarded.

    Attributes: `prefix`, `job_id`, `batch_id`.
    """

    prefix: str
    job_id: str
    batch_id: int


class BatchRefusedError(DualWriteError):
    """A batch can't be committed and was not; its messages are aborted. Attributes: `prefix`, `job_id`, `batch_id`."""

    prefix: str
    job_id: str
    batch_id: int


class JobPlanChangedError(DualWriteError):
    """The job ran before with another plan: another number of partitions, or of rows per transaction.

    The attempt that found this wrote nothing. Attributes: `job_id`, `before` and `now` (the text of each JobPlan).
    """

    job_id: str
    before: str
    now: str


class ChunkChangedError(DualWriteError):
    """A committed chunk has other rows now, or no longer exists: the job's input is not deterministic.

    The attempt that found this wrote nothing. Attributes: `job_id`, `partition`, `chunk`, `committed_rows`, and `rows` (None
    if the chunk no longer exists).
    """

    job_id: str
    partition: int
    chunk: int
    committed_rows: int
    rows: int | None
