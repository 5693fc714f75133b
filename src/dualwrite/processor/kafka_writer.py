"""`KafkaWriter`: transactions on Kafka alone, for processors without a database (consume, transform, produce: KIP-447)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from dualwrite.deadline import check_may_block
from dualwrite.errors import (
    BrokerUnavailableError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    ProducerFencedError,
    UsageError,
    WriterClosedError,
)
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.kafka.choose import choose_producer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.time_budget import chosen_timeout_ms
from dualwrite.logs import SubjectLogger
from dualwrite.observability import observers, tracing
from dualwrite.outages import level_of
from dualwrite.recipe.phases import Event
from dualwrite.recipe.transaction_report import TransactionReport
from dualwrite.settings import ProducerName, Settings, Timeouts
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.transaction import OpenTransaction, Transaction
from dualwrite.transactional_id import validate_transactional_id

log = SubjectLogger(__name__)

_SUFFIX: Final = "#kafka"
"""Keeps the id at Kafka apart from those of writers with a database; a prefixed ACL covers it."""

_GENERATION: Final = frozenset({ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID})
"""The consumer's membership has ended; the producer is not fenced."""


class NoDatabase(StoreTransaction):
    """The database's side of a transaction on Kafka alone: `db` and `session` raise UsageError, nothing is committed."""

    def __init__(self, transactional_id: str) -> None:
        self._id = transactional_id

    @property
    def handle(self) -> NoReturn:
        raise self._no_database()

    @property
    def session(self) -> NoReturn:
        raise self._no_database()

    def record(self, *_state: object, **_generation: object) -> None:
        pass

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass

    def _no_database(self) -> UsageError:
        return UsageError(
            "A KafkaWriter's transaction has no database.",
            transactional_id=self._id,
            next_step="give DualProcessor a DualWriter or a WriterPool to write to a database",
        )


