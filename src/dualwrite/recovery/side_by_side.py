"""The steps of several ids side by side: what they ask for at the same time is sent together.

The steps of one id are a generator. It yields requests, and gets the answers, so the order of an id's own steps is that of its
code, however many ids take part. `SideBySide.run` collects one request of each id, and answers them together: one query for all
rows that are read, one request to each coordinator for all transactions that are described.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from dualwrite.deadline import Deadline
from dualwrite.kafka.base import EndingTransaction, EndTxnResult, InitProducerIdResult, NewProducerId, TransactionCoordinator
from dualwrite.state import TransactionDescription
from dualwrite.stores.base import Acquiring, Claim, Resolution, StateRow, TxnStateStore

T = TypeVar("T")

Steps = Generator["Request", Any, T]
"""The steps of one id, which lead to a `T`."""


class _Describe(NamedTuple):
    kafka_id: str


class _Read(NamedTuple):
    claim: Claim


class _Record(NamedTuple):
    claim: Claim
    resolution: Resolution


class _Acquire(NamedTuple):
    claim: Claim
    acquiring: Acquiring


class _Call(NamedTuple):
    function: Callable[[Deadline], Any]


class _Pause(NamedTuple):
    seconds: float


Request = _Describe | _Read | _Record | _Acquire | EndingTransaction | NewProducerId | _Call | _Pause


def describe(kafka_id: str) -> Steps[TransactionDescription | None]:
    """See TransactionCoordinator.describe."""
    described: TransactionDescription | None = yield _Describe(kafka_id)
    return described


def read(claim: Claim) -> Steps[StateRow]:
    """See TxnStateStore.read_claimed."""
    row: StateRow = yield _Read(claim)
    return row


def record(claim: Claim, resolution: Resolution) -> Steps[None]:
    """See TxnStateStore.record_resolution."""
    yield _Record(claim, resolution)


def acquire(claim: Claim, acquiring: Acquiring) -> Steps[StateRow]:
    """See TxnStateStore.acquire_generations; several ids may acquire for the same kind of producers only."""
    row: StateRow = yield _Acquire(claim, acquiring)
    return row


def end(ending: EndingTransaction) -> Steps[EndTxnResult]:
    """See TransactionCoordinator.end_transaction."""
    answer: EndTxnResult = yield ending
    return answer


def create(new: NewProducerId) -> Steps[InitProducerIdResult]:
    """See TransactionCoordinator.create_all."""
    answer: InitProducerIdResult = yield new
    return answer


def call(function: Callable[[Deadline], T]) -> Steps[T]:
    """Call a function, which gets the deadline of all; those of several ids are called one after the other."""
    answer: T = yield _Call(function)
    return answer


def pause(seconds: float) -> Steps[None]:
    """Wait before the next step."""
    yield _Pause(seconds)


class SideBySide:
    """Runs the steps of several ids; the deadline is that of all requests to Kafka together."""

    def __init__(self, store: TxnStateStore, coordinator: TransactionCoordinator, deadline: Deadline) -> None:
        self._store = store
        self._coordinator = coordinator
        self._deadline = deadline
        self._kinds: dict[type, Callable[[list[Any]], Sequence[Any]]] = {
            _Describe: self._descriptions,
            _Read: self._rows,
            _Record: self._recorded,
            _Acquire: self._generations,
            EndingTransaction: self._ended,
            NewProducerId: self._created,
            _Call: self._called,
            _Pause: self._paused,
        }

    def run(self, several: Sequence[Steps[T]]) -> list[T]:
        """Run the steps until all have ended, and return their results.

        Raises:
            Exception: What a step, or a request, has raised. The steps of the other ids end as well.
        """
        results: dict[int, T] = {}
        asking: dict[int, Request] = {}

        def go_on(number: int, answer: Any = None) -> None:
            try:
                asking[number] = several[number].send(answer)
            except StopIteration as ended:
                results[number] = ended.value

        try:
            for number in range(len(several)):
                go_on(number)
            while asking:
                asked, asking = asking, {}
                for number, answer in zip(asked, self._answers(list(asked.values())), strict=True):
                    go_on(number, answer)
        finally:
            for steps in several:
                steps.close()
        return [results[number] for number in range(len(several))]

    def run_one(self, steps: Steps[T]) -> T:
        """Run the steps of one id."""
        (result,) = self.run([steps])
        return result

    def _answers(self, requests: list[Request]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        for kind, together in self._kinds.items():
            numbers = [number for number, request in enumerate(requests) if type(request) is kind]
            if numbers:
                found = together([requests[number] for number in numbers])
                for number, answer in zip(numbers, found, strict=True):
                    answers[number] = answer
        return answers

    def _descriptions(self, requests: list[_Describe]) -> list[TransactionDescription | None]:
        found = self._coordinator.describe_all([each.kafka_id for each in requests], timeout=self._deadline)
        return [found[each.kafka_id] for each in requests]

    def _rows(self, requests: list[_Read]) -> Sequence[StateRow]:
        return self._store.read_claimed_rows([each.claim for each in requests])

    def _recorded(self, requests: list[_Record]) -> list[None]:
        self._store.record_resolutions([(each.claim, each.resolution) for each in requests])
        return [None] * len(requests)

    def _generations(self, requests: list[_Acquire]) -> Sequence[StateRow]:
        every = [each.acquiring for each in requests]
        lanes = frozenset().union(*(each.lanes for each in every))
        reuse = frozenset().union(*(each.reuse for each in every))
        acquiring = Acquiring(every[0].kind, lanes, reuse, every[0].cluster_id)
        return self._store.acquire_generations([each.claim for each in requests], acquiring)

    def _ended(self, requests: list[EndingTransaction]) -> list[EndTxnResult]:
        return self._coordinator.end_all(requests, timeout=self._deadline)

    def _created(self, requests: list[NewProducerId]) -> list[InitProducerIdResult]:
        return self._coordinator.create_all(requests, timeout=self._deadline)

    def _called(self, requests: list[_Call]) -> list[Any]:
        return [each.function(self._deadline) for each in requests]

    def _paused(self, requests: list[_Pause]) -> list[None]:
        self._deadline.sleep(max(each.seconds for each in requests))
        return [None] * len(requests)
