"""Parts of dualwrite.aio by themselves: messages that wait to be sent, a pool's options and threads, waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dualwrite import PoolOptions, Topic, Transaction, aio
from dualwrite.aio.async_transaction import send_unsent
from dualwrite.aio.coroutine_threads import LoopCalls
from dualwrite.deadline import Limit
from dualwrite.errors import InvalidMessageError, PoolTimeoutError, UnknownTopicError
from dualwrite.observability import tracing
from dualwrite.pool.calls import AloneUnits, UnitCall, WaitingCalls
from dualwrite.pool.declared import NONE, Local
from dualwrite.pool.pool import BoundPool
from dualwrite.pool.pool_ids import FixedIds
from dualwrite.pool.writers import Writers
from fixtures.pace import LIMIT
from fixtures.tables import table

# --- messages ---------------------------------------------------------------------------------------------------------


class Sent:
    """Stands for the transaction in the thread: what was sent.

    Args:
        error: What the first attempt to send raises.
    """

    trace = tracing.NO_TRACE

    def __init__(self, error: Exception | None = None) -> None:
        self.values: list[bytes | None] = []
        self._error = error

    def send_messages(self, messages: list[Any]) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        self.values += [value for _, value, *_ in messages]


def coroutine_transaction(sent: Sent) -> aio.AsyncTransaction:
    transaction: Any = sent
    thread: Any = SimpleNamespace(check=lambda: None)
    return aio.AsyncTransaction(Transaction(transaction), thread)


def first_then(act: Callable[[], None], *values: str) -> Iterator[str]:
    for value in values:
        yield value
        act()


def test_a_message_made_while_the_thread_sends_the_others_is_sent_too() -> None:
    """As in the thread's `run_sync` for another task, while `send` checks its arguments."""
    tx = coroutine_transaction(sent := Sent())
    tx.send("t", "1")
    headers: Any = ((name, b"") for name in first_then(lambda: send_unsent(tx), "h"))
    tx.send("t", "2", headers=headers)
    send_unsent(tx)
    assert sent.values == [b"1", b"2"]


def test_messages_made_while_the_thread_sends_the_others_are_sent_once() -> None:
    tx = coroutine_transaction(sent := Sent())
    tx.send("t", "1")
    tx.send_many("t", first_then(lambda: send_unsent(tx), "2", "3", "4"))
    tx.send("t", "5")
    send_unsent(tx)
    assert sent.values == [b"1", b"2", b"3", b"4", b"5"]


def test_of_many_messages_none_is_sent_if_one_is_invalid() -> None:
    tx = coroutine_transaction(sent := Sent())
    values: Any = ["1", 2]
    with pytest.raises(InvalidMessageError):
        tx.send_many("t", values)
    send_unsent(tx)
    assert sent.values == []


def test_after_a_message_that_could_not_be_sent_the_transaction_can_not_end_well() -> None:
    """A coroutine may catch the error of the `run_sync` that sends its messages; those behind it would be missing."""
    tx = coroutine_transaction(sent := Sent(UnknownTopicError("no topic")))
    tx.send("typo", "1")
    tx.send("t", "2")
    for _ in range(2):
        with pytest.raises(UnknownTopicError):
            send_unsent(tx)
    assert sent.values == []


# --- the pool ---------------------------------------------------------------------------------------------------------


class Calls(WaitingCalls):
    """A queue that nobody empties; it notes the keys of the calls."""

    def __init__(self) -> None:
        super().__init__(AloneUnits("shop"))
        self.keys: set[Hashable] = set()

    def put(self, call: UnitCall) -> bool:
        self.keys.add(call.key)
        return super().put(call)


class Threads:
    """Stands for a WriterPool whose writers are busy for `run`, and of which `transaction()` has as many as it wants."""

    is_closed = False

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        self.waiting = Calls()
        self.open = 0
        self.sent: Any = Sent()
        self._writers = Writers("shop", FixedIds("shop"))

    def with_options(
        self, *, key: Any = None, timeout: float | None = None, alone: bool | None = None, local: Local = NONE
    ) -> BoundPool[Any]:
        limit = self.options.timeout if timeout is None else timeout
        options: Any = {"is_retriable": lambda _: False, "timeout": limit, "alone": bool(alone), "key": key}
        options["declared"] = SimpleNamespace(of_call=lambda local: local)
        nobody: Any = SimpleNamespace(called=lambda: None)
        bound: BoundPool[Any] = BoundPool(self.waiting, nobody, self._writers, lambda *_, **__: None, "shop", **options)
        bound.local = local
        return bound

    @contextmanager
    def transaction(self, *, timeout: Limit, local: Local) -> Iterator[Transaction]:
        del timeout, local
        self.open += 1
        yield Transaction(self.sent)


def pool_of(threads: Threads, **options: Any) -> aio.AsyncWriterPool[Any]:
    made: Any = threads
    return aio.AsyncWriterPool(made, **options)


@table("change", [{"timeout": 0.01}, {"key": "b"}, {"key": "b", "timeout": 0.01}, {}], ids=str)
@table("first", [{"timeout": 0.02}, {"key": "a"}, {"key": "a", "timeout": 0.02}, {}], ids=str)
def test_options_that_are_not_given_stay_as_they_are(first: dict[str, Any], change: dict[str, Any]) -> None:
    threads = Threads(PoolOptions(timeout=0.03))

    async def main() -> None:
        for pool in (pool_of(threads, **first), pool_of(threads).with_options(**first)):
            with pytest.raises(PoolTimeoutError) as caught:
                await pool.with_options(**change).run(lambda _: None)
            assert caught.value.timeout == {"timeout": 0.03, **first, **change}["timeout"]

    asyncio.run(main())
    assert threads.waiting.keys == {{"key": None, **first, **change}["key"]}


def test_a_transaction_for_each_writer_can_be_open_and_one_that_waits_names_its_own_limit() -> None:
    threads = Threads(PoolOptions(max_size=70, timeout=LIMIT))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            pool = pool_of(threads)
            for _ in range(70):
                await stack.enter_async_context(pool.transaction())
            with pytest.raises(PoolTimeoutError, match=r"within 0.05 s") as caught:
                await stack.enter_async_context(pool.transaction(timeout=0.05))
            assert caught.value.timeout == 0.05

    asyncio.run(main())
    assert threads.open == 70


def test_a_serializer_that_blocks_can_run_in_the_thread() -> None:
    """As one that asks a schema registry."""
    used: list[int] = []

    def serialized(number: int, _: Any) -> bytes:
        used.append(threading.get_ident())
        return b"%d" % number

    numbers: Topic[int, str] = Topic("numbers", value_serializer=serialized)
    threads = Threads(PoolOptions(timeout=LIMIT))

    async def main() -> None:
        async with pool_of(threads).transaction() as tx:
            numbers.send(tx, 1)
            await tx.run_sync(lambda plain: numbers.send(plain, 2))
            numbers.send(tx, 3)

    asyncio.run(main())
    assert threads.sent.values == [b"1", b"2", b"3"]
    here = threading.get_ident()
    assert [ident == here for ident in used] == [True, False, True]


# --- waiting in the event loop --------------------------------------------------------------------------------------------


def test_a_wait_for_what_can_not_be_stopped_is_cancelled_when_it_has_ended() -> None:
    async def main() -> None:
        job: Future[None] = Future()
        waiting = asyncio.ensure_future(LoopCalls(asyncio.get_running_loop()).until_done(job))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        threading.Timer(0.05, job.set_exception, [ValueError()]).start()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert job.done()

    asyncio.run(main())
