"""`AsyncDualProcessor`: the same loop with handlers that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack, overload

from dualwrite.aio.async_pool import AsyncWriterPool
from dualwrite.aio.async_transaction import A, AsyncTransaction, plain
from dualwrite.aio.coroutine_threads import LoopCalls
from dualwrite.errors import AfterCommitError, FencedError
from dualwrite.kafka.topic import K, ReadableTopic, V
from dualwrite.observability import tracing
from dualwrite.observability.health import CHECK_LIMIT, ProcessorHealth
from dualwrite.processor.attempts import Content, Runner, StoppedError
from dualwrite.processor.decoded import Handlers, Received
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.processor import (
    check_handlers,
    check_journal,
    log_failed_listener,
    make_loop,
)
from dualwrite.processor.progress import Finish
from dualwrite.stores.positions import Partition, Position
from dualwrite.transaction import opened
from dualwrite.transactional import awaited, name_of

if TYPE_CHECKING:
    from confluent_kafka import Message

AsyncHandle = Callable[[list[Any], AsyncTransaction[Any]], Awaitable[object]]


class AsyncDualProcessor:
    """DualProcessor for asyncio: handlers are coroutines, which run on the event loop and write through an AsyncTransaction.

    Consuming, and everything else that blocks, runs in a separate thread. See DualProcessor for batches, attempts and errors.

    Args:
        pool: The pool of the running event loop; it stays open.
        consumer: See DualProcessor.
        topics: See DualProcessor.
        handle: Called as `await handle(message, tx)` for each message.
        handle_batch: Called as `await handle_batch(messages, tx)` for the messages of one transaction.
        options: See DualProcessor.

    Raises:
        ConfigurationError: See DualProcessor.
    """

    @overload
    def __init__(
        self,
        pool: AsyncWriterPool[A],
        consumer: Mapping[str, Any],
        topics: Sequence[ReadableTopic[V, K]],
        **handlers: Unpack[Handlers[Received[V, K], AsyncTransaction[A], Awaitable[object]]],
    ) -> None: ...

    @overload
    def __init__(
        self,
        pool: AsyncWriterPool[A],
        consumer: Mapping[str, Any],
        topics: Sequence[str],
        **handlers: Unpack[Handlers[Message, AsyncTransaction[A], Awaitable[object]]],
    ) -> None: ...

    @overload
    def __init__(
        self,
        pool: AsyncWriterPool[A],
        consumer: Mapping[str, Any],
        topics: Sequence[str | ReadableTopic[V, K]],
        **handlers: Unpack[Handlers[Received[V | bytes, K | bytes], AsyncTransaction[A], Awaitable[object]]],
    ) -> None: ...

    def __init__(
        self,
        pool: AsyncWriterPool[Any],
        consumer: Mapping[str, Any],
        topics: Sequence[Any],
        *,
        handle: Callable[[Any, AsyncTransaction[Any]], Awaitable[object]] | None = None,
        handle_batch: AsyncHandle | None = None,
        options: ProcessorOptions | None = None,
    ) -> None:
        check_handlers(handle, handle_batch)
        options = options or ProcessorOptions()
        check_journal(pool.options.when_kafka_is_down, options)
        self._runner = _LoopRunner(pool, handle_batch or _each(handle), alone=options.offsets == "kafka")
        self._store = pool.store
        self._loop = make_loop(self._runner, pool.store, consumer, topics, options)

    @property
    def positions(self) -> Mapping[Partition, Position]:
        """The positions of the partitions that are assigned now, as far as this processor knows them."""
        return self._loop.positions

    async def check(self, timeout: float = CHECK_LIMIT) -> ProcessorHealth:  # noqa: ASYNC109  (it is the limit of the sides)
        """Whether the processor works, for probes; see `DualProcessor.check`."""
        return await asyncio.to_thread(self._loop.check, self._store, timeout)

    def stop(self) -> None:
        """End `run` once the transaction in progress has ended. May be called from any thread, and from a signal handler."""
        self._loop.stop()

    async def run(self) -> None:
        """Process messages until `stop`. It handles no signals: `loop.add_signal_handler(signal.SIGTERM, processor.stop)`.

        If it is cancelled, the handler in progress is cancelled and its transaction rolled back; one whose commit has begun may
        still commit. When CancelledError is raised, the handler has ended, and the consumer has left the group.

        Raises: as for `DualProcessor.run`.
        """
        self._loop.begin()
        self._runner.begin()
        executor = ThreadPoolExecutor(1, "dualwrite processor")
        try:
            job, calls = executor.submit(self._loop.run), LoopCalls(asyncio.get_running_loop())
            try:
                await calls.end_of(job)
            except asyncio.CancelledError as cancelled:
                self._loop.stop()
                self._runner.cancel()
                with suppress(asyncio.CancelledError):  # a further one changes nothing: the thread must end first
                    await calls.until_done(job)
                raise cancelled from job.exception()
            job.result()
        finally:
            executor.shutdown(wait=False)


class _LoopRunner(Runner):
    """Runs the handler on the running event loop, for the processor's thread; see ThreadRunner."""

    def __init__(self, pool: AsyncWriterPool[Any], handle: AsyncHandle, *, alone: bool) -> None:
        self._pool = pool
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._alone = alone
        self._current: asyncio.Task[None] | None = None
        self._is_cancelled = False

    def begin(self) -> None:
        """Forget an earlier cancellation."""
        self._is_cancelled = False

    def run(self, content: Content | None, finish: Finish) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._run(content, finish), self._loop).result()
        except CancelledError:  # the coroutine has ended by then
            if self._is_cancelled:
                raise StoppedError from None
            raise

    def cancel(self) -> None:
        """Cancel the transaction in progress, and one that the thread is about to begin; called in the event loop."""
        self._is_cancelled = True
        if self._current is not None:
            self._current.cancel()  # not the future: then the thread would not wait for the coroutine

    def is_transient(self, error: BaseException) -> bool:
        return isinstance(error, FencedError) or self._pool.store.passes(error)  # a pool uses another id

    async def _run(self, content: Content | None, finish: Finish) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError

        async def unit(tx: AsyncTransaction[Any]) -> None:
            messages = None if content is None else content()
            if messages:  # none, if they were replayed for another group
                await awaited(self._handle(messages, tx), name_of(self._handle))
            await tx.run_sync(finish)

        unit.__wrapped__ = self._handle  # type: ignore[attr-defined]  # as in ThreadRunner
        self._current = asyncio.current_task()
        try:
            await (self._run_alone(unit) if self._alone else self._pool.run(unit))
        finally:
            self._current = None

    async def _run_alone(self, unit: Callable[[AsyncTransaction[Any]], Awaitable[None]]) -> None:
        try:
            async with self._pool.transaction() as tx:
                await unit(tx)
        except AfterCommitError as error:
            log_failed_listener(error, opened(plain(tx)).store_transaction.after_commit_error)


def _each(handle: Callable[[Any, AsyncTransaction[Any]], Awaitable[object]] | None) -> AsyncHandle:
    assert handle is not None
    name = name_of(handle)

    async def all_of(messages: list[Any], tx: AsyncTransaction[Any]) -> None:
        for message in messages:
            with opened(plain(tx)).part(shares=len(messages) > 1), tracing.processing_one(message, of=messages):
                await awaited(handle(message, tx), name)

    all_of.__wrapped__ = handle  # type: ignore[attr-defined]  # as functools.wraps does; `pool.alone` looks for it
    return all_of
