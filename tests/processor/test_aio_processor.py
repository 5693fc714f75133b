"""AsyncDualProcessor: handlers are coroutines on the event loop, and each message takes effect once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from processor_scene import ProcessorScene

from dualwrite import aio
from dualwrite.errors import AfterCommitError, ConfigurationError, MessageFailedError, UsageError
from dualwrite.processor import AsyncDualProcessor, ProcessorOptions
from fixtures.broker import make_topic, read_topic
from fixtures.pace import LIMIT, until
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow

FAST = ProcessorOptions(batch=20, attempts=2, pause=0.01, longest_pause=0.1)


@pytest.fixture
def scene(make_scene: Callable[[str], ProcessorScene]) -> ProcessorScene:
    return make_scene("postgresql")


@asynccontextmanager
async def pool_of(scene: ProcessorScene) -> AsyncIterator[aio.AsyncWriterPool[Any]]:
    made = await aio.create_pool(scene.events.database, kafka=scene.broker.bootstrap_servers, prefix=scene.prefix, size=2)
    async with made:
        yield made


async def book(scene: ProcessorScene, message: Any, tx: aio.AsyncTransaction[Any]) -> None:
    number = int(message.value())
    await tx.db.execute(sa.text("INSERT INTO events (writer, number) VALUES (:g, :n)"), {"g": scene.group, "n": number})
    tx.send(scene.target, b"%d" % number)


async def rows(scene: ProcessorScene, numbers: Sequence[int]) -> None:
    """Wait until as many rows are there."""
    await asyncio.to_thread(scene.wait_for, numbers)


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

    async def main() -> None:
        await asyncio.to_thread(scene.produce, range(60))
        async with pool_of(scene) as pool:
            options = replace(FAST, offsets=offsets)
            processor = AsyncDualProcessor(pool, scene.settings(), [scene.source], handle=handle, options=options)
            running = asyncio.create_task(processor.run())
            await rows(scene, range(60))
            processor.stop()
            await running

    asyncio.run(main())
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

    async def main() -> None:
        async with pool_of(scene) as pool:
            processors = [
                AsyncDualProcessor(
                    pool,
                    scene.settings(),
                    [scene.source],
                    handle=handle,
                    options=replace(FAST, offsets=offsets),
                )
                for _ in range(2)
            ]
            running = [asyncio.create_task(processor.run()) for processor in processors]
            await asyncio.to_thread(scene.produce, range(50, 100))
            await rows(scene, range(100))
            with pytest.raises(UsageError, match="running already"):
                await processors[0].run()
            await asyncio.to_thread(until, lambda: any(processor.positions for processor in processors), "one has partitions")
            for processor in processors:
                processor.stop()
            await asyncio.gather(*running)

    scene.produce(range(50))
    asyncio.run(main())
    assert not claims
    assert scene.agree() == list(range(100))


def test_a_failing_handler_stops_the_processor(scene: ProcessorScene) -> None:
    async def fail(messages: Sequence[Any], tx: aio.AsyncTransaction[Any]) -> None:
        for message in messages:
            await book(scene, message, tx)
            if message.value() == b"5":
                raise ValueError("five")

    async def main() -> None:
        async with pool_of(scene) as pool:
            processor = AsyncDualProcessor(pool, scene.settings(), [scene.source], handle_batch=fail, options=FAST)
            with pytest.raises(MessageFailedError, match="ValueError: five") as raised:
                await processor.run()
            assert (raised.value.partition, raised.value.offset, raised.value.attempts) == (1, 1, 2)

    scene.produce(range(8))
    asyncio.run(main())
    assert 5 not in scene.agree()


@pytest.mark.parametrize("offsets", ["database", "kafka"])
def test_another_transaction_has_committed_in_the_handler(scene: ProcessorScene, offsets: Any) -> None:
    """And its listener has failed: that is an error of the handler, and the processor's transaction is rolled back."""
    first = iter([1])

    async def handle(message: Any, tx: aio.AsyncTransaction[Any]) -> None:
        await book(scene, message, tx)
        if message.offset() == 0 and next(first, None):
            raise AfterCommitError("another pool's")

    async def main() -> None:
        async with pool_of(scene) as pool:
            options = replace(FAST, batch=1, offsets=offsets)
            processor = AsyncDualProcessor(pool, scene.settings(), [scene.source], handle=handle, options=options)
            running = asyncio.create_task(processor.run())
            await rows(scene, range(8))
            processor.stop()
            await running

    scene.produce(range(8))
    asyncio.run(main())
    assert scene.agree() == list(range(8))


