"""NativeProducer: a transactional producer that implements KIP-890 and KIP-939, for brokers with transaction.version 2.

Every transaction has its own epoch, so `producerId:epoch` identifies it, and EndTxn v5 is a compare-and-set on it: no request
of this producer can affect another producer's transaction. The unconditional InitProducerId, which could, is sent only by
`init_transactions`, for standalone use of the producer; a DualWriter takes over an id by `adopt` and `create`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sized
from enum import Enum
from functools import partial
from time import time_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dualwrite import process
from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import (
    BrokerError,
    ConfigurationError,
    DualWriteError,
    InvalidTransactionalIdError,
    InvalidTransitionError,
    ProducerFencedError,
    UsageError,
)
from dualwrite.kafka.base import (
    EndingTransaction,
    GivenMessage,
    GroupMetadata,
    Headers,
    InitProducerIdResult,
    NewProducerId,
    SentOffsets,
)
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.time_budget import NO_TIMEOUT_MS, TimeBudget, judged
from dualwrite.kafka.messages import MAX_TIMESTAMP, TIMESTAMP, Columns, check_number
from dualwrite.kafka.native.accumulator import RecordAccumulator
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.kafka.native.registration import Identity, Registrar, commit_offsets
from dualwrite.kafka.native.retry_policy import MarkerWait, Patience, failure
from dualwrite.kafka.native.sender import Sender, Whole
from dualwrite.kafka.sending import Sending
from dualwrite.state import LAST_EPOCH, ConsumedOffset, Delivery, PreparedTxnState

if TYPE_CHECKING:
    import pyarrow as pa


class ProducerState(Enum):
    """The state of a producer. The value completes the sentence "the producer …"."""

    UNINITIALIZED = "has no producer id yet"
    READY = "is between transactions"
    IN_TRANSACTION = "is inside a transaction"
    PREPARED = "has prepared its transaction"
    UNCERTAIN = "does not know whether its transaction was committed"
    ABORTING = "does not know whether its transaction was aborted"
    FENCED = "was fenced: its transactional id was taken over, or another process ended its transaction"
    CLOSED = "is closed"

    __hash__ = object.__hash__  # Enum's is a Python function, called for each of a transaction's checks


_IN_TRANSACTION: Final = ProducerState.IN_TRANSACTION  # an attribute of an Enum takes longer to read
_ACQUIRING: Final = ("init_transactions", "adopt", "create", "close")

ALLOWED: Final = MappingProxyType(
    {
        ProducerState.UNINITIALIZED: _ACQUIRING,
        ProducerState.READY: ("begin_transaction", *_ACQUIRING),
        ProducerState.IN_TRANSACTION: (
            "send",
            "send_many",
            "send_columns",
            "send_offsets_to_transaction",
            "prepare_transaction",
            "commit_transaction",
            "abort_transaction",
            "close",
        ),
        ProducerState.PREPARED: ("commit_transaction", "abort_transaction", "complete_prepared_transaction", "close"),
        ProducerState.UNCERTAIN: ("commit_transaction", "abort_transaction", *_ACQUIRING),
        ProducerState.ABORTING: ("abort_transaction", *_ACQUIRING),  # a commit might include only part of it
        ProducerState.FENCED: _ACQUIRING,
        ProducerState.CLOSED: ("close",),
    }
)
"""The methods that each state allows."""


_LOST: Final = (ProducerState.UNCERTAIN, ProducerState.ABORTING, ProducerState.FENCED, ProducerState.CLOSED)


class NativeProducer(Sending):
    """A transactional producer for one Kafka transactional id; see TransactionalProducer for the contract.

    Args:
        config: The cluster's settings.
        kafka_transactional_id: The id that Kafka sees.
        coordinator: For InitProducerId, EndTxn and DescribeTransactions; None creates one that is closed with the producer.
        two_phase: Whether to use two-phase commit, under which the broker never times out transactions (KIP-939, `enable2Pc`).
        delivery_timeout: Seconds that sending one message may block while the buffer is full or its topic is looked up.
        throttled_timeout: Seconds that a wait for acknowledgements may take if a quota is the reason, even if its own limit is
            shorter; None: not longer.
        network: Connections to share, owned by the thread that uses this producer; None opens separate ones.

    Raises:
        InvalidTransactionalIdError: The id is empty.
        ConfigurationError: A setting is out of range, or `transaction.timeout.ms` is set together with two-phase commit.
        MissingDependencyError: The package for the compression is not installed.
    """

    def __init__(
        self,
        config: KafkaConfig,
        kafka_transactional_id: str,
        coordinator: WireTransactionCoordinator | None = None,
        *,
        two_phase: bool = False,
        delivery_timeout: float = 60.0,
        throttled_timeout: float | None = None,
        network: Network | None = None,
    ) -> None:
        if not isinstance(kafka_transactional_id, str) or not kafka_transactional_id:
            raise InvalidTransactionalIdError(f"A transactional id must be a non-empty str, not {kafka_transactional_id!r}.")
        if two_phase and config.transaction_timeout_ms is not None:
            raise ConfigurationError(
                "transaction.timeout.ms is set together with two-phase commit, under which nothing times out (KIP-939).",
                next_step="remove one of them",
            )
        self._id = kafka_transactional_id
        self._two_phase = two_phase
        settings = NativeSettings.of(config)
        self._delivery_timeout = delivery_timeout
        self._owns_coordinator = coordinator is None
        self._coordinator = coordinator = coordinator or WireTransactionCoordinator(config)
        self._owns_network = network is None
        self._network = network or Network(config)
        self._pid = process.pid
        self._budget = TimeBudget(None)
        judging = partial(judged, self._budget, coordinator)
        self._sender = Sender(self._network, settings, kafka_transactional_id, judging, throttled_timeout or 0.0)
        self._state = ProducerState.UNINITIALIZED
        self._producer_id = self._epoch = -1
        self._accumulator = RecordAccumulator(self._sender, settings, kafka_transactional_id)
        self._offsets = SentOffsets()
        self._prepared: PreparedTxnState | None = None
        self._delivery: Delivery | None = None
        self._markers = MarkerWait(lambda limit: coordinator.describe(kafka_transactional_id, timeout=limit))
        self._registrar = Registrar(config, coordinator, kafka_transactional_id, two_phase=two_phase)
        self._id_has_changed = False

    @property
    def kafka_transactional_id(self) -> str:
        """The transactional id that Kafka sees."""
        return self._id

    @property
    def state(self) -> ProducerState:
        """The producer's state."""
        return self._state

    @property
    def identity(self) -> tuple[int, int]:
        """Producer id and epoch of the current or next transaction; both -1 before the id is registered."""
        return self._producer_id, self._epoch

    @property
    def two_phase(self) -> bool:
        """Whether the broker never times out a transaction of this producer."""
        return self._two_phase

    @property
    def must_be_replaced(self) -> bool:
        """Whether the id should be taken over again before another transaction begins.

        Also true when only the last epoch of the producer id is left: a takeover bumps it while no transaction is open, so the
        producer id changes while nothing is in doubt. The coordinator would remember the outcome of a transaction on that epoch
        only until the next one begins, and some brokers get stuck when it times out (KAFKA-20090). With standalone use of the
        producer this can be ignored.
        """
        return self._id_has_changed or self._epoch >= LAST_EPOCH or self._state in _LOST

    @property
    def transaction_timeout(self) -> float | None:
        """Seconds after which the broker aborts a transaction; None under two-phase commit, and before the id is registered."""
        return self._budget.timeout

    # --- registering the id -----------------------------------------------------------------------------------------------

    def init_transactions(self, keep_prepared_txn: bool = False, *, timeout: Limit = 60.0) -> PreparedTxnState | None:
        """Register the id and fence its previous owners (InitProducerId), for standalone use of the producer.

        With `keep_prepared_txn`, a transaction that a previous owner prepared is kept and its state returned, and only
        `complete_prepared_transaction`, `commit_transaction` and `abort_transaction` are allowed until it has ended. If the
        broker does not support `keepPreparedTxn`, DescribeTransactions and EndTxn are used instead; the previous owner is
        then fenced when the transaction ends.

        Without it, an ongoing transaction of the id is aborted, regardless of its owner: never call this method for an id
        that a DualWriter may be using.

        Args:
            keep_prepared_txn: As `keepPreparedTxn` of KIP-939.
            timeout: Maximum wait in seconds, or a deadline.

        Returns:
            The prepared transaction that was kept, or None.

        Raises:
            TwoPhaseCommitRefusedError: Two-phase commit was requested, and the broker or its ACLs do not allow it.
            TransactionTimeoutRefusedError: The broker rejects the transaction timeout.
            BrokerUnavailableError: No coordinator responded within the time limit.
            BrokerAuthorizationError: The principal is not authorized to use the id.
            InvalidTransitionError: A transaction is open.
        """
        self._check_allowed("init_transactions")
        return self._continue_as(self._registrar.register(Deadline.of(timeout), keep_prepared=keep_prepared_txn))

    def adopt(self, producer_id: int, epoch: int, *, timeout_ms: int) -> None:
        """Take over the id with the response to the EndTxn v5 that aborted the previous epoch (rule F5).

        Before anything is sent, the caller must check that it still owns the claim (rule F2): two claimants that abort the
        same epoch get the same response.

        Args:
            producer_id: The producer id from the response.
            epoch: The epoch from the response.
            timeout_ms: The transaction timeout of the id at its coordinator.
        """
        self._check_allowed("adopt")
        self._continue_as(Identity(producer_id, epoch, timeout_ms))

    def create(self, *, timeout: Limit) -> bool:
        """Register the id if its coordinator does not know it yet; returns whether it did. See `TakeOverProducer.created`.

        On brokers other than Apache's the caller must make sure that nobody else registers the id (rule NG).

        Raises: as `init_transactions`.
        """
        self._check_allowed("create")
        return self._continue_if(self._registrar.create(Deadline.of(timeout)))

    def creation(self, *, timeout: Limit) -> NewProducerId:
        self._check_allowed("create")
        return self._registrar.creation(Deadline.of(timeout))

    def created(self, answer: InitProducerIdResult, *, timeout: Limit) -> bool:
        self._check_allowed("create")
        return self._continue_if(self._registrar.created(answer, Deadline.of(timeout)))

    def _continue_if(self, created: Identity | None) -> bool:
        if created is not None:
            self._continue_as(created)
        return created is not None

    def wanted_timeout_ms(self, *, timeout: Limit) -> int:
        """The transaction timeout that the id must have for this producer to adopt it."""
        return self._registrar.wanted_timeout_ms(Deadline.of(timeout))

    # --- the transaction --------------------------------------------------------------------------------------------------

    def begin_transaction(self) -> None:
        """Begin a transaction; no request is sent."""
        self._check_allowed("begin_transaction")
        self._sender.begin()
        self._accumulator.begin(self._producer_id, self._epoch)
        self._offsets.clear()
        self._delivery = None
        self._budget.reset()
        self._state = ProducerState.IN_TRANSACTION

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Add one message, without the call of `send_messages` where that is all that it would do: a tenth of the time."""
        messages = ((topic, value, key, headers, partition, timestamp),)
        sender = self._sender
        if self._state is _IN_TRANSACTION and sender.has_sent and sender.failure is None and self._pid == process.pid:
            self._accumulator.add(messages, time_ns() // 1_000_000, self._delivery_timeout)
        else:
            self.send_messages(messages)

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """Add messages. Those of a transaction's first call are sent at once, the others when their batch is full."""
        if self._state is not _IN_TRANSACTION or self._pid != process.pid:
            self._check_allowed("send_many" if isinstance(messages, Columns) else "send")
        sender = self._sender
        if sender.failure is not None:
            raise sender.failure
        now = time_ns() // 1_000_000
        if sender.has_sent and (type(messages) is tuple or type(messages) is list):
            self._accumulator.add(messages, now, self._delivery_timeout)
            return
        if type(messages) is tuple:  # as of `send`
            limit = Deadline(self._delivery_timeout)
            self._adding(partial(self._accumulator.add, messages, now, limit), limit)
            return
        patience = Patience(self._delivery_timeout, lambda: sender.stored)
        if isinstance(messages, Columns):
            self._send_columns(messages, now, patience)
            return
        for chunk in patience.chunks(messages):
            self._adding(partial(self._accumulator.add, chunk, now, patience), patience)

    def _send_columns(self, columns: Columns, now: int, deadline: Patience) -> None:
        topic, values, keys, partition = columns.topic, columns.values, columns.keys, columns.partition
        if columns.timestamp is not None:
            now = check_number(TIMESTAMP, columns.timestamp, MAX_TIMESTAMP)
        if isinstance(values, Sized) and not len(values):
            return
        if hasattr(values, "to_pylist"):
            from dualwrite.kafka.native.arrow_records import RecordColumns  # noqa: PLC0415  (needs pyarrow)

            if not self._sender.has_sent:
                first = Columns(topic, values[:1], keys=None if keys is None else keys[:1], partition=partition)
                self._adding(partial(self._accumulator.add, list(first), now, deadline), deadline)
                values, keys = values[1:], None if keys is None else keys[1:]
            records = RecordColumns.of(values, keys)
            if records is not None and self._accumulator.extend_columns(topic, records, partition, now, deadline):
                return
            columns = Columns(topic, values.to_pylist(), keys=keys, partition=partition)
        if keys is None:
            for some in deadline.chunks(columns.values):
                self._adding(partial(self._accumulator.extend, topic, some, partition, now, deadline), deadline)
        else:
            for rows in [columns] if columns.are_lists else deadline.chunks(columns):
                self._adding(partial(self._accumulator.add, rows, now, deadline), deadline)

    def send_columns(self, topic: str, values: pa.Array, *, keys: pa.Array | None = None, partition: int | None = None) -> None:
        """Add many messages from binary Arrow arrays. Thousands of them are sent with the call, fewer as by `send_many`."""
        self._check_allowed("send_columns")
        self.send_messages(Columns(topic, values, keys=keys, partition=partition))

    def send_offsets_to_transaction(
        self, offsets: Iterable[ConsumedOffset], group: GroupMetadata, *, timeout: float = 60.0
    ) -> None:
        """Make a consumer's positions part of the transaction (KIP-447)."""
        self._check_allowed("send_offsets_to_transaction")
        self._sender.raise_failure()
        listed = list(offsets)
        if not listed:
            return
        deadline = Deadline(timeout)
        self._begin_sending(deadline)
        self._offsets.add(group.group_id, listed)
        try:
            with Whole(self._sender):
                commit_offsets(self._network, self._id, self._producer_id, self._epoch, listed, group, deadline)
        except DualWriteError as error:
            self._sender.failure = error
            raise

    def prepare_transaction(self, *, timeout: float = 60.0) -> PreparedTxnState | None:
        """Flush; no other request is needed: each acknowledgement confirms that the transaction is ours (KIP-890).

        If another process ends the transaction meanwhile, this raises only if the markers were written; otherwise commit does.
        """
        self._check_allowed("prepare_transaction")
        try:
            self._flush(Deadline(timeout))
        except ProducerFencedError:
            self.check_time_left()  # if its time is over, that is the likely cause: the broker has aborted it
            raise
        self.check_time_left()
        self._prepared = PreparedTxnState(self._producer_id, self._epoch) if self._has_content else None
        self._delivery = Delivery.of(self._accumulator.places, self._offsets)
        self._state = ProducerState.PREPARED
        return self._prepared

    @property
    def delivery(self) -> Delivery | None:
        """Where in the log the messages of the most recently prepared transaction are."""
        return self._delivery

    def check_time_left(self) -> None:
        """Compare the time since the first message with the transaction's timeout; there is none under two-phase commit."""
        self._budget.check(self._id)

    def commit_transaction(self, *, timeout: float = 60.0) -> None:
        """EndTxn v5, after a flush unless the transaction is prepared; a repeated request is idempotent."""
        self._check_allowed("commit_transaction")
        deadline = Deadline(timeout)
        if self._state is ProducerState.IN_TRANSACTION:
            self._flush(deadline)
        self._end(deadline, commit=True)

    def abort_transaction(self, *, timeout: float = 60.0) -> None:
        """EndTxn v5, which bumps the epoch: messages still in flight are rejected on arrival, and are not waited for."""
        self._check_allowed("abort_transaction")
        self._end(Deadline(timeout), commit=False)

    def complete_prepared_transaction(self, state: PreparedTxnState | None, *, timeout: float = 60.0) -> None:
        """Commit the prepared transaction if `state` names it, else abort it (KIP-939, `completeTransaction`).

        Args:
            state: The state stored in the database; None if there is none.
            timeout: Maximum wait in seconds.

        Raises: as `commit_transaction`.
        """
        self._check_allowed("complete_prepared_transaction")
        self._end(Deadline(timeout), commit=state is not None and state == self._prepared)

    def close(self) -> None:
        """Drop queued messages and close the producer's own connections; no transaction is ended."""
        self._state = ProducerState.CLOSED
        self._sender.close()
        if self._owns_network:
            self._network.close()
        if self._owns_coordinator:
            self._coordinator.close()

    # --- parts --------------------------------------------------------------------------------------------------------

    @property
    def _has_content(self) -> bool:
        return bool(self._offsets) or self._sender.has_sent

    def _check_allowed(self, call: str) -> None:
        """Check that a method may be called in this process and state.

        Raises:
            UsageError: The producer was created in another process.
            InvalidTransitionError: The state does not allow the call; nothing was changed.
        """
        if self._pid != process.pid:
            raise UsageError(
                f"{call}() in process {process.pid}, but the producer was created in {self._pid}: it does not survive a fork.",
                transactional_id=self._id,
                next_step="create a producer in each process, after the fork, with its own id",
            )
        allowed = ALLOWED[self._state]
        if call not in allowed:
            raise InvalidTransitionError(
                f"{call}() is not allowed: the producer {self._state.value}.",
                transactional_id=self._id,
                next_step=f"allowed now: {', '.join(allowed)}",
                state=self._state,
                allowed=allowed,
            )

    def _begin_sending(self, deadline: Deadline) -> None:
        """Called before anything of the transaction is sent."""
        self._markers.wait(deadline)
        self._budget.start()

    def _adding(self, add: Callable[[], None], deadline: Deadline) -> None:
        """Add messages, and send the transaction's first ones at once: they begin it at the broker."""
        if self._sender.has_sent:
            add()
            return
        self._begin_sending(deadline)
        with Whole(self._sender):
            add()
            self._accumulator.push(deadline)

    def _flush(self, deadline: Deadline) -> None:
        if self._accumulator.is_empty:
            self._sender.raise_failure()
            return
        began = time.monotonic()
        self._accumulator.flush(deadline)
        self._markers.flushed(time.monotonic() - began)

    def _end(self, deadline: Deadline, *, commit: bool) -> None:
        """EndTxn for our epoch; continue with the epoch in the response. The state is uncertain before the request is sent."""
        if not self._has_content and self._prepared is None:
            self._state = ProducerState.READY
            return
        self._state = ProducerState.UNCERTAIN if commit else ProducerState.ABORTING
        if not commit:
            self._sender.abandon(deadline)
        # partitions that were just written to have leaders (rule FB)
        at = time.monotonic() if commit and self._budget.just_started else -math.inf
        ending = EndingTransaction(self._id, self._producer_id, self._epoch, commit, described_at=at)
        (response,) = self._coordinator.end_all([ending], timeout=deadline)
        self._markers.transaction_ended()
        if not response.proven:
            error = failure(response.code, "EndTxn", self._id, otherwise=BrokerError)
            if isinstance(error, ProducerFencedError):
                self._state = ProducerState.FENCED
            raise error
        self._id_has_changed = response.producer_id != self._producer_id
        self._producer_id, self._epoch = response.producer_id, response.epoch  # no calls from here on, so no KeyboardInterrupt
        self._prepared = None
        self._state = ProducerState.READY

    def _continue_as(self, identity: Identity) -> PreparedTxnState | None:
        """Write under this identity from now on; a prepared transaction of the id must be ended first."""
        self._producer_id, self._epoch = identity.producer_id, identity.epoch
        self._budget.timeout = None if identity.timeout_ms == NO_TIMEOUT_MS else identity.timeout_ms / 1000
        self._budget.reset()
        self._prepared = identity.prepared
        self._id_has_changed = False
        self._state = ProducerState.READY if identity.prepared is None else ProducerState.PREPARED
        return identity.prepared
