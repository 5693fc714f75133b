"""Probes: what `check` of pools, processors and relays says while they work, and when a side does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import dualwrite.aio
from crash.databases import Databases
from crash.scene import Scene
from dualwrite import ConfigurationError, PoolOptions
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster
from dualwrite.errors import StoreUnavailableError
from dualwrite.observability.health import Asking, Part, PoolHealth, ProcessorHealth, RelayHealth, goes_on
from fixtures.broker import started
from fixtures.pace import LIMIT, done, until
from pool.pool_scene import both, held, open_pool
from processor.processor_scene import ProcessorScene
from relay.relay_scene import RelayScene, running

OK, BAD = Part(is_ok=True, text="fine"), Part(is_ok=False, text="down")


@pytest.fixture(scope="module")
def own_broker() -> Iterator[DevCluster]:
    """A broker that this module pauses."""
    with started() as cluster:
        yield cluster


@pytest.fixture
def pool_scene(databases: Databases, broker: DevCluster) -> Scene:
    return databases.scene("sqlite", broker)


@contextmanager
def paused(broker: DevCluster) -> Iterator[None]:
    broker.pause()
    try:
        yield
    finally:
        broker.resume()


# --- the results ------------------------------------------------------------------------------------------------------------


def test_a_pool_with_a_journal_is_ready_without_kafka() -> None:
    needs, has_journal = (PoolHealth(OK, BAD, OK, OK, needs_kafka=needs) for needs in (True, False))
    assert (needs.is_ready, has_journal.is_ready) == (False, True)
    assert needs.is_alive
    assert not PoolHealth(BAD, OK, OK, OK, needs_kafka=False).is_ready
    stuck = PoolHealth(OK, OK, OK, BAD, needs_kafka=True)
    assert not stuck.is_ready
    assert not stuck.is_alive


@pytest.mark.parametrize("kind", [ProcessorHealth, RelayHealth])
def test_an_outage_makes_nothing_dead(kind: type[ProcessorHealth | RelayHealth]) -> None:
    outage = kind(OK, BAD, BAD, OK, OK)
    assert (outage.is_ready, outage.is_alive) == (False, True)
    assert not kind(BAD, OK, OK, OK, OK).is_alive
    assert not kind(OK, OK, OK, OK, BAD).is_alive


def test_the_text_begins_with_what_is_wrong() -> None:
    found = PoolHealth(OK, BAD, OK, OK, needs_kafka=True)
    assert found.text == "kafka: down; database: fine; writers: fine; progress: fine"
    assert found.record() == {
        "ready": False,
        "alive": True,
        "database": {"ok": True, "text": "fine"},
        "kafka": {"ok": False, "text": "down"},
        "writers": {"ok": True, "text": "fine"},
        "progress": {"ok": True, "text": "fine"},
    }


def test_standing_still_is_a_matter_of_the_limit() -> None:
    assert goes_on(4.9, 5).is_ok
    assert goes_on(6, 5) == Part(is_ok=False, text="stands still for 6 s")


def test_what_does_not_answer_is_asked_once() -> None:
    asking, answer, asked = Asking(), threading.Event(), []

    def ask() -> None:
        asked.append(1)
        answer.wait(LIMIT)

    for _ in range(3):
        parts = asking.answers({"slow": ask, "broken": lambda: 1 / 0}, Deadline.after(0.05))
        assert parts["slow"] == Part(is_ok=False, text="no answer within 0.05 s")
        assert parts["broken"] == Part(is_ok=False, text="division by zero")
    assert asked == [1]
    answer.set()
    assert asking.answers({"slow": ask}, Deadline.after(LIMIT))["slow"].is_ok


# --- real ones --------------------------------------------------------------------------------------------------------------


def test_a_pool_is_ready_until_it_is_closed(pool_scene: Scene) -> None:
    with open_pool(pool_scene, size=2) as pool:
        pool.run(both, pool_scene, 1)
        found = pool.check(LIMIT)
        assert found.is_ready, found.text
        assert found.is_alive
        assert all(name in found.writers.text for name in pool.transactional_ids)
        with pytest.raises(ConfigurationError):
            pool.check(-1)
    closed = pool.check(LIMIT)
    assert not closed.is_ready
    assert closed.writers == Part(is_ok=False, text="the pool is closed")


def test_a_pool_in_which_calls_wait_for_too_long_stands_still(pool_scene: Scene) -> None:
    with open_pool(pool_scene, size=1, options=PoolOptions(timeout=0.1)) as pool:
        with held(pool):
            assert pool.check(LIMIT).progress.is_ok  # nobody waits
            waiting = pool.submit(both, pool_scene, 1)
            until(lambda: not pool.check(LIMIT).is_alive)
        done(waiting)  # the pool's end would wait for it as briefly as callers do


def test_an_async_pool_is_checked_without_blocking_the_loop(pool_scene: Scene) -> None:
    async def check() -> PoolHealth:
        prefix = pool_scene.transactional_id
        pool = await dualwrite.aio.create_pool(pool_scene.events.database, kafka=pool_scene.settings, prefix=prefix)
        async with pool:
            return await pool.check(LIMIT)

    assert asyncio.run(check()).is_ready


@pytest.mark.slow
@pytest.mark.parametrize("when", ["fail", "journal"])
def test_while_kafka_is_down_only_a_pool_with_a_journal_is_ready(
    databases: Databases, own_broker: DevCluster, when: Any
) -> None:
    scene = databases.scene("sqlite", own_broker)
    with open_pool(scene, size=1, options=PoolOptions(timeout=LIMIT, when_kafka_is_down=when)) as pool:
        assert pool.check(LIMIT).is_ready
        with paused(own_broker):
            found = pool.check(1)
            assert not found.kafka.is_ok, found.text
            assert found.database.is_ok, found.text
            assert found.is_ready == (when == "journal")
            assert found.is_alive
        until(lambda: pool.check(LIMIT).is_ready)


@pytest.mark.slow
def test_a_processor_is_alive_while_it_runs(databases: Databases, own_broker: DevCluster, new_name: Any) -> None:
    scene = ProcessorScene(databases.scene("sqlite", own_broker).events, own_broker, new_name)
    scene.produce(range(4))
    with scene.running() as process:
        scene.wait_for(range(4))
        processor = process.processor
        until(lambda: processor.check(LIMIT).is_ready)
        assert f"{scene.source}-0" in processor.check(LIMIT).partitions.text
        with paused(own_broker):
            found = processor.check(1)
            assert (found.is_ready, found.is_alive, found.kafka.is_ok) == (False, True, False), found.text
    ended = processor.check(LIMIT)
    assert (ended.is_ready, ended.is_alive, ended.running.is_ok) == (False, False, False)


@pytest.mark.slow
def test_a_batch_that_is_tried_again_goes_on(databases: Databases, broker: DevCluster, new_name: Any) -> None:
    scene = ProcessorScene(databases.scene("sqlite", broker).events, broker, new_name)
    seen: list[float] = []

    def handle(message: Any, tx: Any) -> None:
        seen.append(process.processor._loop._attempts.active_at)
        if len(seen) < 3:
            raise StoreUnavailableError("as in an outage")
        scene.book(message, tx)

    scene.produce([1])
    with scene.running(handle) as process:
        scene.wait_for([1])
    assert sorted(set(seen)) == seen  # each attempt is progress


@pytest.mark.slow
def test_a_relay_is_alive_while_it_runs(sqlite_url: str, own_broker: DevCluster, new_name: Any) -> None:
    scene = RelayScene(sqlite_url, own_broker, new_name)
    with running(scene) as relay:
        until(lambda: relay.check(LIMIT).is_ready and relay.shards)
        assert relay.check(LIMIT).shards.text == f"{scene.name}.1"
        with paused(own_broker):
            found = relay.check(1)
            assert (found.is_ready, found.is_alive, found.kafka.is_ok) == (False, True, False), found.text
    scene.engine.dispose()
