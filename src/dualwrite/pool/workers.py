"""The pool's threads: each runs one group after another.

While one thread commits its group, the next thread runs the units of the next group. If the pool waits for the network most of
the time, the threads run their groups side by side (`scaling.py`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import FencedError, PoolTimeoutError, StoreError, StoreUnavailableError, WriterClosedError
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import is_no_answer
from dualwrite.pool.calls import UnitCall
from dualwrite.pool.group import Group, Shared
from dualwrite.pool.scaling import SERIAL
from dualwrite.pool.writers import closed

log = SubjectLogger(__name__)


_SIGNAL_SECONDS: Final = 1.0
"""A signal that arrives just before a wait does not interrupt it: Python runs the handler at its end."""


class Workers:
    """Threads that run the calls of a queue in groups.

    Attributes:
        threads: The threads, including surplus ones until their next turn.
    """

    def __init__(self, prefix: str, shared: Shared, *, timeout: float) -> None:
        self.threads: list[threading.Thread] = []
        self._prefix = prefix
        self._shared = shared
        self._scaler = shared.scaler
        self._writers = shared.writers
        self._waiting = shared.waiting
        self._timeout = timeout
        self._turn = threading.Lock()  # one thread at a time collects calls; and runs their SQL, unless groups run side by side
        self._here = threading.local()
        self._threads_lock = threading.Lock()
        self._numbers = itertools.count()
        self._groups: dict[int, list[UnitCall]] = {}  # by thread: what its group has taken

    @property
    def include_this_thread(self) -> bool:
        """Whether the calling thread is one of these threads: the call comes from inside a unit, or from a done-callback."""
        return getattr(self._here, "is_ours", False)

    def match_size(self) -> None:
        """Start the threads that are missing. Surplus threads end at their next turn."""
        with self._threads_lock:
            while len(self.threads) < self._scaler.threads and not self._waiting.is_closed:
                name = f"dualwrite pool {self._prefix} {next(self._numbers)}"
                self.threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self.threads[-1].start()

    def called(self) -> None:
        """A call was put into the queue: start threads, if that asks for more."""
        if self._scaler.called(self._waiting.unfinished):
            self.match_size()

    def run_here(self, call: UnitCall) -> None:
        """Run a call in the calling thread, which waits for it anyway.

        Raises:
            WriterClosedError: The pool is closed.
        """
        if not self._waiting.count():
            raise closed(self._prefix)
        before, self._here.is_ours = self.include_this_thread, True
        try:
            while True:
                with self._writers.checked_out("a group") as writer:
                    group = Group(self._shared, writer, [call], lambda: None, grows=False)
                    group.run()
                if not group.conflicted:  # otherwise it was rolled back because of another one, and runs again
                    return
        except BaseException as error:
            if not isinstance(error, PoolTimeoutError | WriterClosedError):
                log.exception("a unit ended with an unexpected error", prefix=self._prefix)
            call.deliver_error(error)
        finally:
            self._waiting.release([call])
            self._here.is_ours = before

    def drain(self, limit: Deadline, *, is_total: bool) -> Deadline:
        """Wait until the threads have run what is in the closed queue; cancel the calls that have not begun by the limit.

        Unless the limit is a total one, it starts again whenever the pool makes progress. Returns the limit for what follows.
        """
        seen = -1
        while threads := [thread for thread in list(self.threads) if thread.is_alive()]:
            if limit.expired and (is_total or self._writers.steps == seen):
                self._cancel_calls()
                return limit
            if not is_total:
                seen, limit = self._writers.steps, Deadline.after(self._timeout)
            for thread in threads:
                while thread.is_alive() and not limit.expired:
                    thread.join(min(limit.left, _SIGNAL_SECONDS))
        self._cancel_calls()  # nobody would run them; there are none unless the threads have ended early
        return limit if is_total else Deadline.after(self._timeout)

    def _cancel_calls(self) -> None:
        """Cancel the calls that have not begun: they must not run later, when whatever blocks them has ended."""
        self._waiting.cancel()
        for calls in list(self._groups.values()):
            for call in list(calls):
                call.cancel()

    # --- in the threads -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Take turns: collect calls, and run them as a group."""
        self._here.is_ours = True
        while True:
            with ExitStack() as turn:  # ends at once if groups run side by side; otherwise as soon as the group's SQL is done
                turn.enter_context(self._turn)
                try:
                    groups = self._scaler.side_by_side
                    if self._is_surplus():
                        return
                    calls = self._waiting.take(self._shared.most_units, groups)
                    if not calls:
                        return
                    if groups > SERIAL:
                        turn.close()
                    self._run_group(calls, turn.close)
                    if self._scaler.group_ended(calls):
                        self.match_size()
                except Exception:  # whatever it was, such as an ordering key's __eq__: this thread must go on
                    log.exception("an unexpected error in a thread of the pool", prefix=self._prefix)

    def _is_surplus(self) -> bool:
        """Whether this thread should end; if so, it is removed from `threads`."""
        with self._threads_lock:
            if len(self.threads) <= self._scaler.threads or self._waiting.is_closed:
                return False
            self.threads.remove(threading.current_thread())
            return True

    def _run_group(self, calls: list[UnitCall], has_written: Callable[[], None]) -> None:
        self._groups[threading.get_ident()] = calls
        try:
            limit = Deadline.after(self._timeout)
            while self._is_fenced_before_it_begins(calls, has_written, limit):
                pass
        except BaseException as error:
            self._note_outage(error)
            if not isinstance(error, FencedError | WriterClosedError):
                log.exception("a group ended with an unexpected error", prefix=self._prefix)
            for call in calls:
                call.deliver_error(error)
        finally:
            del self._groups[threading.get_ident()]
            self._waiting.release(calls)

    def _is_fenced_before_it_begins(self, calls: list[UnitCall], has_written: Callable[[], None], limit: Deadline) -> bool:
        """Run the calls as a group; True if its writer was fenced before any unit ran: they can run on a writer taken again.

        Raises:
            FencedError: The units have run, and were rolled back; or there is no other writer for them.
        """
        with self._writers.checked_out("a group") as writer:  # without a limit: each caller has its own
            group = Group(self._shared, writer, calls, has_written)
            try:
                group.run()
                if group.conflicted:
                    group.put_back(group.conflicted)
            except FencedError as error:
                if group.has_begun or not self._writers.can_continue(limit):
                    raise
                text = "fenced before a unit ran; taking a writer again: %s"
                log.info(text, error, transactional_id=writer.transactional_id)
                return True
        self._note_outage(group.error)
        if isinstance(group.error, StoreError) and group.error.retriable and not isinstance(group.error, StoreUnavailableError):
            self._scaler.conflicted()
        return False

    def _note_outage(self, error: BaseException | None) -> None:
        """While the pool is being closed, cancel the calls that wait if a side does not answer: they would fail, one by one."""
        if self._waiting.is_closed and is_no_answer(error):
            self._waiting.cancel()
