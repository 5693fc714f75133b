"""A FastAPI service whose endpoints commit sessions of their own is killed again and again under a steady load of requests."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest
import sqlalchemy as sa

import dualwrite
from crash.scene import Scene
from dualwrite.testing.server_process import free_port
from dualwrite.testing.topics import read_committed
from fixtures.pace import LIMIT, limit, until

log = logging.getLogger(__name__)

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


class Load:
    """Sends orders at a steady rate, and notes what it is told of each."""

    def __init__(self, base: str) -> None:
        self._base = base
        self.answers: Counter[str] = Counter()
        self.taken: set[str] = set()
        self.refused: set[str] = set()

    async def run(self, seconds: float) -> None:
        numbers, begun = iter(range(1_000_000)), time.monotonic()

        async def caller(client: httpx2.AsyncClient) -> None:
            while time.monotonic() - begun < seconds:
                number = next(numbers)
                await asyncio.sleep(max(0.0, begun + number / PER_SECOND - time.monotonic()))
                await self._order(client, f"{number:06}")

        async with httpx2.AsyncClient(base_url=self._base, timeout=LIMIT) as client, asyncio.TaskGroup() as callers:
            for _ in range(CALLERS):
                callers.create_task(caller(client))

    async def _order(self, client: httpx2.AsyncClient, name: str) -> None:
        try:
            answer = await client.post("/orders", json={"id": name, "item": name, "quantity": 1})
        except httpx2.HTTPError as error:
            self.answers[type(error).__name__] += 1
            return
        self.answers[str(answer.status_code)] += 1
        if answer.status_code == 201:
            self.taken.add(name)
        elif not answer.json().get("in_doubt", True):
            self.refused.add(name)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 4 + 600)
@pytest.mark.parametrize("database", ["postgresql"])
def test_a_service_under_load_that_is_killed(scene: Scene) -> None:
    service, chance = Service(scene), random.Random(20261129)
    load = Load(f"http://127.0.0.1:{service.port}")
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
            await asyncio.to_thread(service.kill)
            kills += 1
            service.start()
        await task

    with service.running():
        until(is_up, "the service is ready")
        asyncio.run(work())
    report = dualwrite.recover(scene.events.database, kafka=scene.settings, prefix="shop.")
    assert not report.failed
    engine = sa.create_engine(scene.url)
    with closing(engine.raw_connection()) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT id FROM orders")
        rows = Counter(found[0] for found in cursor.fetchall())
    engine.dispose()
    messages = Counter(json.loads(each.value or b"")["id"] for each in read_committed(scene.bootstrap, scene.topic))
    log.info("%d kills; %d orders in %g s; answers: %s", kills, len(rows), SECONDS, dict(load.answers))
    assert rows == messages
    assert load.taken <= rows.keys(), "told, but missing"
    assert not load.refused & rows.keys(), "refused, but there"
    assert kills > SECONDS / limit(6.0) / 2
