"""The pool's writers: lent to one group or one transaction at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import FencedError, PoolTimeoutError, WriterClosedError
from dualwrite.recipe.phases import Phase
from dualwrite.writer import DualWriter

log = logging.getLogger(__name__)

_PAUSE: Final = 0.01
_RECOVERER: Final = "recoverer "
"""How the owner of a recoverer's claim begins (`recovery.recoverer`)."""


class Writers:
    """Lends out writers, in turn.

    One that a recoverer has fenced takes its id back. One that another writer has fenced is not lent any more: two that both
    took it back would keep taking it from each other.

    Args:
        writers: The writers, open.
        prefix: The prefix of their ids, for errors.
    """

    def __init__(self, writers: Sequence[DualWriter[Any]], prefix: str) -> None:
        self._all = tuple(writers)
        self._free: SimpleQueue[DualWriter[Any] | None] = SimpleQueue()  # None: there will be no more
        for writer in writers:
            self._free.put(writer)
        self._doing: dict[DualWriter[Any], tuple[str, float]] = {}
        self._retired: set[DualWriter[Any]] = set()
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self._all) - len(self._retired)

    @contextmanager
    def lent(self, doing: str, deadline: Deadline | None = None) -> Iterator[DualWriter[Any]]:
        """A writer for one transaction; waits until one is free.

        Args:
            doing: What it is for, for the errors of those who wait.
            deadline: The limit for waiting; None: no limit.

        Raises:
            PoolTimeoutError: No writer was free within the limit.
            FencedError: Other processes use the ids of all writers.
        """
        writer = self._acquire(doing, deadline)
        while not self._is_ours(writer):
            writer = self._acquire(doing, deadline)
        try:
            yield writer
        finally:
            self._give_back(writer)

    def note(self, writer: DualWriter[Any], doing: str) -> None:
        """Note what a lent writer is doing now."""
        self._doing[writer] = (doing, time.monotonic())

    def doing(self) -> tuple[str, ...]:
        """What the writers are doing, with the seconds since they began it."""
        now = time.monotonic()
        return tuple(f"{what} (for {now - since:.1f} s)" for what, since in list(self._doing.values()))

    def _acquire(self, doing: str, deadline: Deadline | None) -> DualWriter[Any]:
        try:
            writer = self._free.get(timeout=None if deadline is None else deadline.left)
        except Empty:
            assert deadline is not None
            raise pool_timeout("No writer of the pool was free", deadline.seconds, self.doing()) from None
        if writer is None:
            self._free.put(None)  # for the next who waits
            raise FencedError(
                "Other writers or recoverers have claimed the ids of all of the pool's writers.",
                transactional_id=self._all[0].transactional_id,
                next_step=f"give each process a prefix of its own (this one's is {self._prefix!r}), and restart it",
            )
        self.note(writer, doing)
        return writer

    def _is_ours(self, writer: DualWriter[Any]) -> bool:
        """Take the id back from a recoverer; False, and the writer is not lent again, if another writer has it."""
        if writer.phase is not Phase.FENCED:
            return True
        try:
            owners = writer.new_owners()
            if all(owner.startswith(_RECOVERER) for owner in owners):
                log.info("%s: taking the id back from %s", writer.transactional_id, "; ".join(owners))
                writer.reopen()
                return True
        except BaseException:
            self._give_back(writer)
            raise
        log.error("%s: not used any more: it was claimed by %s", writer.transactional_id, "; ".join(owners))
        self._doing.pop(writer, None)
        self._retired.add(writer)
        if not len(self):
            self._free.put(None)
        return False

    def _give_back(self, writer: DualWriter[Any]) -> None:
        self._doing.pop(writer, None)
        self._free.put(writer)

    def close(self, deadline: Deadline) -> None:
        """Wait for the transactions that are open, and close every writer, even if closing one fails.

        Raises:
            ConcurrentUseError: A transaction was still open at the deadline; the other writers are closed.
            DualWriteError: The first error; those of other writers are added as notes.
        """
        while self._doing and not deadline.expired:
            deadline.sleep(_PAUSE)
        failed: list[Exception] = []
        for writer in self._all:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001  (the others must still be closed)
                failed.append(error)
        if failed:
            for other in failed[1:]:
                failed[0].add_note(f"dualwrite, closing the pool: {other}")
            raise failed[0]


def pool_timeout(what: str, seconds: float, running: tuple[str, ...]) -> PoolTimeoutError:
    """The error for a wait that took too long."""
    return PoolTimeoutError(
        f"{what} within {seconds:g} s; nothing was done.",
        cause=f"the pool is running {'; '.join(running)}" if running else "the pool's writers are busy",
        next_step="look for a unit that waits for a lock or for another service; raise `size` if there are simply too many "
        "transactions of their own, or `timeout`",
        timeout=seconds,
        running=running,
    )


def closed(prefix: str) -> WriterClosedError:
    """The error for a call of a closed pool."""
    return WriterClosedError(f"The pool {prefix!r} is closed.", next_step="make a new one with dualwrite.create_pool")
