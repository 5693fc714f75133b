"""Notices when Kafka or the database does not answer: one warning when that begins, and one when it is over.

A broker that throttles (KIP-219) answers, and wants the next requests later: that is no outage, and has a warning of its own.

All clients of a process report their calls here, so that an outage is logged once, however many calls wait or fail. See
docs/operations/monitoring.md.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final, Self
from weakref import ReferenceType, WeakValueDictionary, ref

from dualwrite import process
from dualwrite.deadline import Deadline
from dualwrite.errors import (
    BrokerError,
    BrokerUnavailableError,
    DeliveryError,
    HostClockError,
    JournalSwitchedError,
    MessageRefusedError,
    StoreCommitUnknownError,
    StoreError,
    StoreLockedError,
    StoreNotWritableError,
    StoreUnavailableError,
)
from dualwrite.observability import observers
from dualwrite.observability.events import OutageBegan, OutageEnded
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.readings import Reading, add_source, side_of

log = SubjectLogger("dualwrite.outages")

DELIVERY: Final = "messages were not acknowledged"
"""Kind of a call that waits until messages are stored, or looks up where to send them."""

REQUEST: Final = "a request was not answered"
"""Kind of any other call to Kafka."""

BEGIN: Final = "the beginning of a transaction was not answered"
"""Kind of a call to the database that only reads."""

DATABASE: Final = "a transaction was not answered"
"""Kind of a call to the database that writes."""

WRITES: Final = "a write was not accepted"
"""Kind of what is reported of a database that answers, and takes no writes, until a call that writes succeeds."""

_PROVES: Final = {DATABASE: (DATABASE, WRITES, BEGIN)}
"""The kinds that an answer to such a call answers: a beginning's may come with a statement of the user's."""

SLOW: Final = 1.5
"""Seconds after which a call without an answer is an outage."""

_LOOK_INTERVAL: Final = 0.25
"""Seconds between two looks at the calls in progress."""

_SETTLING_SECONDS: Final = 1.0
"""Seconds for which no call may be without an answer after the first answer; then the outage is over."""

_MAX_SETTLING_SECONDS: Final = 60.0
"""`_SETTLING_SECONDS` are doubled, up to this, for each outage that begins so soon after another: not all are logged."""

_THROTTLED_AGAIN: Final = 60.0
"""Seconds after which a quota that still throttles is logged again."""

_REFUSAL_COUNTS_SECONDS: Final = 60.0
"""Seconds for which a write that was refused counts for probes: without traffic there may be no other."""

_JOIN_SECONDS: Final = 1.0
"""Seconds that the interpreter's end waits for the thread."""


_NO_ANSWER: Final = (BrokerUnavailableError, DeliveryError, StoreUnavailableError, StoreCommitUnknownError)


class ErrorMeaning(Enum):
    """What an error of a transaction means for a loop of them. Both sides are rolled back, unless it is in doubt."""

    IN_DOUBT = "the transaction may have committed"
    LATER = "the same transaction may succeed later"
    CONTENT = "one of its messages or rows may have caused it"
    STOP = "no later attempt would succeed"


def is_no_answer(error: BaseException | None) -> bool:
    """Whether an error says that Kafka or the database did not answer in time, or can't be reached; a refusal is an answer."""
    if isinstance(error, MessageRefusedError | HostClockError | StoreLockedError) or _is_throttled(error):
        return False
    return isinstance(error, _NO_ANSWER)


def _is_throttled(error: BaseException | None) -> bool:
    return isinstance(error, BrokerError) and "throttled" in error.facts


def level_of(error: BaseException) -> int:
    """The level at which to log that something is tried again: if a side does not answer, there is one warning of that."""
    is_known = _is_throttled(error) or is_no_answer(error) or isinstance(error, JournalSwitchedError)
    return logging.INFO if is_known else logging.WARNING


