"""`DualProcessor`: consume, transform, dual write, so that each message takes effect once; and how it runs transactions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Unpack, overload

from dualwrite.deadline import check_may_block
from dualwrite.errors import AfterCommitError, ConfigurationError, FencedError, UsageError
from dualwrite.kafka.topic import K, ReadableTopic, Topic, V
from dualwrite.observability import tracing
from dualwrite.observability.health import CHECK_LIMIT, ProcessorHealth
from dualwrite.pool.pool import WriterPool
from dualwrite.process import stopped_by_sigterm
from dualwrite.processor.attempts import Attempts, Content, Runner
from dualwrite.processor.decoded import Handlers, Received
from dualwrite.processor.loop import ProcessingLoop
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.position_keeping import DatabaseKeeping, KafkaKeeping, PositionKeeping
from dualwrite.processor.progress import Finish, Progress
from dualwrite.settings import Settings, WhenKafkaIsDown
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.positions import Partition, Position, validate_group_id
from dualwrite.transaction import H, Transaction, opened
from dualwrite.transactional import check_has_run, name_of
from dualwrite.writer import DualWriter

if TYPE_CHECKING:
    from confluent_kafka import Message

log = logging.getLogger(__name__)

Handle = Callable[[list[Any], Transaction[Any]], object]


class DualProcessor:
    """Reads topics as a member of a consumer group, and processes each message once, atomically with what it writes.

    Pass either `handle` or `handle_batch`. A handler may run more than once for a message, so everything that it changes must
    go through `tx`; what an attempt wrote is rolled back on both sides before the next one. If processing a batch raises an
    exception, the batch is processed again message by message, so that one message can't block the others; the attempt with the
    whole batch is not counted. Attempts are counted in memory, and the count starts again after a restart: a message that kills
    the process each time is never given up.

    Use it in one thread; `stop` may be called from any thread. Several processors in a process may share a WriterPool.

    Args:
        runner: An open DualWriter or WriterPool; it stays open.
        consumer: Settings for confluent-kafka's Consumer, with `group.id`; what is missing comes from the environment.
        topics: Names of topics, or Topics, whose deserializers are applied to the messages' keys and values. A message that
            can't be deserialized is treated as if its handler had raised an exception.
        handle: Called as `handle(message, tx)` for each message: a confluent-kafka Message, or an object with its methods
            (`Received`).
        handle_batch: Called as `handle_batch(messages, tx)` for the messages of one transaction: a list, new for each call.
        options: Batches, retries, where positions are kept, and what to do with messages that can't be processed.

    Raises:
        ConfigurationError: An argument is missing or not allowed, or the store does not support consumer positions; or
            offsets="kafka" with a runner that has when_kafka_is_down="journal".
        UsageError: The runner is no DualWriter and no WriterPool.
    """

    @overload
    def __init__(
        self,
        runner: DualWriter[H] | WriterPool[H],
        consumer: Mapping[str, Any],
        topics: Sequence[ReadableTopic[V, K]],
        **handlers: Unpack[Handlers[Received[V, K], Transaction[H], None]],
    ) -> None: ...

    @overload
    def __init__(
        self,
        runner: DualWriter[H] | WriterPool[H],
        consumer: Mapping[str, Any],
        topics: Sequence[str],
        **handlers: Unpack[Handlers[Message, Transaction[H], None]],
    ) -> None: ...

    @overload
    def __init__(
        self,
        runner: DualWriter[H] | WriterPool[H],
        consumer: Mapping[str, Any],
        topics: Sequence[str | ReadableTopic[V, K]],
        **handlers: Unpack[Handlers[Received[V | bytes, K | bytes], Transaction[H], None]],
    ) -> None: ...

    def __init__(
        self,
        runner: DualWriter[Any] | WriterPool[Any],
        consumer: Mapping[str, Any],
        topics: Sequence[Any],
        *,
        handle: Callable[[Any, Transaction[Any]], None] | None = None,
        handle_batch: Callable[[list[Any], Transaction[Any]], None] | None = None,
        options: ProcessorOptions | None = None,
    ) -> None:
        check_handlers(handle, handle_batch)
        options = options or ProcessorOptions()
        if not isinstance(runner, DualWriter | WriterPool):
            raise UsageError(
                f"A DualProcessor needs a DualWriter or a WriterPool, not {type(runner).__name__}.",
                next_step="for coroutines use AsyncDualProcessor; to write to topics only, without a database, use "
                "confluent-kafka: Producer.send_offsets_to_transaction commits the positions with the messages",
            )
        by = runner.options if isinstance(runner, WriterPool) else runner
        check_journal(by.when_kafka_is_down, options)
        self._store = runner.store
        runs = ThreadRunner(runner, handle_batch or each_of(handle), alone=options.offsets == "kafka")
        self._loop = make_loop(runs, runner.store, consumer, topics, options)

    @property
    def positions(self) -> Mapping[Partition, Position]:
        """The positions of the partitions that are assigned now, as far as this processor knows them."""
        return self._loop.positions

    def check(self, timeout: float = CHECK_LIMIT) -> ProcessorHealth:
        """Whether the processor works, for probes: asks the database and a broker at the same time. Any thread may call it.

        If a side does not answer, that is a part of the result, not an error. It stands still if it has neither asked for
        messages nor begun an attempt for `max.poll.interval.ms` (5 minutes by default), perhaps because a handler waits.

        Args:
            timeout: Seconds within which it returns.

        Raises:
            ConfigurationError: The time limit is not a number of seconds from 0 to 1000000.
        """
        return self._loop.check(self._store, timeout)

    def stop(self) -> None:
        """End `run` once the transaction in progress has ended. May be called from any thread, and from a signal handler."""
        self._loop.stop()

    def run(self) -> None:
        """Process messages until `stop`. In the main thread SIGTERM stops it too. It can be called again after that.

        Raises:
            MessageFailedError: A message can't be processed, and there is no dead-letter topic that accepts it.
            MessagesDeletedError, LogTruncatedError, TopicReplacedError: See `on_gap` and `on_new_topic` of the options.
            PositionForgottenError: A position was removed while its partition was read.
            FencedError: Another process has claimed the writer's transactional id.
            LostTransactionError, UnverifiedTransactionError: As for `DualWriter.transaction`: a position in the database has
                moved, and the messages that the batch has sent are not visible, or may not be.
            BrokerError, StoreError: A permanent error of Kafka or of the database; transient ones are retried.
            UsageError: An event loop runs in the thread, which `run` would block: use AsyncDualProcessor.
        """
        check_may_block("DualProcessor.run()", "AsyncDualProcessor")
        self._loop.begin()
        with stopped_by_sigterm(self.stop):
            self._loop.run()


def check_handlers(handle: object, handle_batch: object) -> None:
    """Check that exactly one of the two is given.

    Raises:
        ConfigurationError: None or both are given.
    """
    if (handle is None) == (handle_batch is None):
        raise ConfigurationError("Give either handle or handle_batch.")


def check_journal(when_kafka_is_down: WhenKafkaIsDown, options: ProcessorOptions) -> None:
    """Check that positions move with the messages: a transaction that goes into the journal has no side at Kafka.

    Raises:
        ConfigurationError: The writers have a journal, and the positions are Kafka's.
    """
    if when_kafka_is_down == "journal" and options.offsets == "kafka":
        raise ConfigurationError(
            "ProcessorOptions(offsets='kafka') can't be combined with when_kafka_is_down='journal'.",
            cause="Kafka commits the group's offsets in its own transaction, and while it is down there is none",
            next_step="set offsets='database' (the default); or give the processor a writer or a pool without a journal",
        )


def make_loop(
    runs: Runner,
    store: TxnStateStore,
    consumer: Mapping[str, Any],
    topics: Sequence[str | Topic[Any, Any]],
    options: ProcessorOptions,
) -> ProcessingLoop:
    """Make the loop of a processor from the user's arguments.

    Raises:
        ConfigurationError: An argument is missing or not allowed, or the store does not support consumer positions.
    """
    if isinstance(topics, str | Topic) or not topics:
        raise ConfigurationError("topics must be a list of at least one topic.")
    settings = {**Settings.from_environment().kafka, **consumer}
    names = [topic.name if isinstance(topic, Topic) else topic for topic in topics]
    pattern = next((name for name in names if name.startswith("^")), None)
    if pattern is not None:
        raise ConfigurationError(
            f"The topic {pattern!r} is a pattern, as librdkafka accepts them.",
            cause="positions belong to topics that are known when the processor starts",
            next_step="name each topic",
        )
    decoding = {topic.name: topic for topic in topics if isinstance(topic, Topic) and topic.deserializes}
    group = validate_group_id(str(consumer.get("group.id", "")))
    keeping: PositionKeeping
    at_kafka = options.offsets == "kafka"
    keeping = KafkaKeeping(group, names, store.positions) if at_kafka else DatabaseKeeping(group, store)
    progress = Progress(group, settings, keeping, options)
    return ProcessingLoop(Attempts(group, settings, decoding, runs, progress, options), names)


class ThreadRunner(Runner):
    """Runs a plain handler in the processor's thread, or in the pool's.

    Args:
        runner: A writer or a pool.
        handle: Called with the messages and the transaction.
        alone: Don't run in a unit that shares its commit, because `finish` does something that a unit may not do.
    """

    def __init__(self, runner: DualWriter[Any] | WriterPool[Any], handle: Handle, *, alone: bool) -> None:
        self._runner = runner
        self._handle = handle
        self._alone = alone

    def run(self, content: Content | None, finish: Finish) -> None:
        def work(tx: Transaction[Any]) -> None:
            messages = None if content is None else content()
            if messages:  # none, if they were replayed for another group
                check_has_run(self._handle(messages, tx), name_of(self._handle))
            finish(tx)

        work.__wrapped__ = self._handle  # type: ignore[attr-defined]  # as functools.wraps does; `pool.alone` looks for it
        if isinstance(self._runner, WriterPool) and not self._alone:
            self._runner.run(work)
            return
        block: AbstractContextManager[Transaction[Any]] = self._runner.transaction()
        try:
            with block as tx:
                opened(tx).store_transaction.watch(shares=False)
                work(tx)
        except AfterCommitError as error:
            log_failed_listener(error, opened(tx).store_transaction.after_commit_error)

    def is_transient(self, error: BaseException) -> bool:
        if isinstance(error, FencedError):
            return isinstance(self._runner, WriterPool)  # a pool uses another id
        return self._runner.store.passes(error)


def log_failed_listener(error: AfterCommitError, own: Exception | None) -> None:
    """Log that a transaction has committed, and a listener of the commit has failed: `own`, the `after_commit_error`.

    Raises:
        AfterCommitError: `error`, if it is another transaction's.
    """
    if own is None:
        raise error
    log.error("a transaction has committed, and a listener of the commit has failed", exc_info=error)


def each_of(handle: Callable[[Any, Transaction[Any]], object] | None) -> Handle:
    """The handler of a list that passes each message to `handle`."""
    assert handle is not None
    name = name_of(handle)

    def all_of(messages: list[Any], tx: Transaction[Any]) -> None:
        for message in messages:
            with opened(tx).part(shares=len(messages) > 1), tracing.processing_one(message, of=messages):
                check_has_run(handle(message, tx), name)

    all_of.__wrapped__ = handle  # type: ignore[attr-defined]  # as functools.wraps does; `pool.alone` looks for it
    return all_of
