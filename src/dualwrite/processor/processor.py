"""`DualProcessor`: consume, transform, dual write, so that each message takes effect once.

The positions are in the database, and move in the transaction of what was written, by compare-and-set. So whatever a consumer
believes about its assignment, what it writes takes effect only if nobody has gone on from the same position. The outcome of a
COMMIT that was not answered is read from there as well: the next attempt finds the position where it left it, or moved.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerUnavailableError,
    ConfigurationError,
    DeserializationError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    InvalidMessageError,
    MessageFailedError,
    MessageRefusedError,
    MessageTooLargeError,
    PositionMovedError,
    StoreError,
    UnknownTopicError,
    UsageError,
)
from dualwrite.kafka.inspect.topic_ids import topic_ids
from dualwrite.kafka.librdkafka import consumer as places
from dualwrite.kafka.librdkafka.batch import Batch, name_of
from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.topic import Topic
from dualwrite.pool.pool import WriterPool
from dualwrite.processor.dead_letters import dead_letter_headers
from dualwrite.processor.decoded import decoded
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.starts import BEGINNING, END, Seen, begin_of, topics_of
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Move, Partition, Position, Positions, validate_group_id
from dualwrite.transaction import Transaction
from dualwrite.writer import DualWriter

log = logging.getLogger(__name__)

Unit = Callable[[Transaction[Any]], None]

_TURN: Final = 1.0
"""Seconds that one wait for messages may take; `stop` is noticed after it."""

_IDLE: Final = 5.0
"""Seconds without messages after which the positions are read again."""

_ASSIGNING: Final = 60.0
"""Seconds for reading positions when partitions are assigned; librdkafka waits for it."""

_POISON: Final = (InvalidMessageError, MessageTooLargeError, MessageRefusedError, DeserializationError)
"""Errors about a message, or about what the handler has sent: it can't be processed."""

_PLACES: Final = {BEGINNING: places.BEGINNING, END: places.END}


