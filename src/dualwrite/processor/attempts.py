"""Attempts at one transaction of a processor: until it has committed, or until nothing of its batch is left to process.

`Runner` runs a transaction, `meaning_of` decides what its error means, `Attempts` acts on that.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from dualwrite.deadline import Pauses
from dualwrite.errors import (
    AfterCommitError,
    BrokerUnavailableError,
    DeliveryError,
    DeserializationError,
    DualWriteError,
    InDoubtTransactionError,
    InvalidMessageError,
    JournalSwitchedError,
    MessageFailedError,
    MessageRefusedError,
    MessageTooLargeError,
    PositionMovedError,
    StoreCommitFailedError,
    StoreError,
    StoreUnavailableError,
    TransactionTimeoutError,
    causes_of,
)
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Batch, fields_of, name_of, partition_of
from dualwrite.kafka.topic import Topic
from dualwrite.observability import observers, tracing
from dualwrite.observability.events import BatchFailed, BatchProcessed
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.observability.outages import ErrorMeaning, level_of
from dualwrite.process import StopFlag
from dualwrite.processor.dead_letters import is_for
from dualwrite.processor.decoded import decoded
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.progress import Finish, Progress
from dualwrite.stores.positions import Partition
from dualwrite.stores.store_transaction import RunAloneError
from dualwrite.transaction import Transaction
from dualwrite.transactional import made_for_each_attempt

log = SubjectLogger(__name__)

Content = Callable[[], list[Any]]
"""Returns the messages for a handler: with each call a list of its own, with new objects if they were deserialized."""

IsPassing = Callable[[BaseException], bool]
"""Whether an error, the driver's or our own, says that the same transaction may succeed later."""

_ABOUT_MESSAGES: Final = (
    DeserializationError,
    InvalidMessageError,
    MessageRefusedError,
    MessageTooLargeError,
    TransactionTimeoutError,
)
"""Regardless of their `retriable`: the same batch or message would fail again."""

_OFTEN_ABOUT_MESSAGES: Final = (
    AfterCommitError,  # of another transaction, which the handler has run
    StoreCommitFailedError,
)
"""Their causes decide. So do those of a plain StoreError: the block continued after a failed statement, or wrote too much."""

_PASSING: Final = (
    StoreUnavailableError,  # also of a COMMIT that was not sent
    BrokerUnavailableError,
    DeliveryError,
    JournalSwitchedError,  # a StoreCommitFailedError, too
)
"""Ours that say that the same transaction may succeed later, even as the causes of an error that a handler raises itself."""

_DEFAULT_POLL_INTERVAL_MS: Final = 300_000
"""librdkafka's default of `max.poll.interval.ms`."""


class Runner(ABC):
    """Runs transactions, one at a time: on a writer, as a unit of a pool, or as a separate transaction of a pool."""

    @abstractmethod
    def run(self, content: Content | None, finish: Finish) -> None:
        """Run one transaction; when it returns, it has committed. If a listener of the commit has failed, that is logged.

        Args:
            content: Called for the handler's messages each time the handler is called; None for a transaction that does not
                call it.
            finish: Called after the handler.

        Raises:
            AfterCommitError: Another transaction's, raised by the handler; this one has not committed.
            Exception: What the handler, the transaction, or `finish` raises.
            StoppedError: The transaction was cancelled because the processor is being stopped.
        """

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether a retry may succeed after an error, or the cause of one, even if the error is not `retriable`."""


def meaning_of(error: Exception, is_transient: IsPassing, *, before: BaseException | None = None) -> ErrorMeaning:
    """Decide what an error of a transaction, or of the handler in it, means. Both sides are rolled back, unless it is in doubt.

    `is_transient` is also asked about the error's causes if the error itself does not say what it means. `before` is what was
    being handled before the transaction began; see `causes_of`.
    """
    if isinstance(error, InDoubtTransactionError):
        return ErrorMeaning.IN_DOUBT
    if isinstance(error, _ABOUT_MESSAGES):
        return ErrorMeaning.CONTENT
    if _says_nothing_about_messages(error, is_transient):
        return ErrorMeaning.LATER
    if not isinstance(error, DualWriteError) or isinstance(error, _OFTEN_ABOUT_MESSAGES) or type(error) is StoreError:
        for cause in causes_of(error, before=before):
            if _says_nothing_about_messages(cause, is_transient):
                return ErrorMeaning.LATER
        return ErrorMeaning.CONTENT
    return ErrorMeaning.LATER if error.retriable else ErrorMeaning.STOP


def _says_nothing_about_messages(error: BaseException, is_transient: IsPassing) -> bool:
    return is_transient(error) or (isinstance(error, _PASSING) and not isinstance(error, _ABOUT_MESSAGES))


class StoppedError(BaseException):
    """The processor was stopped in the middle of its work. Internal: the processor never raises it."""


class UnprocessableError(Exception):
    """One of the messages may have caused the failure of the transaction. Internal: the processor never raises it.

    Args:
        reason: The exception that the transaction raised.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"{type(reason).__qualname__}: {reason}")
        self.reason = reason


