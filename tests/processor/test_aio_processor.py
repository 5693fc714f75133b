"""AsyncDualProcessor: handlers are coroutines on the event loop, and each message takes effect once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from processor_scene import FAST, ProcessorScene

from dualwrite import aio
from dualwrite.errors import AfterCommitError, ConfigurationError, MessageFailedError, UsageError
from dualwrite.processor import AsyncDualProcessor
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow


@pytest.fixture
def scene(make_scene: Callable[[str], ProcessorScene]) -> ProcessorScene:
    return make_scene("postgresql")


async def book(scene: ProcessorScene, message: Any, tx: aio.AsyncTransaction[Any]) -> None:
    number = int(message.value())
    await tx.db.execute(sa.text("INSERT INTO events (writer, number) VALUES (:g, :n)"), {"g": scene.group, "n": number})
    tx.send(scene.target, b"%d" % number)


Work = Callable[..., Awaitable[None]]


def process(
    scene: ProcessorScene, work: Work, handle: Any = None, *, handle_batch: Any = None, count: int = 1, **options: Any
) -> None:
    """Run `work` with so many processors on a pool, which have not been started, in an event loop."""

    async def main() -> None:
        made = await aio.create_pool(scene.events.database, kafka=scene.broker.bootstrap_servers, prefix=scene.prefix, size=2)
        async with made as pool, asyncio.timeout(3 * LIMIT):
            chosen = replace(FAST, **{"attempts": 2, **options})
            handles = {"handle": handle, "handle_batch": handle_batch}
            make = partial(AsyncDualProcessor, pool, scene.settings(), [scene.source], options=chosen, **handles)
            await work(*(make() for _ in range(count)))

    asyncio.run(main())


def process_until(scene: ProcessorScene, numbers: Sequence[int], handle: Any, **options: Any) -> None:
    """Run the processor until these numbers are booked."""

    async def work(processor: AsyncDualProcessor) -> None:
        running = asyncio.create_task(processor.run())
        await asyncio.to_thread(scene.wait_for, numbers)
        processor.stop()
        await running

    process(scene, work, handle, **options)


@pytest.mark.parametrize("offsets", thinned(["database", "kafka"], kept=["database"]))
def test_a_setting_for_one_message_is_not_seen_by_the_next(scene: ProcessorScene, offsets: Any) -> None:
    """Each third message of a partition sets a tenant, and options of the connection."""
    seen: set[tuple[Any, ...]] = set()

    async def handle(message: Any, tx: aio.AsyncTransaction[Any]) -> None:
        tenant = await tx.db.scalar(sa.text("SELECT current_setting('app.tenant', true)"))
        seen.add((tenant or "", tx.db.sync_connection.get_execution_options().get("mark")))
        await book(scene, message, tx)
        await tx.db.execution_options(mark=1)
        if int(message.value()) % 12 == 0:
            await tx.db.execute(sa.text("SELECT set_config('app.tenant', 'one', true)"))

    scene.produce(range(60))
    process_until(scene, range(60), handle, offsets=offsets)
    assert scene.agree() == list(range(60))
    assert seen == {("", None)}


@pytest.mark.parametrize("offsets", ["database", "kafka"])
def test_each_message_is_processed_once(scene: ProcessorScene, offsets: Any) -> None:
    """Two processors share a pool, and stop. Another process claims the pool's ids in the middle of two handlers."""
    claims = [scene.claim, scene.claim]

    async def handle(message: Any, tx: aio.AsyncTransaction[Any]) -> None:
        if claims and int(message.value()) >= 50:
            await asyncio.to_thread(claims.pop())
        await book(scene, message, tx)

    async def work(processor: AsyncDualProcessor, other: AsyncDualProcessor) -> None:
        running = [asyncio.create_task(each.run()) for each in (processor, other)]
        await asyncio.to_thread(scene.produce, range(50, 100))
        await asyncio.to_thread(scene.wait_for, range(100))
        with pytest.raises(UsageError, match="running already"):
            await processor.run()
        await asyncio.to_thread(until, lambda: processor.positions or other.positions, "one has partitions")
        for each in (processor, other):
            each.stop()
        await asyncio.gather(*running)

    scene.produce(range(50))
    process(scene, work, handle, count=2, offsets=offsets)
    assert not claims
    assert scene.agree() == list(range(100))


def test_a_failing_handler_stops_the_processor(scene: ProcessorScene) -> None:
    async def fail(messages: Sequence[Any], tx: aio.AsyncTransaction[Any]) -> None:
        for message in messages:
            await book(scene, message, tx)
            if message.value() == b"5":
                raise ValueError("five")

    async def work(processor: AsyncDualProcessor) -> None:
        with pytest.raises(MessageFailedError, match="ValueError: five") as raised:
            await processor.run()
        assert (raised.value.partition, raised.value.offset, raised.value.attempts) == (1, 1, 2)

    scene.produce(range(8))
    process(scene, work, handle_batch=fail)
    assert 5 not in scene.agree()