class DualProcessor:
    """Reads topics as a member of a consumer group, and processes each message once, together with what is written for it.

    Give one of `handle` and `handle_batch`. They act only through `tx`, and may run more than once for a message; what an
    attempt wrote is rolled back on both sides before the next. A batch that raises an exception is processed again message by
    message, so that one message can't hold the others up.

    For one thread; `stop` may be called from any. Several processors of a process may share a WriterPool.

    Args:
        runner: An open DualWriter or WriterPool; it stays open.
        consumer: Settings for confluent-kafka's Consumer, with `group.id`; what is missing comes from the environment.
        topics: The topics: names, or Topics, with whose deserializers the messages' keys and values are read. What can't be
            deserialized counts as a message whose handler has raised an exception.
        handle: Called as `handle(message, tx)` for each message: confluent-kafka's, or one with the same methods.
        handle_batch: Called as `handle_batch(messages, tx)` for the messages of one transaction.
        options: Batches, retries, and what to do with messages that can't be processed.

    Raises:
        ConfigurationError: An argument is missing or not allowed, or the store keeps no positions.
    """

    def __init__(
        self,
        runner: DualWriter[Any] | WriterPool[Any],
        consumer: Mapping[str, Any],
        topics: Sequence[str | Topic[Any, Any]],
        *,
        handle: Callable[[Any, Transaction[Any]], None] | None = None,
        handle_batch: Callable[[Sequence[Any], Transaction[Any]], None] | None = None,
        options: ProcessorOptions | None = None,
    ) -> None:
        if (handle is None) == (handle_batch is None):
            raise ConfigurationError("Give either handle or handle_batch.")
        if isinstance(topics, str) or not topics:
            raise ConfigurationError("topics must be a list of at least one topic.")
        self._runner = runner
        self._settings = {**Settings.from_environment().kafka, **consumer}
        self._topics = [topic.name if isinstance(topic, Topic) else topic for topic in topics]
        self._decoding = {topic.name: topic for topic in topics if isinstance(topic, Topic) and topic.deserializes}
        self._handle = handle_batch if handle_batch is not None else _each(handle)
        self._options = options or ProcessorOptions()
        self._positions = _positions_of(runner.store)
        self._group = validate_group_id(str(consumer.get("group.id", "")))
        self._stored: dict[Partition, Position] = {}
        self._next: dict[Partition, int] = {}
        self._ids: Mapping[str, str] = {}
        self._looked_at = time.monotonic()
        self._stopped = threading.Event()
        self._consumer: GroupConsumer | None = None

    @property
    def positions(self) -> Mapping[Partition, Position]:
        """The stored positions of the partitions that are assigned now, as far as this processor knows."""
        consumer = self._consumer
        owned = {} if consumer is None else consumer.owned()
        return {key: position for key, position in dict(self._stored).items() if key in owned}

    def stop(self) -> None:
        """End `run` once the transaction in progress has ended. May be called from any thread, and from a signal handler."""
        self._stopped.set()

    def run(self) -> None:
        """Process messages until `stop`. In the main thread SIGTERM stops it too. It can be called again after that.

        Raises:
            MessageFailedError: A message can't be processed, and there is no dead-letter topic that takes it.
            MessagesDeletedError, TopicReplacedError: See `on_gap` and `on_new_topic` of the options.
            FencedError: Another process has claimed the writer's transactional id.
            BrokerError, StoreError: Kafka or the database refuses to go on; what a retry may change is retried.
        """
        if self._consumer is not None:
            raise UsageError("The processor is running already.")
        self._stopped.clear()
        self._positions.prepare()
        self._consumer = made = GroupConsumer(self._settings, self._topics, self._begin)
        try:
            with _stopped_by_sigterm(self.stop):
                while not self._stopped.is_set():
                    self._turn(made)
        finally:
            self._consumer = None
            self._stored.clear()
            made.close()

    # --- one batch --------------------------------------------------------------------------------------------------------

    def _turn(self, consumer: GroupConsumer) -> None:
        batch = consumer.take(self._options.batch, _TURN).from_offsets(self._next)  # what was processed does not come back
        if not batch.messages:
            self._look_again(consumer)
            return
        self._looked_at = time.monotonic()
        if self._process(consumer, batch):
            return
        for one in batch.one_by_one():
            kept = one.still_owned(consumer.owned())
            if self._stopped.is_set() or (kept.messages and not self._process_one(consumer, kept)):
                return

    def _look_again(self, consumer: GroupConsumer) -> None:
        """Notice, while nothing comes, that a position was reset."""
        if time.monotonic() - self._looked_at < _IDLE:
            return
        self._looked_at = time.monotonic()
        try:
            found = self._positions.read(self._group)
        except StoreError as error:
            log.warning("%s: %s", self._group, error)
            return
        owned = consumer.owned()
        moved = {key: one for key, one in found.items() if key in owned and _at(found, key) != _at(self._stored, key)}
        if moved:
            log.warning("%s: positions were moved: %s", self._group, ", ".join(map(str, moved.values())))
            self._stored |= moved
            self._go_on(consumer, {key: position.offset for key, position in moved.items()})

    def _process(self, consumer: GroupConsumer, batch: Batch) -> bool:
        """Process a batch in one transaction, or give up what is not ours any more; False if its processing raised an error."""
        try:
            self._repeated(consumer, batch, self._unit)
        except _UnprocessableError as error:
            if len(batch.messages) == 1:
                return self._process_one(consumer, batch, first=error.reason)
            log.warning(
                "%s: a batch of %d messages failed, and is processed one by one: %s", self._group, len(batch.messages), error
            )
            return False
        return True

    def _process_one(self, consumer: GroupConsumer, one: Batch, first: BaseException | None = None) -> bool:
        """Process one message, by all attempts; False if the processor was stopped before the last one."""
        (message,) = one.messages
        tried = 0 if first is None else 1
        reason = first
        pause = self._options.pause
        while tried < self._options.attempts:
            if tried:
                consumer.wait(pause, self._stopped)
                pause = min(2 * pause, self._options.longest_pause)
                if self._stopped.is_set():
                    return False
            try:
                self._repeated(consumer, one, self._unit)
            except _UnprocessableError as error:
                tried, reason = tried + 1, error.reason
                log.warning("%s: %s failed (attempt %d): %s", self._group, name_of(message), tried, error)
            else:
                return True
        assert reason is not None
        self._give_up(consumer, one, reason, tried)
        return True

    def _give_up(self, consumer: GroupConsumer, one: Batch, reason: BaseException, attempts: int) -> None:
        """Send the message to the dead-letter topic, and go on behind it; or stop."""
        (message,) = one.messages
        topic = self._options.dead_letter_topic
        if topic is None:
            raise MessageFailedError(
                f"The message {name_of(message)} could not be processed in {attempts} attempts.",
                cause=f"{type(reason).__qualname__}: {reason}",
                next_step="fix the handler and start again; or set dead_letter_topic, or `dualwrite offsets reset` past it",
                **_where(message, attempts),
            ) from reason
        headers = dead_letter_headers(message, reason, group_id=self._group, attempts=attempts)

        def unit(batch: Batch) -> Unit:
            def work(tx: Transaction[Any]) -> None:
                tx.send(topic, message.value(), key=message.key(), headers=headers)
                self._move(tx, batch)

            return work

        try:
            self._repeated(consumer, one, unit)
        except (_UnprocessableError, UnknownTopicError, BrokerAuthorizationError) as error:
            refused = error.reason if isinstance(error, _UnprocessableError) else error
            raise MessageFailedError(
                f"The message {name_of(message)} could not be processed in {attempts} attempts, nor sent to the dead-letter "
                f"topic {topic!r}: {refused}",
                cause=f"its processing raised {type(reason).__qualname__}: {reason}",
                next_step=f"make {topic!r} take it (a dead letter is the message and some 1,500 bytes of headers) or fix the "
                "handler, and start again; or `dualwrite offsets reset` past it",
                **_where(message, attempts),
            ) from refused
        log.error("%s: %s went to %s: %s", self._group, name_of(message), topic, reason)

    # --- one transaction --------------------------------------------------------------------------------------------------

    def _repeated(self, consumer: GroupConsumer, batch: Batch, unit: Callable[[Batch], Unit]) -> None:
        """Run a transaction until it has committed, or nothing of the batch is ours. Retries what a retry may change.

        Raises:
            _UnprocessableError: The handler raised an exception; nothing took effect.
            DualWriteError: An error that a retry does not change.
        """
        pause = self._options.pause
        while batch.messages:
            try:
                self._run(unit(batch))
            except PositionMovedError:
                left = self._caught_up(consumer, batch)
                if len(left.messages) < len(batch.messages):
                    batch = left
                    continue
            except InDoubtTransactionError as error:  # the next attempt finds out by the position
                log.warning("%s: %s", self._group, error)
            except _POISON as error:
                raise _UnprocessableError(error) from error
            except Exception as error:
                if not self._is_passing(error):
                    raise
                log.warning("%s: trying again in %.3g s: %s", self._group, pause, error)
            else:
                self._moved(consumer, batch)
                return
            consumer.wait(pause, self._stopped)
            pause = min(2 * pause, self._options.longest_pause)
            if self._stopped.is_set():
                return
            batch = batch.still_owned(consumer.owned())

    def _run(self, unit: Unit) -> None:
        if isinstance(self._runner, WriterPool):
            self._runner.run(unit)
        else:
            with self._runner.transaction() as tx:
                unit(tx)

    def _is_passing(self, error: Exception) -> bool:
        """Whether the same transaction may succeed later. A pool that was fenced on an id uses another one."""
        if isinstance(error, FencedError):
            return isinstance(self._runner, WriterPool)
        if isinstance(error, DualWriteError):
            return error.retriable
        if isinstance(error, _UnprocessableError):
            return not self._answers()  # a statement of the handler may have failed since the database is away
        return self._runner.store.is_conflict(error)

    def _answers(self) -> bool:
        """Whether the database can be read now."""
        try:
            self._positions.read(self._group)
        except StoreError as error:
            return not error.retriable
        return True

    def _unit(self, batch: Batch) -> Unit:
        def work(tx: Transaction[Any]) -> None:
            try:
                self._handle(decoded(batch.messages, self._decoding) if self._decoding else batch.messages, tx)
            except Exception as error:
                if isinstance(error, DualWriteError) or self._runner.store.is_conflict(error):
                    raise
                raise _UnprocessableError(error) from error
            self._move(tx, batch)

        return work

    def _move(self, tx: Transaction[Any], batch: Batch) -> None:
        tx.move_positions(self._positions, self._group, self._moves(batch))

    def _moves(self, batch: Batch) -> list[Move]:
        return [
            Move(self._stored.get(key), Position(*key, offset, self._ids.get(key[0], "")))
            for key, offset in batch.after().items()
        ]

    def _moved(self, consumer: GroupConsumer, batch: Batch) -> None:
        after = batch.after()
        for key, offset in after.items():
            self._stored[key] = Position(*key, offset, self._ids.get(key[0], ""))
        self._next |= after
        consumer.show_progress(after)

    def _go_on(self, consumer: GroupConsumer, offsets: Mapping[Partition, int]) -> None:
        """Go on at other offsets."""
        self._next |= {key: max(offset, 0) for key, offset in offsets.items()}
        consumer.seek(offsets)

    def _caught_up(self, consumer: GroupConsumer, batch: Batch) -> Batch:
        """What is left of a batch whose positions have moved: nothing if our own earlier attempt has moved them.

        Partitions that another consumer has moved go on from there, if they are still assigned.
        """
        found = self._positions.read(self._group)
        after = batch.after()
        moved = {key for key in after if _at(found, key) != _at(self._stored, key)}
        elsewhere = {}
        for key in moved:
            position = found.get(key)
            if position is not None:
                self._stored[key] = position
                self._next[key] = position.offset
                if position.offset != after[key]:
                    elsewhere[key] = position.offset
            else:
                self._stored.pop(key, None)
                elsewhere[key] = places.BEGINNING
        if elsewhere:
            log.warning("%s: going on where another consumer has left %s", self._group, elsewhere)
            self._go_on(consumer, elsewhere)
        return batch.only(after.keys() - moved)

    # --- assignment -------------------------------------------------------------------------------------------------------

    def _begin(self, partitions: list[Partition]) -> Mapping[Partition, int]:
        """Where partitions begin that were just assigned; retried for a while, since librdkafka waits for it."""
        deadline = time.monotonic() + _ASSIGNING
        pause = self._options.pause
        while True:
            try:
                return self._begun(partitions)
            except DualWriteError as error:
                if not error.retriable or time.monotonic() + pause > deadline or self._stopped.is_set():
                    raise
                log.warning("%s: the positions can't be read yet: %s", self._group, error)
                time.sleep(pause)
                pause = min(2 * pause, self._options.longest_pause)

    def _begun(self, partitions: list[Partition]) -> Mapping[Partition, int]:
        consumer = self._consumer
        assert consumer is not None
        stored = self._positions.read(self._group)
        left = max(_TURN, _ASSIGNING / 2)
        self._ids = topic_ids(_connection(self._settings), self._topics, timeout=left)
        for topic in {topic for topic, _ in partitions} - self._ids.keys():  # or a new one could pass for the one before it
            raise BrokerUnavailableError(
                f"The brokers don't know the topic {topic!r} of an assigned partition.",
                cause="it was created or deleted just now",
                next_step="retry",
            )
        missing = [key for key in partitions if key not in stored]
        committed = consumer.committed(missing, left) if missing else {}
        topics = topics_of(stored)
        found: dict[Partition, int] = {}
        for key in partitions:
            position = stored.get(key)
            first = None if position is None else consumer.first_offset(key, left)
            seen = Seen(self._ids.get(key[0], ""), first, committed.get(key))
            begin = begin_of(key, position, seen, self._options, topics)
            found[key] = begin if isinstance(begin, int) else _PLACES[begin]
            self._next[key] = max(found[key], 0)
            if position is None:
                self._stored.pop(key, None)
            else:
                self._stored[key] = position
        return found


