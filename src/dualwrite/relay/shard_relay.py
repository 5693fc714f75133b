"""One shard's relay: a writer and a drain, in a thread, until it is stopped or the shard is another relay's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dualwrite.errors import BrokerError, DualWriteError, FencedError, InDoubtTransactionError
from dualwrite.logs import SubjectLogger, if_unexpected
from dualwrite.outages import is_no_answer, level_of
from dualwrite.outbox.drain import Drain, Turn
from dualwrite.outbox.poison import Verdict, verdict_of
from dualwrite.relay.options import RelayOptions
from dualwrite.relay.wake_up import WakeUp
from dualwrite.stores.base import TxnStateStore
from dualwrite.writer import DualWriter

log = SubjectLogger(__name__)


class ShardRelay:
    """Publishes the rows of one shard.

    Attributes:
        name: The shard's transactional id.
        wake_up: Where it waits for new rows.
        error: Why its thread has ended, if that was an error that no retry would resolve.
        looked_at: When it last looked for rows, by `time.monotonic`.
        tried_at: When it last tried to, which may have failed.

    Args:
        name: See above.
        store: The database.
        open_writer: Opens the shard's writer, which recovers what the previous relay has left.
        make_drain: Makes the drain on a writer.
        keeps: Whether the shard is still ours; may raise the store's errors.
        check_kafka: Raises BrokerUnavailableError if Kafka does not answer. Called before the next transaction after Kafka has
            not answered: a transaction would keep its rows locked, on SQLite the whole database, while it waits.
        options: How to wait and to retry.
        done: Called with each turn that has moved rows, in the thread.
    """

    def __init__(
        self,
        name: str,
        store: TxnStateStore,
        open_writer: Callable[[], DualWriter[Any]],
        make_drain: Callable[[DualWriter[Any]], Drain],
        keeps: Callable[[], bool],
        check_kafka: Callable[[], None],
        options: RelayOptions,
        done: Callable[[Turn], None],
    ) -> None:
        self.name = name
        self.wake_up = WakeUp()
        self.error: Exception | None = None
        self.looked_at = self.tried_at = time.monotonic()
        self._store = store
        self._open_writer = open_writer
        self._make_drain = make_drain
        self._keeps = keeps
        self._check_kafka = check_kafka
        self._options = options
        self._done = done
        self._stopping = threading.Event()
        self._writer: DualWriter[Any] | None = None
        self._drain: Drain | None = None
        self._pause = options.pause
        self._is_kafka_out = False
        self._thread = threading.Thread(target=self._run, name=f"dualwrite relay {name}", daemon=True)

    # --- in the thread that owns it ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, unless that was done."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def stop(self) -> None:
        """End the thread once its transaction has ended; `join` waits for that."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until the thread has ended and has closed the writer, within its limits; without a thread, close it."""
        if self._thread.ident is None:
            self._close_quietly()
        else:
            self._thread.join()

    def turn(self) -> Turn:
        """Publish one batch, in the caller's thread, while there is no other.

        Raises: as `Drain.turn`, and as `DualWriter.open`.
        """
        if self._writer is None or self._drain is None:
            self._writer = self._open_writer()
            self._drain = self._make_drain(self._writer)
        turn = self._drain.turn()
        if turn.rows:
            self._done(turn)
        return turn

    def close(self) -> None:
        """Close the writer.

        Raises: as `DualWriter.close`.
        """
        writer, self._writer, self._drain = self._writer, None, None
        if writer is not None:
            writer.close()

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001  (the relay raises it)
            self.error = error
        finally:
            self._close_quietly()

    def _close_quietly(self) -> None:
        try:
            self.close()
        except DualWriteError as error:  # recovery resolves what is left
            log.warning("closing: %s", error, transactional_id=self.name)

    def _loop(self) -> None:
        poll, is_idle = self._options.poll, False
        while not self._stopping.is_set():
            self.tried_at = time.monotonic()
            try:
                if self._is_kafka_out:
                    self._check_kafka()
                    self._is_kafka_out = False
                turn = Turn() if is_idle and self._drain is not None and not self._drain.has_rows() else self.turn()
            except FencedError as error:
                if not self._is_ours_after(error):
                    return
            except Exception as error:  # noqa: BLE001  (raised again, unless a retry may succeed)
                self._retry(error)
            else:
                self.looked_at = time.monotonic()
                self._pause = self._options.pause
                is_idle = not turn.rows
                if turn.rows or self.wake_up.wait(poll, self._stopping):
                    poll = self._options.poll
                else:
                    poll = min(2 * poll, self._options.longest_poll)

    def _retry(self, error: Exception) -> None:
        """Wait before the next attempt; or raise the error, if no attempt would succeed."""
        if verdict_of(error, self._store) is not Verdict.LATER:
            raise error
        self._is_kafka_out = isinstance(error, BrokerError) and is_no_answer(error)
        if isinstance(error, InDoubtTransactionError):
            log.warning("%s", error, transactional_id=self.name)
        else:
            level = level_of(error) if self._pause == self._options.pause else logging.INFO
            text = "trying again in %.3g s: %s"
            log.log(level, text, self._pause, error, exc_info=if_unexpected(error), transactional_id=self.name)
        self._sleep()

    def _sleep(self) -> None:
        self._stopping.wait(self._pause)
        self._pause = min(2 * self._pause, self._options.longest_pause)

    def _is_ours_after(self, error: FencedError) -> bool:
        """After another process has claimed the id: whether the shard is still ours, so that it is claimed again."""
        log.info("%s", error, transactional_id=self.name)
        with suppress(DualWriteError):  # fenced, so there is nothing left that it could commit
            self.close()
        try:
            if not self._keeps():
                return False
        except DualWriteError as unknown:
            log.info("whether the shard is still leased can't be read: %s", unknown, transactional_id=self.name)
        self._sleep()
        return True