class Throttling:
    """For how long quotas hold back requests to one cluster, as this process knows.

    Attributes:
        until: When all requests may be sent again, by `time.monotonic`.
        produce_until: The same for messages, by broker and client: also on other connections than the one that the broker has
            muted, which would otherwise exceed the quota.
        quota: The last one that has, and whose it is, in words.
        added: For how long requests are held back in all, until `until`.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self.produce_until: dict[tuple[object, str], float] = {}
        self.quota = ""
        self.added = 0.0
        self._logged_at: dict[str, float] = {}

    def add(self, seconds: float, quota: str) -> bool:
        """A response says that the next request should come so much later; whether that should be logged."""
        now = time.monotonic()
        until = max(now + seconds, self.until)
        self.added += until - max(now, self.until)
        self.until, self.quota = until, quota
        if now - self._logged_at.get(quota, -_THROTTLED_AGAIN) < _THROTTLED_AGAIN:
            return False
        self._logged_at[quota] = now
        return True

    @property
    def seconds(self) -> float:
        """For how long requests were held back until now."""
        return self.added - max(self.until - time.monotonic(), 0.0)


class Side:
    """Kafka or a database, as this process sees it. Any thread may use it; `kafka_at` and `database_at` return it.

    Attributes:
        calls: Those in progress.
        failing: For each kind of which something was not answered: since when.
        began: When the outage began; None: there is none.
        throttling: What Kafka's quotas hold back.
    """

    def __init__(self, name: str, *, is_local: bool = False) -> None:
        self._name = name
        self._is_local = is_local
        self.forget_all()

    def forget_all(self) -> None:
        """Start again in a forked child: the calls are its parent's."""
        self._lock = threading.RLock()  # a signal handler may make calls, too
        self.calls: dict[int, ReferenceType[SideCall]] = {}  # weak, since an interrupt may keep one from being removed
        self.failing: dict[str, float] = {}
        self.began: float | None = None
        self.throttling = Throttling()
        self._kinds: set[str] = set()  # of the calls that had no answer in this outage
        self._answered: float | None = None
        self._refused: tuple[float, BaseException] | None = None  # the last write that was not accepted
        self._ended = -_MAX_SETTLING_SECONDS
        self._settling = _SETTLING_SECONDS

    @property
    def is_out(self) -> bool:
        """Whether there is an outage."""
        return self.began is not None

    def call(self, kind: str, *, may_wait: bool = False) -> SideCall:
        """A call to this side, as a `with` block. It has no answer yet, or none at all if the block raises `is_no_answer`.

        An outage is over once something of a `kind` is answered that was not. `may_wait`: the call may wait for something else
        than an answer, such as a lock; then only its error counts.
        """
        return SideCall(self, kind, may_wait=may_wait or self._is_local)

    def failed(self, kind: str, error: BaseException, *, since: float | None = None) -> None:
        """Report that something was not answered, and why.

        `since` is the beginning of a call that may have had too little time: it is an outage once nothing of this kind was
        answered for `SLOW` seconds, since the last one was over. Without it, it is one at once.
        """
        now = time.monotonic()
        with self._lock:
            self._answered = None
            if kind is WRITES:
                self._refused = now, error
            first = self.failing.setdefault(kind, now if since is None else max(since, self._ended))
            if self.began is not None:
                self._kinds.add(kind)
            elif since is None or now - first >= SLOW:
                self._begin(kind, first, error)

    def check_writes(self) -> None:
        """For a probe: check that no write was refused lately, or that one has succeeded since.

        Raises:
            StoreNotWritableError: See there; its cause is the last error.
        """
        refused = self._refused
        if WRITES in self.failing and refused is not None and time.monotonic() - refused[0] < _REFUSAL_COUNTS_SECONDS:
            raise StoreNotWritableError(f"{self._name} takes no writes.", cause=str(refused[1]), next_step="see the cause")

    def answered(self, kind: str) -> None:
        """Report that something was answered."""
        if kind not in self.failing and self.began is None:
            return
        with self._lock:
            self.failing.pop(kind, None)
            if self._answered is None and kind in self._kinds:
                self._answered = time.monotonic()

    def throttled(self, seconds: float, quota: str) -> None:
        """Report a response with which Kafka asks for a pause of so many seconds, because of a quota."""
        with self._lock:
            if not self.throttling.add(seconds, quota):
                return
        log.warning(
            "%s throttles: the quota %s holds requests back, now for %.1f s; calls are slower", self._name, quota, seconds
        )

    def readings(self) -> Iterator[Reading]:
        """How long it has not answered, for `dualwrite.observability.current_readings`; and how long it has throttled."""
        began, side = self.began, side_of(self._name)
        yield Reading("outage_open_seconds", 0.0 if began is None else time.monotonic() - began, {"side": side})
        if side == "kafka":
            yield Reading("kafka_throttled_seconds", self.throttling.seconds, {"side": side})

    # --- for calls and the thread --------------------------------------------------------------------------------------------

    def ended(self, call: SideCall, error: BaseException | None) -> None:
        """A call has ended with an error, or while there are others that were not answered."""
        if isinstance(error, BrokerError) and is_no_answer(error) and call.is_throttled:
            self._explain(error, call)
            self.answered(call.kind)
        elif error is not None and is_no_answer(error):
            kind = WRITES if isinstance(error, StoreNotWritableError) else call.kind
            self.failed(kind, error, since=None if isinstance(error, StoreError) else call.began)
        elif error is None or isinstance(error, Exception):
            for kind in _PROVES.get(call.kind, (call.kind,)):
                self.answered(kind)

    def held_until(self, call: SideCall) -> float:
        """Until when quotas hold back what a call waits for, by `time.monotonic`; 0 if something else has gone wrong."""
        return self.throttling.until if call.error is None or getattr(call.error, "is_throttled", False) else 0.0

    def look(self) -> bool:
        """Log what has changed; return whether there is anything to look at again."""
        now = time.monotonic()
        known = self.calls.copy()  # at once; list(….items()) makes tuples, and the garbage collector may let other threads in
        found = [(key, made()) for key, made in known.items()]
        for key, call in found:
            if call is None:
                self.calls.pop(key, None)
        calls = [call for _, call in found if call is not None]
        waiting = [
            call for call in calls if not call.may_wait and now - max(call.began, self._ended, self.held_until(call)) >= SLOW
        ]
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

    def _explain(self, error: BrokerError, call: SideCall) -> None:
        """Say in the error of a call that a quota has held it back, instead of what else an answer that is late may mean."""
        error.facts["throttled"] = held = self.throttling.seconds - call.throttled_before
        lasted = time.monotonic() - call.began
        error.cause = f"throttled for {held * 1000:.0f} ms of the last {lasted * 1000:.0f} by the quota {self.throttling.quota}"
        error.next_step = "send less, or raise the quota (kafka-configs.sh --describe --entity-type clients); then try again"

    def _begin(self, kind: str, since: float, error: BaseException | None) -> None:
        now = time.monotonic()
        is_repeated = now - self._ended < _MAX_SETTLING_SECONDS
        self._settling = min(2 * self._settling, _MAX_SETTLING_SECONDS) if is_repeated else _SETTLING_SECONDS
        self.began, self._kinds, self._answered = since, {kind}, None
        within = f" within {now - since:.1f} s" if now > since else ""
        why = "" if error is None else f": {error}"
        if kind is WRITES:
            log.warning("%s takes no writes%s", self._name, why)
        else:
            log.warning("%s does not answer: %s%s%s", self._name, kind, within, why)
        if observers.installed:
            observers.notify(OutageBegan(self._name, kind))

    def _end(self, began: float, answered: float) -> None:
        self.began, self._ended = None, time.monotonic()
        self.failing.clear()
        what = "takes writes" if WRITES in self._kinds else "answers"
        log.warning("%s %s again, after %.1f s", self._name, what, answered - began)
        if observers.installed:
            observers.notify(OutageEnded(self._name, answered - began))


