"""The results of `check` of pools, processors and relays, for probes of Kubernetes and load balancers.

Ready means: it can do its work now, so send requests. Alive means: a restart would not help. A pool whose database or broker is
down is alive, but not ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Generic, TypeVar

from dualwrite.deadline import Deadline

T = TypeVar("T")

CHECK_LIMIT: Final = 2.0
"""The default limit of `check`, in seconds."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a check.

    Args:
        is_ok: Whether it is as it should be.
        text: What was found, for people.
    """

    is_ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Health:
    """The base class of the results: each field that is a Part is one part of the check."""

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by their names."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: part for name, part in found.items() if isinstance(part, Part)}

    @property
    def is_ready(self) -> bool:
        """Whether it can do its work now."""
        return all(part.is_ok for part in self.parts.values())

    @property
    def is_alive(self) -> bool:
        """Whether a restart of the process would not help: false if it has ended, or has made no progress for long."""
        return all(part.is_ok for name, part in self.parts.items() if name in ("running", "progress"))

    @property
    def text(self) -> str:
        """One line for people, with what is not as it should be first."""
        parts = sorted(self.parts.items(), key=lambda part: part[1].is_ok)
        return "; ".join(f"{name}: {part.text}" for name, part in parts)

    def record(self) -> dict[str, Any]:
        """Its values for JSON."""
        parts = {name: {"ok": part.is_ok, "text": part.text} for name, part in self.parts.items()}
        return {"ready": self.is_ready, "alive": self.is_alive, **parts}


@dataclass(frozen=True, slots=True)
class PoolHealth(Health):
    """The result of `WriterPool.check`.

    Args:
        database: Whether the database answers, and has dualwrite's tables.
        kafka: Whether the coordinators of the pool's ids answer.
        writers: Whether there is a writer to use, and which ids are leased.
        progress: Whether calls that wait are taken by groups.
        needs_kafka: Whether the pool can't write without Kafka: it has no journal.
    """

    database: Part
    kafka: Part
    writers: Part
    progress: Part
    needs_kafka: bool

    @property
    def is_ready(self) -> bool:
        """Whether units can be written now. With a journal this does not depend on Kafka."""
        return all(part.is_ok for name, part in self.parts.items() if name != "kafka" or self.needs_kafka)


@dataclass(frozen=True, slots=True)
class ProcessorHealth(Health):
    """The result of `DualProcessor.check`.

    Args:
        running: Whether `run` is in progress.
        database: Whether the database answers.
        kafka: Whether a broker answers about the processor's topics.
        partitions: Which partitions are assigned; a member without any is in reserve.
        progress: Whether it goes on: it asks for messages, or tries a batch again.
    """

    running: Part
    database: Part
    kafka: Part
    partitions: Part
    progress: Part


@dataclass(frozen=True, slots=True)
class RelayHealth(Health):
    """The result of `Relay.check`.

    Args:
        running: Whether `run` is in progress.
        database: Whether the database answers, and has dualwrite's tables.
        kafka: Whether a broker answers.
        shards: Which shards it works on; a relay without any is in reserve.
        progress: Whether its shards go on: they look for rows, or try again.
    """

    running: Part
    database: Part
    kafka: Part
    shards: Part
    progress: Part


class InThread(Generic[T]):
    """Calls a function in a thread. What does not answer holds up neither the caller nor the end of the process.

    Args:
        name: The thread's name.

    Attributes:
        seconds: How long the last call has taken.
    """

    def __init__(self, name: str) -> None:
        self.seconds = 0.0
        self._name = name
        self._thread: threading.Thread | None = None
        self._outcome: list[T | BaseException] = []

    def start(self, function: Callable[[], T]) -> None:
        """Begin a call, unless an earlier one is still in progress: then `result` waits for that one."""
        if self._thread is None or not self._thread.is_alive():
            self._outcome = []
            self._thread = threading.Thread(target=self._run, args=(function, self._outcome), name=self._name, daemon=True)
            self._thread.start()

    def result(self, deadline: Deadline) -> T:
        """What the function has returned, once `start` was called.

        Raises:
            TimeoutError: The call is still in progress at the deadline.
            Exception: What the function has raised.
        """
        assert self._thread is not None
        self._thread.join(deadline.left)
        if not self._outcome:
            raise TimeoutError
        (found,) = self._outcome
        if isinstance(found, BaseException):
            raise found
        return found

    def _run(self, function: Callable[[], T], outcome: list[Any]) -> None:
        began = time.monotonic()
        try:
            found: Any = function()
        except BaseException as error:  # noqa: BLE001  (raised by `result`)
            found = error
        self.seconds = time.monotonic() - began
        outcome.append(found)


class Asking:
    """Asks several sides at the same time whether they answer. Of each there is one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, InThread[object]] = {}

    def answers(self, asks: Mapping[str, Callable[[], object]], limit: Deadline) -> dict[str, Part]:
        """Whether each has answered within the limit; what it raises is its text."""
        with self._lock:
            for name, ask in asks.items():
                self._calls.setdefault(name, InThread("dualwrite check")).start(ask)
        return {name: self._part(self._calls[name], limit) for name in asks}

    def _part(self, call: InThread[object], limit: Deadline) -> Part:
        try:
            call.result(limit)
        except TimeoutError:
            return Part(is_ok=False, text=f"no answer within {limit.seconds:g} s")
        except Exception as error:  # noqa: BLE001  (whatever a driver raises is the answer)
            return Part(is_ok=False, text=f"{error}" or type(error).__name__)
        return Part(is_ok=True, text=f"answers ({1000 * call.seconds:.0f} ms)")


def goes_on(idle: float, longest: float) -> Part:
    """The part about progress: what has done nothing for `idle` seconds stands still if that is more than `longest`."""
    if idle > longest:
        return Part(is_ok=False, text=f"stands still for {idle:.0f} s")
    return Part(is_ok=True, text=f"last seen {idle:.1f} s ago")