class _UnprocessableError(Exception):
    """The handler raised an exception."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"{type(reason).__qualname__}: {reason}")
        self.reason = reason


def _where(message: Any, attempts: int) -> dict[str, Any]:
    return {"topic": message.topic(), "partition": message.partition(), "offset": message.offset(), "attempts": attempts}


def _each(handle: Callable[[Any, Transaction[Any]], None] | None) -> Callable[[Sequence[Any], Transaction[Any]], None]:
    assert handle is not None

    def all_of(messages: Sequence[Any], tx: Transaction[Any]) -> None:
        for message in messages:
            handle(message, tx)

    return all_of


def _at(positions: Mapping[Partition, Position], key: Partition) -> tuple[int, str] | None:
    found = positions.get(key)
    return None if found is None else (found.offset, found.topic_id)


def _positions_of(store: TxnStateStore) -> Positions:
    found = store.positions
    if found is None:
        raise ConfigurationError(
            f"The store {type(store).__name__} ({store.description}) keeps no positions.",
            next_step="use a SQL database, RocksDB or ZooKeeper; or send the consumer's offsets with tx.send_offsets",
        )
    return found


def _connection(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those of a consumer."""
    return {name: value for name, value in settings.items() if not name.startswith(("group.", "partition.assignment", "auto."))}


@contextmanager
def _stopped_by_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
