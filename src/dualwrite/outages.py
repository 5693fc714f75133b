"""Notices when Kafka or the database does not answer: one warning when that begins, and one when it is over.

All clients of a process report their calls here, so that an outage is logged once, however many calls wait or fail. See
docs/operations/monitoring.md.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final, Self
from weakref import ReferenceType, WeakValueDictionary, ref

from dualwrite.errors import (
    BrokerUnavailableError,
    DeliveryError,
    JournalSwitchedError,
    MessageRefusedError,
    StoreCommitUnknownError,
    StoreError,
    StoreLockedError,
    StoreUnavailableError,
)
from dualwrite.logs import SubjectLogger
from dualwrite.observability import observers
from dualwrite.observability.events import OutageBegan, OutageEnded

log = SubjectLogger(__name__)

DELIVERY: Final = "messages were not acknowledged"
"""Kind of a call that waits until messages are stored, or looks up where to send them."""

REQUEST: Final = "a request was not answered"
"""Kind of any other call to Kafka."""

DATABASE: Final = "a transaction was not answered"
"""Kind of a call to the database."""

SLOW: Final = 1.5
"""Seconds after which a call without an answer is an outage."""

_LOOK_INTERVAL: Final = 0.25
"""Seconds between two looks at the calls in progress."""

_SETTLING: Final = 1.0
"""Seconds for which no call may be without an answer after the first answer; then the outage is over."""

_MOST_SETTLING: Final = 60.0
"""`_SETTLING` is doubled, up to this, for each outage that begins within this time after another: not all are logged."""

_JOIN: Final = 1.0
"""Seconds that the interpreter's end waits for the thread."""


_NO_ANSWER: Final = (BrokerUnavailableError, DeliveryError, StoreUnavailableError, StoreCommitUnknownError)


def is_no_answer(error: BaseException | None) -> bool:
    """Whether an error says that Kafka or the database did not answer in time, or can't be reached."""
    if isinstance(error, MessageRefusedError | StoreLockedError):
        return False
    return isinstance(error, _NO_ANSWER)


def level_of(error: BaseException) -> int:
    """The level at which to log that something is tried again: if a side does not answer, there is one warning of that."""
    return logging.INFO if is_no_answer(error) or isinstance(error, JournalSwitchedError) else logging.WARNING


class Side:
    """Kafka or a database, as this process sees it. Any thread may use it; `kafka_at` and `database_at` return it.

    Attributes:
        calls: Those in progress.
        failing: For each kind of which something was not answered: since when.
        began: When the outage began; None: there is none.
    """

    def __init__(self, name: str, *, is_local: bool = False) -> None:
        self._name = name
        self._is_local = is_local
        self.forget_all()

    def forget_all(self) -> None:
        """Start again in a forked child: the calls are its parent's."""
        self._lock = threading.RLock()  # a signal handler may make calls, too
        self.calls: dict[int, ReferenceType[Call]] = {}  # weak, since an interrupt may keep one from being removed
        self.failing: dict[str, float] = {}
        self.began: float | None = None
        self._kinds: set[str] = set()  # of the calls that had no answer in this outage
        self._answered: float | None = None
        self._ended = -_MOST_SETTLING
        self._settling = _SETTLING

    @property
    def is_out(self) -> bool:
        """Whether there is an outage."""
        return self.began is not None

    def call(self, kind: str, *, may_wait: bool = False) -> Call:
        """A call to this side, as a `with` block. It has no answer yet, or none at all if the block raises `is_no_answer`.

        An outage is over once something of a `kind` is answered that was not. `may_wait`: the call may wait for something else
        than an answer, such as a lock; then only its error counts.
        """
        return Call(self, kind, may_wait=may_wait or self._is_local)

    def failed(self, kind: str, error: BaseException, *, since: float | None = None) -> None:
        """Report that something was not answered, and why.

        `since` is the beginning of a call that may have had too little time: it is an outage once nothing of this kind was
        answered for `SLOW` seconds, since the last one was over. Without it, it is one at once.
        """
        now = time.monotonic()
        with self._lock:
            self._answered = None
            first = self.failing.setdefault(kind, now if since is None else max(since, self._ended))
            if self.began is not None:
                self._kinds.add(kind)
            elif since is None or now - first >= SLOW:
                self._begin(kind, first, error)

    def answered(self, kind: str) -> None:
        """Report that something was answered."""
        if kind not in self.failing and self.began is None:
            return
        with self._lock:
            self.failing.pop(kind, None)
            if self._answered is None and kind in self._kinds:
                self._answered = time.monotonic()

    # --- for Call and the thread ------------------------------------------------------------------------------------------

    def ended(self, call: Call, error: BaseException | None) -> None:
        """A call has ended with an error, or while there are others that were not answered."""
        if error is not None and is_no_answer(error):
            self.failed(call.kind, error, since=None if isinstance(error, StoreError) else call.began)
        elif error is None or isinstance(error, Exception):
            self.answered(call.kind)

    def look(self) -> bool:
        """Log what has changed; return whether there is anything to look at again."""
        now = time.monotonic()
        found = [(key, made()) for key, made in list(self.calls.items())]
        for key, call in found:
            if call is None:
                self.calls.pop(key, None)
        calls = [call for _, call in found if call is not None]
        waiting = [call for call in calls if not call.may_wait and now - max(call.began, self._ended) >= SLOW]
        with self._lock:
            if waiting:
                longest = min(waiting, key=lambda call: call.began)
                if self.began is None:
                    self._begin(longest.kind, longest.began, longest.error)
                self._kinds.update(call.kind for call in waiting)
                self._answered = None
            elif self.began is not None and self._answered is not None and now - self._answered >= self._settling:
                self._end(self.began, self._answered)
        return bool(calls) or self.began is not None

    def _begin(self, kind: str, since: float, error: BaseException | None) -> None:
        now = time.monotonic()
        is_repeated = now - self._ended < _MOST_SETTLING
        self._settling = min(2 * self._settling, _MOST_SETTLING) if is_repeated else _SETTLING
        self.began, self._kinds, self._answered = since, {kind}, None
        within = f" within {now - since:.1f} s" if now > since else ""
        why = "" if error is None else f": {error}"
        log.warning("%s does not answer: %s%s%s", self._name, kind, within, why)
        if observers.installed:
            observers.notify(OutageBegan(self._name, kind))

    def _end(self, began: float, answered: float) -> None:
        self.began, self._ended = None, time.monotonic()
        self.failing.clear()
        log.warning("%s answers again, after %.1f s", self._name, answered - began)
        if observers.installed:
            observers.notify(OutageEnded(self._name, answered - began))


