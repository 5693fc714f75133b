"""Units that are coroutines: they run on the event loop, in the task of their caller, and share commits with plain units."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import dualwrite
from crash.databases import DATABASES
from crash.scene import Scene
from dualwrite import PoolOptions, Transaction, aio
from dualwrite.errors import (
    ConcurrentUseError,
    InvalidMessageError,
    NestedTransactionError,
    PoolTimeoutError,
    StoreCommitFailedError,
    UnknownTopicError,
    UsageError,
    WriterClosedError,
)
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, limit
from fixtures.tiers import thinned
from pool.aio_scene import CancelledAt, Pool, both_here, grouped, held, in_loop, in_pool, opened
from pool.pool_scene import both


async def then_raise_here(tx: aio.AsyncTransaction, scene: Scene, number: int, error: BaseException) -> int:
    await both_here(tx, scene, number)
    raise error


# --- results and errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", thinned(DATABASES, quick=["postgresql", "rocksdb"]))
def test_coroutines_and_plain_functions_share_groups(scene: Scene, database: str) -> None:
    """Each gets its own result or error; what failed is undone alone."""
    del database
    kinds: list[Callable[[Pool, int], Any]] = [
        lambda pool, number: pool.run(both, scene, number),
        lambda pool, number: pool.run(both_here, scene, number),
        lambda pool, number: pool.run(then_raise_here, scene, number, KeyError(number)),
    ]

    async def main(pool: Pool) -> None:
        for number, result in enumerate(await grouped(pool, *(kinds[number % 3](pool, number) for number in range(30)))):
            if number % 3 == 2:
                assert isinstance(result, KeyError)
                assert result.args == (number,)
            else:
                assert result == number

    in_pool(scene, main, size=1)
    assert scene.agree() == [number for number in range(30) if number % 3 != 2]


class Base(DeclarativeBase):
    pass


class Event(Base):
    __tablename__ = "events"
    writer: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize("failing", ["another unit", "the commit"])
def test_objects_made_outside_of_their_units_are_written_when_these_run_again(scene: Scene, failing: str) -> None:
    """Under savepoints of their own, because another unit has failed; and one by one, because the group has."""
    runs: list[int] = []

    def plain(tx: Transaction, made: Event) -> None:
        tx.session.add(made)
        tx.session.flush()
        runs.append(made.number)
        tx.send(scene.topic, str(made.number))

    async def here(tx: aio.AsyncTransaction, made: Event) -> None:
        tx.session.add(made)
        await tx.session.flush()
        runs.append(made.number)
        tx.send(scene.topic, str(made.number))

    async def fail(tx: aio.AsyncTransaction) -> None:
        del tx
        if failing == "another unit":
            raise KeyError

    def conflict() -> None:
        if failing == "the commit" and runs == [1, 2]:
            raise StoreCommitFailedError("a conflict")

    async def main(pool: Pool) -> None:
        one, two = (Event(writer=scene.transactional_id, number=number) for number in (1, 2))
        found = await grouped(pool, pool.run(plain, one), pool.run(here, two), pool.run(fail))
        assert found[:2] == [None, None]
        assert isinstance(found[2], KeyError) if failing == "another unit" else found[2] is None

    with failpoints.armed("after_prepare", conflict):
        in_pool(scene, main, size=1)
    assert runs == [1, 2, 1, 2]
    assert scene.agree() == [1, 2]


def test_a_unit_runs_in_the_task_of_its_caller(scene: Scene) -> None:
    """So it sees the caller's context variables, and its calls see the unit's."""
    variable = contextvars.ContextVar("variable", default="nothing")

    async def unit(tx: aio.AsyncTransaction, task: Any) -> None:
        assert asyncio.current_task() is task
        assert variable.get() == "the caller's"
        variable.set("the unit's")
        assert await tx.run_sync(lambda _: variable.get()) == "the unit's"
        assert await tx.run_sync(type) is Transaction  # not what the pool itself works with
        assert await tx.run_sync(lambda _: threading.get_ident()) != threading.get_ident()

    async def main(pool: Pool) -> None:
        variable.set("the caller's")
        await pool.run(unit, asyncio.current_task())

    in_pool(scene, main)


def test_every_kind_of_callable_is_recognized(scene: Scene) -> None:
    class Callable_:  # noqa: N801  (a unit that is an object)
        async def __call__(self, tx: aio.AsyncTransaction, number: int) -> int:
            return await both_here(tx, scene, number)

    async def main(pool: Pool) -> None:
        assert await pool.run(functools.partial(both_here, scene=scene, number=1)) == 1
        assert await pool.run(Callable_(), 2) == 2

    in_pool(scene, main)
    assert scene.agree() == [1, 2]


def test_a_unit_may_run_again(scene: Scene) -> None:
    """A deferred constraint fails at the group's COMMIT: then each unit runs in a transaction of its own."""
    with scene.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE places (id INTEGER UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    runs: list[int] = []

    async def unit(tx: aio.AsyncTransaction, number: int, place: int) -> int:
        runs.append(number)
        await tx.db.exec_driver_sql(f"INSERT INTO places VALUES ({place})")
        return await both_here(tx, scene, number)

    async def main() -> None:
        async with opened(scene, size=1) as pool:
            results = await grouped(pool, *(pool.run(unit, number, max(number, 1)) for number in range(3)))
        assert results[0] == 0
        assert isinstance(results[1], dualwrite.DualWriteError)
        assert results[2] == 2

    try:
        in_loop(main())
    finally:
        with scene.engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE places")
    assert runs == [0, 1, 2, 0, 1, 2]
    assert scene.agree() == [0, 2]


@pytest.mark.slow
def test_messages_are_checked_at_once_and_sent_in_order(scene: Scene) -> None:
    async def unit(tx: aio.AsyncTransaction) -> None:
        tx.send(scene.topic, "1", key="k")
        await tx.run_sync(lambda plain: plain.send(scene.topic, "2", key="k"))
        tx.send_many(scene.topic, ["3", "4"], keys=["k", "k"])
        with pytest.raises(InvalidMessageError):
            tx.send("not a topic!", "value")

    async def to_nowhere(tx: aio.AsyncTransaction) -> None:
        await both_here(tx, scene, 5)
        tx.send(scene.topic, "5", partition=999)

    async def offsets(tx: aio.AsyncTransaction) -> None:
        await tx.send_offsets(None)

    async def main(pool: Pool) -> None:
        await pool.run(unit)
        with pytest.raises((UnknownTopicError, InvalidMessageError, dualwrite.errors.DeliveryError)):
            await pool.run(to_nowhere)
        with pytest.raises((UsageError, AttributeError)):
            await pool.run(offsets)

    in_pool(scene, main)
    assert scene.messages() == [1, 2, 3, 4]
    assert scene.rows() == []


# --- cancellation -----------------------------------------------------------------------------------------------------


async def many_awaits(tx: aio.AsyncTransaction, scene: Scene, number: int, ended: list[int]) -> int:
    await both_here(tx, scene, number)
    await asyncio.sleep(0)
    async with tx.db.begin_nested():
        await tx.db.exec_driver_sql("SELECT 1")
    await (await tx.session.begin_nested()).rollback()
    await tx.run_sync(lambda plain: plain.session.connection().exec_driver_sql("SELECT 1"))
    ended.append(number)
    return number


def test_a_unit_cancelled_at_any_await_is_rolled_back_alone(scene: Scene) -> None:
    """From waiting for its turn to waiting for the group's commit. The other units of the group are not affected."""
    told: set[int] = set()
    ended: list[int] = []

    async def at(pool: Pool, place: int) -> bool:
        number = 10 * place
        cancelled = CancelledAt(place, pool.run(many_awaits, scene, number, ended))

        async def unit() -> None:
            told.add(await cancelled)

        async with held(pool):
            others = [asyncio.ensure_future(pool.run(both, scene, number + 1))]
            running = asyncio.ensure_future(unit())
            await asyncio.sleep(0)
            others.append(asyncio.ensure_future(pool.run(both_here, scene, number + 2)))
            await asyncio.sleep(0)
        told.update(await asyncio.gather(*others))
        await asyncio.wait([running])
        assert running.cancelled() == cancelled.is_cancelled
        return cancelled.is_cancelled

    async def main(pool: Pool) -> None:
        for place in itertools.count():
            if not await at(pool, place):
                break
        assert place > 8, "a unit waits for its turn, for each of its calls, and for the commit"

    in_pool(scene, main, size=1)
    found = set(scene.agree())
    assert told <= found
    assert found - told <= set(ended), "a unit that was cancelled before its end is not there"
    assert len([number for number in ended if number not in told]) == 1, "cancelled while the group committed"


@pytest.mark.slow
def test_many_coroutines_cancelled_at_random(scene: Scene) -> None:
    """Units of both kinds and transactions of their own; each reported outcome is right, and both sides agree."""
    chance = random.Random(4711)
    told: set[int] = set()
    ended: list[int] = []

    async def alone(pool: Pool, number: int) -> int:
        async with pool.transaction() as tx:
            return await many_awaits(tx, scene, number, ended)

    def plain(tx: Transaction, number: int) -> int:
        ended.append(number)  # it is finished even if its caller is cancelled
        return both(tx, scene, number)

    async def call(pool: Pool, number: int) -> None:
        await asyncio.sleep(chance.random() * 0.5)
        match number % 5:
            case 0:
                told.add(await alone(pool, number))
            case 1 | 2:
                told.add(await pool.run(plain, number))
            case _:
                told.add(await pool.run(many_awaits, scene, number, ended))

    async def main(pool: Pool) -> None:
        tasks = [asyncio.ensure_future(call(pool, number)) for number in range(150)]
        for task in chance.sample(tasks, 75):
            asyncio.get_running_loop().call_later(chance.random(), task.cancel)
        await asyncio.wait(tasks)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert await pool.run(both_here, scene, 999) == 999

    in_pool(scene, main)
    found = set(scene.agree())
    assert told <= found
    assert found - told <= {*ended, 999}


@pytest.mark.slow
def test_a_cancelled_statement_ends_before_the_unit_continues(scene: Scene) -> None:
    """So a time limit inside the unit leaves the transaction in a known state."""

    async def unit(tx: aio.AsyncTransaction) -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), tx.db.begin_nested():
                await tx.db.exec_driver_sql("SELECT pg_sleep(0.3)")
        assert not tx.db.in_nested_transaction()
        return await both_here(tx, scene, 1)

    assert in_pool(scene, lambda pool: pool.run(unit)) == 1
    assert scene.agree() == [1]


