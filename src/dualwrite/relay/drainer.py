"""The thread that publishes rows: it opens its writer late, drains turn by turn, pauses, and closes quietly."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from dualwrite.deadline import Pauses
from dualwrite.errors import DualWriteError, FencedError
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import level_of
from dualwrite.pool.pool_ids import LeasedIds
from dualwrite.relay.drain import Drain, Turn

log = SubjectLogger(__name__)


class Drainer(ABC):
    """Publishes the rows of one source under one transactional id, which is leased.

    A subclass says when there is something to do, and what an error means. The thread uses the writer from `start` until it has
    ended; before and after that, `turn` and `close` may be called by one other thread.

    Attributes:
        name: The transactional id.
        error: Why its thread has ended, if that was an error that no retry would resolve.
        waits_for: The error after which it tries again, while it does.
        looked_at: When it last looked for rows, by `time.monotonic`.
        tried_at: When it last tried to, which may have failed.

    Args:
        name: See above.
        ids: Where the id is leased. A lease only says who should drain: the claim of the id stops the others.
        open_drain: Opens a writer on the id, which recovers what the previous one has left, and makes the drain on it.
        pauses: Those before retries after errors.
        woken: Set when there may be new rows; by default an event of its own.
    """

    def __init__(
        self,
        name: str,
        ids: LeasedIds,
        open_drain: Callable[[], Drain],
        pauses: Pauses,
        *,
        woken: threading.Event | None = None,
    ) -> None:
        self.name = name
        self.error: Exception | None = None
        self.waits_for: Exception | None = None
        self.looked_at = self.tried_at = time.monotonic()
        self._ids = ids
        self._open_drain = open_drain
        self._drain: Drain | None = None
        self._pauses = pauses
        self._woken = woken or threading.Event()
        self._was_woken = False  # before this step
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"dualwrite drain {name}", daemon=True)

    # --- in the thread that owns it ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, unless that was done."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def wake(self) -> None:
        """There may be new rows."""
        self._woken.set()

    def stop(self) -> None:
        """End the thread once its transaction has ended; `join` waits for that. What is not published yet stays there."""
        self._stopping.set()
        self._woken.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended and has closed the writer, within its limits; without a thread, close it."""
        if self._thread.ident is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def turn(self) -> Turn:
        """Publish one batch.

        Raises: as `Drain.turn`, and as `DualWriter.open`.
        """
        if self._drain is None:
            self._drain = self._open_drain()
        turn = self._drain.turn()
        self._done(turn)
        return turn

    def close(self) -> None:
        """Close the writer.

        Raises: as `DualWriter.close`.
        """
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.writer.close()

    # --- what subclasses say ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _is_due(self) -> bool:
        """Whether to publish a batch now. May raise what `turn` does."""

    @abstractmethod
    def _idle_seconds(self) -> float:
        """Seconds until the next look, if nothing was due, or nothing was there."""

    @abstractmethod
    def _done(self, turn: Turn) -> None:
        """What a turn has done."""

    @abstractmethod
    def _failed(self, error: Exception) -> None:
        """Log that it is tried again; or raise the error, which ends the thread, if no attempt would succeed."""

    @abstractmethod
    def _lost(self) -> None:
        """Another process has leased the id, and has claimed it."""

    def _end(self) -> None:
        """Release what the drainer uses. May be called more than once."""
        self._close_quietly()

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._step()
        except Exception as error:  # noqa: BLE001  (raised by whoever has started it)
            self.error = error
        finally:
            self._end()

    def _step(self) -> None:
        self.tried_at = time.monotonic()
        self._was_woken = self._woken.is_set()
        self._woken.clear()  # what comes from here on wakes it again
        try:
            turn = self.turn() if self._is_due() else Turn(is_last=True)
        except FencedError as error:
            log.info("%s", error, transactional_id=self.name)
            self._close_quietly()  # there is nothing left that it could commit
            if self._keeps():
                self._stopping.wait(next(self._pauses))
            else:
                self._lost()
        except Exception as error:  # noqa: BLE001  (raised again, unless a retry may succeed)
            self.waits_for = error
            self._failed(error)
            self._stopping.wait(next(self._pauses))
        else:
            self.looked_at, self.waits_for = time.monotonic(), None
            self._pauses.reset()
            if turn.is_last or not turn.rows:
                self._woken.wait(self._idle_seconds())

    def _keeps(self) -> bool:
        """Whether the id is still leased by this process, so that it is claimed again."""
        try:
            return self._ids.keeps(self.name)
        except DualWriteError as unknown:
            log.info("whether the id is still leased can't be read: %s", unknown, transactional_id=self.name)
            return True

    def _close_quietly(self) -> None:
        try:
            self.close()
        except DualWriteError as error:  # recovery resolves what is left
            log.log(level_of(error), "closing: %s", error, transactional_id=self.name)