@pytest.mark.parametrize("offsets", ["database", "kafka"])
def test_a_further_attempt_gets_all_messages_again(scene: ProcessorScene, offsets: Any) -> None:
    seen: list[list[int]] = []

    async def handle(messages: list[Any], tx: aio.AsyncTransaction[Any]) -> None:
        seen.append([int(message.value()) for message in messages])
        while messages:
            await book(scene, messages.pop(), tx)
        if len(seen) == 1:
            await tx.db.execute(sa.text("DO $$ BEGIN RAISE EXCEPTION 'a conflict' USING ERRCODE = '40001'; END $$"))

    scene.produce(range(8))
    process_until(scene, range(8), None, handle_batch=handle, attempts=1, offsets=offsets)
    assert scene.agree() == list(range(8))
    assert seen[0] == seen[1]


def not_async(_message: Any, _tx: Any) -> None:
    pass


async def without_await(messages: Any, tx: Any) -> Any:
    return book(messages, messages, tx)


@pytest.mark.parametrize("handler", [{"handle": not_async}, {"handle_batch": without_await}])
def test_a_handler_that_has_not_run_is_refused(scene: ProcessorScene, handler: Any) -> None:
    """Otherwise every message would count as processed, or become a dead letter."""
    scene.produce([0])
    with pytest.raises(UsageError, match="returned"):
        process(scene, lambda processor: processor.run(), **handler)


@pytest.mark.parametrize("offsets", ["database", "kafka"])
def test_another_transaction_has_committed_in_the_handler(scene: ProcessorScene, offsets: Any) -> None:
    """And its listener has failed: that is an error of the handler, and the processor's transaction is rolled back."""
    first = iter([1])

    async def handle(message: Any, tx: aio.AsyncTransaction[Any]) -> None:
        await book(scene, message, tx)
        if message.offset() == 0 and next(first, None):
            raise AfterCommitError("another pool's")

    scene.produce(range(8))
    process_until(scene, range(8), handle, batch=1, offsets=offsets)
    assert scene.agree() == list(range(8))


def test_cancellation_rolls_back_and_leaves_the_group(scene: ProcessorScene, new_name: Callable[[str], str]) -> None:
    """In the middle of a handler that would never end, and which it waits for, even if it comes twice.

    What was cancelled is no attempt of the message; the next processor begins with it.
    """
    dead = new_name("dead")
    make_topic(scene.broker, dead)
    has_ended = False

    async def work(processor: AsyncDualProcessor) -> None:
        running = asyncio.create_task(processor.run())
        await waits.wait()
        running.cancel()
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert has_ended
        processor._loop.begin()  # raises while the thread still runs it

    async def wait(message: Any, tx: aio.AsyncTransaction[Any]) -> None:
        nonlocal has_ended
        await book(scene, message, tx)
        waits.set()
        try:
            await asyncio.sleep(10 * LIMIT)
        finally:
            await asyncio.sleep(0.5)
            has_ended = True

    scene.produce(range(10))
    waits = asyncio.Event()
    process(scene, work, wait, attempts=1, dead_letter_topic=dead)
    assert scene.agree() == []
    process_until(scene, range(10), lambda message, tx: book(scene, message, tx))
    assert scene.agree() == list(range(10))
    assert read_topic(scene.broker.bootstrap_servers, dead) == []


@pytest.mark.parametrize("stop", ["stop", "cancel"])
def test_a_stop_before_the_thread_has_started(scene: ProcessorScene, stop: str) -> None:
    """The thread begins late, as on a machine that is busy."""
    release = threading.Event()

    class Late(ThreadPoolExecutor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            def late() -> Any:
                assert release.wait(LIMIT)
                return function(*args, **kwargs)

            return super().submit(late)

    async def handle(message: Any, tx: aio.AsyncTransaction[Any]) -> None:
        raise AssertionError("it was stopped before")

    async def work(processor: AsyncDualProcessor) -> None:
        running = asyncio.create_task(processor.run())
        await asyncio.sleep(0)
        processor.stop() if stop == "stop" else running.cancel()
        await asyncio.sleep(0)
        release.set()
        await asyncio.wait([running])
        assert running.cancelled() == (stop == "cancel")
        assert running.cancelled() or running.exception() is None

    scene.produce(range(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualwrite.processor.async_processor.ThreadPoolExecutor", Late)
        process(scene, work, handle)


def test_invalid_arguments(scene: ProcessorScene) -> None:
    with pytest.raises(ConfigurationError, match="either handle or handle_batch"):
        process(scene, lambda processor: processor.run())
