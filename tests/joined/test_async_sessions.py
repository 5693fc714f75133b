"""`pool.join` with AsyncSession: no statement and no wait for Kafka blocks the event loop, whatever is cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import dualwrite
from crash.databases import Databases
from crash.proxied import Proxied, through_a_proxy
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import aio, failpoints
from dualwrite.devcluster import DevCluster
from dualwrite.testing.proxy import Link
from fixtures.tiers import thinned
from joined.own_sessions import ASYNC, INSERT, each, own_async_engine, row, send, users_url
from pool.pool_scene import open_pool

drivers = pytest.mark.parametrize(("driver", "database"), each(ASYNC))
that_may_be_cancelled = pytest.mark.parametrize(
    ("driver", "database"),
    thinned([("asyncpg", "postgresql"), ("aiomysql", "mariadb"), ("asyncmy", "mariadb")], quick=[("asyncpg", "postgresql")]),
)
"""One for each implementation of a protocol."""


@pytest.fixture
def producer() -> str:
    return "native"


async def write(session: AsyncSession, pool: Any, scene: Scene, number: int) -> Any:
    tx = pool.join(session)
    await session.execute(INSERT, row(scene, number))
    send(tx, scene, number)
    return tx


@drivers
def test_a_commit_commits_both_and_a_rollback_neither(scene: Scene, driver: str) -> None:
    async def work(pool: Any) -> None:
        async with own_async_engine(scene, driver) as engine:
            async with AsyncSession(engine) as session:
                tx = await write(session, pool, scene, 1)
                await session.commit()
                assert tx.outcome == "published"
                await write(session, pool, scene, 2)
                await session.rollback()
                await write(session, pool, scene, 3)
            async with AsyncSession(engine) as session, session.begin():
                await write(session, pool, scene, 4)
                savepoint = await session.begin_nested()
                await write(session, pool, scene, 5)
                await savepoint.rollback()
            async with engine.connect() as connection:
                await connection.execute(INSERT, row(scene, 6))
                send(pool.join(connection), scene, 6)
                await connection.commit()
            async with AsyncSession(engine) as session:
                send(pool.join(session), scene, 7)
                pool.join(session).send(scene.topic, b"x" * 1_100_000)
                await session.execute(INSERT, row(scene, 7))
                with pytest.raises(dualwrite.MessageTooLargeError):
                    await session.commit()

    with open_pool(scene) as pool:
        asyncio.run(work(pool))
    assert scene.agree() == [1, 4, 6]


@drivers
def test_many_commit_at_once(scene: Scene, driver: str) -> None:
    async def work(pool: Any) -> None:
        async with own_async_engine(scene, driver, **({} if driver == "aiosqlite" else {"pool_size": 10})) as engine:

            async def one(number: int) -> None:
                async with AsyncSession(engine) as session, session.begin():
                    await write(session, pool, scene, number)

            if driver == "aiosqlite":  # one writes at a time
                for number in range(20):
                    await one(number)
            else:
                await asyncio.gather(*map(one, range(40)))

    with open_pool(scene, size=4) as pool:
        asyncio.run(work(pool))
    assert scene.agree() == list(range(20 if driver == "aiosqlite" else 40))


@drivers
def test_a_pool_is_made_from_the_engine_of_the_sessions(scene: Scene, driver: str) -> None:
    async def work() -> None:
        async with own_async_engine(scene, driver) as engine:
            given = {"kafka": scene.settings, "prefix": scene.transactional_id, "timeouts": timeouts()}
            async with aio.create_pool(engine, **given) as pool, AsyncSession(engine) as session:
                await write(session, pool, scene, 1)
                await session.commit()

    asyncio.run(work())
    assert scene.agree() == [1]


@that_may_be_cancelled
@pytest.mark.parametrize("point", ["after_begin", "after_prepare", "after_record", "after_db_commit", "after_kafka_commit"])
def test_a_cancellation_is_raised_when_the_commit_has_ended(
    scene: Scene, driver: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(pool: Any) -> bool:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            monkeypatch.delitem(failpoints.armed, point)
            loop.call_soon_threadsafe(task.cancel)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result()  # the loop is not blocked

        async with own_async_engine(scene, driver) as engine:
            session = AsyncSession(engine)
            tx = await write(session, pool, scene, 1)
            monkeypatch.setitem(failpoints.armed, point, cancel)
            with pytest.raises(asyncio.CancelledError):
                await session.commit()
            task.uncancel()
            await session.close()
            async with AsyncSession(engine) as session:
                await write(session, pool, scene, 2)
                await session.commit()
        return tx.outcome is not None

    with open_pool(scene) as pool:
        has_committed = asyncio.run(work(pool))
    assert scene.agree() == ([1, 2] if has_committed else [2])


@pytest.mark.slow
@that_may_be_cancelled
@pytest.mark.parametrize("has_committed", [True, False])
def test_a_cancellation_while_the_database_commits(
    databases: Databases, broker: DevCluster, driver: str, database: str, has_committed: bool
) -> None:
    """The driver gives the COMMIT up, so its outcome is unknown to it: the row is read."""

    async def work(pool: Any, proxied: Proxied, scene: Scene) -> bool:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def cancel(link: Link) -> None:
            if has_committed:
                link.blackhole("server_to_client")
            loop.call_soon_threadsafe(task.cancel)
            if not has_committed:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result()  # the driver has given up
                link.cut()

        engine = create_async_engine(users_url(proxied.url, driver))
        session = AsyncSession(engine)
        tx = await write(session, pool, scene, 1)
        proxied.proxy.on_client_bytes(b"COMMIT", cancel, when="answered" if has_committed else "before")
        with pytest.raises(asyncio.CancelledError):
            await session.commit()
        task.uncancel()
        await session.close()
        async with AsyncSession(engine) as session:
            await write(session, pool, scene, 2)
            await session.commit()
        await engine.dispose()
        return tx.outcome is not None

    with through_a_proxy(databases, database, broker) as proxied, open_pool(proxied.scene) as pool:
        assert asyncio.run(work(pool, proxied, proxied.scene)) is has_committed
        assert proxied.scene.agree() == ([1, 2] if has_committed else [2])
