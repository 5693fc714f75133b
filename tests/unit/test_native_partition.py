"""One partition's batches and a broker's rule for idempotent producers: what is refused, lost or split arrives once, in order.

The broker is a double: it takes the batch whose sequence follows, knows the last five again, and refuses all others, which is
what Apache Kafka's ProducerStateManager does for one producer epoch (KIP-98). It reads the real bytes.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kafka.record.default_records import DefaultRecordBatch

from dualwrite.kafka.native.compression import compression_by_name
from dualwrite.kafka.native.partition import Batch, Partition
from dualwrite.kafka.native.settings import MAX_UNDER_WAY

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
        """Store a batch, or not; the error code."""
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
    """A batch on its way; `code` is the answer once the broker has looked at it."""

    batch: Batch
    data: bytes = field(init=False)
    code: int | None = None

    def __post_init__(self) -> None:
        self.data = self.batch.data


class OnePartition(RuleBasedStateMachine):
    """A sender's moves and a network's whims; requests of one connection reach the broker in order, answers come in any."""

    @initialize(sequence=st.sampled_from([0, GREATEST_SEQUENCE - 25]), compression=st.sampled_from(["none", "gzip"]))
    def begin(self, sequence: int, compression: str) -> None:
        self.partition = Partition("topic", 0, PRODUCER_ID, EPOCH, compression_by_name(compression))
        self.partition._next_sequence = sequence
        self.broker = BrokerDouble(sequence)
        self.sent: list[Record] = []
        self.now = 0.0
        self.buffered = 0
        self.under_way: list[Request] = []
        self.late: deque[bytes] = deque()  # left a connection that broke, and arrive nevertheless

    # --- the producer -------------------------------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 90),
        longest=st.integers(0, 150),
        seed=st.integers(0, 2**16),
        key=st.sampled_from([None, b"", b"key"]),
        drift=st.integers(-200, 200),
    )
    def fill_and_close_a_batch(self, count: int, longest: int, seed: int, key: bytes | None, drift: int) -> None:
        noise = random.Random(seed)
        for n in range(count):
            value = noise.randbytes(noise.randint(0, longest))
            record = (key, value, (("n", b"%d" % len(self.sent)),) if n % 3 else (), NOW + n * drift)
            self.partition.builder.append(*record)
            self.sent.append(record)
        self.buffered += self.partition.builder.size
        self.partition.close_batch()

    @rule(most=st.integers(1, MAX_UNDER_WAY))
    def send_what_may_be_sent(self, most: int) -> None:
        while self.partition.may_send(self.now, most):
            self.under_way.append(Request(self.partition.take()))

    @rule(seconds=st.floats(0, 2))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # --- the broker ---------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> list[Request]:
        return [request for request in self.under_way if request.code is None]

    @property
    def answered(self) -> list[Request]:
        return [request for request in self.under_way if request.code is not None]

    @precondition(lambda self: self.unread)
    @rule()
    def the_broker_reads_the_next_request(self) -> None:
        request = self.unread[0]
        request.code = self.broker.take(request.data)

    @precondition(lambda self: self.unread)
    @rule()
    def the_broker_refuses_the_next_request_for_now(self) -> None:
        self.unread[0].code = NOT_ENOUGH_REPLICAS

    @precondition(lambda self: self.unread)
    @rule()
    def the_broker_stores_the_next_batch_and_does_not_hear_of_its_replicas(self) -> None:
        request = self.unread[0]
        code = self.broker.take(request.data)
        request.code = NOT_ENOUGH_REPLICAS if code == NONE else code

    @precondition(lambda self: self.late)
    @rule()
    def a_request_of_a_broken_connection_arrives_late(self) -> None:
        self.broker.take(self.late.popleft())

    # --- answers ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), wait=st.floats(0, 1))
    def an_answer_arrives(self, data: st.DataObject, wait: float) -> None:
        request = data.draw(st.sampled_from(self.answered))
        self.under_way.remove(request)
        batch = request.batch
        assert request.code is not None
        if request.code == NONE:
            self.partition.stored(batch)
            self.buffered -= batch.size
        elif request.code == TOO_LARGE:
            self.partition.split(batch, 0.0, request.code)
        else:
            if request.code == OUT_OF_ORDER:
                assert self.partition.is_behind_another(batch), "would be taken for lost records"
            self.partition.send_again(batch, self.now + wait, request.code)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), wait=st.floats(0, 1))
    def the_connection_breaks(self, data: st.DataObject, wait: float) -> None:
        unread = [request.data for request in self.unread]
        self.late.extend(unread[: data.draw(st.integers(0, len(unread)))])
        for request in self.under_way:
            self.partition.send_again(request.batch, self.now + wait, 13)
        self.under_way.clear()

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def what_is_stored_is_the_beginning_of_what_was_sent(self) -> None:
        assert self.broker.stored == self.sent[: len(self.broker.stored)]

    @invariant()
    def a_broker_that_remembers_five_batches_is_never_sent_more(self) -> None:
        assert len(self.partition.under_way) <= MAX_UNDER_WAY
        assert [request.batch for request in self.under_way] == self.partition.under_way

    @invariant()
    def the_buffer_is_counted_by_what_is_not_stored(self) -> None:
        assert self.buffered == sum(batch.size for batch in (*self.partition.waiting, *self.partition.under_way))

    def teardown(self) -> None:
        """The network calms down: everything must arrive, in a number of steps that the batches bound."""
        if not hasattr(self, "partition"):
            return
        steps = 0
        while self.partition.waiting or self.under_way:
            self.now = max(self.now, self.partition.not_before)
            self.send_what_may_be_sent(MAX_UNDER_WAY)
            assert self.under_way, "nothing is under way, and nothing may be sent"
            request = self.under_way[0]
            request.code = self.broker.take(request.data) if request.code is None else request.code
            self.under_way.remove(request)
            if request.code == NONE:
                self.partition.stored(request.batch)
                self.buffered -= request.batch.size
            elif request.code == TOO_LARGE:
                self.partition.split(request.batch, 0.0, request.code)
            else:
                self.partition.send_again(request.batch, 0.0, request.code)
            steps += 1
            assert steps < 20 * len(self.sent) + 50, "no progress"
        assert self.broker.stored == self.sent
        assert self.buffered == 0, "the buffer keeps room for records that are stored"


OnePartition.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestOnePartition = OnePartition.TestCase
