"""The pool's writers: each is checked out for one group or one transaction at a time."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from queue import Empty
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import ConcurrentUseError, FencedError, PoolTimeoutError, WriterClosedError
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.pool.fair_queue import FairQueue
from dualwrite.pool.pool_ids import Ids
from dualwrite.recipe.lanes import CLOSE_LIMIT
from dualwrite.recipe.phases import Phase
from dualwrite.writer import DualWriter

log = SubjectLogger(__name__)

_PAUSE: Final = 0.01
_RECOVERER: Final = "recoverer "
"""The prefix of the owner in a recoverer's claim (`recovery.recoverer`)."""

_BEFORE: Final = (Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED, Phase.RECORDED, Phase.ABORTING)
_LEFT: Final = {
    **dict.fromkeys(_BEFORE, "neither side has committed"),
    Phase.COMMITTING_DATABASE: "the database has been asked to commit, and has not answered",
    Phase.COMMITTING_KAFKA: "the database has committed, Kafka's side is still prepared",
    Phase.IN_DOUBT: "its outcome is not known yet",
}


class Writers:
    """The open writers of a pool, and which of them are free.

    A writer that was fenced by a recoverer claims its id again if the pool still owns the id. A writer that was fenced by
    another writer, or whose id was leased by another pool, is retired: two writers that kept reclaiming an id would fence each
    other forever.

    Attributes:
        steps: Incremented whenever a writer begins or ends something.
        changed: Set when a writer is retired, or another number of them is wanted; the pool's upkeep waits for it.
    """

    def __init__(self, prefix: str, ids: Ids) -> None:
        self.steps = 0
        self.changed = threading.Event()
        self._prefix = prefix
        self._ids = ids
        self._lock = threading.Lock()
        self._usable: dict[str, DualWriter[Any]] = {}  # by id
        self._open: dict[DualWriter[Any], None] = {}  # including retired ones
        self._retired: list[DualWriter[Any]] = []
        self._free: FairQueue[DualWriter[Any] | None] = FairQueue()  # None: check why no writer is left
        self._doing: dict[DualWriter[Any], tuple[str, float]] = {}
        self._opening_error: Exception | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._usable)

    @property
    def transactional_ids(self) -> tuple[str, ...]:
        """The ids of the writers that can be used."""
        return tuple(self._usable)

    def add(self, writer: DualWriter[Any]) -> None:
        """Add a writer, which is open."""
        with self._lock:
            self._open[writer] = None
            self._usable[writer.transactional_id] = writer
            self._opening_error = None
        self._free.put(writer)

    @contextmanager
    def checked_out(
        self, doing: str, deadline: Deadline | None = None, *, before_claiming: Callable[[], None] | None = None
    ) -> Iterator[DualWriter[Any]]:
        """Check out a writer for one transaction, as soon as one is free; errors of others that wait tell what it is `doing`.

        `before_claiming` is called if the writer has to claim its id again.

        Raises:
            PoolTimeoutError: No writer was free within the limit.
            FencedError: Other processes use the ids of all writers.
            DualWriteError: No writer is left, and opening another one failed with this error.
        """
        writer = self._acquire(doing, deadline)
        if before_claiming is not None and writer.must_claim:
            before_claiming()
        while not self._is_ours(writer):
            writer = self._acquire(doing, deadline)
        try:
            yield writer
        finally:
            self._check_in(writer)

    def can_continue(self, limit: Deadline) -> bool:
        """Whether work that another process has fenced before it began can take a writer again: not without leases.

        The writer that it takes claims its id again, or has another one; see the class. `limit` ends the attempts of work that
        is fenced each time.
        """
        return self._ids.are_leased and not limit.expired

    def note(self, writer: DualWriter[Any], doing: str) -> None:
        """Record what a checked-out writer is doing now."""
        self.steps += 1
        self._doing[writer] = (doing, time.monotonic())

    def doing(self) -> tuple[str, ...]:
        """What each writer is doing, and for how many seconds."""
        return tuple(_what(each) for each in list(self._doing.values()))

    def busy_for(self) -> tuple[float, ...]:
        """For how many seconds each writer that is checked out has been doing the same thing."""
        now = time.monotonic()
        return tuple(now - since for _, since in list(self._doing.values()))

    def kafka_ids(self) -> list[str]:
        """The ids of all lanes of the writers, as Kafka sees them."""
        return [name for writer in list(self._usable.values()) for name in writer.kafka_transactional_ids]

    def _acquire(self, doing: str, deadline: Deadline | None) -> DualWriter[Any]:
        while True:
            try:
                writer = self._free.get(timeout=None if deadline is None else deadline.left)
            except Empty:
                assert deadline is not None
                raise pool_timeout("No writer of the pool was free", deadline.seconds, self.doing()) from None
            if writer is None:
                self._check_any_are_left()
            elif self._is_usable(writer):
                self.note(writer, doing)
                return writer
            else:
                self._retire(writer)

    def _is_ours(self, writer: DualWriter[Any]) -> bool:
        """Claim the id again if a recoverer has fenced the writer; retire it and return False if another writer has.

        It is retired, too, if somebody claims the id once more while it is claimed again.
        """
        if writer.phase is not Phase.FENCED:
            return True
        name = writer.transactional_id
        try:
            owners = writer.new_owners()
            if all(owner.startswith(_RECOVERER) for owner in owners) and self._ids.keeps(name):
                log.info("claiming the id again after %s", "; ".join(owners), transactional_id=name)
                writer.reopen()
                return True
        except FencedError as again:
            if not self._ids.are_leased:
                self._check_in(writer)
                raise
            owners = (again.facts.get("current_owner") or str(again),)
        except BaseException:
            self._check_in(writer)
            raise
        level = logging.WARNING if self._ids.are_leased else logging.ERROR
        log.log(level, "not used any more: it was claimed by %s", "; ".join(owners), transactional_id=name)
        self._doing.pop(writer, None)
        self._retire(writer)
        return False

    def _check_in(self, writer: DualWriter[Any]) -> None:
        self.steps += 1
        with self._lock:
            self._doing.pop(writer, None)
            is_late = self._is_closed
        if is_late:
            self._close_late(writer)
        elif self._is_usable(writer):
            self._free.put(writer)
        else:
            self._retire(writer)

    # --- retired writers --------------------------------------------------------------------------------------------------

    def _is_usable(self, writer: DualWriter[Any]) -> bool:
        return self._usable.get(writer.transactional_id) is writer

    def _retire(self, writer: DualWriter[Any]) -> None:
        """Ensure that a writer, which is not checked out now, is never checked out again."""
        with self._lock:
            if self._is_usable(writer):
                del self._usable[writer.transactional_id]
            self._retired.append(writer)
        if not self._ids.are_leased and not self._usable:
            self._free.put(None)
        self.changed.set()

    def remove(self, names: Collection[str]) -> None:
        """Retire the writers of ids that the pool no longer owns. Those that are checked out finish their work first."""
        with self._lock:
            for name in names:
                self._usable.pop(name, None)
        self.changed.set()

    def remove_one(self, deadline: Deadline) -> DualWriter[Any]:
        """Remove a writer as soon as one is free; the caller closes it.

        Raises:
            PoolTimeoutError: All were busy until the deadline.
        """
        writer = self._acquire("making the pool smaller", deadline)
        with self._lock:
            self._usable.pop(writer.transactional_id, None)
        self._doing.pop(writer, None)
        return writer

    def retired(self) -> list[DualWriter[Any]]:
        """The retired writers that are not checked out; the caller closes them."""
        for _ in range(self._free.qsize()):
            try:
                writer = self._free.get(timeout=0)
            except Empty:
                break
            if writer is None or self._is_usable(writer):
                self._free.put(writer)
            else:
                with self._lock:
                    self._retired.append(writer)
        with self._lock:
            found, self._retired = self._retired, []
        return found

    # --- no writers -------------------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Record why missing writers could not be replaced: if none is left, callers that wait for one get this error."""
        with self._lock:
            is_new, self._opening_error = self._opening_error is None, error
        if is_new:
            self._free.put(None)

    def _check_any_are_left(self) -> None:
        """Return if there may be a writer; raise the reason why none is left otherwise."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed and (self._usable or (self._ids.are_leased and self._opening_error is None)):
                return
            error = self._opening_error
        self._free.put(None)  # wakes the next caller that waits
        if is_closed:
            raise closed(self._prefix)
        if error is not None:
            raise copy.copy(error) from error
        raise FencedError(
            "Other writers or recoverers have claimed the ids of all of the pool's writers.",
            next_step=f"give each process a prefix of its own (this one's is {self._prefix!r}), and restart it",
        )

    # --- closing ----------------------------------------------------------------------------------------------------------

    def close_one(self, writer: DualWriter[Any], limit: Deadline | None = None) -> None:
        """Close a writer that was removed or retired, as `DualWriter.close` does."""
        try:
            writer.close(limit=limit)
        finally:
            with self._lock:
                self._open.pop(writer, None)

    def _close_late(self, writer: DualWriter[Any]) -> None:
        """Close a writer whose transaction has ended after `close`."""
        try:
            self.close_one(writer)
        except Exception as error:  # nobody waits for it; recovery resolves what is left
            text, name = "closing a writer after its pool: %s", writer.transactional_id
            log.warning(text, error, exc_info=if_unexpected(error), transactional_id=name)

    def close(self, deadline: Deadline) -> None:
        """Wait for open transactions, then close every writer, even if closing one fails.

        Raises:
            ConcurrentUseError: A transaction was still open at the deadline; the other writers are closed, and this one will be
                as soon as its transaction has ended.
            DualWriteError: The first error; those of other writers are added as notes.
        """
        while self._doing and not deadline.expired:
            deadline.sleep(_PAUSE)
        with self._lock:
            self._is_closed = True
            self._usable.clear()
            busy = {writer: doing for writer, doing in self._doing.copy().items() if writer in self._open}
        self._free.put(None)
        failed: list[Exception] = [_not_ended(self._prefix, deadline.seconds, busy)] if busy else []
        limit = Deadline.after(CLOSE_LIMIT)
        for writer in [each for each in self._open if each not in busy]:
            try:
                self.close_one(writer, limit)
            except Exception as error:  # noqa: BLE001  (the others must still be closed)
                failed.append(error)
        if failed:
            for other in failed[1:]:
                failed[0].add_note(f"dualwrite, closing the pool: {other}")
            raise failed[0]


class UnclaimedWriters(Writers):
    """Writers that have no ids, and are made when they are needed: as many as transactions run side by side, up to a limit.

    Args:
        prefix: Of the pool.
        ids: Of the pool, which acquires none for them.
        make: Makes an open writer.
        most: The limit.
        timeout: Seconds that a transaction waits if there are so many, unless it has a limit of its own.
    """

    def __init__(self, prefix: str, ids: Ids, make: Callable[[], DualWriter[Any]], *, most: int, timeout: float) -> None:
        super().__init__(prefix, ids)
        self._make = make
        self._most = most
        self._timeout = timeout
        for _ in range(most):
            self._free.put(None)  # here: the place of a writer that was not needed yet

    def __len__(self) -> int:
        return self._most

    @contextmanager
    def checked_out(
        self, doing: str, deadline: Deadline | None = None, *, before_claiming: Callable[[], None] | None = None
    ) -> Iterator[DualWriter[Any]]:
        del before_claiming  # nothing is claimed
        seconds = self._timeout if deadline is None else deadline.left
        try:
            writer = self._free.get(timeout=seconds)
        except Empty:
            raise pool_timeout("No place in the pool was free", seconds, self.doing()) from None
        try:
            writer = writer or self._made()
            self.note(writer, doing)
            yield writer
        finally:
            if writer is None:
                self._free.put(None)
            else:
                self._check_in(writer)

    def _made(self) -> DualWriter[Any]:
        if self._is_closed:
            raise closed(self._prefix)
        made = self._make()
        with self._lock:
            self._open[made] = None
        return made

    def _is_usable(self, writer: DualWriter[Any]) -> bool:
        return writer in self._open


def _what(doing: tuple[str, float]) -> str:
    what, since = doing
    return f"{what} (for {time.monotonic() - since:.1f} s)"


def _not_ended(prefix: str, seconds: float, busy: Mapping[DualWriter[Any], tuple[str, float]]) -> ConcurrentUseError:
    left = [
        f"{writer.transactional_id}: {_what(doing)}; {_LEFT.get(writer.phase, f'the writer {writer.phase.value}')}"
        for writer, doing in busy.items()
    ]
    return ConcurrentUseError(
        f"The pool {prefix!r} was closed, but {len(busy)} of its transactions did not end within {seconds:g} s.",
        cause=" | ".join(left),
        next_step="look for a unit that waits for a lock or for another service. If the process ends now, the next pool of the "
        f"prefix, or `dualwrite recover --prefix {prefix}.`, commits what the database has committed and aborts the rest",
    )


def pool_timeout(what: str, seconds: float, running: tuple[str, ...]) -> PoolTimeoutError:
    """The error for a wait that took too long, while the pool was `running` these."""
    return PoolTimeoutError(
        f"{what} within {seconds:g} s; nothing was done.",
        cause=f"the pool is running {'; '.join(running)}" if running else "the pool's writers are busy",
        next_step="look for a unit that waits for a lock or for another service; raise `size` if too many threads use "
        "`pool.transaction()`, or raise `timeout`",
        timeout=seconds,
        running=running,
    )


def closed(prefix: str) -> WriterClosedError:
    """The error for a call of a closed pool."""
    return WriterClosedError(f"The pool {prefix!r} is closed.", next_step="make a new one with dualwrite.create_pool")
