"""The loop of a processor: poll a batch, process it in one transaction, continue; what to do if that fails; whom it waits for.

A read_committed consumer gets nothing that comes after the messages of an open transaction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

from dualwrite.admin import TransactionAdmin
from dualwrite.deadline import Deadline
from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    DualWriteError,
    MessageFailedError,
    StoreError,
    UnknownTopicError,
    UsageError,
    shell_word,
)
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Batch, fields_of, name_of
from dualwrite.observability import observers
from dualwrite.observability.events import DeadLettered
from dualwrite.observability.health import Asking, InThread, Part, ProcessorHealth, goes_on
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import level_of
from dualwrite.observability.readings import Reading, add_source, remove_source
from dualwrite.processor.attempts import Attempts, StoppedError, UnprocessableError, where
from dualwrite.processor.dead_letters import dead_letter_headers
from dualwrite.processor.progress import connection_settings, how_to_reset
from dualwrite.settings import check_seconds
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Partition, Position
from dualwrite.stores.store_transaction import RunAloneError
from dualwrite.transaction import Transaction

log = SubjectLogger(__name__)

_POLL_SECONDS: Final = 1.0
"""The maximum wait for messages, in seconds; `stop` is noticed at its end."""

_CHECK_SECONDS: Final = 5.0
"""Seconds after which the positions are read again."""


_PATIENCE_SECONDS: Final = 60.0
"""For so long a processor waits at one offset, before it asks for whom."""

_ADMIN_SECONDS: Final = 10.0

_WaitingAt = tuple[str, int, int]
"""A topic, a partition, and the offset at which its reading waits."""


class ProcessingLoop:
    """Processes the messages of topics, each once. `run` is for one thread; `stop` may be called from any."""

    def __init__(self, attempts: Attempts, topics: Sequence[str]) -> None:
        self._attempts = attempts
        self._topics = topics
        self._group, self._options, self._progress = attempts.group_id, attempts.options, attempts.progress
        self._stopped = attempts.stopped
        self._asking = Asking()
        self._checked_at = time.monotonic()
        self._blocked = _Blocked(attempts.group_id, connection_settings(attempts.settings))
        self._free = threading.Lock()  # locked from `begin` until `run` has ended
        self._consumer: GroupConsumer | None = None
        self._dead_in_a_row = 0

    @property
    def positions(self) -> Mapping[Partition, Position]:
        """The positions of the partitions that are assigned now, as far as they are known."""
        consumer = self._consumer
        owned = {} if consumer is None else consumer.owned()
        return {key: position for key, position in self._progress.known().items() if key in owned}

    def readings(self) -> Iterator[Reading]:
        """Its partitions and its lag, for `dualwrite.observability.current_readings`; without a request."""
        consumer = self._consumer
        if consumer is None:
            return
        labels = {"group": self._group}
        owned, passed = consumer.owned(), consumer.passed
        yield Reading("processor_partitions", len(owned), labels)
        yield Reading("processor_idle_seconds", time.monotonic() - self._attempts.active_at, labels)
        for key, (first, end) in consumer.watermarks().items():
            position = self._attempts.next_offsets.get(key)
            if position is None:
                continue
            polled, read_to = passed.get(key, (end, position))
            lag = end - max(read_to if polled <= position else position, first)  # only markers are between polled and read_to
            of_partition = {**labels, "topic": key[0], "partition": str(key[1])}
            yield Reading("processor_lag_messages", max(lag, 0), of_partition)
            processed_ms = self._attempts.timestamps.get(key)
            if lag <= 0:
                yield Reading("processor_lag_seconds", 0.0, of_partition)
            elif processed_ms is not None:
                yield Reading("processor_lag_seconds", max(time.time() - processed_ms / 1000, 0.0), of_partition)

    def check(self, store: TxnStateStore, timeout: float) -> ProcessorHealth:
        """See `DualProcessor.check`."""
        check_seconds("timeout", timeout, may_be_zero=True)
        limit, consumer = Deadline.after(timeout), self._consumer
        asks: dict[str, Callable[[], object]] = {
            "kafka": partial(self._progress.ask_kafka, self._topics, timeout),
            "database": store.check_now,
        }
        answers = self._asking.answers(asks, limit)
        owned = [] if consumer is None else sorted(f"{topic}-{number}" for topic, number in consumer.owned())
        return ProcessorHealth(
            Part(is_ok=consumer is not None, text="no" if consumer is None else "yes"),
            answers["database"],
            answers["kafka"],
            Part(is_ok=True, text="; waits at ".join([", ".join(owned) or "none", *self._blocked.texts])),
            goes_on(time.monotonic() - self._attempts.active_at, self._attempts.max_poll_seconds),
        )

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
            add_source(self)
            with closing(GroupConsumer(self._attempts.settings, self._topics, self._begin)) as consumer:
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
            remove_source(self)
            self._consumer = None
            self._progress.forget()
            self._free.release()

    # --- one batch --------------------------------------------------------------------------------------------------------

    def _turn(self, consumer: GroupConsumer) -> None:
        self._attempts.active_at = time.monotonic()
        refused = consumer.refused
        if refused:  # retention has deleted their next messages, or their log was truncated
            self._attempts.seek(consumer, self._begin(list(refused), refused))
        self._follow_moves(consumer)
        found = consumer.poll(self._attempts.batch_limit, _POLL_SECONDS)
        batch = found.from_offsets(self._attempts.next_offsets)  # without messages that were processed already
        if not batch.messages or self._process(consumer, batch):
            return
        for one in batch.one_by_one():  # without those that turned out to be processed already
            kept = one.still_owned(consumer.owned()).from_offsets(self._attempts.next_offsets)
            if self._stopped.is_set() or (kept.messages and not self._process_one(consumer, kept)):
                return

    def _follow_moves(self, consumer: GroupConsumer) -> None:
        """Notice that positions were reset in partitions without new messages; with new messages, moving the position fails."""
        if time.monotonic() - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = time.monotonic()
        self._blocked.look(consumer)
        try:
            moved = self._progress.moved_by_others(consumer)
        except (StoreError, BrokerError) as error:
            log.log(level_of(error), "%s", error, group_id=self._group)
            return
        if moved:
            log.warning("positions were moved: %s", moved, group_id=self._group)
            self._attempts.seek(consumer, moved)
        self._advance_to_ends(consumer)

    def _advance_to_ends(self, consumer: GroupConsumer) -> None:
        """Move positions past the markers at the ends of partitions in which every polled message has been processed."""
        ends = {key: end for key, (polled, end) in consumer.passed.items() if polled <= self._attempts.next_offsets.get(key, 0)}
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
        if first is not None:
            self._log_failed(message, tried, first)
        pauses = self._attempts.pauses()
        while tried < self._options.attempts:
            if tried:
                consumer.wait(next(pauses), self._stopped.is_set)
                if self._stopped.is_set():
                    return False
                if not one.still_owned(consumer.owned()).messages:
                    return True  # the partition was reassigned: its position may have moved, and was read again
            try:
                self._attempts.run(consumer, one)
            except UnprocessableError as error:
                tried, reason = tried + 1, error.reason
                self._log_failed(message, tried, reason)
            else:
                self._dead_in_a_row = 0
                return True
        assert reason is not None
        self._give_up(consumer, one, reason, tried)
        return True

    def _log_failed(self, message: Any, attempt: int, reason: BaseException) -> None:
        kind = type(reason).__qualname__
        log.warning("%s failed (attempt %d): %s: %s", name_of(message), attempt, kind, reason, **self._fields(message))

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
        pauses = self._attempts.pauses()
        while True:
            self._attempts.active_at = time.monotonic()
            try:
                found = self._progress.begin(consumer, partitions, refused)
            except DualWriteError as error:
                if not error.retriable:
                    raise
                log.log(level_of(error), "the positions can't be read yet: %s", error, group_id=self._group)
                self._stopped.wait(next(pauses))
                if self._stopped.is_set():
                    raise StoppedError from error
            else:
                self._attempts.note_next(found)
                return found


class _Blocked:
    """Looks for partitions that end earlier for a read_committed consumer than for others, for long.

    Args:
        group_id: The group.
        kafka: The settings for questions to the brokers.
    """

    def __init__(self, group_id: str, kafka: Mapping[str, Any]) -> None:
        self._group = group_id
        self._kafka = kafka
        self._asking: InThread[None] = InThread("dualwrite waits")
        self._since: dict[_WaitingAt, float] = {}
        self._texts: dict[_WaitingAt, str] = {}

    @property
    def texts(self) -> list[str]:
        """At which offsets it waits, and for whom; without those that have not lasted for long."""
        return [text for place, text in self._texts.copy().items() if place in self._since]

    def look(self, consumer: GroupConsumer) -> None:
        """Look at what the consumer knows, without a request. Questions are asked in another thread."""
        now, marks = time.monotonic(), consumer.watermarks()
        places = [(*key, end) for key, end in consumer.ends.items() if key in marks and marks[key][1] > end]
        self._since = {place: self._since.get(place, now) for place in places}
        for place in self._texts.keys() - self._since.keys():
            log.info("%s-%d goes on after offset %d", *place, **self._fields(place))
            del self._texts[place]
        late = [place for place, since in self._since.items() if now - since >= _PATIENCE_SECONDS and place not in self._texts]
        if late:
            self._asking.start(partial(self._log_holders, late))

    def _log_holders(self, late: Iterable[_WaitingAt]) -> None:
        for place in late:
            whose = self._holder(*place[:2])
            if whose is not None:
                self._texts[place] = text = "{}-{} offset {} for {}".format(*place, whose)
                log.warning("waits at %s: `dualwrite stuck --topic %s`", text, shell_word(place[0]), **self._fields(place))

    def _holder(self, topic: str, partition: int) -> str | None:
        """Whose transaction is the oldest open one of a partition; None if there is none."""
        try:
            with closing(TransactionAdmin(self._kafka, timeout=_ADMIN_SECONDS)) as admin:
                opened = [each for found in admin.describe_producers(topic, [partition]) for each in found.opened]
                if not opened:
                    return None
                producer = min(opened, key=lambda each: each.producer.transaction_start_offset or 0).producer
                ids = [each.transactional_id for each in admin.list(producer_ids=[producer.producer_id])]
        except DualWriteError as error:
            return f"an open transaction (whose can't be looked up: {error.what})"
        return f"the open transaction of {ids[0]!r}" if ids else f"an open transaction of producer {producer.producer_id}"

    def _fields(self, place: _WaitingAt) -> dict[str, Any]:
        return {"group_id": self._group, "topic": place[0], "partition": place[1], "offset": place[2]}
