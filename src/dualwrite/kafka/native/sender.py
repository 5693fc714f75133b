"""Sends a transaction's batches to the partition leaders, several in flight at once, and reads the responses.

Runs in the caller's thread: responses that have arrived are read whenever a batch is sent, the rest when the transaction is
prepared.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import BrokerError, DeliveryError, DualWriteError
from dualwrite.kafka.client.broker_connection import Connection, ConnectionLostError, Inbox
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import Address
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.client.messages_generated import ProduceRequest, ProduceResponse
from dualwrite.kafka.client.time_budget import Judged
from dualwrite.kafka.native.metadata import Topics
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.kafka.native.partition import Partition, ProduceBatch
from dualwrite.kafka.native.records import BatchBuilder, EncodedRecords, timestamps
from dualwrite.kafka.native.retry_policy import NO_RESPONSE, Reaction, failure, reaction_to, retry_pause
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import DELIVERY, kafka_at

log = SubjectLogger(__name__)

_Topic: Final = ProduceRequest.TopicProduceData
_PartitionData: Final = _Topic.PartitionProduceData
_ALL_REPLICAS: Final = -1
_MAX_REQUEST_BYTES: Final = 4 * 2**20
_CHECK_INTERVAL: Final = 0.5  # seconds between checks for unanswered requests during a wait
_CONNECTION_WAIT: Final = 0.05  # seconds to wait for one connection while there are other leaders to send to
_ONLY_CONNECTION_WAIT: Final = 1.0  # and while there are none
_OPENINGS_INTERVAL: Final = 0.01
_ABORT_WAIT: Final = 0.1  # seconds that an abort waits for requests in flight before it closes their connections
_NOT_NUMBERED: Final = -1  # of a request that is being sent


@dataclass(slots=True, eq=False)
class SentBatches:
    """The batches of one Produce request without a response yet, by topic and partition; and when it was sent."""

    sent_at: float
    batches: dict[tuple[str, int], tuple[Partition, ProduceBatch]]


@dataclass(slots=True, eq=False)
class InFlightRequests:
    """The transaction's requests in flight on one connection, by number, and the responses that are not yet processed."""

    connection: Connection
    requests: dict[int, SentBatches] = field(default_factory=dict)
    inbox: Inbox = field(default_factory=list)


class Whole:
    """A block that is done as a whole: after KeyboardInterrupt in it, for example, the transaction can only be aborted.

    A half-closed batch could otherwise be sent twice, and a response that was lost would be waited for.
    """

    __slots__ = ("_sender",)

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, DualWriteError):
            self._sender.interrupted()


