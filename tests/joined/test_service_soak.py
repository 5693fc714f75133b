"""A FastAPI service whose endpoints commit sessions of their own is killed again and again under a steady load of requests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path

import httpx2
import pytest
import sqlalchemy as sa
from history_recorder import Recorder

import dualwrite
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from fixtures.histories import judge
from fixtures.pace import LIMIT, limit, until
from joined.service import Load, Service

SECONDS = float(os.environ.get("DUALWRITE_TEST_SECONDS", "180"))
PER_SECOND = 200


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 4 + 600)
@pytest.mark.parametrize("database", ["postgresql"])
def test_a_service_under_load_that_is_killed(scene: Scene, broker: DevCluster, history: Path) -> None:
    service, chance = Service(scene.url, scene.bootstrap, scene.topic), random.Random(20261129)
    recorder = Recorder(history, "test", versions={"kafka": broker.status().kafka_version})
    load = Load(service, scene.topic, recorder)
    kills, end = 0, time.monotonic() + SECONDS

    def is_up() -> bool:
        try:
            return httpx2.get(f"http://127.0.0.1:{service.port}/health/ready", timeout=LIMIT).status_code == 200
        except httpx2.HTTPError:
            return False

    async def work() -> None:
        nonlocal kills
        task = asyncio.create_task(load.run(lambda: time.monotonic() > end, PER_SECOND))
        while not task.done():
            await asyncio.wait([task], timeout=limit(2.0) + chance.random() * limit(4.0))
            if task.done():
                break
            recorder.fault("a process killed")
            await asyncio.to_thread(service.kill)
            kills += 1
            service.start()
        await task

    with service.running():
        until(is_up, "the service is ready")
        asyncio.run(work())
    report = dualwrite.recover(scene.events.database, kafka=scene.settings, prefix="shop.")
    assert not report.failed
    with scene.engine.connect() as connection:
        recorder.final_rows(connection.scalars(sa.text("SELECT id FROM orders")))
    judge(recorder, history, scene.settings, scene.topic, value_of=lambda value: json.loads(value)["id"])
    assert kills > SECONDS / limit(6.0) / 2
