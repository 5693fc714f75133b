"""TransactionalProducer over confluent-kafka (librdkafka): any broker from 3.0 on, without two-phase commit.

Its transactions are limited by `transaction.timeout.ms`. All transactions of a session have the same (producerId, epoch), so
the prepared state includes the coordinator's start time, read by DescribeTransactions at prepare.

Remaining gap (docs/how-it-works/promise.md): librdkafka retries requests internally. A duplicate of its EndTxn or
InitProducerId, delayed in the network until the next transaction, can't be ruled out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, ThrottleEvent, TopicPartition
from confluent_kafka.cimpl import Producer  # the package's one may be auto-instrumented, and add headers a second time

from dualwrite.deadline import Deadline, Limit
from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    ConfigurationError,
    DeliveryError,
    InvalidMessageError,
    PrepareError,
    ProducerFencedError,
    TransactionTimeoutError,
    UsageError,
)
from dualwrite.kafka.base import GivenMessage, GroupMetadata, SentOffsets
from dualwrite.kafka.client.broker_connection import PRODUCE_QUOTA
from dualwrite.kafka.client.brokers import REFUSAL_LIMIT, check_not_refused
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.client.logins import TokenLogin
from dualwrite.kafka.client.time_budget import (
    DEFAULT_TRANSACTION_TIMEOUT_MS,
    TimeBudget,
    chosen_timeout_ms,
    judged,
    transaction_timeout_ms,
)
from dualwrite.kafka.librdkafka.client_settings import client_settings, without_tokens
from dualwrite.kafka.librdkafka.delivery_reports import DeliveryReports
from dualwrite.kafka.librdkafka.librdkafka_errors import broker_error, is_retriable, kafka_error
from dualwrite.kafka.librdkafka.topic_admin import wait_for_topic
from dualwrite.kafka.messages import (
    MAX_PARTITION,
    MAX_TIMESTAMP,
    TIMESTAMP,
    as_bytes,
    check_number,
    check_topic,
    header_list,
)
from dualwrite.kafka.sending import Sending
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import DELIVERY, REQUEST, SideCall, kafka_at
from dualwrite.state import ConsumedOffset, Delivery, PreparedTxnState, TransactionDescription, TransactionStatus

log = SubjectLogger(__name__)

_POLL: Final = 0.1
_MIN_SECONDS: Final = 0.001  # some of librdkafka's calls read 0 as "no limit"
_REASON_WAIT: Final = 1.0
_STEP: Final = 2.0  # seconds after which a call is interrupted, and continued, to see whether the brokers refuse this client
_FIRST_LOOK_SECONDS: Final = 0.5  # the same for what is not acknowledged: with a journal it is given up after 1.5 s
_WITHOUT_REASON: Final = frozenset(
    {
        *(KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT),  # noqa: SLF001  (public)
        *(KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD),  # noqa: SLF001  (public)
    }
)
"""What is reported of a message instead of why its batch was refused, such as INVALID_TIMESTAMP."""
_NO_TIMES: Final = (MAX_TIMESTAMP, 0)


def check_settings(config: KafkaConfig) -> None:
    """Check that librdkafka accepts the settings, as `open_producer` does; opens no connection."""
    timeout_ms = chosen_timeout_ms(config) or DEFAULT_TRANSACTION_TIMEOUT_MS
    if isinstance(config.sasl, TokenLogin):  # to wait for a token takes a second
        protocol = config.protocol.removeprefix("SASL_")
        config = KafkaConfig.of({**without_tokens(config.properties), "security.protocol": protocol})
    open_producer(config, "dualwrite-check", timeout_ms, SimpleQueue[ThrottleEvent]().put)


def open_producer(
    config: KafkaConfig, kafka_transactional_id: str, timeout_ms: int, throttled: Callable[[ThrottleEvent], object]
) -> Producer:
    """A producer of librdkafka, which opens its connections in its own threads, and reports a broker that throttles in `poll`.

    Raises:
        ConfigurationError: librdkafka does not know a setting, or rejects its value.
        BrokerError: There is no token for the login; see `client_settings`.
    """
    settings: Mapping[str, Any] = {
        "client.id": config.client_id,
        "socket.keepalive.enable": True,  # with its default (off), a peer that vanished goes unnoticed for minutes
        "throttle_cb": throttled,
        "linger.ms": 0,  # the default of 5 ms only delays prepare; under load, messages are batched while others are in flight
        **config.properties,
        "bootstrap.servers": config.servers,
        "transactional.id": kafka_transactional_id,
        "transaction.timeout.ms": timeout_ms,
        "enable.idempotence": True,
        "acks": "all",
    }
    made = client_settings(settings, kafka_transactional_id=kafka_transactional_id)
    try:
        return Producer(made)
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise ConfigurationError(
            f"librdkafka rejects the Kafka settings: {reason.strip()}.", next_step="see librdkafka's CONFIGURATION.md"
        ) from error


class LibrdkafkaProducer(Sending):
    """One session of librdkafka for one Kafka transactional id; see TransactionalProducer for the contract.

    Args:
        config: The cluster's settings; all of them are passed to librdkafka.
        kafka_transactional_id: The id that Kafka sees. No other session may use it (rule O2): librdkafka's InitProducerId
            can't be made conditional.
        coordinator: For DescribeTransactions at prepare.
        delivery_timeout: Seconds that sending one message may block when the queue is full.
        throttled_timeout: Seconds that a wait for acknowledgements may take if a quota is the reason, even if its own limit is
            shorter; None: not longer.
    """

    _producer: Producer

    def __init__(
        self,
        config: KafkaConfig,
        kafka_transactional_id: str,
        coordinator: WireTransactionCoordinator,
        *,
        delivery_timeout: float = 60.0,
        throttled_timeout: float | None = None,
    ) -> None:
        self._id = kafka_transactional_id
        self._coordinator = coordinator
        self._delivery_timeout = delivery_timeout
        self._throttled_timeout = throttled_timeout or 0.0
        self._config = config
        self._kafka = kafka_at(config.servers)
        self._throttled: SimpleQueue[ThrottleEvent] = SimpleQueue()
        self._reports = DeliveryReports()  # for every topic that was looked up
        self._delivery: Delivery | None = None
        self._is_closed = self._must_be_replaced = False
        self._previous_start_ms: int | None = None
        self._failure: BrokerError | None = None
        self._times = _NO_TIMES  # the first and the last of the transaction's messages
        self._offsets = SentOffsets()
        self._budget = TimeBudget(None)

    @property
    def kafka_transactional_id(self) -> str:
        """The transactional id that Kafka sees."""
        return self._id

    @property
    def must_be_replaced(self) -> bool:
        """Whether this session must not begin another transaction (rule F9)."""
        return self._must_be_replaced

    @property
    def transaction_timeout(self) -> float | None:
        """`transaction.timeout.ms`, in seconds; None before the id is registered."""
        return self._budget.timeout

    @property
    def _has_content(self) -> bool:
        return self._reports.sent > 0 or bool(self._offsets)

    # --- the transaction ----------------------------------------------------------------------------------------------

    def init_transactions(self, *, timeout: Limit) -> None:
        """Start librdkafka, and let it register the id (InitProducerId), which no other session may use.

        Raises: as TransactionalProducer, and ConfigurationError if librdkafka does not know a setting, or rejects its value.
        """
        deadline = Deadline.of(timeout)
        if self._is_closed:
            raise self._unusable("init_transactions", "is closed", "create another one")
        if "_producer" not in vars(self):
            timeout_ms = transaction_timeout_ms(self._config, self._coordinator, timeout=deadline)
            self._budget = TimeBudget(timeout_ms / 1000)
            self._producer = open_producer(self._config, self._id, timeout_ms, self._throttled.put)
        self._until_done(self._producer.init_transactions, "init_transactions", deadline)

    def begin_transaction(self) -> None:
        """Begin a transaction; no request is sent."""
        if self._is_closed:
            raise self._unusable("begin_transaction", "is closed", "create another one")
        if "_producer" not in vars(self):
            raise self._unusable("begin_transaction", "is not registered", "call init_transactions first")
        for _ in self._reports.failures():  # of the previous transaction
            self._must_be_replaced = True
        self._reports.begin()
        self._delivery = None
        self._failure = None
        self._times = _NO_TIMES
        self._budget.reset()
        self._offsets.clear()
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            self._must_be_replaced = True
            raise broker_error(error, self._id, "begin_transaction") from error

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """Queue messages, one by one; librdkafka sends them in the background."""
        now = time.time_ns() // 1_000_000
        for message in messages:
            self._send(message, now)

    def _send(self, given: GivenMessage, now: int) -> None:
        topic, value, key, headers, partition, timestamp = given
        message: dict[str, Any] = {"value": as_bytes("value", value), "key": as_bytes("key", key)}
        if headers is not None:
            message["headers"] = header_list(headers)
        if partition is not None:
            message["partition"] = check_number("partition", partition, MAX_PARTITION)
        message["timestamp"] = created = now if timestamp is None else _timestamp(timestamp)
        self._times = min(self._times[0], created), max(self._times[1], created)
        deadline: Deadline | None = None  # set only when waiting is necessary
        if not isinstance(topic, str) or topic not in self._reports:
            deadline = Deadline(self._delivery_timeout)
            check_topic(topic)
            with self._kafka.call(DELIVERY):
                wait_for_topic(self._list_topics, topic, self._id, deadline)
            self._reports.add_topic(topic)
        self._raise_failure()
        report = self._reports.callback(topic)
        self._budget.start()
        while True:
            try:
                self._producer.produce(topic, on_delivery=report, **message)
                break
            except BufferError as error:
                deadline = deadline or Deadline(self._delivery_timeout)
                if deadline.expired:
                    raise DeliveryError(
                        f"The producer's queue stayed full for {self._delivery_timeout:g} s.",
                        cause="the broker accepts messages too slowly, or not at all",
                        next_step="check the brokers, queue.buffering.max.kbytes and queue.buffering.max.messages",
                        transactional_id=self._id,
                    ) from error
                self._poll(min(_POLL, deadline.left))
                self._raise_failure()
            except KafkaException as error:
                self._wait_for_reason(error, deadline or Deadline(self._delivery_timeout))
                raise self._failed(broker_error(error, self._id, f"send to topic {topic!r}")) from error
        self._reports.count(topic)
        self._poll(0)

    def send_offsets_to_transaction(self, offsets: Iterable[ConsumedOffset], group: GroupMetadata, *, timeout: float) -> None:
        """Make a consumer's positions part of the transaction (KIP-447)."""
        listed = list(offsets)
        positions = [TopicPartition(o.topic, o.partition, o.offset, o.metadata, o.leader_epoch) for o in listed]
        if not positions:
            return
        self._budget.start()
        self._offsets.add(group.group_id, listed)
        self._until_done(
            lambda left: self._producer.send_offsets_to_transaction(positions, group.for_librdkafka(), left),
            "send_offsets_to_transaction",
            Deadline(timeout),
        )

    def prepare_transaction(self, *, timeout: float) -> PreparedTxnState | None:
        """Flush, count the acknowledgements, and check with the coordinator that the transaction is ongoing and ours."""
        if not self._has_content:
            return None
        with self._kafka.call(DELIVERY) as call:
            return self._prepared(call, Deadline(timeout))

    def _prepared(self, call: SideCall, deadline: Deadline) -> PreparedTxnState:
        if_throttled = Deadline(self._throttled_timeout)
        waiting = self._deliver(lambda: call.limit(deadline, if_throttled).left)
        self._raise_failure()
        sent, acknowledged = self._reports.sent, self._reports.acknowledged
        if waiting or acknowledged != sent:
            seconds = call.limit(deadline, if_throttled).seconds
            raise self._failed(
                DeliveryError(
                    f"{sent - acknowledged} of {sent} messages were not acknowledged within {seconds:g} s.",
                    cause="the broker accepts messages too slowly, or not at all",
                    transactional_id=self._id,
                )
            )
        found = self._described(call.limit(deadline, if_throttled))
        self.check_time_left()
        self._previous_start_ms = found.start_time_ms
        self._delivery = Delivery.of(self._reports.places(found.partitions), self._offsets)
        return PreparedTxnState(found.producer_id, found.epoch, found.start_time_ms)

    @property
    def delivery(self) -> Delivery | None:
        """Where in the log the messages of the most recently prepared transaction are."""
        return self._delivery

    def check_time_left(self) -> None:
        """Compare the time since the first message with the transaction's timeout."""
        try:
            self._budget.check(self._id)
        except TransactionTimeoutError as error:
            raise self._failed(error) from None

    def commit_transaction(self, *, timeout: float) -> None:
        """EndTxn by librdkafka; after an error that it calls retriable it is retried, and the session must be replaced."""
        just_written = self._budget.just_started
        self._end(self._producer.commit_transaction, "commit_transaction", Deadline(timeout), just_written=just_written)

    def abort_transaction(self, *, timeout: float) -> None:
        """EndTxn(abort) by librdkafka, once no message is in flight.

        With messages in flight, librdkafka would send an InitProducerId after the abort to bump its epoch: that leaves the id
        in state Empty, and destroys the evidence of the last committed transaction (rule F7).
        """
        deadline = Deadline(timeout)
        waiting = self._deliver(lambda: deadline.left)
        self._raise_failure()
        if waiting:
            raise self._failed(
                DeliveryError(f"{waiting} messages are still in flight after {timeout:g} s.", transactional_id=self._id)
            )
        self._end(self._producer.abort_transaction, "abort_transaction", deadline, just_written=False)

    def close(self) -> None:
        """Drop queued messages and stop librdkafka's threads; no transaction is ended."""
        self._is_closed = self._must_be_replaced = True
        producer: Producer | None = vars(self).pop("_producer", None)
        if producer is None:
            return
        try:
            producer.purge(in_queue=True, in_flight=True, blocking=False)
            producer.poll(0)
        except KafkaException as error:
            log.debug("purging the queue: %s", error, kafka_transactional_id=self._id)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _unusable(self, call: str, state: str, next_step: str) -> UsageError:
        return UsageError(f"{call}(): the producer {state}.", transactional_id=self._id, next_step=next_step)

    def _described(self, deadline: Deadline) -> TransactionDescription:
        found = self._coordinator.describe(self._id, timeout=deadline)
        if found is None or found.status is not TransactionStatus.ONGOING:
            status = "it does not know the id" if found is None else f"its state is {found.status.value}"
            raise self._failed(
                PrepareError(
                    f"The transaction is not ongoing at its coordinator: {status}.",
                    cause="it timed out, or another process took over the id",
                    transactional_id=self._id,
                )
            )
        if found.start_time_ms == self._previous_start_ms:
            raise self._failed(
                PrepareError(
                    f"Two consecutive transactions started in the same millisecond ({found.start_time_ms}), "
                    "so the prepared state would not distinguish them.",
                    cause="the broker's clock was set back",
                    transactional_id=self._id,
                )
            )
        return found

    def _list_topics(self, topic: str, timeout: float) -> Any:
        try:
            return self._producer.list_topics(topic, timeout)
        except KafkaException:
            check_not_refused(self._config, REFUSAL_LIMIT)
            raise

    def _deliver(self, seconds_left: Callable[[], float]) -> int:
        """Wait until every message has its report; returns the number of those without one when no time is left.

        confluent-kafka's flush() is not used: when librdkafka reports a fatal error (fencing), flush() continues to serve
        delivery reports with that exception set, which raises a SystemError, or something that no `except` clause catches.
        poll() stops there.
        """
        look_at = time.monotonic() + _FIRST_LOOK_SECONDS
        while (waiting := len(self._producer)) and (left := seconds_left()) > 0:
            self._poll(min(left, _POLL))
            if time.monotonic() >= look_at:
                self._check_not_refused(seconds_left())
                look_at = time.monotonic() + _STEP
        return waiting

    def _check_not_refused(self, seconds_left: float) -> None:
        try:
            check_not_refused(self._config, min(seconds_left, REFUSAL_LIMIT))
        except BrokerAuthorizationError as error:
            raise self._failed(error) from None

    def _poll(self, timeout: float) -> None:
        """Serve delivery reports; raise a fatal error as a BrokerError."""
        try:
            self._producer.poll(timeout)
        except KafkaException as error:
            raise self._failed(broker_error(error, self._id, "delivery of messages")) from error
        finally:
            self._read_reports()

    def _read_reports(self) -> None:
        while not self._throttled.empty():
            self._kafka.throttled(self._throttled.get_nowait().throttle_time, f"{PRODUCE_QUOTA} of {self._config.client}")
        for topic, error in self._reports.failures():
            if self._failure is None:
                reason = self._reason_of_dropping() if error.code() in _WITHOUT_REASON else None
                refused = reason or broker_error(error, self._id, f"delivery to topic {topic!r}")
                if refused.name == "INVALID_TIMESTAMP":
                    refused = judged(self._budget, self._coordinator, refused, self._times)
                self._failed(refused)

    def _reason_of_dropping(self) -> BrokerError | None:
        """Why librdkafka has dropped the messages of the transaction, or a broker has refused them, if it says so.

        After an error that only an abort ends, librdkafka drops them all, and answers every other call about transactions with
        that error; `begin_transaction` has no effect in the middle of a transaction.
        """
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            inner = kafka_error(error)
            if inner is None or not inner.txn_requires_abort():
                return None
            reason = broker_error(error, self._id, f"delivery to {' or '.join(map(repr, self._reports.topics))}")
            # an id that has expired is registered again: the same transaction may succeed
            return None if isinstance(reason, ProducerFencedError) else reason
        return None

    def _wait_for_reason(self, error: KafkaException, deadline: Deadline) -> None:
        """Raise the failed delivery that made librdkafka refuse further messages; its report arrives a moment later."""
        inner = kafka_error(error)
        limit = deadline.within(_REASON_WAIT)
        while inner is not None and inner.code() == KafkaError._STATE:  # noqa: SLF001  (public)
            self._poll(min(_POLL, limit.left))
            self._raise_failure()
            if limit.expired:
                return

    def _failed(self, error: BrokerError) -> BrokerError:
        """Record that an abort is not enough for this session: librdkafka bumps its epoch automatically afterwards."""
        self._must_be_replaced = True
        explained = self._budget.explained(error, self._id)
        if self._failure is None:
            self._failure = explained
        return explained

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end(self, call: Callable[[float], None], what: str, deadline: Deadline, *, just_written: bool) -> None:
        """EndTxn by librdkafka, after checking the leaders (rule FB) unless everything was written just now."""
        if self._has_content and not just_written:
            try:
                self._coordinator.wait_for_leaders(self._id, timeout=deadline)
            except BaseException:
                self._must_be_replaced = True
                raise
        self._until_done(call, what, deadline, ends=True)

    def _until_done(self, call: Callable[[float], None], what: str, deadline: Deadline, *, ends: bool = False) -> None:
        """Call, and retry within the deadline while librdkafka calls the error retriable, as it does that `_STEP` has passed.

        `ends`: it ends the transaction, so that a second request for that may be on its way after any error.
        """
        with self._kafka.call(REQUEST) as waiting:
            while True:
                try:
                    call(max(min(deadline.left, _STEP), _MIN_SECONDS))
                except KafkaException as error:
                    waiting.error = error
                    is_step = error.args[0].code() == KafkaError._TIMED_OUT and not deadline.expired  # noqa: SLF001  (public)
                    self._must_be_replaced = self._must_be_replaced or ends or not is_step
                    if not is_retriable(error) or deadline.expired:
                        raise broker_error(error, self._id, what) from error
                    if is_step:
                        self._check_not_refused(deadline.left)
                    deadline.sleep(_POLL)
                else:
                    return


def _timestamp(given: int) -> int:
    """A valid timestamp that librdkafka can send."""
    if check_number(TIMESTAMP, given, MAX_TIMESTAMP) == 0:
        raise InvalidMessageError(
            "librdkafka can't send the timestamp 0 (the beginning of 1970): it takes it for none, and uses the current time.",
            next_step="use producer='native', or a timestamp of at least 1",
        )
    return given