class Sender:
    """Sends the current transaction's batches over the connections to the leaders of their partitions. Not thread-safe.

    A broker reads nothing more from a connection while a quota holds back its messages. That must not hold back the commits, so
    others do not use the connection meanwhile (`Network.set_aside`).

    Call `add`, `push`, `make_room` and `flush` in a `Whole`.

    Attributes:
        buffered: Bytes of records that are not stored yet, without the batches being filled.
        failure: Why the transaction can only be aborted, or None.
        has_sent: Whether a Produce request of the transaction was sent.
        stored: How many records the brokers have stored, in all transactions.
    """

    def __init__(
        self,
        network: Network,
        settings: NativeSettings,
        kafka_transactional_id: str,
        judged: Judged,
        throttled_timeout: float = 0.0,
    ) -> None:
        self._throttled_timeout = throttled_timeout
        self._network = network
        self._judged = judged
        self._settings = settings
        self._id = kafka_transactional_id
        self._kafka = kafka_at(network.config.servers)
        self._lost: Exception | None = None  # why a connection was lost last, for the log
        self._in_flight: dict[Address, InFlightRequests] = {}
        self._waiting: dict[Partition, None] = {}
        self.topics = Topics(network, settings.metadata_max_age, kafka_transactional_id)
        self._unstored = 0  # records
        self.stored = 0
        self.buffered = 0
        self.failure: DualWriteError | None = None
        self.has_sent = False

    def begin(self) -> None:
        """A new transaction: forget the previous one's batches, and ignore late responses to them."""
        self._in_flight.clear()
        self._waiting.clear()
        self.buffered = self._unstored = 0
        self.failure = None
        self.has_sent = False

    def add(self, partition: Partition, records: EncodedRecords | None = None) -> None:
        """Close the partition's batch; the next call of `push` or `flush` sends it.

        Or add `records`, a batch that was filled elsewhere; the partition's own batch must be closed before.
        """
        batch = partition.add(partition.builder if records is None else records)
        if records is None:
            partition.builder = BatchBuilder()
        self.buffered += batch.size
        self._unstored += batch.count
        self._waiting[partition] = None

    def push(self, deadline: Deadline) -> None:
        """Send what can be sent now, and read the responses that have arrived; does not wait for responses.

        It may wait for the leaders to be looked up, or a connection to be opened.

        Raises:
            BrokerError: The transaction has failed; see `failure`.
        """
        try:
            self._push(deadline)
        except BrokerError as error:
            self.failure = self.failure or error
            raise

    def make_room(self, limit: int, deadline: Deadline) -> None:
        """Wait until less than `limit` bytes are unacknowledged.

        Raises:
            DeliveryError: More are still unacknowledged at the deadline.
            BrokerError: The transaction has failed.
        """
        self._until(lambda: self.buffered < limit, deadline, "The producer's buffer stayed full")

    def flush(self, deadline: Deadline) -> None:
        """Send everything that was added and wait until it is stored.

        Raises:
            DeliveryError: Not everything is stored by the deadline.
            BrokerError: The transaction has failed.
        """
        self._until(lambda: self._unstored == 0, deadline, "Messages were not acknowledged")

    def raise_failure(self) -> None:
        """Raise the failure because of which the transaction can only be aborted, if there is one."""
        if self.failure is not None:
            raise self.failure

    def interrupted(self) -> None:
        """After KeyboardInterrupt or GeneratorExit, for example, only an abort is possible: a response may have been lost."""
        self.failure = self.failure or DeliveryError("The delivery was interrupted.", transactional_id=self._id)
        self.close()

    def abandon(self, deadline: Deadline) -> None:
        """Before an abort: drop requests in flight, so that they don't delay the abort.

        A broker processes the requests of a connection one at a time, and may block on a Produce until all replicas have it.
        """
        soon = deadline.within(_ABORT_WAIT)
        with suppress(BrokerError):
            while self._in_flight and not soon.expired:
                self._wait(soon.left)
        self.close()

    def close(self) -> None:
        """Close the connections that have requests in flight, and drop these; idle connections stay open for other users."""
        all_in_flight = list(self._in_flight.values())
        self._in_flight.clear()
        for in_flight in all_in_flight:
            in_flight.connection.close()

    # --- the send loop ----------------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], deadline: Deadline, what: str) -> None:
        try:
            with self._kafka.call(DELIVERY) as call:
                self._lost = None
                if_throttled = Deadline(self._throttled_timeout)
                while True:
                    call.error = self._lost
                    self.raise_failure()
                    limit = call.limit(deadline, if_throttled)
                    left = limit.left
                    if left <= 0:
                        self._read_arrived()  # nothing sent now could be acknowledged before the deadline
                    elif self._waiting:
                        self._push(limit)
                    if done():
                        return
                    if left <= 0:
                        raise self._too_late(what, limit.seconds)
                    self._wait(min(limit.left, self._next_attempt_in()))
        except BrokerError as error:
            self.failure = self.failure or error
            raise

    def _push(self, deadline: Deadline) -> None:
        self._read_arrived()
        if self._waiting:
            self._send_waiting(deadline)
            self.raise_failure()

    def _read_arrived(self) -> None:
        if self._in_flight:
            for in_flight in list(self._in_flight.values()):
                self._read(in_flight, 0.0)
            self.raise_failure()

    def _too_late(self, what: str, timeout: float) -> BrokerError:
        """The error for records that were not stored in time, with the last error code from a broker, if any."""
        reasons = [p for p in self._waiting if p.last_code]
        waited = f"{what} within {timeout:g} s"
        if reasons and reasons[0].last_code != ErrorCode.CONCURRENT_TRANSACTIONS:
            partition = reasons[0]
            action = f"delivery to {_name(partition)}"
            return failure(partition.last_code, action, self._id, message=waited, unreachable=DeliveryError)
        return DeliveryError(
            f"{waited}.",
            cause="the broker accepts messages too slowly, or not at all",
            next_step="check queue.buffering.max.kbytes and the brokers' load",
            transactional_id=self._id,
        )

    # --- sending ----------------------------------------------------------------------------------------------------------

    def _send_waiting(self, deadline: Deadline) -> None:
        now = time.monotonic()
        limit = deadline.within(self._settings.answer_timeout)
        leaders = self._by_leader(now, limit)
        most = self._settings.in_flight
        # An unreachable leader must not block the other leaders, or a caller that has more to send.
        connection_limit = limit.within(_CONNECTION_WAIT if self._in_flight or len(leaders) > 1 else _ONLY_CONNECTION_WAIT)
        for address, ready in leaders.items():
            partitions = ready
            try:
                wait = 0.0 if self._network.is_opening(address) else connection_limit.left
                busy = self._in_flight.get(address)
                if busy is not None and self._network.is_aside(busy.connection):
                    connection: Connection | None = busy.connection
                else:
                    connection = self._network.connection_soon(address, limit, wait=wait)
                if connection is None:
                    continue
                if (held := self._held_until(connection)) > now:
                    for partition in partitions:  # it is looked at again now and then: the leader may move
                        partition.not_before = max(partition.not_before, min(held, now + _CHECK_INTERVAL))
                    continue
                in_flight = self._on(address, connection)
                while partitions and len(in_flight.requests) < most:
                    self._send(in_flight, partitions, limit)
                    partitions = [p for p in partitions if p.may_send(now, most)]
            except ConnectionLostError as error:
                self._connection_lost(address, error)

    def _on(self, address: Address, connection: Connection) -> InFlightRequests:
        in_flight = self._in_flight.get(address)
        if in_flight is None:
            if not connection.supports(ProduceRequest, ProduceRequest.NEWEST):
                raise ConnectionLostError(address, f"the broker does not support Produce v{ProduceRequest.NEWEST}")
            in_flight = self._in_flight[address] = InFlightRequests(connection)
        if in_flight.connection is not connection:  # another user of the connection has found it broken and replaced it
            raise ConnectionLostError(address, "closed")
        return in_flight

    def _by_leader(self, now: float, deadline: Deadline) -> dict[Address, list[Partition]]:
        ready = [p for p in self._waiting if p.may_send(now, self._settings.in_flight)]
        unknown = {p.topic for p in ready if self.topics.leader(p.topic, p.index) is None}
        if unknown:
            self.topics.refresh(unknown, deadline)
        leaders: dict[Address, list[Partition]] = {}
        for partition in ready:
            leader = self.topics.leader(partition.topic, partition.index)
            if leader is None:
                self.topics.check_exists(partition.topic, partition.index)
                partition.not_before = now + self._settings.retry_backoff
                partition.last_code = partition.last_code or NO_RESPONSE
            else:
                leaders.setdefault(leader, []).append(partition)
        return leaders

    def _send(self, in_flight: InFlightRequests, partitions: list[Partition], deadline: Deadline) -> None:
        """Send one request with the next batch of as many of the partitions as fit."""
        batches: dict[tuple[str, int], tuple[Partition, ProduceBatch]] = {}
        by_topic: dict[str, list[ProduceRequest.TopicProduceData.PartitionProduceData]] = {}
        size = 0
        for partition in partitions:
            data = partition.waiting[0].data
            if batches and size + len(data) > _MAX_REQUEST_BYTES:
                break
            size += len(data)
            batch = partition.drain()
            batches[partition.topic, partition.index] = (partition, batch)
            by_topic.setdefault(partition.topic, []).append(_PartitionData(partition.index, batch.data))
            if not partition.waiting:
                del self._waiting[partition]
        self.has_sent = True
        topics = [_Topic(name, found) for name, found in by_topic.items()]
        timeout_ms = int(self._settings.request_timeout * 1000)
        request = ProduceRequest(self._id, _ALL_REPLICAS, timeout_ms, topics, version=ProduceRequest.NEWEST)
        # Recorded before it is sent, under a number that no response has, so that it is found if the connection breaks.
        in_flight.requests[_NOT_NUMBERED] = SentBatches(time.monotonic(), batches)
        number = in_flight.connection.send(request, in_flight.inbox, deadline)
        in_flight.requests[number] = in_flight.requests.pop(_NOT_NUMBERED)

    # --- responses ----------------------------------------------------------------------------------------------------------

    def _wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for a response, and read it."""
        timeout = min(max(timeout, 0.0), _CHECK_INTERVAL)
        all_in_flight = list(self._in_flight.values())
        if not all_in_flight and self._network.has_openings:
            self._network.wait_for_openings(timeout)
            return
        if not all_in_flight:
            time.sleep(timeout)
            return
        if self._network.has_openings:
            timeout = min(timeout, _OPENINGS_INTERVAL)
            self._network.wait_for_openings(0.0)
        if len(all_in_flight) == 1:
            self._read(all_in_flight[0], timeout)
        else:
            try:
                _wait_for_responses(all_in_flight, timeout)
            except ConnectionLostError as error:
                self._connection_lost(error.address, error)
            else:
                for in_flight in all_in_flight:
                    self._read(in_flight, 0.0)
        if self._in_flight:
            self._drop_silent_connections()

    def _read(self, in_flight: InFlightRequests, timeout: float) -> None:
        """Process the responses that arrive within `timeout` seconds, including those read by other users of the connection."""
        address = in_flight.connection.address
        try:
            if not in_flight.inbox:
                in_flight.connection.receive(timeout)
        except ConnectionLostError as error:
            self._connection_lost(address, error)
            return
        responses, in_flight.inbox[:] = list(in_flight.inbox), []
        for number, response in responses:
            self._answered(in_flight.requests.pop(number), response)
        if any(response.throttle_time_ms for _, response in responses):
            self._throttled(in_flight.connection)
        if not in_flight.requests and self._in_flight.get(address) is in_flight:
            del self._in_flight[address]

    def _held_until(self, connection: Connection) -> float:
        """Until when quotas hold back messages to a broker, by `time.monotonic`."""
        client = (connection.address, self._network.config.client)
        return max(connection.throttled_until, self._kafka.throttling.produce_until.get(client, 0.0))

    def _throttled(self, connection: Connection) -> None:
        client = (connection.address, self._network.config.client)
        self._kafka.throttling.produce_until[client] = self._held_until(connection)
        self._network.set_aside(connection)

    def _answered(self, request: SentBatches, response: ProduceResponse) -> None:
        for topic in response.responses:
            for found in topic.partition_responses:
                entry = request.batches.pop((topic.name, found.index), None)
                if entry is not None:
                    self._act_on(*entry, found)
        if request.batches:  # missing in the response
            self._send_again(request, NO_RESPONSE)

    def _act_on(
        self, partition: Partition, batch: ProduceBatch, found: ProduceResponse.TopicProduceResponse.PartitionProduceResponse
    ) -> None:
        """Act on the response for one batch."""
        code = found.error_code
        reaction = reaction_to(code)
        if reaction is Reaction.STORED:
            partition.stored(batch, found.base_offset)
            self.buffered -= batch.size
            self._unstored -= batch.count
            self.stored += batch.count
            return
        log.debug("%s returned %d to attempt %d", _name(partition), code, batch.attempts, **self._fields(partition))
        in_order = reaction is Reaction.IN_ORDER and partition.is_behind_another(batch)
        if reaction is Reaction.SPLIT and batch.count > 1:
            partition.split(batch, 0.0, code)
        elif in_order or reaction in (Reaction.AGAIN, Reaction.LOOK_UP):
            if reaction is Reaction.LOOK_UP:
                self.topics.invalidate(partition.topic)
            # If the batch only had to wait for an earlier one, keep the earlier one's reason.
            reason = (in_order and partition.last_code) or code
            partition.send_again(batch, time.monotonic() + retry_pause(code, batch.attempts, self._settings), reason)
        else:
            facts: dict[str, Any] = {"size": len(batch.data)} if reaction is Reaction.SPLIT else {}
            refused = failure(code, f"delivery to {_name(partition)}", self._id, message=found.error_message, **facts)
            if code == ErrorCode.INVALID_TIMESTAMP:
                refused = self._judged(refused, timestamps(batch.data, [each.batch_index for each in found.record_errors]))
            self.failure = self.failure or refused
            return
        self._waiting[partition] = None

    def _connection_lost(self, address: Address, error: Exception) -> None:
        """Retry, with the then current leader, all batches unanswered on the connection to an address."""
        log.debug("%s", error, kafka_transactional_id=self._id)
        self._lost = error
        in_flight = self._in_flight.pop(address, None)
        if in_flight is not None:
            in_flight.connection.close()
            for request in in_flight.requests.values():
                self._send_again(request, NO_RESPONSE)
        not_before = time.monotonic() + self._settings.retry_backoff
        for partition in [p for p in self._waiting if self.topics.leader(p.topic, p.index) == address]:
            self.topics.invalidate(partition.topic)
            partition.not_before = max(partition.not_before, not_before)
            partition.last_code = partition.last_code or NO_RESPONSE

    def _send_again(self, request: SentBatches, code: int) -> None:
        for partition, batch in request.batches.values():
            self.topics.invalidate(partition.topic)
            partition.send_again(batch, time.monotonic() + retry_pause(code, batch.attempts, self._settings), code)
            self._waiting[partition] = None
        request.batches.clear()

    def _drop_silent_connections(self) -> None:
        limit = time.monotonic() - max(self._settings.answer_timeout, self._settings.request_timeout)
        for address, in_flight in list(self._in_flight.items()):
            if in_flight.connection.throttled_until < limit and any(
                request.sent_at < limit for request in in_flight.requests.values()
            ):
                self._connection_lost(address, ConnectionLostError(address, "no response to Produce"))

    def _fields(self, partition: Partition) -> dict[str, Any]:
        """The fields of a log record."""
        return {"kafka_transactional_id": self._id, "topic": partition.topic, "partition": partition.index}

    def _next_attempt_in(self) -> float:
        """Seconds until the next batch that is backing off may be retried."""
        if not self._waiting:
            return _CHECK_INTERVAL
        now = time.monotonic()
        return min((p.not_before - now for p in self._waiting if p.not_before > now), default=_CHECK_INTERVAL)


def _name(partition: Partition) -> str:
    return f"topic {partition.topic!r}, partition {partition.index}"


def _wait_for_responses(in_flight: Sequence[InFlightRequests], timeout: float) -> None:
    """Wait until a response may have arrived on one of several connections, or the timeout.

    Raises:
        ConnectionLostError: One of them is closed.
    """
    if any(each.inbox or each.connection.has_read for each in in_flight):
        return
    with selectors.DefaultSelector() as selector:
        for each in in_flight:
            try:
                selector.register(each.connection, selectors.EVENT_READ)
            except ValueError as error:
                raise ConnectionLostError(each.connection.address, f"{error}") from error
        selector.select(timeout)
