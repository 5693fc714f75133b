"""One partition's batches and a broker's rule for idempotent producers: rejected, lost or split batches arrive once, in order.

The broker is a fake: it accepts the batch with the next sequence, recognises the last five, and rejects all others, as Apache
Kafka's ProducerStateManager does for one producer epoch (KIP-98). It reads the real bytes.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kafka.record.default_records import DefaultRecordBatch

from dualwrite.kafka.client.compression import compression_by_name
from dualwrite.kafka.native.native_settings import MAX_IN_FLIGHT
from dualwrite.kafka.native.partition import Partition, ProduceBatch
from dualwrite.kafka.native.records import BatchBuilder

NONE, TOO_LARGE, NOT_ENOUGH_REPLICAS, OUT_OF_ORDER = 0, 10, 19, 45
PRODUCER_ID, EPOCH = 7, 3
GREATEST_SEQUENCE = 2**31 - 1
LARGEST_BATCH = 400
NOW = 1_700_000_000_000

Record = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int]


class BrokerDouble:
    """The leader of one partition, as far as sequences go."""

    def __init__(self, next_sequence: int) -> None:
        self.stored: list[Record] = []
        self._next_sequence = next_sequence
        self._known: deque[tuple[int, int]] = deque(maxlen=5)

    def take(self, data: bytes) -> int:
        """Store a batch or reject it; return the error code."""
        batch = DefaultRecordBatch(data)
        assert batch.validate_crc()
        assert (batch.producer_id, batch.producer_epoch) == (PRODUCER_ID, EPOCH)
        if len(data) > LARGEST_BATCH:
            return TOO_LARGE
        records = [(r.key, r.value, tuple(r.headers), r.timestamp) for r in batch]
        if (batch.base_sequence, len(records)) in self._known:
            return NONE
        if batch.base_sequence != self._next_sequence:
            return OUT_OF_ORDER
        self._known.append((batch.base_sequence, len(records)))
        self._next_sequence = (self._next_sequence + len(records)) & GREATEST_SEQUENCE
        self.stored += records
        return NONE


@dataclass(eq=False)
class Request:
    """A batch in the network; `code` is the answer once the broker has processed it."""

    batch: ProduceBatch
    data: bytes = field(init=False)
    code: int | None = None

    def __post_init__(self) -> None:
        self.data = self.batch.data


class OnePartition(RuleBasedStateMachine):
    """Steps of a sender and of a network: requests of one connection arrive in order, answers in any order."""

    @initialize(
        sequence=st.sampled_from([0, GREATEST_SEQUENCE - 25]),
        compression=st.sampled_from(["none", "gzip"]),
        seed=st.integers(0, 2**16),
        batches=st.integers(0, 8),
    )
    def begin(self, sequence: int, compression: str, seed: int, batches: int) -> None:
        self.partition = Partition("topic", 0, PRODUCER_ID, EPOCH, compression_by_name(compression))
        self.partition._next_sequence = sequence
        self.broker = BrokerDouble(sequence)
        self.sent: list[Record] = []
        self.now = 0.0
        self.buffered = 0
        self.in_flight: list[Request] = []
        self.late: deque[bytes] = deque()  # sent over a connection that broke, and arrive nevertheless
        for number in range(batches):
            self.fill_and_close_a_batch(seed + number)

    # --- the producer -------------------------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**16))
    def fill_and_close_a_batch(self, seed: int) -> None:
        noise = random.Random(seed)
        key = noise.choice([None, b"", b"key"])
        drift, longest = noise.randint(-200, 200), noise.choice([0, 10, 150])
        for n in range(noise.choice([1, 3, 90])):
            value = noise.randbytes(noise.randint(0, longest))
            record = (key, value, (("n", b"%d" % len(self.sent)),) if n % 3 else (), NOW + n * drift)
            self.partition.builder.append(*record)
            self.sent.append(record)
        self.buffered += self.partition.builder.size
        self.partition.add(self.partition.builder)
        self.partition.builder = BatchBuilder()

    @rule(most=st.integers(1, MAX_IN_FLIGHT), patient=st.booleans())
    def send_what_may_be_sent(self, most: int, patient: bool) -> None:
        if patient:
            self.now = max(self.now, self.partition.not_before)
        while self.partition.may_send(self.now, most):
            assert self.now >= self.partition.not_before
            self.in_flight.append(Request(self.partition.drain()))

    # --- the broker ---------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> list[Request]:
        return [request for request in self.in_flight if request.code is None]

    @property
    def answered(self) -> list[Request]:
        return [request for request in self.in_flight if request.code is not None]

    @precondition(lambda self: self.unread)
    @rule(looks=st.sampled_from(["takes it", "takes it", "refuses it for now", "does not hear of its replicas"]))
    def the_broker_reads_the_next_request(self, looks: str) -> None:
        request = self.unread[0]
        code = NOT_ENOUGH_REPLICAS if looks == "refuses it for now" else self.broker.take(request.data)
        request.code = NOT_ENOUGH_REPLICAS if looks == "does not hear of its replicas" and code == NONE else code

    @precondition(lambda self: self.late)
    @rule()
    def a_request_of_a_broken_connection_arrives_late(self) -> None:
        self.broker.take(self.late.popleft())

    # --- answers ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), wait=st.sampled_from([0.0, 0.0, 0.3]))
    def an_answer_arrives(self, data: st.DataObject, wait: float) -> None:
        self.handle(data.draw(st.sampled_from(self.answered)), wait)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def the_connection_breaks(self, data: st.DataObject) -> None:
        unread = [request.data for request in self.unread]
        self.late.extend(unread[: data.draw(st.integers(0, len(unread)))])
        for request in self.in_flight:
            self.partition.send_again(request.batch, self.now, 13)
        self.in_flight.clear()

    @rule(seed=st.integers(0, 2**16))
    def a_lively_moment(self, seed: int) -> None:
        """Many steps at once, which random choice would rarely combine."""
        chance = random.Random(seed)
        for _ in range(20):
            move = chance.choice(["send", "read", "read", "answer"])
            if move == "send":
                self.send_what_may_be_sent(chance.randint(1, MAX_IN_FLIGHT), patient=True)
            elif move == "read" and self.unread:
                self.the_broker_reads_the_next_request(chance.choice(["takes it", "refuses it for now"]))
            elif move == "answer" and self.answered:
                self.handle(chance.choice(self.answered), 0.0)

    def handle(self, request: Request, wait: float) -> None:
        """What a sender does with an answer."""
        self.in_flight.remove(request)
        batch = request.batch
        assert request.code is not None
        if request.code == NONE:
            self.partition.stored(batch, 0)
            self.buffered -= batch.size
        elif request.code == TOO_LARGE:
            self.partition.split(batch, self.now + wait, request.code)
        else:
            if request.code == OUT_OF_ORDER:
                assert self.partition.is_behind_another(batch), "would be taken for lost records"
            self.partition.send_again(batch, self.now + wait, request.code)

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_stored_is_the_beginning_of_what_was_sent(self) -> None:
        assert self.broker.stored == self.sent[: len(self.broker.stored)]

    @invariant()
    def a_broker_that_remembers_five_batches_is_never_sent_more(self) -> None:
        assert len(self.partition.in_flight) <= MAX_IN_FLIGHT
        assert [request.batch for request in self.in_flight] == self.partition.in_flight

    @invariant()
    def the_buffer_is_counted_by_what_is_not_stored(self) -> None:
        assert self.buffered == sum(batch.size for batch in (*self.partition.waiting, *self.partition.in_flight))

    def teardown(self) -> None:
        """The network recovers: everything must arrive, within a number of steps bounded by the number of records."""
        if not hasattr(self, "partition"):
            return
        for _ in range(3 * len(self.sent) + 100):
            self.send_what_may_be_sent(MAX_IN_FLIGHT, patient=True)
            if not self.in_flight:
                break
            request = self.in_flight[0]
            request.code = self.broker.take(request.data) if request.code is None else request.code
            self.handle(request, 0.0)
        assert self.broker.stored == self.sent
        assert not self.partition.waiting
        assert self.buffered == 0, "the buffer keeps room for records that are stored"


OnePartition.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestOnePartition = OnePartition.TestCase