class SideCall:
    """One call to a side; see `Side.call`.

    Attributes:
        error: The last transient error, after which the call goes on.
        has_answer: Whether it has an answer if the block raises nothing; false if it has sent nothing.
        throttled_before: `Throttling.seconds` when it began.
    """

    __slots__ = ("__weakref__", "_side", "began", "error", "has_answer", "kind", "may_wait", "throttled_before")

    def __init__(self, side: Side, kind: str, *, may_wait: bool) -> None:
        self._side = side
        self.kind = kind
        self.may_wait = may_wait
        self.began = time.monotonic()
        self.error: BaseException | None = None
        self.has_answer = True
        self.throttled_before = side.throttling.added - max(side.throttling.until - self.began, 0.0)

    @property
    def is_throttled(self) -> bool:
        """Whether a quota holds back what it waits for, or has until just now; false if something else has gone wrong."""
        return time.monotonic() < self._side.held_until(self) + SLOW

    def limit(self, deadline: Deadline, if_throttled: Deadline) -> Deadline:
        """The deadline that counts now: the other one, if it is longer, once a quota is why the first one has passed."""
        return if_throttled if if_throttled.seconds > deadline.seconds and deadline.expired and self.is_throttled else deadline

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
                add_source(found)
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
            self._thread.join(_JOIN_SECONDS)

    def _run(self, wakes: SimpleQueue[bool]) -> None:
        is_busy = has_failed = False
        while True:
            try:
                if not wakes.get(timeout=_LOOK_INTERVAL if is_busy else None):
                    return
            except Empty:
                pass
            self.is_asleep = True  # before the look: a call that begins from now on wakes the thread
            with self._lock:
                sides = list(self._sides.values())
            try:
                is_busy = sum(side.look() for side in sides) > 0  # all of them
            except Exception:  # nobody else looks
                if not has_failed:
                    log.exception("outages can't be looked for; this is logged once, and tried again")
                is_busy = has_failed = True
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
process.call_in_child(_watch.forget_all)
