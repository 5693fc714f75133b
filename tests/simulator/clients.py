"""Kafka's clients of one process: recovery's coordinator client, and both kinds of producers, above a cluster in memory.

They keep the contracts of `dualwrite.kafka.base`: requests are repeated within the time limit, and only NONE proves an outcome.
"""

# ruff: noqa: ARG002  (the arguments are those of the contracts)

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from dualwrite.deadline import Deadline
from dualwrite.errors import (
    BrokerError,
    BrokerUnavailableError,
    DeliveryError,
    MessagesCommittedError,
    PrepareError,
    ProducerFencedError,
    TransactionTimeoutError,
)
from dualwrite.kafka.base import (
    EndingTransaction,
    EndTxnResult,
    GivenMessage,
    InitProducerIdResult,
    Message,
    NewProducerId,
    ProducerFactory,
)
from dualwrite.kafka.client.kafka_errors import ErrorCode
from dualwrite.kafka.sending import Sending
from dualwrite.state import (
    LAST_EPOCH,
    Delivery,
    Fate,
    FoundMessages,
    FoundPlace,
    Place,
    PreparedTxnState,
    ProducerKind,
    TransactionDescription,
    TransactionStatus,
)
from simulator.brokers import NO_TIMEOUT_MS, Cluster
from simulator.world import World

TOPIC: Final = "orders"
TIMEOUT_MS: Final = 20_000
_TIMEOUT: Final = 30.0
_PAUSE: Final = 0.05
_NO_ANSWER: Final = InitProducerIdResult(int(ErrorCode.NETWORK_EXCEPTION), "NETWORK_EXCEPTION")
_KNOWN: Final = InitProducerIdResult(int(ErrorCode.PRODUCER_FENCED), "PRODUCER_FENCED")
_CONCURRENT: Final = ErrorCode.CONCURRENT_TRANSACTIONS

T = TypeVar("T")
A = TypeVar("A", bound=EndTxnResult)


def _unavailable() -> BrokerUnavailableError:
    return BrokerUnavailableError("No broker has answered.")


def _unless_concurrent(request: Callable[[], A], deadline: Deadline) -> A:
    """The answer, once an earlier transaction's markers are written."""
    while (answer := request()).code == _CONCURRENT:
        if deadline.expired:
            raise _unavailable()
        deadline.sleep(_PAUSE)
    return answer


