"""The steps of several ids side by side: what they ask for at the same time is sent together.

The steps of one id are a generator. It yields questions, and gets the answers, so the order of an id's own steps is that of its
code, however many ids take part. `SideBySide.run` collects one question of each id, and answers them together: one query for
all rows that are read, one request to each coordinator for all transactions that are described.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from dualwrite.deadline import Deadline
from dualwrite.kafka.base import EndingTransaction, EndTxnResult, InitProducerIdResult, NewProducerId, TransactionCoordinator
from dualwrite.state import TransactionDescription
from dualwrite.stores.base import Acquiring, Claim, Resolution, StateRow, TxnStateStore

T = TypeVar("T")

Steps = Generator["Question", Any, T]
"""The steps of one id, which lead to a `T`."""


class Question(NamedTuple):
    """What the steps of one id ask for.

    Args:
        answers: The method that answers all questions of its kind together.
        of: What is asked about.
    """

    answers: Callable[[SideBySide, list[Any]], Sequence[Any]]
    of: Any


def describe(kafka_id: str) -> Steps[TransactionDescription | None]:
    """See TransactionCoordinator.describe."""
    described: TransactionDescription | None = yield Question(SideBySide.described, kafka_id)
    return described


def read(claim: Claim) -> Steps[StateRow]:
    """See TxnStateStore.read_claimed."""
    row: StateRow = yield Question(SideBySide.rows, claim)
    return row


def record(claim: Claim, resolution: Resolution) -> Steps[None]:
    """See TxnStateStore.record_resolution."""
    yield Question(SideBySide.recorded, (claim, resolution))


def acquire(claim: Claim, acquiring: Acquiring) -> Steps[StateRow]:
    """See TxnStateStore.acquire_generations; several ids may acquire for the same kind of producers only."""
    row: StateRow = yield Question(SideBySide.acquired, (claim, acquiring))
    return row


def end(ending: EndingTransaction) -> Steps[EndTxnResult]:
    """See TransactionCoordinator.end_transaction."""
    answer: EndTxnResult = yield Question(SideBySide.ended, ending)
    return answer


def create(new: NewProducerId) -> Steps[InitProducerIdResult]:
    """See TransactionCoordinator.create_all."""
    answer: InitProducerIdResult = yield Question(SideBySide.created, new)
    return answer


def call(function: Callable[[Deadline], T]) -> Steps[T]:
    """Call a function, which gets the deadline of all; those of several ids are called one after the other."""
    answer: T = yield Question(SideBySide.called, function)
    return answer


def pause(seconds: float) -> Steps[None]:
    """Wait before the next step."""
    yield Question(SideBySide.paused, seconds)


class SideBySide:
    """Runs the steps of several ids; the deadline is that of all requests to Kafka together."""

    def __init__(self, store: TxnStateStore, coordinator: TransactionCoordinator, deadline: Deadline) -> None:
        self._store = store
        self._coordinator = coordinator
        self._deadline = deadline

    def run(self, several: Sequence[Steps[T]]) -> list[T]:
        """Run the steps until all have ended, and return their results.

        Raises:
            Exception: What a step, or an answer, has raised. The steps of the other ids end as well.
        """
        results: dict[int, T] = {}
        asking: dict[int, Question] = {}

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

    def _answers(self, questions: list[Question]) -> list[Any]:
        answers: list[Any] = [None] * len(questions)
        kinds = dict.fromkeys(question.answers for question in questions)
        # nobody's question waits for a pause, or for another id's call, which may take long
        for kind in sorted(kinds, key=lambda each: (each is SideBySide.paused, each is SideBySide.called)):
            numbers = [number for number, question in enumerate(questions) if question.answers is kind]
            for number, answer in zip(numbers, kind(self, [questions[number].of for number in numbers]), strict=True):
                answers[number] = answer
        return answers

    # --- the answers to questions of one kind -------------------------------------------------------------------------------

    def described(self, kafka_ids: list[str]) -> list[TransactionDescription | None]:
        """For `describe`."""
        found = self._coordinator.describe_all(kafka_ids, timeout=self._deadline)
        return [found[each] for each in kafka_ids]

    def rows(self, claims: list[Claim]) -> Sequence[StateRow]:
        """For `read`."""
        return self._store.read_claimed_rows(claims)

    def recorded(self, resolutions: list[tuple[Claim, Resolution]]) -> list[None]:
        """For `record`."""
        self._store.record_resolutions(resolutions)
        return [None] * len(resolutions)

    def acquired(self, acquirings: list[tuple[Claim, Acquiring]]) -> Sequence[StateRow]:
        """For `acquire`."""
        claims, every = zip(*acquirings, strict=True)
        lanes = frozenset().union(*(each.lanes for each in every))
        reuse = frozenset().union(*(each.reuse for each in every))
        return self._store.acquire_generations(claims, Acquiring(every[0].kind, lanes, reuse, every[0].cluster_id))

    def ended(self, endings: list[EndingTransaction]) -> list[EndTxnResult]:
        """For `end`."""
        return self._coordinator.end_all(endings, timeout=self._deadline)

    def created(self, wanted: list[NewProducerId]) -> list[InitProducerIdResult]:
        """For `create`."""
        return self._coordinator.create_all(wanted, timeout=self._deadline)

    def called(self, functions: list[Callable[[Deadline], Any]]) -> list[Any]:
        """For `call`."""
        return [function(self._deadline) for function in functions]

    def paused(self, seconds: list[float]) -> list[None]:
        """For `pause`."""
        self._deadline.sleep(max(seconds))
        return [None] * len(seconds)
