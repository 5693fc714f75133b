"""The example with sessions of its own as a service under a steady load of requests, which soak runs kill."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

import httpx2
from history_recorder import Recorder

from dualwrite.testing.server_process import free_port
from fixtures.pace import LIMIT

EXAMPLES = Path(__file__).parents[2] / "examples"
CALLERS = 40


class Service:
    """The example under uvicorn, on a port of its own.

    Args:
        url: The database.
        servers: Kafka.
        topic: Where the orders are sent.
        log: Where its output goes; by default where ours does.
    """

    def __init__(self, url: str, servers: str, topic: str, log: IO[bytes] | None = None) -> None:
        self.port, self._log = free_port(), log
        self._environment = {
            **os.environ,
            "DUALWRITE_DATABASE_URL": url.replace("+psycopg", "+asyncpg"),
            "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": servers,
        }
        code = (
            f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import fastapi_own_session as s; s.TOPIC = {topic!r}; "
            f"import uvicorn; uvicorn.run(s.app, port={self.port}, log_level='error')"
        )
        self._command = [sys.executable, "-c", code]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env=self._environment, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

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
    """Sends orders at a steady rate, and records what it is told of each.

    Args:
        service: The service.
        topic: Where it sends the orders.
        recorder: Records them.
        first: The first order's number.
    """

    def __init__(self, service: Service, topic: str, recorder: Recorder, *, first: int = 0) -> None:
        self._base, self._topic, self._recorder, self._first = f"http://127.0.0.1:{service.port}", topic, recorder, first

    async def run(self, is_over: Callable[[], bool], per_second: int) -> None:
        """Send so many orders a second until it is over."""
        numbers, begun = count(self._first), time.monotonic()

        async def caller(client: httpx2.AsyncClient, place: int) -> None:
            while not is_over():
                number = next(numbers)
                await asyncio.sleep(max(0.0, begun + (number - self._first) / per_second - time.monotonic()))
                name, may_fail = f"{number:08}", lambda error: isinstance(error, RefusedError | httpx2.ConnectError)
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
            says = answer.json() if "json" in answer.headers.get("content-type", "") else {}
            raise InDoubtError if says.get("in_doubt", True) else RefusedError