class SimulatedCoordinator:
    """TransactionCoordinator of one process."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world, self._cluster = world, cluster

    def _ask(self, what: str, effect: Callable[[], T], *, changes: bool = False) -> T:
        self._world.linger()
        return self._world.request(what, effect, _unavailable, changes=changes)

    def knows_end_by_epoch(self, *, timeout: Any = None) -> bool:
        return self._cluster.ends_by_epoch

    def cluster_id(self, *, timeout: Any = None) -> str:
        return self._ask("Metadata", lambda: self._cluster.name)

    def forget_cluster(self) -> None: ...

    def describe(self, name: str, *, timeout: Any = None) -> TransactionDescription | None:
        return self._ask(f"describes {name}", lambda: self._cluster.describe(name))

    def describe_all(self, names: Sequence[str], *, timeout: Any = None) -> dict[str, TransactionDescription | None]:
        return {name: self.describe(name) for name in names}

    def end_transaction(self, name: str, *, producer_id: int, epoch: int, commit: bool, timeout: Any = None) -> EndTxnResult:
        cluster, by_epoch = self._cluster, self._cluster.ends_by_epoch
        what = f"EndTxn {'v5' if by_epoch else 'v4'}({'commit' if commit else 'abort'}, {producer_id}:{epoch}) of {name}"
        return _unless_concurrent(
            lambda: self._ask(
                what, lambda: cluster.end(name, producer_id, epoch, commit=commit, by_epoch=by_epoch), changes=True
            ),
            Deadline.of(_TIMEOUT if timeout is None else timeout),
        )

    def end_all(self, endings: Sequence[EndingTransaction], *, timeout: Any = None) -> list[EndTxnResult]:
        return [
            self.end_transaction(
                each.kafka_transactional_id, producer_id=each.producer_id, epoch=each.epoch, commit=each.commit, timeout=timeout
            )
            for each in endings
        ]

    def init_producer_id(self, name: str, *, timeout: Any = None, timeout_ms: int = TIMEOUT_MS) -> InitProducerIdResult:
        return self._ask(f"InitProducerId of {name}", lambda: self._cluster.init(name, timeout_ms), changes=True)

    def create_all(self, new: Sequence[NewProducerId], *, timeout: Any = None) -> list[InitProducerIdResult]:
        return [self._created(each) for each in new]

    def _created(self, new: NewProducerId) -> InitProducerIdResult:
        name, timeout_ms = new.kafka_transactional_id, NO_TIMEOUT_MS if new.two_phase else new.timeout_ms
        found = self._once(f"create-only InitProducerId of {name}", lambda: self._cluster.create(name, timeout_ms))
        if found.code != ErrorCode.INVALID_PRODUCER_ID_MAPPING:
            return found
        if self.describe(name) is not None:
            return _KNOWN
        return self._once(f"InitProducerId of {name}", lambda: self._cluster.init(name, timeout_ms))

    def _once(self, what: str, effect: Callable[[], InitProducerIdResult]) -> InitProducerIdResult:
        try:
            return self._world.request(what, effect, _unavailable, attempts=1)
        except BrokerUnavailableError:
            return _NO_ANSWER

    # --- the log ----------------------------------------------------------------------------------------------------------

    def fate(self, state: PreparedTxnState, place: Place, *, timeout: Any = None) -> Fate:
        return self._ask(f"reads in the log how {state} ended", lambda: self._fate(state, place))

    def _fate(self, state: PreparedTxnState, place: Place) -> Fate:
        cluster, partition = self._cluster, self._cluster.partitions[place.partition]
        offset = place.first_offset
        if not cluster.is_readable or offset is None or offset >= len(partition.log) or offset in partition.deleted:
            return Fate.GONE
        first = partition.log[offset]
        if first.is_marker or (first.producer_id, first.epoch) != (state.producer_id, state.epoch):
            return Fate.GONE
        for record in partition.log[offset:]:
            if record.is_marker and record.producer_id == state.producer_id:
                return Fate.COMMITTED if record.commits else Fate.ABORTED
        return Fate.OPEN

    def find_messages(self, state: PreparedTxnState, delivery: Delivery, *, timeout: Any = None) -> FoundMessages:
        fates: list[Fate] = self._ask(
            f"looks for the messages of {state}", lambda: [self._fate(state, place) for place in delivery.places]
        )
        found, missing = [], []
        for place, fate in zip(delivery.places, fates, strict=True):
            if fate is Fate.COMMITTED:
                raise MessagesCommittedError("The log shows that the transaction was committed.")
            if fate is Fate.OPEN:
                raise _unavailable()
            if fate is Fate.GONE:
                missing.append(f"{place} is gone")
            else:
                log, at = self._cluster.partitions[place.partition].log, place.first_offset or 0
                end = next(n for n in range(at, len(log)) if log[n].is_marker and log[n].producer_id == state.producer_id)
                found.append(FoundPlace(TOPIC, place.partition, at, end, place.messages))
        return FoundMessages(tuple(found), tuple(missing))

    def read_messages(self, state: PreparedTxnState, found: FoundMessages, *, timeout: Any = None) -> Iterator[Message]:
        for place in found.places:
            log = self._cluster.partitions[place.partition].log[place.first_offset : place.end_offset]
            for record in log:
                if (record.producer_id, record.epoch) == (state.producer_id, state.epoch):
                    yield Message(TOPIC, b"%d" % record.number, None, None, place.partition, None)

    def find_later(self, state: PreparedTxnState, delivery: Delivery, *, timeout: Any) -> tuple[int, Delivery | None]:
        return 1, None

    def committed_positions(self, group_id: str, partitions: Any, *, timeout: Any = None) -> dict[Any, int]:
        return {}

    def list_transactions(self, prefix: str = "", *, timeout: Any = None) -> list[Any]:
        return []

    def close(self) -> None: ...


class _Producer(Sending):
    """What both kinds of producers have in common: messages that are sent at once, or when the transaction is prepared."""

    by_epoch = True

    def __init__(
        self, world: World, cluster: Cluster, coordinator: SimulatedCoordinator, name: str, *, two_phase: bool
    ) -> None:
        self.kafka_transactional_id = name
        self.must_be_replaced = False
        self.delivery: Delivery | None = None
        self._world = world
        self._cluster = cluster
        self._coordinator = coordinator
        self._two_phase = two_phase
        self._id = self._epoch = -1
        self._sequences = [0, 0]
        self._queue: list[tuple[int, int]] = []
        self._stored: list[tuple[int, int]] = []
        self._began: float | None = None
        self._has_content = False

    @property
    def transaction_timeout(self) -> float | None:
        return None if self._two_phase else TIMEOUT_MS / 1000

    def begin_transaction(self) -> None:
        self._queue, self._stored, self._began, self._has_content, self.delivery = [], [], None, False, None

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        for _, value, _, _, partition, _ in messages:
            self._began = time.monotonic() if self._began is None else self._began
            self._queue.append((partition or 0, int(value or 0)))
        self._has_content = True
        if self._world.choices.happens(0.5):
            self._flush()

    def send_offsets_to_transaction(self, offsets: Any, group: Any, *, timeout: float) -> None: ...

    def check_time_left(self) -> None:
        age, timeout = 0.0 if self._began is None else time.monotonic() - self._began, self.transaction_timeout
        if timeout is not None and age > 0.8 * timeout:
            self._failed()
            raise TransactionTimeoutError("Too little time is left.", transactional_id=self.kafka_transactional_id)
        world = self._world
        if timeout is not None and world.faults.oversleeps and world.choices.happens(world.faults.oversleeps):
            world.now += timeout
            world.note("environment", f"{timeout:g} s pass; {self._cluster.time_out()}")

    def _failed(self) -> None: ...

    def _flush(self) -> None:
        while self._queue:
            partition, number = self._queue.pop(0)
            self._stored.append((partition, self._sent(partition, number)))

    def _sent(self, partition: int, number: int) -> int:
        sequence = self._sequences[partition]
        self._sequences[partition] += 1
        name, of, produce, adds = self.kafka_transactional_id, (self._id, self._epoch), self._cluster.produce, self.by_epoch
        what = f"Produce({self._id}:{self._epoch}, message {number})"
        return self._stored_by(what, lambda: produce(name, *of, partition, sequence, number, adds=adds))

    def _stored_by(self, what: str, effect: Callable[[], tuple[ErrorCode, int]]) -> int:
        """Repeat a request until the brokers have stored something."""
        deadline = Deadline.after(_TIMEOUT)
        while True:
            try:
                code, offset = self._world.request(what, effect, _unavailable)
            except BrokerUnavailableError as error:
                self._failed()
                raise DeliveryError("A message was not stored.", transactional_id=self.kafka_transactional_id) from error
            if code is ErrorCode.NONE:
                return offset
            if code is not _CONCURRENT or deadline.expired:
                raise self._fenced(f"{what} was answered {code.name}")
            deadline.sleep(_PAUSE)

    def _fenced(self, what: str) -> ProducerFencedError:
        self.must_be_replaced = True
        return ProducerFencedError(f"{what}.", transactional_id=self.kafka_transactional_id)

    def _places(self) -> list[Place]:
        found: dict[int, list[int]] = {}
        for partition, offset in self._stored:
            found.setdefault(partition, []).append(offset)
        return [Place(TOPIC, partition, min(offsets), len(offsets)) for partition, offsets in found.items()]

    def close(self) -> None:
        self.must_be_replaced = True


class NativeProducer(_Producer):
    """As `dualwrite.kafka.native`: each transaction has its own epoch."""

    def init_transactions(self, *, timeout: Any) -> None:
        name = self.kafka_transactional_id
        init = partial(self._coordinator.init_producer_id, name, timeout_ms=self._timeout_ms)
        self._continue(_unless_concurrent(init, Deadline.of(timeout)))

    @property
    def _timeout_ms(self) -> int:
        return NO_TIMEOUT_MS if self._two_phase else TIMEOUT_MS

    def wanted_timeout_ms(self, *, timeout: Any) -> int:
        return self._timeout_ms

    def creation(self, *, timeout: Any) -> NewProducerId:
        return NewProducerId(self.kafka_transactional_id, TIMEOUT_MS, self._two_phase)

    def created(self, answer: InitProducerIdResult, *, timeout: Any) -> bool:
        if answer.code in (ErrorCode.PRODUCER_FENCED, ErrorCode.NETWORK_EXCEPTION, ErrorCode.CONCURRENT_TRANSACTIONS):
            return False
        if not answer.proven:
            raise BrokerError(f"InitProducerId was answered {answer.name}.")
        self._continue(answer)
        return True

    def adopt(self, producer_id: int, epoch: int, *, timeout_ms: int) -> None:
        self._continue(EndTxnResult(0, "NONE", producer_id, epoch))

    def _continue(self, answer: EndTxnResult) -> None:
        self._id, self._epoch, self._sequences, self.must_be_replaced = answer.producer_id, answer.epoch, [0, 0], False
        if self._epoch >= LAST_EPOCH:
            self.must_be_replaced = True

    def prepare_transaction(self, *, timeout: float) -> PreparedTxnState | None:
        self._flush()
        self.check_time_left()
        self.delivery = Delivery.of(self._places())
        return PreparedTxnState(self._id, self._epoch) if self._has_content else None

    def commit_transaction(self, *, timeout: float) -> None:
        self._end(commit=True, timeout=timeout)

    def abort_transaction(self, *, timeout: float) -> None:
        self._queue = []
        self._end(commit=False, timeout=timeout)

    def _end(self, *, commit: bool, timeout: float) -> None:
        if not self._has_content:
            return
        self.must_be_replaced = True  # until the answer is known
        answer = self._coordinator.end_transaction(
            self.kafka_transactional_id, producer_id=self._id, epoch=self._epoch, commit=commit, timeout=timeout
        )
        if not answer.proven:
            raise self._fenced(f"EndTxn was answered {answer.name}")
        has_changed = answer.producer_id != self._id
        self._continue(answer)
        self.must_be_replaced = self.must_be_replaced or has_changed


class LibrdkafkaProducer(_Producer):
    """As `dualwrite.kafka.librdkafka`: one epoch for a session, which ends after a request that was repeated (rule F9)."""

    by_epoch = False

    def __init__(
        self, world: World, cluster: Cluster, coordinator: SimulatedCoordinator, name: str, *, two_phase: bool
    ) -> None:
        super().__init__(world, cluster, coordinator, name, two_phase=False)
        self._added: set[int] = set()
        self._previous_start = -1

    def init_transactions(self, *, timeout: Any) -> None:
        """Sent once: a duplicate that arrives in the session's first transaction can't be excluded (docs: the promise)."""
        name, init, world = self.kafka_transactional_id, self._cluster.init, self._world
        answer = _unless_concurrent(
            lambda: world.request(f"InitProducerId of {name}", lambda: init(name, TIMEOUT_MS), _unavailable, attempts=1),
            Deadline.of(timeout),
        )
        self._id, self._epoch = answer.producer_id, answer.epoch

    def begin_transaction(self) -> None:
        super().begin_transaction()
        self._added = set()

    def _failed(self) -> None:
        self.must_be_replaced = True

    def _sent(self, partition: int, number: int) -> int:
        if partition not in self._added:
            name, of, add = self.kafka_transactional_id, (self._id, self._epoch), self._cluster.add
            self._stored_by(f"AddPartitionsToTxn({self._id}:{self._epoch})", lambda: (add(name, *of, partition), 0))
            self._added.add(partition)
        return super()._sent(partition, number)

    def prepare_transaction(self, *, timeout: float) -> PreparedTxnState | None:
        if not self._has_content:
            return None
        self._flush()
        found = self._coordinator.describe(self.kafka_transactional_id)
        if found is None or found.status is not TransactionStatus.ONGOING or found.start_time_ms == self._previous_start:
            self._failed()
            raise PrepareError("The transaction is not ongoing.", transactional_id=self.kafka_transactional_id)
        self.check_time_left()
        self._previous_start = found.start_time_ms
        self.delivery = Delivery.of(self._places())
        return PreparedTxnState(found.producer_id, found.epoch, found.start_time_ms)

    def commit_transaction(self, *, timeout: float) -> None:
        self._end(commit=True, timeout=timeout)

    def abort_transaction(self, *, timeout: float) -> None:
        self._flush()  # messages in flight are waited for
        self._end(commit=False, timeout=timeout)

    def _end(self, *, commit: bool, timeout: float) -> None:
        if not self._has_content:
            return
        name, producer_id, epoch = self.kafka_transactional_id, self._id, self._epoch
        what = f"EndTxn v4({'commit' if commit else 'abort'}, {producer_id}:{epoch}) of {name}"
        end = partial(self._cluster.end, name, producer_id, epoch, commit=commit, by_epoch=False)

        def once() -> EndTxnResult:
            try:
                return self._world.request(what, end, _unavailable, attempts=1)
            except BrokerUnavailableError:
                self.must_be_replaced = True  # rule F9: it is sent again
                return EndTxnResult(_CONCURRENT, "")

        answer = _unless_concurrent(once, Deadline.of(timeout))
        if not answer.proven:
            raise self._fenced(f"EndTxn was answered {answer.name}")


def producers(world: World, cluster: Cluster, coordinator: SimulatedCoordinator, kind: ProducerKind) -> ProducerFactory:
    """The producers of a process."""
    make = LibrdkafkaProducer if kind is ProducerKind.LIBRDKAFKA else NativeProducer
    two_phase = kind is ProducerKind.NATIVE_TWO_PHASE
    return ProducerFactory(kind, lambda name: make(world, cluster, coordinator, name, two_phase=two_phase))