class KafkaWriter:
    """Writes transactions to Kafka alone, for a DualProcessor: its offsets are committed in the same transaction (KIP-447).

    Opening it ends the open transaction of the id's previous owner, and fences that owner. Nothing is prepared, so there is
    nothing to recover: after a crash an open transaction is aborted, at the latest after `transaction.timeout.ms`.

    Args:
        kafka: Settings in librdkafka's names, which replace those of the environment; or `host:port`, which replaces only the
            servers. By default those of the environment.
        transactional_id: Must stay the same across restarts; only one KafkaWriter may use it at a time.
        producer: "auto", "native" or "librdkafka"; see the guide about producers.
        timeouts: Time limits; `claim` is not used.

    Raises:
        InvalidTransactionalIdError: The id is empty, too long, or has reserved characters.
        ConfigurationError: A setting is unknown or not allowed.
    """

    def __init__(
        self,
        kafka: str | Mapping[str, Any] | None = None,
        *,
        transactional_id: str,
        producer: ProducerName = "auto",
        timeouts: Timeouts | None = None,
    ) -> None:
        self._id = validate_transactional_id(transactional_id, lanes=1)
        environment = Settings.from_environment()
        self._timeouts = timeouts or environment.timeouts
        self._config = KafkaConfig.over(kafka, environment.kafka)
        chosen_timeout_ms(self._config)  # raises if it is too short
        self._settings = Settings(transactional_id=self._id, producer=producer, two_phase=False, timeouts=self._timeouts)
        self._coordinator: WireTransactionCoordinator | None = None
        self._make: Callable[[str], TransactionalProducer] | None = None
        self._producer: TransactionalProducer | None = None
        self._fenced: ProducerFencedError | None = None
        self._may_fence_itself = False

    def open(self) -> Self:
        """Register the id, and fence its previous owner.

        Raises:
            BrokerUnavailableError: Kafka can't be reached.
            BrokerAuthorizationError: The principal is not authorized to use the id.
        """
        if self._coordinator is None:
            self._coordinator = WireTransactionCoordinator(self._config, timeout=self._timeouts.kafka)
        try:
            self._make = choose_producer(self._config, self._coordinator, self._settings, share_connections=True).make
            self._fenced = None
            self._replace_producer()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Release all resources. May be called more than once."""
        self._drop_producer()
        self._make = None
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One transaction: the end of the block commits, an exception aborts.

        Raises:
            DeliveryError, UnknownTopicError, MessageTooLargeError: A message was not stored; the transaction was aborted.
            ProducerFencedError: The consumer's generation has ended, or another process uses the id; the transaction was
                aborted.
            FencedError: Another process uses the id, or a transaction took longer than its timeout; open the writer again.
            InDoubtTransactionError: The commit was not answered; the group's offsets show whether it succeeded.
            BrokerUnavailableError: Kafka can't be reached; nothing was committed.
            UsageError: An event loop runs in the thread, which the block would keep waiting.
            WriterClosedError: The writer is not open.
        """
        check_may_block("transaction()", "AsyncDualProcessor on an AsyncWriterPool")
        producer = self._ready()
        producer.begin_transaction()
        report = TransactionReport(self._id, self._id + _SUFFIX, has_database=False) if observers.installed else None
        number = 0 if report is None else report.number
        begun = OpenTransaction(self._id, NoDatabase(self._id), producer, timeout=self._timeouts.kafka, number=number)
        trace = tracing.unit_trace("transaction", self._id, number)
        committing = False
        try:
            with trace.current():
                yield Transaction(begun)
            begun.end()
            if report is not None:
                report.entered(Event.PREPARE)
            producer.prepare_transaction(timeout=self._timeouts.for_delivery)
            if report is not None:
                report.messages = 0 if producer.delivery is None else producer.delivery.messages
                report.entered(Event.PREPARED)
            committing = True
            producer.commit_transaction(timeout=self._timeouts.kafka)
        except BaseException as error:
            begun.end()
            with _reported(report, trace, is_in_doubt=committing):
                if committing:
                    self._drop_producer()  # the next producer waits for the end of this transaction
                    self._raise_in_doubt(error)
                else:
                    self._abort(producer, error)
                raise
        if report is not None:
            report.committed("published")
        trace.end(None)

    def _ready(self) -> TransactionalProducer:
        if self._make is None:
            raise WriterClosedError("The KafkaWriter is not open.", transactional_id=self._id)
        if self._fenced is not None:
            raise FencedError(
                "The transactional id was taken over by another process, or a transaction took longer than its timeout.",
                transactional_id=self._id,
                next_step="give each process an id of its own; or raise transaction.timeout.ms, or reduce "
                "ProcessorOptions(batch=…)",
            ) from self._fenced
        if self._producer is None or self._producer.must_be_replaced:
            self._replace_producer()
        assert self._producer is not None
        return self._producer

    def _replace_producer(self) -> None:
        assert self._make is not None
        self._drop_producer()
        made = self._make(self._id + _SUFFIX)
        try:
            made.init_transactions(timeout=self._timeouts.kafka)
        except BaseException:
            self._may_fence_itself = True
            made.close()
            raise
        self._may_fence_itself |= made.must_be_replaced  # it had to repeat its registration
        self._producer = made

    def _drop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def _note_fencing(self, error: ProducerFencedError) -> None:
        """Note that another process uses the id, unless an unanswered registration of our own may have arrived late."""
        if self._may_fence_itself:
            self._may_fence_itself = False
            log.warning(
                "registering again, since an earlier registration of this process may have come late: %s",
                error,
                kafka_transactional_id=self._id,
            )
        else:
            self._fenced = error

    def _raise_in_doubt(self, error: BaseException) -> None:
        """Raise the error for a failed commit. Being fenced proves nothing either: a timeout may have ended the transaction."""
        if isinstance(error, ProducerFencedError):
            self._note_fencing(error)
        if isinstance(error, BrokerUnavailableError | ProducerFencedError):
            raise InDoubtTransactionError(
                "It is not known whether the transaction committed.",
                transactional_id=self._id,
                cause=str(error),
                next_step="read the group's committed offsets: they have advanced if the transaction committed",
                state="",
                database_committed=None,
            ) from error

    def _abort(self, producer: TransactionalProducer, error: BaseException) -> None:
        if isinstance(error, ProducerFencedError) and getattr(error, "code", None) not in _GENERATION:
            self._note_fencing(error)
        if self._fenced is not None or producer.must_be_replaced:
            self._drop_producer()  # registering the next producer aborts the transaction
            return
        try:
            producer.abort_transaction(timeout=self._timeouts.kafka)
        except DualWriteError as aborting:
            log.log(level_of(aborting), "aborting: %s", aborting, kafka_transactional_id=self._id)
            self._drop_producer()


@contextmanager
def _reported(report: TransactionReport | None, trace: tracing.UnitTrace, *, is_in_doubt: bool) -> Iterator[None]:
    """A block whose error is the outcome of a transaction, for the observers and the trace."""
    try:
        yield
    except BaseException as error:
        if report is not None:
            report.failed(error, is_in_doubt=is_in_doubt)
        trace.end(error)
        raise
