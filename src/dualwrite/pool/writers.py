"""The pool's writers: lent to one group or one transaction at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dualwrite.deadline import Deadline
from dualwrite.errors import FencedError, PoolTimeoutError, WriterClosedError
from dualwrite.recipe.phases import Phase
from dualwrite.writer import DualWriter


class Writers:
    """Lends out writers. One that was fenced is not lent any more: another process uses its id.

    Args:
        writers: The writers, open.
        prefix: The prefix of their ids, for errors.
    """

    def __init__(self, writers: Sequence[DualWriter[Any]], prefix: str) -> None:
        self._all = tuple(writers)
        self._free = list(writers)
        self._changed = threading.Condition(threading.Lock())
        self._doing: dict[DualWriter[Any], tuple[str, float]] = {}
        self._fenced: FencedError | None = None
        self._usable = len(writers)
        self._prefix = prefix

    def __len__(self) -> int:
        return self._usable

    def __iter__(self) -> Iterator[DualWriter[Any]]:
        return iter(self._all)

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
        try:
            yield writer
        except FencedError as error:
            if writer.phase is Phase.FENCED:
                self._retire(error)
            raise
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
        with self._changed:
            while not self._free:
                if not self._usable and self._fenced is not None:
                    raise FencedError(
                        "Other processes use the ids of all of the pool's writers.",
                        transactional_id=self._fenced.transactional_id,
                        cause=str(self._fenced),
                        next_step=f"give each process a prefix of its own (this one's is {self._prefix!r}), and restart it",
                    )
                if deadline is not None and deadline.expired:
                    raise pool_timeout("No writer of the pool was free", deadline.seconds, self.doing())
                self._changed.wait(None if deadline is None else deadline.left)
            writer = self._free.pop()
            self._doing[writer] = (doing, time.monotonic())
            return writer

    def _give_back(self, writer: DualWriter[Any]) -> None:
        with self._changed:
            self._doing.pop(writer, None)
            if writer.phase not in (Phase.FENCED, Phase.CLOSED):
                self._free.append(writer)
                self._changed.notify()
            if not self._usable or not self._doing:
                self._changed.notify_all()

    def _retire(self, error: FencedError) -> None:
        with self._changed:
            self._fenced = error
            self._usable -= 1

    def close(self, deadline: Deadline) -> None:
        """Wait for the transactions that are open, and close every writer, even if closing one fails.

        Raises:
            ConcurrentUseError: A transaction was still open at the deadline; the other writers are closed.
            DualWriteError: The first error; those of other writers are added as notes.
        """
        with self._changed:
            while self._doing and not deadline.expired:
                self._changed.wait(deadline.left)
        failed: list[Exception] = []
        for writer in self._all:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001  (the others must still be closed)
                failed.append(error)
        with self._changed:
            self._free.clear()
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