class Call:
    """One call to a side; see `Side.call`.

    Attributes:
        error: The last transient error, after which the call goes on.
        has_answer: Whether it has an answer if the block raises nothing; false if it has sent nothing.
    """

    __slots__ = ("__weakref__", "_side", "began", "error", "has_answer", "kind", "may_wait")

    def __init__(self, side: Side, kind: str, *, may_wait: bool) -> None:
        self._side = side
        self.kind = kind
        self.may_wait = may_wait
        self.began = time.monotonic()
        self.error: BaseException | None = None
        self.has_answer = True

    def __enter__(self) -> Self:
        self._side.calls[id(self)] = ref(self)
        if _watch.is_asleep:
            _watch.wake()
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        side = self._side
        side.calls.pop(id(self), None)
        if error is not None or (self.has_answer and (side.failing or side.began is not None)):
            side.ended(self, error)


class _Watch:
    """The thread that looks at the calls in progress. It sleeps while there are none, and does not keep the process alive."""

    def __init__(self) -> None:
        self._sides: WeakValueDictionary[str, Side] = WeakValueDictionary()
        self.forget_all()

    def forget_all(self) -> None:
        """Start again in a forked child, which does not have the thread."""
        self._lock = threading.RLock()
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # an interrupt can't leave it locked; False ends the thread
        self.is_asleep = True
        self._thread: threading.Thread | None = None
        for side in list(self._sides.values()):
            side.forget_all()

    def side(self, name: str, *, is_local: bool = False) -> Side:
        """The process's object for a side."""
        with self._lock:
            found = self._sides.get(name)
            if found is None:
                found = self._sides[name] = Side(name, is_local=is_local)
            return found

    def wake(self) -> None:
        """A call has begun, and `is_asleep`."""
        self.is_asleep = False
        self._wakes.put(True)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock, suppress(RuntimeError):  # no more threads, or the interpreter is ending: outages are not logged
            if self._thread is None:
                thread = threading.Thread(target=self._run, args=(self._wakes,), name="dualwrite outages", daemon=True)
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """End the thread before the interpreter ends."""
        if self._thread is not None:
            self._wakes.put(False)
            self._thread.join(_JOIN)

    def _run(self, wakes: SimpleQueue[bool]) -> None:
        is_busy = False
        while True:
            try:
                if not wakes.get(timeout=_LOOK_INTERVAL if is_busy else None):
                    return
            except Empty:
                pass
            self.is_asleep = True  # before the look: a call that begins from now on wakes the thread
            with self._lock:
                sides = list(self._sides.values())
            is_busy = sum(side.look() for side in sides) > 0  # all of them
            if is_busy:
                self.is_asleep = False


_watch: Final = _Watch()


def kafka_at(servers: str) -> Side:
    """The cluster with these `bootstrap.servers`; the caller keeps the object as long as it makes calls."""
    return _watch.side(f"Kafka at {servers}")


def database_at(address: str, *, is_local: bool = False) -> Side:
    """The database at this address, or in this local file; the caller keeps the object as long as it makes calls."""
    return _watch.side(f"The database {address}", is_local=is_local)


atexit.register(_watch.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watch.forget_all)
