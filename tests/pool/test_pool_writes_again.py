"""The database is read-only for a while: pools, writers and pools for asyncio go on by themselves, with new connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import dualwrite
from crash.scene import Scene
from fixtures.pace import LIMIT
from fixtures.read_only import read_only
from fixtures.tiers import thinned
from pool.aio_scene import opened
from pool.pool_scene import both, open_pool

Run = Callable[[int], Any]


@contextmanager
def a_pool(scene: Scene) -> Iterator[Run]:
    with open_pool(scene, scene.url) as pool:
        yield lambda number: pool.run(both, scene, number)


@contextmanager
def a_writer(scene: Scene) -> Iterator[Run]:
    with scene.connect(scene.url) as writer:

        def run(number: int) -> None:
            with writer.transaction() as tx:
                both(tx, scene, number)

        yield run


@contextmanager
def coroutines(scene: Scene) -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def in_loop(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(LIMIT)

    pool = opened(scene)
    try:
        units = in_loop(pool.__aenter__())
        yield lambda number: in_loop(units.run(both, scene, number))
        in_loop(pool.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT)
        loop.close()


def agreed(scene: Scene) -> list[int]:
    scene.engine.dispose()  # its sessions were ended too
    return scene.agree()


CASES = [
    (made, database, producer)
    for made in (a_pool, a_writer, coroutines)
    for database in ("postgresql", "mariadb")
    for producer in ("native", "librdkafka")
]
IN_CI = [CASES[0], CASES[3], CASES[4], CASES[7], CASES[8]]


@pytest.mark.parametrize(("made", "database", "producer"), thinned(CASES, kept=IN_CI, quick=CASES[:1]), indirect=["producer"])
def test_they_write_again_without_an_error(scene: Scene, made: Callable[[Scene], Any]) -> None:
    with made(scene) as run:
        run(0)
        with read_only(scene.url) as over:
            for _ in range(3):
                with pytest.raises(Exception, match=r"(?i)read.only|terminat|lost"):  # sessions may end a moment later
                    run(1)
            over()
        for number in range(2, 6):
            run(number)
    assert agreed(scene) == [0, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_function_is_called_again_while_it_lasts(scene: Scene) -> None:
    with scene.connect(scene.url) as writer, read_only(scene.url) as over:
        calls: list[int] = []

        @writer.transactional(attempts=3)
        def unit(tx: dualwrite.Transaction[Any]) -> None:
            calls.append(1)
            if len(calls) == 2:
                over()
            both(tx, scene, len(calls))

        unit()
    assert agreed(scene) == [3] == [len(calls)]