def test_a_rerun_of_a_group_does_not_wait_for_a_cancelled_coroutine(scene: Scene) -> None:
    """It was cancelled after its end; then COMMIT failed, and its unit can't run again."""
    committing, go = threading.Event(), threading.Event()
    commits = 0

    def fail() -> None:
        nonlocal commits
        commits += 1
        if commits == 2:  # not that of the unit that is held
            committing.set()
            assert go.wait(LIMIT)
            raise dualwrite.StoreCommitFailedError("The test's own.")

    async def main(pool: Pool) -> None:
        async with held(pool):
            leaving = asyncio.ensure_future(pool.run(both_here, scene, 1))
            await asyncio.sleep(0)
            staying = asyncio.ensure_future(pool.run(both_here, scene, 2))
            await asyncio.sleep(0)
            failpoints.arm("group_after_units", fail)
        assert await asyncio.to_thread(committing.wait, LIMIT)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        go.set()
        assert await staying == 2

    try:
        in_pool(scene, main, size=1)
    finally:
        failpoints.disarm()
    assert scene.agree() == [2]


# --- limits -------------------------------------------------------------------------------------------------------------


def test_a_timeout_names_the_coroutine_that_was_waited_for(scene: Scene) -> None:
    async def stuck(tx: aio.AsyncTransaction, begun: asyncio.Event, release: asyncio.Event) -> int:
        begun.set()
        await release.wait()
        return await both_here(tx, scene, 1)

    async def main(pool: Pool) -> None:
        begun, release = asyncio.Event(), asyncio.Event()
        running = asyncio.ensure_future(pool.run(stuck, begun, release))
        await begun.wait()
        for unit in (both, both_here):
            with pytest.raises(PoolTimeoutError, match=r"stuck"):
                await pool.with_options(timeout=0.05).run(unit, scene, 2)
        release.set()
        assert await running == 1

    in_pool(scene, main, size=1)
    assert scene.agree() == [1]


