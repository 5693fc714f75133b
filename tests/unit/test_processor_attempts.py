"""A processor's attempts at one batch, with stand-ins for Kafka and the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dualwrite import Topic, WriterPool
from dualwrite.errors import BrokerUnavailableError, MessageFailedError, SerializationError, UsageError
from dualwrite.kafka.librdkafka.group_offsets import Batch, Partition
from dualwrite.processor import async_processor
from dualwrite.processor.async_processor import _LoopRunner
from dualwrite.processor.attempts import Attempts, Runner, StopFlag, UnprocessableError
from dualwrite.processor.loop import ProcessingLoop
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.processor import ThreadRunner, each_of
from dualwrite.processor.progress import Finish
from fixtures.tables import table

ORDERS: Partition = ("orders", 0)
STORE = SimpleNamespace(is_conflict=lambda _: False, is_outage=lambda error: isinstance(error, AwayError))
QUICK = ProcessorOptions(pause=0.001, longest_pause=0.001)


class AwayError(Exception):
    """The driver's."""


def unreachable() -> None:
    raise AwayError


class Read:
    """A message, with what a batch looks at."""

    def __init__(self, at: int) -> None:
        self._at = at

    def topic(self) -> str:
        return ORDERS[0]

    def partition(self) -> int:
        return ORDERS[1]

    def offset(self) -> int:
        return self._at

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes:
        return b"%d" % self._at

    def headers(self) -> None:
        return None


class Tx:
    """A transaction, of a thread or of a coroutine."""

    _opened = SimpleNamespace(watch=lambda **_: None, part=lambda **_: nullcontext(), after_commit_error=None)

    @property
    def _transaction(self) -> Tx:
        return self

    async def run_sync(self, finish: Finish) -> None:
        finish(self)  # type: ignore[arg-type]


class Writer:
    """In place of a DualWriter and a pool of asyncio: the first commit fails."""

    store = STORE

    def __init__(self) -> None:
        self._failures = iter([BrokerUnavailableError("the COMMIT")])

    @contextmanager
    def transaction(self) -> Iterator[Tx]:
        yield Tx()
        for error in self._failures:
            raise error


class Pool(WriterPool[Any]):
    """A pool that runs a unit once more, as if another unit of its group had failed."""

    store: Any = STORE

    def __init__(self) -> None:
        pass

    def run(self, unit: Callable[..., Any], /, *_args: Any, **_kwargs: Any) -> Any:
        for _ in range(2):
            unit(Tx())


class AsyncWriter:
    """Both kinds of pool of asyncio."""

    store = STORE

    def __init__(self) -> None:
        self._writer = Writer()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        with self._writer.transaction() as tx:
            yield tx

    async def run(self, unit: Callable[[Tx], Awaitable[None]]) -> None:
        for _ in range(2):
            await unit(Tx())


class Progress:
    """The positions never move by themselves."""

    can_assign = False

    def prepare(self) -> None:
        pass

    def move(self, _consumer: Any, _batch: Batch, _tx: Any) -> None:
        pass

    def advance_to_ends(self, _consumer: Any, _ends: Any) -> None:
        pass

    def forget(self) -> None:
        pass

    def has_lost_partitions(self, _error: BaseException) -> bool:
        return False

    def catch_up(self, _consumer: Any, batch: Batch) -> tuple[Batch, dict[Partition, int]]:
        return batch, {}

    def moved(self, _consumer: Any, _batch: Batch) -> None:
        pass


def attempts(runner: Runner, decoding: Mapping[str, Topic[Any, Any]]) -> Attempts:
    return Attempts("group", {}, decoding, runner, Progress(), QUICK, StopFlag())  # type: ignore[arg-type]


def whole() -> Batch:
    return Batch(tuple(map(Read, range(3))), {ORDERS: object()})


def run(runner: Runner, batch: Batch, decoding: Mapping[str, Topic[Any, Any]] | None = None) -> bool:
    consumer: Any = SimpleNamespace(owned=lambda: batch.terms)
    return attempts(runner, decoding or {}).run(consumer, batch)


class Consumes:
    """A handler that uses its list up.

    Attributes:
        seen: The offsets that each call has got.
    """

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, messages: Sequence[Any], _tx: Any) -> None:
        assert isinstance(messages, list)
        self.seen.append([message.offset() for message in messages])
        messages.clear()

    async def in_loop(self, messages: Sequence[Any], tx: Any) -> None:
        self(messages, tx)