class Attempts:
    """Runs the transactions of batches, each until it has committed, or `stopped` is set. For one thread.

    Args:
        group_id: The group.
        settings: The consumer's settings.
        decoding: The topics whose messages are deserialized, by name.
        runner: Runs a transaction.
        progress: The positions.
        options: How often to try, and how large batches are.

    Attributes: as the arguments, and
        stopped: Set to end the work.
        batch_limit: The maximum number of messages of a batch, which errors may lower.
        next_offsets: The next offset of each partition.
        active_at: When it last asked for messages, or began an attempt, by `time.monotonic`.
        timestamps: The timestamp of the last message of each partition that was processed, in milliseconds since 1970.
    """

    def __init__(
        self,
        group_id: str,
        settings: Mapping[str, Any],
        decoding: Mapping[str, Topic[Any, Any]],
        runner: Runner,
        progress: Progress,
        options: ProcessorOptions,
    ) -> None:
        self.group_id = group_id
        self.settings = settings
        self.progress = progress
        self.options = options
        self.stopped = StopFlag()
        self._decoding = decoding
        self._runner = runner
        self.batch_limit = options.batch
        self.next_offsets: dict[Partition, int] = {}
        self.timestamps: dict[Partition, int] = {}
        self.active_at = time.monotonic()
        self._times_too_slow = 0

    def begin(self) -> None:
        """Forget what the batches of an earlier run have shown."""
        self.batch_limit, self._times_too_slow = self.options.batch, 0
        self.timestamps = {}

    def note_next(self, offsets: Mapping[Partition, int]) -> None:
        """The next messages are those from these offsets on; BEGINNING is 0."""
        self.next_offsets |= {key: max(offset, 0) for key, offset in offsets.items()}

    def seek(self, consumer: GroupConsumer, offsets: Mapping[Partition, int]) -> None:
        """Continue at other offsets."""
        self.note_next(offsets)
        consumer.seek(offsets)

    @property
    def max_poll_seconds(self) -> float:
        """Seconds after which librdkafka takes a member that does not ask for messages out of the group."""
        return int(self.settings.get("max.poll.interval.ms", _DEFAULT_POLL_INTERVAL_MS)) / 1000

    def pauses(self) -> Pauses:
        """The pauses between attempts, as the options have them."""
        return Pauses(self.options.pause, self.options.longest_pause, spread=0.0)

    def run(self, consumer: GroupConsumer, batch: Batch, *, instead: Finish | None = None) -> bool:
        """Run a transaction until it has committed, or no partition of the batch is still assigned, or `stop` was called.

        Transient errors are retried. `instead` is called in place of the handler, to send a dead letter.

        Returns:
            Whether this call has committed it; False also if it turns out that an earlier attempt had committed it.

        Raises:
            UnprocessableError: One of the messages may be the cause; nothing took effect.
            MessageFailedError: A single message exceeded the time limit too often; see `_was_too_slow`.
            DualWriteError: A permanent error.
        """
        before = sys.exception()
        pauses, first = self.pauses(), time.monotonic()
        while batch.messages:
            began = self.active_at = time.monotonic()
            try:
                content = None if instead is not None else self._content(batch)
                with tracing.processing(self.group_id, batch.messages):
                    self._runner.run(content, partial(self._finish, consumer, batch, instead))
            except PositionMovedError as error:
                left = self._left_of(consumer, batch, "positions have moved")
                if left is not None and len(left.messages) < len(batch.messages):
                    batch = left
                    continue
                log.warning("trying again in %.3g s: %s", pauses.upcoming, error, group_id=self.group_id)
            except Exception as error:  # noqa: BLE001  (raised again, unless a retry may succeed)
                meaning = meaning_of(error, self._is_transient, before=before)
                rest = self._rest_after(error, meaning, consumer, batch, pauses, seconds=time.monotonic() - began)
                if rest is not None:
                    batch = rest
                    continue
            else:
                self._has_committed(consumer, batch, seconds=time.monotonic() - first, was_retried=pauses.taken > 0)
                return True
            if self.progress.can_assign:
                consumer.wait(next(pauses), self.stopped.is_set)
            else:  # no rebalance, which would wait for this very transaction
                self.stopped.wait(next(pauses))
            if self.stopped.is_set():
                break
            batch = batch.still_owned(consumer.owned())
        return False

    def _finish(self, consumer: GroupConsumer, batch: Batch, instead: Finish | None, tx: Transaction[Any]) -> None:
        if instead is not None:
            instead(tx)
        self.progress.move(consumer, batch, tx)

    def _has_committed(self, consumer: GroupConsumer, batch: Batch, *, seconds: float, was_retried: bool) -> None:
        self._times_too_slow = 0
        if observers.installed:
            of_topics = Counter(message.topic() for message in batch.messages)
            observers.notify(BatchProcessed(self.group_id, of_topics, seconds))
        if was_retried:
            log.info("the batch is committed, %.1f s after its first attempt", seconds, group_id=self.group_id)
        self.next_offsets |= batch.after
        self._note_timestamps(batch)
        self.progress.moved(consumer, batch.after)

    def _note_timestamps(self, batch: Batch) -> None:
        missing = set(batch.after)
        for message in reversed(batch.messages):  # the last ones of all partitions are soon found
            key = partition_of(message)
            if key in missing:
                missing.remove(key)
                self.timestamps[key] = message.timestamp()[1]
            if not missing:
                return

    def _rest_after(
        self, error: Exception, meaning: ErrorMeaning, consumer: GroupConsumer, batch: Batch, pauses: Pauses, *, seconds: float
    ) -> Batch | None:
        """What to run now, after an error that came after so many seconds; None: the same batch again, after the pause.

        Raises:
            UnprocessableError: One of the messages may be the cause.
            MessageFailedError: See `_was_too_slow`.
            Exception: The error itself, if the processor can't continue.
        """
        if observers.installed:
            observers.notify(BatchFailed(self.group_id, len(batch.messages), error))
        if isinstance(error, RunAloneError):
            self.batch_limit = 1
            what = "from now on each message has a transaction of its own: the next ones would see"
            log.info("%s %s", what, error.what, group_id=self.group_id)
            raise UnprocessableError(error) from error
        match meaning:
            case ErrorMeaning.IN_DOUBT:  # the position shows the next attempt whether it committed
                log.warning("%s", error, group_id=self.group_id)
                self.progress.left_in_doubt()
            case ErrorMeaning.LATER:
                self._log_retry(error, pauses)
            case ErrorMeaning.STOP:
                raise error
            case ErrorMeaning.CONTENT:
                return self._without_cause(error, consumer, batch)
        if self.progress.has_lost_partitions(error):
            self._was_too_slow(batch, seconds, error)
        return None

    def _log_retry(self, error: Exception, pauses: Pauses) -> None:
        """Warn before the first retry of a batch only; and not if a side does not answer, since there is a warning of that."""
        level = logging.INFO if pauses.taken else level_of(error)
        exc_info = if_unexpected(error) if level > logging.INFO else None
        log.log(level, "trying again in %.3g s: %s", pauses.upcoming, error, exc_info=exc_info, group_id=self.group_id)

    def _without_cause(self, error: Exception, consumer: GroupConsumer, batch: Batch) -> Batch | None:
        """The rest of a failed batch if some of its messages have been processed already: they may be the cause.

        That is so if a transaction in doubt has committed, or if this member has lost its partitions: the handler then finds
        rows that are there already.

        Returns:
            None if the positions can't be read now: until they can, the error is not blamed on a message.

        Raises:
            UnprocessableError: No position has moved.
        """
        left = self._left_of(consumer, batch, f"a batch failed ({error})")
        if left is None:
            return None
        if len(left.messages) == len(batch.messages):
            raise UnprocessableError(error) from error
        log.info("some messages of a batch that failed were processed already: %s", error, group_id=self.group_id)
        return left

    def _was_too_slow(self, batch: Batch, seconds: float, error: Exception) -> None:
        """After the error of a member whose generation has ended: poll fewer messages at once, if they took too long.

        Otherwise the member would lose its partitions with each batch, and no message would ever be processed.

        Raises:
            MessageFailedError: A single message exceeded the time limit in all of its attempts.
        """
        limit = self.max_poll_seconds
        if seconds < limit:
            return
        if len(batch.messages) > 1:
            self.batch_limit = max(1, len(batch.messages) // 2)
            log.warning(
                "%d messages took %.3g s, longer than max.poll.interval.ms (%g s), so that the group has given their "
                "partitions to another member. From now on %d are taken at once.",
                *(len(batch.messages), seconds, limit, self.batch_limit),
                group_id=self.group_id,
            )
            return
        self._times_too_slow += 1
        if self._times_too_slow >= self.options.attempts:
            (message,) = batch.messages
            raise MessageFailedError(
                f"The message {name_of(message)} could not be processed in {self._times_too_slow} attempts: it took "
                f"{seconds:.3g} s, and a member that does not poll for {limit:g} s loses its partitions.",
                next_step="raise max.poll.interval.ms, or make the handler faster; offsets='database' has no such limit",
                **where(message, self._times_too_slow),
            ) from error

    def _content(self, batch: Batch) -> Content:
        def make() -> list[Any]:
            messages = [message for message in batch.messages if is_for(message, self.group_id)]
            return decoded(messages, self._decoding) if self._decoding else messages

        return made_for_each_attempt(make)

    def _is_transient(self, error: BaseException) -> bool:
        return self._runner.is_transient(error) or self.progress.has_lost_partitions(error)

    def _left_of(self, consumer: GroupConsumer, batch: Batch, what: str) -> Batch | None:
        """The batch without the partitions whose positions have moved, as far as the database or Kafka shows that now.

        Nothing is left if our own earlier attempt has moved them. Those that another consumer has moved continue from there, if
        they are still assigned.

        Returns:
            None if the positions can't be read now (logged, with `what` has happened): the next attempt tries again.

        Raises:
            DualWriteError: The positions can't be read, or are gone.
        """
        try:
            left, moved = self.progress.catch_up(consumer, batch)
        except DualWriteError as error:
            if not error.retriable:
                raise
            log.warning("%s, and the positions can't be read yet: %s", what, error, group_id=self.group_id)
            return None
        after = batch.after
        self.note_next(moved)
        elsewhere = {key: offset for key, offset in moved.items() if offset != after[key]}
        if elsewhere:
            log.warning("continuing at the positions of another consumer: %s", elsewhere, group_id=self.group_id)
            self.seek(consumer, elsewhere)
        return left


def where(message: Any, attempts: int) -> dict[str, Any]:
    """The facts of an error about a message."""
    return {**fields_of(message), "attempts": attempts}
