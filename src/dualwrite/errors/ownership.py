"""Who owns a transactional id, the prefix of a job, or a writer of a pool."""

from __future__ import annotations

from dualwrite.errors.base import DualWriteError


class FencedError(DualWriteError):
    """Another writer or recoverer has claimed the transactional id; this writer's transaction was rolled back on both sides.

    Attributes: `fence` (this writer's fencing token), and, where they are known, `current_fence` and `current_owner`.
    """

    fence: int
    current_fence: int | None
    current_owner: str | None


class ClaimTimeoutError(DualWriteError):
    """The row of the id stayed locked for longer than the claim's time limit.

    Attributes: `timeout` (seconds), `blocker` (what holds the lock, if the database shows it), `blocker_pid` (PostgreSQL: the
    backend's process id).
    """

    timeout: float
    blocker: str | None
    blocker_pid: int | None

    retriable = True


class PoolTimeoutError(DualWriteError):
    """No writer of the pool was free, or the unit did not begin, within the time limit; nothing was done.

    Attributes: `timeout` (seconds), `running` (what each of the pool's writers was doing, as text).
    """

    timeout: float
    running: tuple[str, ...]

    retriable = True


class PrefixLeasedError(DualWriteError):
    """Another job owns the lease on the prefix of transactional ids; nothing was written.

    Attributes: `prefix`, and that job's `job_id`, `batch_id` and `owner`.
    """

    prefix: str
    job_id: str
    batch_id: int
    owner: str