PLAIN: dict[str, Callable[[Any], Runner]] = {
    "writer": lambda handle: ThreadRunner(Writer(), handle, alone=False),  # type: ignore[arg-type]
    "pool": lambda handle: ThreadRunner(Pool(), handle, alone=False),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_further_attempt_gets_all_messages_again(kind: str) -> None:
    handler, batch = Consumes(), whole()
    assert run(PLAIN[kind](handler), batch)
    assert handler.seen == [[0, 1, 2], [0, 1, 2]]
    assert len(batch.messages) == 3


@pytest.mark.parametrize("kind", PLAIN)
def test_a_further_attempt_gets_new_objects(kind: str) -> None:
    """A handler that empties what a message was deserialized to finds it whole again."""

    def handle(messages: list[Any], _tx: Any) -> None:
        seen.append([message.value().pop() for message in messages])

    seen: list[list[bytes]] = []
    decoding = {ORDERS[0]: Topic(ORDERS[0], value_deserializer=lambda content, _: [content])}
    assert run(PLAIN[kind](handle), whole(), decoding)
    assert seen == [[b"0", b"1", b"2"], [b"0", b"1", b"2"]]


@pytest.mark.parametrize("alone", [False, True], ids=["a unit", "a transaction"])
def test_a_further_attempt_of_a_coroutine_gets_all_messages_again(alone: bool) -> None:
    handler = Consumes()

    async def main() -> bool:
        runner = _LoopRunner(AsyncWriter(), handler.in_loop, alone=alone)  # type: ignore[arg-type]
        return await asyncio.to_thread(run, runner, whole())

    assert asyncio.run(main())
    assert handler.seen == [[0, 1, 2], [0, 1, 2]]


def test_a_batch_whose_handler_failed_is_processed_one_by_one() -> None:
    def handle(messages: list[Any], _tx: Any) -> None:
        messages.clear()
        raise ValueError("the handler's")

    batch = whole()
    with pytest.raises(UnprocessableError):
        run(PLAIN["writer"](handle), batch)
    assert [one.offset() for single in batch.one_by_one() for one in single.messages] == [0, 1, 2]


def test_an_error_from_before_the_attempts_does_not_make_a_bad_message_retriable() -> None:
    """The program calls `run` while it handles an outage, as in a loop that starts the processor again."""

    def handle(messages: Any, _tx: Any) -> None:
        calls.append(messages)
        if len(calls) > 1:
            pytest.fail("it is tried again")
        raise ValueError("the handler's")

    calls: list[Any] = []
    try:
        unreachable()
    except AwayError:
        with pytest.raises(UnprocessableError, match="the handler's"):
            run(PLAIN["writer"](handle), whole())
    assert len(calls) == 1


class Consumer:
    """In place of a GroupConsumer: one message, which is polled once."""

    refused: Mapping[Partition, int] = {}
    passed: Mapping[Partition, tuple[int, int]] = {}

    def __init__(self, *_: Any) -> None:
        self._batches = [Batch((Read(0),), {ORDERS: self})]

    def owned(self) -> Mapping[Partition, object]:
        return {ORDERS: self}

    def poll(self, _most: int, _timeout: float) -> Batch:
        return self._batches.pop()

    def wait(self, _seconds: float, _is_over: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_outage_of_an_earlier_attempt_does_not_make_a_bad_message_retriable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt fails because of another server, the others send something that can't be serialized."""
    topic: Topic[Any, Any] = Topic("answers", value_serializer=lambda value, _: value + b"")
    calls: list[Any] = []

    def handle(messages: Any, tx: Any) -> None:
        calls.append(messages)
        if len(calls) == 1:
            raise ConnectionError("another server's")
        if len(calls) > QUICK.attempts:
            pytest.fail("it is not counted")
        topic.send(tx, 17)

    monkeypatch.setattr("dualwrite.processor.loop.GroupConsumer", Consumer)
    loop = ProcessingLoop("group", {}, ["orders"], {}, PLAIN["writer"](handle), Progress(), QUICK)  # type: ignore[arg-type]
    loop.begin()
    with pytest.raises(MessageFailedError) as raised:
        loop.run()
    assert isinstance(raised.value.__cause__, SerializationError)
    assert raised.value.attempts == len(calls) == QUICK.attempts


async def coroutine(_messages: Any, _tx: Any) -> None:
    pass


def generator(_messages: Any, _tx: Any) -> Iterator[None]:
    yield


@table("kind", PLAIN)
@table("handle", [coroutine, generator])
@table("each", [False, True], ids=["handle_batch", "handle"])
def test_a_handler_that_only_returns_a_coroutine_or_a_generator_is_refused(kind: str, handle: Any, each: bool) -> None:
    """Otherwise every message would count as processed."""
    with pytest.raises(UsageError, match=f"{handle.__name__} returned a {handle.__name__}"):
        run(PLAIN[kind](each_of(handle) if each else handle), whole())


def not_async(_messages: Any, _tx: Any) -> None:
    pass


async def without_await(messages: Any, tx: Any) -> Any:
    return coroutine(messages, tx)


async def async_generator(_messages: Any, _tx: Any) -> AsyncIterator[None]:
    yield


@table("alone", [False, True], ids=["a unit", "a transaction"])
@table("handle", [not_async, without_await, async_generator])
@table("each", [False, True], ids=["handle_batch", "handle"])
def test_a_handler_of_coroutines_that_has_not_run_is_refused(handle: Any, alone: bool, each: bool) -> None:
    """Otherwise every message would count as processed, or become a dead letter."""

    async def main() -> bool:
        chosen = async_processor._each(handle) if each else handle
        runner = _LoopRunner(AsyncWriter(), chosen, alone=alone)  # type: ignore[arg-type]
        return await asyncio.to_thread(run, runner, whole())

    with pytest.raises(UsageError, match=f"{handle.__name__} returned"):
        asyncio.run(main())
