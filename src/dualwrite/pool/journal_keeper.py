"""The thread that looks after a pool's or a writer's journal: it notices that Kafka answers, drains, and closes the gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from dualwrite.errors import DualWriteError, FencedError
from dualwrite.logs import SubjectLogger, if_unexpected
from dualwrite.outages import level_of
from dualwrite.outbox.journal_drain import DrainLease, JournalDrain, drainer_id
from dualwrite.recipe.journaling import Journal
from dualwrite.stores.leases import LeaseStore
from dualwrite.writer import DualWriter

log = SubjectLogger(__name__)

_TICK: Final = 0.5
"""Seconds between two looks while the gate is open."""

_LOOK: Final = 5.0
"""Seconds between two looks while it is closed: another process may have opened it and died."""

_SHARE: Final = 20
"""Counting the entries takes at most this fraction of the time."""

_LONGEST_PAUSE: Final = 10.0
_JOIN: Final = 10.0


class JournalKeeper:
    """Looks after one journal, in a thread.

    Args:
        journal: The journal.
        leases: One process at a time drains. The lease only says which; its claim of the drainer's id stops the others.
        probe: Asks Kafka for something within a second; raises if it does not answer.
        open_drainer: Opens a writer on an id.
        closed: Called when it has stopped; perhaps more than once.
    """

    def __init__(
        self,
        journal: Journal,
        leases: LeaseStore,
        probe: Callable[[], object],
        open_drainer: Callable[[str], DualWriter[Any]],
        closed: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._probe = probe
        self._open_drainer = open_drainer
        self._closed = closed
        self._id = drainer_id(journal.prefix)
        self._stopping = threading.Event()
        self._writer: DualWriter[Any] | None = None
        self._drain: JournalDrain | None = None
        self._lease = DrainLease(leases, journal.prefix, journal.owner)
        self._next_count = 0.0
        self._pause = _TICK
        self._thread = threading.Thread(target=self._run, name=f"dualwrite journal {journal.prefix}", daemon=True)

    @property
    def is_open(self) -> bool:
        """Whether messages go into the journal, as far as this process knows."""
        return self._journal.is_open

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is in the journal stays there, for another process or the next start."""
        self._stopping.set()
        self._journal.changed.set()
        if self._thread.ident is None:
            self._closed()
        elif self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    @property
    def kafka_is_lost(self) -> bool:
        """Whether Kafka did not answer when it was needed last."""
        return self._journal.is_lost

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        journal = self._journal
        try:
            while not self._stopping.is_set():
                if not (journal.is_open or journal.is_lost):
                    journal.changed.wait(_LOOK)
                    journal.changed.clear()
                else:
                    self._stopping.wait(self._pause)
                if not self._stopping.is_set():
                    self._tick()
        finally:
            self._release()
            self._closed()

    def _tick(self) -> None:
        try:
            self._look()
            needs_kafka = self._journal.is_open or self._journal.is_lost
            if needs_kafka and self._answers() and self._journal.is_open and self._lease.is_ours():
                self._empty()
            self._pause = _TICK
        except Exception as error:  # whatever it is, the journal must be drained some day
            log.log(
                level_of(error),
                "the journal can't be emptied now, trying again: %s",
                error,
                exc_info=if_unexpected(error),
                prefix=self._journal.prefix,
            )
            self._close_writer()
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _look(self) -> None:
        """Read the gate, and how much the journal contains."""
        now = time.monotonic()
        counts = self._journal.is_open and now >= self._next_count
        (status,) = self._journal.store.gates(self._journal.prefix, counts=counts) or (None,)
        if status is None:
            return
        self._journal.note(status.epoch)
        if counts:
            took = time.monotonic() - now
            self._next_count = time.monotonic() + max(1.0, _SHARE * took)
            self._journal.full = self._journal.limits.reached(status, time.time())

    def _answers(self) -> bool:
        """Whether Kafka answers."""
        try:
            self._probe()
        except DualWriteError as error:
            log.debug("Kafka does not answer yet: %s", error, prefix=self._journal.prefix)
            return False
        self._journal.is_lost = False
        return True

    def _empty(self) -> None:
        """Drain until the gate is closed."""
        if self._drain is None:
            self._writer = self._open_drainer(self._id)
            self._drain = JournalDrain(self._writer, self._journal.prefix, self._journal.owner)
        try:
            while self._drain.step():
                if self._stopping.is_set() or not self._lease.is_ours():
                    return
                if time.monotonic() >= self._next_count:
                    self._look()
        except FencedError as error:
            log.info("another process drains the journal now: %s", error, prefix=self._journal.prefix)
            self._lease.give_up()
            self._close_writer()
            return
        log.info("the journal is empty, and its gate is closed", prefix=self._journal.prefix)
        self._look()
        self._release()

    def _release(self) -> None:
        self._close_writer()
        self._lease.release()

    def _close_writer(self) -> None:
        writer, self._writer, self._drain = self._writer, None, None
        if writer is not None:
            try:
                writer.close()
            except DualWriteError as error:  # recovery resolves what is left
                log.info("closing: %s", error, transactional_id=self._id)
