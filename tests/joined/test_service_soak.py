"""A FastAPI service whose endpoints commit sessions of their own is killed again and again under a steady load of requests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
import sqlalchemy as sa
from history_recorder import Recorder

import dualwrite
from crash.scene import Scene
from dualwrite.devcluster import DevCluster
from dualwrite.testing.server_process import free_port
from fixtures.histories import judge
from fixtures.pace import LIMIT, limit, until

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = float(os.environ.get("DUALWRITE_TEST_SECONDS", "180"))
PER_SECOND = 200
CALLERS = 40


class Service:
    """The example under uvicorn, on a port of its own."""

    def __init__(self, scene: Scene) -> None:
        self.port = free_port()
        self._environment = {
            **os.environ,
            "DUALWRITE_DATABASE_URL": scene.url.replace("+psycopg", "+asyncpg"),
            "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": scene.bootstrap,
        }
        code = (
            f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import fastapi_own_session as s; s.TOPIC = {scene.topic!r}; "
            f"import uvicorn; uvicorn.run(s.app, port={self.port}, log_level='error')"
        )
        self._command = [sys.executable, "-c", code]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.kill()


class RefusedError(Exception):
    """An answer that says that nothing is committed."""


class InDoubtError(Exception):
    """An answer that says that nobody knows."""


class Load:
    """Sends orders at a steady rate, and records what it is told of each."""

    def __init__(self, base: str, topic: str, recorder: Recorder) -> None:
        self._base, self._topic, self._recorder = base, topic, recorder

    async def run(self, seconds: float) -> None:
        numbers, begun = iter(range(1_000_000)), time.monotonic()

        async def caller(client: httpx2.AsyncClient, place: int) -> None:
            while time.monotonic() - begun < seconds:
                number = next(numbers)
                await asyncio.sleep(max(0.0, begun + number / PER_SECOND - time.monotonic()))
                name, may_fail = f"{number:06}", lambda error: isinstance(error, RefusedError | httpx2.ConnectError)
                with (
                    suppress(httpx2.HTTPError, RefusedError, InDoubtError),
                    self._recorder.operation(place, [name], {self._topic: [(name, name)]}, fails=may_fail),
                ):
                    await self._order(client, name)

        async with httpx2.AsyncClient(base_url=self._base, timeout=LIMIT) as client, asyncio.TaskGroup() as callers:
            for place in range(CALLERS):
                callers.create_task(caller(client, place))

    async def _order(self, client: httpx2.AsyncClient, name: str) -> None:
        answer = await client.post("/orders", json={"id": name, "item": name, "quantity": 1})
        if answer.status_code != 201:
            raise InDoubtError if answer.json().get("in_doubt", True) else RefusedError


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 4 + 600)
@pytest.mark.parametrize("database", ["postgresql"])
def test_a_service_under_load_that_is_killed(scene: Scene, broker: DevCluster, history: Path) -> None:
    service, chance = Service(scene), random.Random(20261129)
    recorder = Recorder(history, "test", versions={"kafka": broker.status().kafka_version})
    load = Load(f"http://127.0.0.1:{service.port}", scene.topic, recorder)
    kills = 0

    def is_up() -> bool:
        try:
            return httpx2.get(f"http://127.0.0.1:{service.port}/health/ready", timeout=LIMIT).status_code == 200
        except httpx2.HTTPError:
            return False

    async def work() -> None:
        nonlocal kills
        task = asyncio.create_task(load.run(SECONDS))
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
