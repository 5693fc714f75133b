"""Looks after writers that are idle, in one background thread for the whole process: clears their stored state, and recovers.

The row names the writer's last transaction until the next one replaces it. Only the writer knows that it is committed: if the
process is killed, and restarted after the coordinator has forgotten the id and retention has deleted the messages, there is no
proof left, and the transaction would be reported as UNVERIFIED. So the state is cleared from the row of a lane that is idle.

A lane whose last transaction is in doubt is recovered before the writer's next transaction. If there is none for a while, the
thread recovers it. Until then its messages are invisible, and so are those after them in the same partitions; and without
two-phase commit Kafka aborts them after the transaction's timeout.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from dualwrite import process
from dualwrite.observability.logs import SubjectLogger, if_unexpected

log = SubjectLogger(__name__)

T = TypeVar("T")

CLEAR_AFTER: Final = 60.0
"""Seconds after a transaction for which its state stays in the row; also the pause after an attempt that failed."""

RECOVER_AFTER: Final = 1.0
"""Seconds after which a lane that must be recovered is recovered, if no transaction does so; doubled after each failure."""

RECOVER_PAUSE: Final = 30.0
"""The maximum seconds between two attempts."""

RECOVER_LIMIT: Final = 5.0
"""Maximum seconds for a claim, and for each step at Kafka, of the writer's lanes; a transaction that begins waits for them."""

_JOIN: Final = 1.0
"""Seconds that the last `unwatch` waits for the thread's end; it is a daemon thread."""


class _Watched(NamedTuple):
    clear: Callable[[Any], float]
    due: float


class IdleThread:
    """The thread. It runs while there are writers to watch, and does not keep a writer, or the process, alive.

    A fork does not copy it: a child begins without writers, since it can't use those of its parent.
    """

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Start again in a forked child, which does not have the thread, and in which its lock may stay locked forever."""
        # `with` uses the RLock itself: an interrupt inside Condition.__enter__, a Python function, could leave it locked
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._watched: WeakKeyDictionary[Any, _Watched] = WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def watch(self, writer: T, clear: Callable[[T], float]) -> None:
        """Call a function with the writer from time to time, until `unwatch` or until nobody refers to the writer.

        `clear` clears what is in the writer's rows, if it is idle, and returns how many seconds the next call can wait. It must
        not block the writer's user for longer than one short transaction of the database, except to do what the user's next
        transaction would have to do first. The first call comes after CLEAR_AFTER seconds.
        """
        with self._lock:
            self._watched[writer] = _Watched(clear, time.monotonic() + CLEAR_AFTER)
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="dualwrite idle writers", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads, or the interpreter is ending: the writer works without it
                    log.debug("states of idle writers are not cleared: %s", error)
                else:
                    self._thread = thread

    def call_within(self, writer: object, seconds: float) -> None:
        """If the writer is watched, call its function in `seconds`, unless the next call comes earlier anyway."""
        with self._lock:
            watched = self._watched.get(writer)
            due = time.monotonic() + seconds
            if watched is not None and due < watched.due:
                self._watched[writer] = watched._replace(due=due)
                self._changed.notify_all()

    def unwatch(self, writer: object) -> None:
        """Stop calling the writer's function; a call may still be running. The thread ends when no writers are left."""
        with self._lock:
            self._watched.pop(writer, None)
            self._changed.notify_all()
            thread = None if self._watched else self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN)

    def stop(self) -> None:
        """End the thread before the interpreter ends."""
        with self._lock:
            self._watched.clear()
        self.unwatch(self)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
                due = (watched.due for watched in self._watched.values())
                pause = min(due, default=0.0) - time.monotonic()  # empty: the last writer has just been garbage-collected
                if pause > 0:
                    self._changed.wait(pause)
                    continue
            self._clear_due()

    def _clear_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [(writer, watched) for writer, watched in self._watched.items() if watched.due <= now]
            # while the function runs, the next call is due at some time that `call_within` can bring forward
            due = [(writer, watched._replace(due=math.inf)) for writer, watched in due]
            self._watched.update(due)
        for writer, watched in due:
            pause = CLEAR_AFTER
            try:
                pause = watched.clear(writer)
            except Exception as error:  # whatever a store raises, the other writers must be served
                log.info(
                    "the state of an idle writer could not be cleared; trying again: %s", error, exc_info=if_unexpected(error)
                )
            self.call_within(writer, pause)


IDLE: Final = IdleThread()
"""The process's thread."""

atexit.register(IDLE.stop)
process.call_in_child(IDLE.forget_all)
