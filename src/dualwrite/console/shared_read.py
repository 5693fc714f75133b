"""Reads that may fail or take long, shared by all viewers: one at a time, in a thread of its own, with the last result kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

import anyio

from dualwrite.errors import BrokerUnavailableError, DualWriteError, StoreUnavailableError
from dualwrite.observability.logs import SubjectLogger, if_unexpected

T = TypeVar("T")

log = SubjectLogger(__name__)

Side = Literal["Kafka", "the database"]

_SILENT: Final[tuple[tuple[type[Exception], Side], ...]] = (
    (BrokerUnavailableError, "Kafka"),
    (StoreUnavailableError, "the database"),
)
_STEP_SECONDS: Final = 0.02
_PAUSE_FACTOR: Final = 5
"""A read that takes a second is repeated after five at the earliest."""


@dataclass(frozen=True)
class LastRead(Generic[T]):
    """What is known of something that is read again and again.

    Args:
        value: The last result; None before the first one.
        at: When it was read, in seconds since 1970.
        problem: Why there is no newer one; None if it is up to date.
        silent: The side that does not answer, if that is the problem.
    """

    value: T | None = None
    at: float | None = None
    problem: str | None = None
    silent: Side | None = None

    @property
    def current(self) -> T | None:
        """The last result, if there is no problem."""
        return None if self.problem is not None else self.value


class SharedRead(Generic[T]):
    """Something that is read again when somebody asks and the last result is too old.

    Args:
        name: What is read, for the log.
        read: Reads it; may raise.
        limit: Seconds that an answer waits for it. A read that takes longer goes on, and nobody begins a second one.
        every: Seconds after which it is too old.
        side: What does not answer if that takes longer than the limit.
    """

    def __init__(self, name: str, read: Callable[[], T], *, limit: float, every: float, side: Side | None = None) -> None:
        self.limit = limit
        self._side = side
        self._name = name
        self._read = read
        self._every = every
        self._lock = threading.Lock()
        self._known: LastRead[T] = LastRead()
        self._begun: float | None = None
        self._due = 0.0

    async def answer(self, wait: float | None = None) -> LastRead[T]:
        """What is known, after waiting for a read that is due; `wait` is a shorter limit."""
        self.begin_if_due()
        limit = self.limit if wait is None else wait
        until = time.monotonic() + limit
        while (begun := self._begun) is not None:
            now = time.monotonic()
            if now >= until or now - begun >= self.limit:
                return self.known
            await anyio.sleep(_STEP_SECONDS)
        return self.known

    @property
    def known(self) -> LastRead[T]:
        """What is known now, without waiting."""
        with self._lock:
            begun, known = self._begun, self._known
        taken = 0.0 if begun is None else time.monotonic() - begun
        if taken < self.limit:
            return known
        return LastRead(known.value, known.at, f"There has been no answer for {taken:.0f} s.", self._side)

    @property
    def is_running(self) -> bool:
        """Whether it is being read."""
        return self._begun is not None

    def again(self) -> None:
        """Read it again when somebody asks next."""
        with self._lock:
            self._due = 0.0

    def begin_if_due(self) -> None:
        """Begin to read it, in a thread, if the last result is too old and nobody reads it."""
        with self._lock:
            if self._begun is not None or time.monotonic() < self._due:
                return
            self._begun = time.monotonic()
        threading.Thread(target=self._run, name=f"dualwrite console {self._name}", daemon=True).start()

    def _run(self) -> None:
        begun = time.monotonic()
        value, problem, silent = self._known.value, None, None
        try:
            value = self._read()
        except Exception as error:
            silent = next((side for kind, side in _SILENT if isinstance(error, kind)), None)
            problem = f"{error}" if isinstance(error, DualWriteError) else f"{type(error).__name__} (see the log)"
            log.info("the console could not read %s: %s", self._name, error, exc_info=if_unexpected(error))
        ended = time.monotonic()
        with self._lock:
            at = time.time() if problem is None else self._known.at
            self._known = LastRead(value, at, problem, silent)
            self._due = ended + max(self._every, _PAUSE_FACTOR * (ended - begun))
            self._begun = None
