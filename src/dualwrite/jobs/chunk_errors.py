"""What is wrong with a job in chunks that runs again: it is cut in another way, or its rows are others."""

from __future__ import annotations

from dualwrite.errors import DualWriteError


class JobPlanChangedError(DualWriteError):
    """A job of this id was cut in another way before: another number of partitions, or of rows in a transaction.

    Nothing was written by the attempt that found it. Attributes: `job_id`, `before` and `now` (a JobPlan's texts).
    """


class ChunkChangedError(DualWriteError):
    """A chunk that was committed holds other rows now, or is gone: what feeds the job does not give the same rows again.

    Nothing was written by the attempt that found it. Attributes: `job_id`, `partition`, `chunk`, `committed_rows`, and `rows`
    (None where the chunk is gone).
    """
