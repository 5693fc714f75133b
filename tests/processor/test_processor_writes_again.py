"""The database takes no writes for a while: no message is blamed for that, whatever the handler makes of the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from processor_scene import ProcessorScene

import dualwrite
from fixtures.pace import until
from fixtures.read_only import read_only
from fixtures.tiers import thinned

FULL = "DO $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$"
RUNNERS = thinned(["writer", "pool"], quick=["writer"])


@pytest.fixture
def scene(make_scene: Callable[[str], ProcessorScene]) -> ProcessorScene:
    return make_scene("postgresql")


class OwnError(Exception):
    pass


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_full_disk_is_waited_for(scene: ProcessorScene, new_name: Callable[[str], str], runner: str) -> None:
    scene.produce(range(6))
    seen: list[int] = []
    is_full = True

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        seen.append(int(message.value()))
        if is_full:
            try:
                tx.db.exec_driver_sql(FULL)
            except Exception as error:
                raise OwnError from error
        scene.book(message, tx)

    options = {"attempts": 2, "dead_letter_topic": new_name("dead")}  # which does not exist
    with (
        scene.pool() if runner == "pool" else scene.writer() as made,
        scene.running(handle, runner=made, **options) as running,
    ):
        until(lambda: len(seen) > 10 or running.has_ended, "more attempts than a message gets")
        assert not running.has_ended
        health = running.processor.check()
        assert not health.database.is_ok
        assert "could not extend file" in health.database.text
        is_full = False
        scene.wait_for(range(6))
    assert scene.agree() == list(range(6))


@pytest.mark.parametrize("runner", RUNNERS)
def test_it_is_read_only(scene: ProcessorScene, runner: str) -> None:
    attempts: list[int] = []

    def handle(message: Any, tx: dualwrite.Transaction[Any]) -> None:
        attempts.append(int(message.value()))
        scene.book(message, tx)

    url = scene.events.url
    with scene.pool() if runner == "pool" else scene.writer() as made, scene.running(handle, runner=made, attempts=2):
        scene.produce([0])
        scene.wait_for([0])
        with read_only(url) as over:
            scene.produce([1])
            until(lambda: attempts.count(1) > 3, "more attempts than a message gets")
            over()
        scene.events.database.dispose()
        scene.produce([2])
        scene.wait_for([0, 1, 2])
    assert scene.agree() == [0, 1, 2]
