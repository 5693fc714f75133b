"""The loop of a processor: poll a batch, process it in one transaction, continue; and what to do if that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final

from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    DualWriteError,
    MessageFailedError,
    StoreError,
    UnknownTopicError,
    UsageError,
)
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Batch, fields_of, name_of
from dualwrite.kafka.topic import Topic
from dualwrite.logs import SubjectLogger
from dualwrite.observability import observers
from dualwrite.observability.events import DeadLettered
from dualwrite.outages import level_of
from dualwrite.processor.attempts import Attempts, Runner, StoppedError, UnprocessableError, where
from dualwrite.processor.dead_letters import dead_letter_headers
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.progress import Progress, how_to_reset
from dualwrite.stopping import StopFlag
from dualwrite.stores.positions import Partition, Position
from dualwrite.stores.store_transaction import RunAloneError
from dualwrite.transaction import Transaction

log = SubjectLogger(__name__)

_TURN: Final = 1.0
"""The maximum wait for messages, in seconds; `stop` is noticed at its end."""

_CHECK_INTERVAL: Final = 5.0
"""Seconds after which the positions are read again."""


class ProcessingLoop:
    """Processes the messages of topics, each once. `run` is for one thread; `stop` may be called from any.

    `settings` are the consumer's, `decoding` has the topics whose messages are deserialized, by name.
    """

    def __init__(
        self,
        group_id: str,
        settings: Mapping[str, Any],
        topics: Sequence[str],
        decoding: Mapping[str, Topic[Any, Any]],
        runner: Runner,
        progress: Progress,
        options: ProcessorOptions,
    ) -> None:
        self._group = group_id
        self._settings = settings
        self._topics = topics
        self._progress = progress
        self._options = options
        self._checked_at = time.monotonic()
        self._stopped = StopFlag()
        self._attempts = Attempts(group_id, settings, decoding, runner, progress, options, self._stopped)
        self._reading = self._attempts.reading
        self._free = threading.Lock()  # locked from `begin` until `run` has ended
        self._consumer: GroupConsumer | None = None
        self._dead_in_a_row = 0

    @property
    def positions(self) -> Mapping[Partition, Position]:
        """The positions of the partitions that are assigned now, as far as they are known."""
        consumer = self._consumer
        owned = {} if consumer is None else consumer.owned()
        return {key: position for key, position in self._progress.known().items() if key in owned}

    def stop(self) -> None:
        """End `run` once the transaction in progress has ended."""
        self._stopped.set()

    def begin(self) -> None:
        """Prepare for `run`: from now on `stop` ends it, even if `stop` is called before `run`.

        Raises:
            UsageError: It is running already.
        """
        if not self._free.acquire(blocking=False):
            raise UsageError("The processor is running already.")
        self._stopped.clear()
        self._dead_in_a_row = 0
        self._attempts.begin()

    def run(self) -> None:
        """Process messages until `stop`, once `begin` was called; see DualProcessor."""
        try:
            self._progress.prepare()
            with closing(GroupConsumer(self._settings, self._topics, self._begin)) as consumer:
                self._consumer = consumer
                while not self._stopped.is_set():
                    self._turn(consumer)
                self._advance_to_ends(consumer)
        except StoppedError:
            log.debug("stopped in the middle of its work", group_id=self._group)
        except Exception as error:
            log.exception("the processor stops: %s", error, group_id=self._group)  # noqa: TRY401  (one line may be all that is seen)
            raise
        finally:
            self._consumer = None
            self._progress.forget()
            self._free.release()

    # --- one batch --------------------------------------------------------------------------------------------------------

    def _turn(self, consumer: GroupConsumer) -> None:
        refused = consumer.refused
        if refused:  # retention has deleted their next messages, or their log was truncated
            self._reading.seek(consumer, self._begin(list(refused), refused))
        self._follow_moves(consumer)
        batch = consumer.poll(self._reading.most, _TURN).from_offsets(
            self._reading.next
        )  # without messages that were processed already
        if not batch.messages or self._process(consumer, batch):
            return
        for one in batch.one_by_one():  # without those that turned out to be processed already
            kept = one.still_owned(consumer.owned()).from_offsets(self._reading.next)
            if self._stopped.is_set() or (kept.messages and not self._process_one(consumer, kept)):
                return

    def _follow_moves(self, consumer: GroupConsumer) -> None:
        """Notice that positions were reset in partitions without new messages; with new messages, moving the position fails."""
        if time.monotonic() - self._checked_at < _CHECK_INTERVAL:
            return
        self._checked_at = time.monotonic()
        try:
            moved = self._progress.moved_by_others(consumer)
        except (StoreError, BrokerError) as error:
            log.log(level_of(error), "%s", error, group_id=self._group)
            return
        if moved:
            log.warning("positions were moved: %s", moved, group_id=self._group)
            self._reading.seek(consumer, moved)
        self._advance_to_ends(consumer)

    def _advance_to_ends(self, consumer: GroupConsumer) -> None:
        """Move positions past the markers at the ends of partitions in which every polled message has been processed."""
        ends = {key: end for key, (polled, end) in consumer.passed.items() if polled <= self._reading.next.get(key, 0)}
        try:
            self._progress.advance_to_ends(consumer, ends)
        except DualWriteError as error:  # the next batch moves them too, or raises the reason
            log.info("positions were not moved to the ends of partitions: %s", error, group_id=self._group)

    def _process(self, consumer: GroupConsumer, batch: Batch) -> bool:
        """Process a batch in one transaction, without reassigned partitions; False if one of its messages may be at fault."""
        try:
            self._attempts.run(consumer, batch)
        except UnprocessableError as error:
            if len(batch.messages) > 1:
                if not isinstance(error.reason, RunAloneError):
                    log.warning(
                        "a batch of %d messages failed, and is processed one by one: %s",
                        len(batch.messages),
                        error,
                        group_id=self._group,
                    )
                return False
            reason = error.reason
        else:
            self._dead_in_a_row = 0
            return True
        return self._process_one(consumer, batch, first=reason)

    def _process_one(self, consumer: GroupConsumer, one: Batch, first: BaseException | None = None) -> bool:
        """Process one message, in up to `attempts` attempts; False if the processor was stopped before the last one."""
        (message,) = one.messages
        tried = 0 if first is None else 1
        reason = first
        pause = self._options.pause
        while tried < self._options.attempts:
            if tried:
                consumer.wait(pause, self._stopped.is_set)
                pause = min(2 * pause, self._options.longest_pause)
                if self._stopped.is_set():
                    return False
                if not one.still_owned(consumer.owned()).messages:
                    return True  # the partition was reassigned: its position may have moved, and was read again
            try:
                self._attempts.run(consumer, one)
            except UnprocessableError as error:
                tried, reason = tried + 1, error.reason
                log.warning("%s failed (attempt %d): %s", name_of(message), tried, error, **self._fields(message))
            else:
                self._dead_in_a_row = 0
                return True
        assert reason is not None
        self._give_up(consumer, one, reason, tried)
        return True

    def _give_up(self, consumer: GroupConsumer, one: Batch, reason: BaseException, attempts: int) -> None:
        """Send the message to the dead-letter topic, and continue after it; or stop."""
        (message,) = one.messages
        log.warning(
            "%s could not be processed in %d attempts", name_of(message), attempts, exc_info=reason, **self._fields(message)
        )
        topic = self._options.dead_letter_topic
        if topic is None:
            raise MessageFailedError(
                f"The message {name_of(message)} could not be processed in {attempts} attempts.",
                cause=f"{type(reason).__qualname__}: {reason}",
                next_step="fix the handler and start again; or set dead_letter_topic, or move the position past it: "
                f"{how_to_reset(self._options)}",
                **where(message, attempts),
            ) from reason
        most = self._options.dead_letters_in_a_row
        if most is not None and self._dead_in_a_row >= most:
            raise MessageFailedError(
                f"The message {name_of(message)} could not be processed in {attempts} attempts, and neither could the {most} "
                "before it, which are dead letters.",
                cause=f"{type(reason).__qualname__}: {reason}; most likely all messages would fail now, whatever is in them",
                next_step="find out what they have in common (a schema registry, another service, the handler itself), start "
                "again, and replay the dead letters: dualwrite dead-letters replay. Or raise dead_letters_in_a_row",
                **where(message, attempts),
            ) from reason
        headers = dead_letter_headers(message, reason, group_id=self._group, attempts=attempts)

        def send(tx: Transaction[Any]) -> None:
            tx.send(topic, message.value(), key=message.key(), headers=headers)

        try:
            is_sent = self._attempts.run(consumer, one, instead=send)
        except (UnprocessableError, UnknownTopicError, BrokerAuthorizationError) as error:
            refused = error.reason if isinstance(error, UnprocessableError) else error
            raise MessageFailedError(
                f"The message {name_of(message)} could not be processed in {attempts} attempts, and could not be sent to "
                f"the dead-letter topic {topic!r}: {refused}",
                cause=f"its processing raised {type(reason).__qualname__}: {reason}",
                next_step=f"make {topic!r} accept it (a dead letter is the message and some 1,500 bytes of headers) or fix the "
                f"handler, and start again; or move the position past it: {how_to_reset(self._options)}",
                **where(message, attempts),
            ) from refused
        if is_sent:
            self._dead_in_a_row += 1
            log.error("%s went to %s: %s", name_of(message), topic, reason, **self._fields(message))
            if observers.installed:
                observers.notify(DeadLettered(self._group, message.topic(), reason))

    def _fields(self, message: Any) -> dict[str, Any]:
        """The fields of a log record about a message."""
        return {"group_id": self._group, **fields_of(message)}

    # --- assignment -------------------------------------------------------------------------------------------------------

    def _begin(self, partitions: list[Partition], refused: Mapping[Partition, int] | None = None) -> Mapping[Partition, int]:
        """Where to start in newly assigned partitions, or to continue in those where Kafka refused to read at these offsets.

        Until that is known, the partitions can't be read. librdkafka waits for it, and the member stays in the group, for at
        least `max.poll.interval.ms`; after that it joins again.

        Raises:
            StoppedError: `stop` was called.
            DualWriteError: A permanent error.
        """
        consumer = self._consumer
        assert consumer is not None
        pause = self._options.pause
        while True:
            try:
                found = self._progress.begin(consumer, partitions, refused)
            except DualWriteError as error:
                if not error.retriable:
                    raise
                log.log(level_of(error), "the positions can't be read yet: %s", error, group_id=self._group)
                self._stopped.wait(pause)
                if self._stopped.is_set():
                    raise StoppedError from error
                pause = min(2 * pause, self._options.longest_pause)
            else:
                self._reading.next |= {key: max(offset, 0) for key, offset in found.items()}
                return found
