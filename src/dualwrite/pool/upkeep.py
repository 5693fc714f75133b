"""Maintains the pool's size: opens writers, replaces those whose id another process has claimed, closes retired ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import ClaimTimeoutError, FencedError, LostTransactionError, PoolTimeoutError, UnverifiedTransactionError
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.observability.outages import level_of
from dualwrite.pool.pool_ids import Adoption, Ids
from dualwrite.pool.scaling import Sizing
from dualwrite.pool.workers import Workers
from dualwrite.pool.writers import Writers
from dualwrite.writer import DualWriter

log = SubjectLogger(__name__)

_TRIES: Final = 5
"""How many ids are tried for one writer if other processes claim them or have locked their rows."""

_AT_ONCE: Final = 4
"""How many writers the thread opens side by side: each waits for some 20 round trips."""

_FIRST_RETRY: Final = 0.1
"""The pause after a writer could not be replaced, as a fraction of the search interval; doubled after each failure."""

_JOIN: Final = 10.0
"""Seconds that `stop` waits for the thread to end."""


class Upkeep:
    """Keeps a pool at the size that its scaler wants. With leased ids, `start` starts a thread that does so."""

    def __init__(
        self,
        prefix: str,
        ids: Ids,
        writers: Writers,
        scaler: Sizing,
        workers: Workers,
        open_writer: Callable[[str], DualWriter[Any]],
        *,
        kafka_is_lost: Callable[[], bool],
    ) -> None:
        self._prefix = prefix
        self._ids = ids
        self._writers = writers
        self._scaler = scaler
        self._workers = workers
        self._open_writer = open_writer
        self._kafka_is_lost = kafka_is_lost
        self._sizing = threading.Lock()  # one change of the number of writers at a time
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the size ---------------------------------------------------------------------------------------------------------

    def resize(self, size: int, deadline: Deadline) -> None:
        """Open writers, or close some as soon as their transactions have ended, until there are `size` writers.

        After an error the pool keeps the size that it has reached.

        Raises:
            PoolTimeoutError: The writers were busy until the deadline.
            DualWriteError: A writer could not be opened.
        """
        with self._sizing:
            before, self._scaler.wanted = self._scaler.wanted, size
            try:
                self._fill(at_once=1)  # in this thread, which may be interrupted
                while len(self._writers) > size:
                    self._close(self._writers.remove_one(deadline))
            except BaseException:
                self._scaler.wanted = max(len(self._writers), min(before, size))
                raise

    def _fill(self, *, at_once: int) -> None:
        while (missing := self._scaler.wanted - len(self._writers)) > 0 and not self._stopping.is_set():
            if (count := min(missing, at_once)) == 1:
                self._open_one()
            else:
                self._open_side_by_side(count)

    def _open_one(self) -> None:
        writer = self._opened()
        self._writers.add(writer)
        if self._stopping.is_set():  # the pool may have closed its writers before this one was added
            self._writers.close_one(writer)

    def _open_side_by_side(self, count: int) -> None:
        """Open writers in threads of their own; after an error, which is raised then, those that were opened stay."""
        errors: list[Exception] = []

        def open_one() -> None:
            try:
                self._open_one()
            except Exception as error:  # noqa: BLE001  (raised in the calling thread)
                errors.append(error)

        name = f"dualwrite opening {self._prefix}"
        threads = [threading.Thread(target=open_one, name=name, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors[1:]:
            log.info("a writer could not be opened, either: %s", error, exc_info=if_unexpected(error), prefix=self._prefix)
        if errors:
            raise errors[0]

    def _opened(self) -> DualWriter[Any]:
        """Open a writer on the next id, or on another one if that id is in use without a lease or its row is locked."""
        for left in reversed(range(_TRIES)):
            (name,) = self._ids.acquire(1)
            try:
                return self._open_writer(name)
            except (FencedError, ClaimTimeoutError) as error:
                if not left or not self._ids.are_leased:
                    self._ids.release(name)
                    raise
                log.warning("the id can't be opened; using another one: %s", error, transactional_id=name)
                self._ids.avoid(name)
            except (LostTransactionError, UnverifiedTransactionError):
                self._ids.avoid(name)  # nothing is in doubt any more, but an operator has to acknowledge it
                raise
            except BaseException:
                self._ids.release(name)
                raise
        raise AssertionError("unreachable")

    def _close(self, writer: DualWriter[Any]) -> None:
        name = writer.transactional_id
        try:
            self._writers.close_one(writer)
        finally:
            self._ids.release(name)

    # --- the thread -------------------------------------------------------------------------------------------------------

    def start(self, adoption: Adoption, interval: float) -> None:
        """Start the thread, which also searches for ids of dead processes every `interval` seconds."""
        self._thread = threading.Thread(
            target=self._run, args=(adoption, interval), name=f"dualwrite upkeep {self._prefix}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. What it is doing may continue for a while, but it does not open any more writers."""
        self._stopping.set()
        self._writers.changed.set()
        if self._thread is not None:
            self._thread.join(_JOIN)

    def _run(self, adoption: Adoption, interval: float) -> None:
        search_at, retry = time.monotonic(), 0.0
        while not self._stopping.is_set():
            self._close_retired()
            self._close_surplus()
            retry = 0.0 if self._replace() else min(max(retry * 2, interval * _FIRST_RETRY), interval)
            if time.monotonic() >= search_at:
                self._scaler.rest()
                self._workers.match_size()
                self._search(adoption)
                search_at = time.monotonic() + interval
            pause = max(0.0, search_at - time.monotonic())
            if retry:
                self._stopping.wait(min(pause, retry))
            else:
                self._writers.changed.wait(pause)
            self._writers.changed.clear()

    def _close_retired(self) -> None:
        for writer in self._writers.retired():
            try:
                self._writers.close_one(writer)
            except Exception as error:  # the process that has the id now resolves it
                text, name = "closing a writer whose id another process has claimed: %s", writer.transactional_id
                log.info(text, error, exc_info=if_unexpected(error), transactional_id=name)

    def _close_surplus(self) -> None:
        """Close writers that are not wanted any more, as far as they are free now."""
        with self._sizing, suppress(PoolTimeoutError):
            while len(self._writers) > self._scaler.wanted and not self._stopping.is_set():
                writer = self._writers.remove_one(Deadline.after(0))
                try:
                    self._close(writer)
                except Exception as error:  # recovery resolves what is left
                    text, name = "closing a writer that is not needed any more: %s", writer.transactional_id
                    log.info(text, error, exc_info=if_unexpected(error), transactional_id=name)

    def _replace(self) -> bool:
        """Open writers for those that are missing; False if one could not be opened."""
        missing = self._scaler.wanted - len(self._writers)
        try:
            with self._sizing:
                self._fill(at_once=_AT_ONCE)
        except Exception as error:  # whatever it was: this thread must keep running
            if len(self._writers) >= self._scaler.size and not self._stopping.is_set():
                self._scaler.stay()
                self._workers.match_size()  # others may have been opened
                text = "stays at %d writers: %s"
                log.info(text, self._scaler.wanted, error, exc_info=if_unexpected(error), prefix=self._prefix)
                return True
            if not self._stopping.is_set():
                text = "a writer of the pool could not be replaced; trying again: %s"
                log.log(level_of(error), text, error, exc_info=if_unexpected(error), prefix=self._prefix)
                self._writers.fail(error)
            return False
        if missing > 0:
            self._workers.match_size()
        return True

    def _search(self, adoption: Adoption) -> None:
        if self._kafka_is_lost():  # they can't be recovered now, and the pool has a journal
            return
        try:
            adoption.search(lambda: not self._stopping.is_set())
        except Exception as error:  # as above
            if not self._stopping.is_set():
                text = "the search for ids of dead processes failed; trying again: %s"
                log.log(level_of(error), text, error, exc_info=if_unexpected(error), prefix=self._prefix)
