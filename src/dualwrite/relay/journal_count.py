"""How much a journal contains: counted by a thread of its own, since the one that publishes may wait for Kafka.

Whether a limit is reached is known only by counting. Each process counts, since each keeps to its own limits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Final

from dualwrite.errors import DualWriteError
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.readings import Reading
from dualwrite.recipe.journaling import Journal
from dualwrite.stores.journal import GateStatus

log = SubjectLogger(__name__)

_PAUSE_SECONDS: Final = 1.0
"""Seconds between two counts, at least."""

_FRACTION: Final = 20
"""Counting takes at most this fraction of the time."""

_JOIN_SECONDS: Final = 2.0


class JournalCount:
    """Counts what a journal contains while its gate is open, and tells the journal which limit is reached.

    Args:
        journal: The journal, as the writers of this process see it.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._counted: GateStatus | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def readings(self) -> Iterator[Reading]:
        """Whether the journal is open, and what it contained when that was counted last."""
        labels = {"prefix": self._journal.prefix}
        yield Reading("journal_open", self._journal.is_open, labels)
        counted = self._counted
        if counted is not None and self._journal.is_open:
            yield Reading("journal_messages", counted.entries or 0, labels)
            yield Reading("journal_bytes", counted.size or 0, labels)
            yield Reading("journal_age_seconds", counted.age(time.time()), labels)
            yield Reading("journal_later_messages", counted.later or 0, labels)

    def start_if_open(self) -> None:
        """Begin, if the gate is open; it ends by itself when the gate is closed. For one thread."""
        if self._journal.is_open and (self._thread is None or not self._thread.is_alive()):
            name = f"dualwrite count {self._journal.prefix}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End. May be called more than once, and without a start."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while self._journal.is_open and not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._count()
            except DualWriteError as error:  # the next unit, and whoever publishes, say so as well
                log.debug("the journal can't be counted now: %s", error, prefix=self._journal.prefix)
            self._stopping.wait(max(_PAUSE_SECONDS, _FRACTION * (time.monotonic() - began)))
        self._counted = None

    def _count(self) -> None:
        (status,) = self._journal.store.gates(self._journal.prefix, counts=True) or (None,)
        if status is not None:
            self._counted = status
            self._journal.note_counts(status)