@pytest.mark.slow
def test_closing_the_pool_cancels_a_coroutine_that_does_not_end(scene: Scene) -> None:
    async def stuck(tx: aio.AsyncTransaction, begun: asyncio.Event) -> None:
        await both_here(tx, scene, 1)
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        begun = asyncio.Event()
        async with opened(scene, size=1, options=PoolOptions(timeout=limit(2))) as pool:
            running = asyncio.ensure_future(pool.with_options(timeout=LIMIT).run(stuck, begun))
            await begun.wait()
        with pytest.raises(WriterClosedError, match=r"(?s)stuck.*was cancelled, and is rolled back"):
            await running

    in_loop(main())
    assert scene.agree() == []


@pytest.mark.slow
def test_closing_the_pool_abandons_a_coroutine_that_ignores_cancellation(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualwrite.aio.coroutine_threads.GRACE", 0.1)
    seen: list[type] = []

    async def stubborn(tx: aio.AsyncTransaction, begun: asyncio.Event, release: asyncio.Event) -> None:
        await both_here(tx, scene, 1)
        begun.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                seen.append(asyncio.CancelledError)
        with pytest.raises(WriterClosedError):
            await both_here(tx, scene, 2)

    async def main() -> None:
        begun, release = asyncio.Event(), asyncio.Event()
        async with opened(scene, size=1, options=PoolOptions(timeout=limit(2))) as pool:
            running = asyncio.ensure_future(pool.with_options(timeout=LIMIT).run(stubborn, begun, release))
            await begun.wait()
        assert not running.done()
        release.set()
        with pytest.raises(WriterClosedError, match="the pool was closed, and it did not end"):
            await running

    in_loop(main())
    assert seen == [asyncio.CancelledError]
    assert scene.agree() == []


# --- misuse -------------------------------------------------------------------------------------------------------------


def test_misuse_is_refused_with_an_explanation(scene: Scene) -> None:
    kept: list[aio.AsyncTransaction] = []

    async def nested(_: aio.AsyncTransaction, pool: Pool) -> None:
        for unit in (both, both_here):
            with pytest.raises(NestedTransactionError, match="inside a unit"):
                await pool.run(unit, scene, 1)
            with pytest.raises(NestedTransactionError, match="inside a unit"):
                await asyncio.create_task(pool.with_options(key=1).run(unit, scene, 1))
        with pytest.raises(NestedTransactionError, match="transaction"):
            async with pool.transaction():
                pass
        with pytest.raises(NestedTransactionError, match="close"):
            await pool.close()

    async def in_another_thread(tx: aio.AsyncTransaction) -> None:
        with pytest.raises(ConcurrentUseError, match="another thread"):
            await asyncio.to_thread(tx.send, scene.topic, "1")

    async def keep(tx: aio.AsyncTransaction) -> None:
        kept.append(tx)

    async def too_late(tx: aio.AsyncTransaction) -> None:
        with pytest.raises(WriterClosedError, match="ended with its coroutine"):
            await tx.run_sync(lambda _: None)
        for use in (lambda: tx.db, lambda: tx.session, lambda: tx.send(scene.topic, "1")):
            with pytest.raises(WriterClosedError):
                use()

    async def wrong_loop(pool: Pool) -> None:
        with pytest.raises(UsageError, match="another event loop"):
            await pool.run(both_here, scene, 1)
        with pytest.raises(UsageError, match="another event loop"):
            async with pool.transaction():
                pass

    async def main() -> None:
        async with opened(scene) as pool:
            await pool.run(nested, pool)
            await pool.run(in_another_thread)
            await pool.run(keep)
            await too_late(kept[0])
            with pytest.raises(UsageError, match="returned a coroutine"):
                await pool.run(lambda tx: keep(tx))  # noqa: PLW0108  (a plain function)
            await asyncio.to_thread(in_loop, wrong_loop(pool))
        with pytest.raises(WriterClosedError, match="is closed"):
            await pool.run(both_here, scene, 1)

    in_loop(main())
    assert scene.agree() == []


def test_a_task_of_a_unit_may_use_the_pool_once_the_unit_has_ended(scene: Scene) -> None:
    started: list[asyncio.Task[int]] = []

    async def later(pool: Pool, go: asyncio.Event) -> int:
        await go.wait()
        return await pool.run(both_here, scene, 2)

    async def unit(tx: aio.AsyncTransaction, pool: Pool, go: asyncio.Event) -> int:
        started.append(asyncio.create_task(later(pool, go)))
        return await both_here(tx, scene, 1)

    async def main(pool: Pool) -> None:
        go = asyncio.Event()
        await pool.run(unit, pool, go)
        go.set()
        assert await started[0] == 2

    in_pool(scene, main)
    assert scene.agree() == [1, 2]


def test_on_uvloop(scene: Scene) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with opened(scene) as pool:
            units = [pool.run((both, both_here)[number % 2], scene, number) for number in range(20)]
            assert await asyncio.gather(*units) == list(range(20))
            async with pool.transaction() as tx:
                await both_here(tx, scene, 20)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert scene.agree() == list(range(21))