def test_cancellation_rolls_back_and_leaves_the_group(scene: ProcessorScene) -> None:
    """In the middle of a handler that would never end; the next processor begins at the same message."""

    async def main() -> None:
        waits = asyncio.Event()

        async def wait(message: Any, tx: aio.AsyncTransaction[Any]) -> None:
            await book(scene, message, tx)
            waits.set()
            await asyncio.sleep(10 * LIMIT)

        async with pool_of(scene) as pool:
            running = asyncio.create_task(
                AsyncDualProcessor(pool, scene.settings(), [scene.source], handle=wait, options=FAST).run()
            )
            async with asyncio.timeout(LIMIT):
                await waits.wait()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert await asyncio.to_thread(scene.agree) == []
            other = AsyncDualProcessor(
                pool, scene.settings(), [scene.source], handle=lambda message, tx: book(scene, message, tx), options=FAST
            )
            running = asyncio.create_task(other.run())
            await rows(scene, range(10))
            other.stop()
            await running

    scene.produce(range(10))
    asyncio.run(main())
    assert scene.agree() == list(range(10))


def test_a_cancellation_waits_for_the_handler(scene: ProcessorScene, new_name: Callable[[str], str]) -> None:
    """Even if it comes twice; and what was cancelled is no attempt of the message."""
    dead = new_name("dead")
    make_topic(scene.broker, dead)

    async def main() -> None:
        waits, has_ended = asyncio.Event(), False

        async def wait(message: Any, tx: aio.AsyncTransaction[Any]) -> None:
            nonlocal has_ended
            await book(scene, message, tx)
            waits.set()
            try:
                await asyncio.sleep(10 * LIMIT)
            finally:
                await asyncio.sleep(0.5)
                has_ended = True

        async with pool_of(scene) as pool:
            options = replace(FAST, attempts=1, dead_letter_topic=dead)
            processor = AsyncDualProcessor(pool, scene.settings(), [scene.source], handle=wait, options=options)
            running = asyncio.create_task(processor.run())
            async with asyncio.timeout(LIMIT):
                await waits.wait()
                running.cancel()
                await asyncio.sleep(0.1)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert has_ended
            processor._loop.begin()  # raises while the thread still runs it

    scene.produce([0])
    asyncio.run(main())
    assert scene.agree() == []
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

    async def main() -> None:
        async with pool_of(scene) as pool:
            processor = AsyncDualProcessor(pool, scene.settings(), [scene.source], handle=handle, options=FAST)
            running = asyncio.create_task(processor.run())
            await asyncio.sleep(0)
            processor.stop() if stop == "stop" else running.cancel()
            await asyncio.sleep(0)
            release.set()
            async with asyncio.timeout(LIMIT):
                await asyncio.wait([running])
            assert running.cancelled() == (stop == "cancel")
            assert running.cancelled() or running.exception() is None

    scene.produce(range(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualwrite.processor.async_processor.ThreadPoolExecutor", Late)
        asyncio.run(main())


def test_invalid_arguments(scene: ProcessorScene) -> None:
    async def main() -> None:
        async with pool_of(scene) as pool:
            with pytest.raises(ConfigurationError, match="either handle or handle_batch"):
                AsyncDualProcessor(pool, scene.settings(), [scene.source])

    asyncio.run(main())
