"""The clients of a soak run, by kind: each kind has processes of its own, a database, a topic, and a history that is judged.

The processes are those of the crash tests: this starts, ends and feeds them, and reads both sides when all is recovered.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import check_history
import sqlalchemy as sa
from history_recorder import Recorder

import dualwrite
from crash.events import SqlEvents
from crash.scene import Scene
from endurance.stage import Stage
from fixtures.broker import make_topic
from fixtures.fork_server import ForkedProcess
from fixtures.histories import final_topics, of_events, watched
from fixtures.pace import LIMIT, ended
from journaled.hot_key_worker import begin
from journaled.journaled_scene import publish_all
from pool.soak_worker import PER_CALLER

PARTITIONS = 3
LEASE = 3.0
"""Seconds: much shorter than in a service, so that a pause outlasts it."""
CLOCKS = (-3.0, -0.7, 0.7)
"""Hours that a clock is ahead: brokers refuse what is an hour from the future."""
TURNED = 0.1
"""How many of the processes have such a clock."""


class Kind(ABC):
    """Processes that do the same.

    Args:
        stage: The servers.
        folder: Where the history is written.
        chance: Chooses.
    """

    name: ClassVar[str]
    database: ClassVar[str] = "postgresql"
    count: ClassVar[int] = 2
    """How many processes there are at a time."""
    can_replace: ClassVar[bool] = True
    """Whether another process takes over while one is paused."""

    def __init__(self, stage: Stage, folder: Path, chance: random.Random) -> None:
        self.stage, self.folder, self.chance = stage, folder, chance
        self.recorder = Recorder(folder, "soak", versions=stage.versions(self.database))
        self.direct, self.url = stage.databases[self.database].create(f"soak_{uuid4().hex[:8]}")
        self.kafka = {"bootstrap.servers": stage.direct}
        self.engine = sa.create_engine(self.direct, pool_pre_ping=True)  # the database is restarted
        self.members: list[Any] = [None] * self.count
        self.busy: set[int] = set()
        self.started = 0
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make tables and topics."""

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """What this process does for the clients during the block; at least a consumer watches."""

    def feed(self) -> None:  # noqa: B027  (most kinds write by themselves)
        """Called about every second."""

    # --- processes --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, place: int) -> Any:
        """Start a process there, which is returned and is one of `members`."""

    def kill(self, member: Any) -> None:
        """`kill -9` a process."""
        member.kill()
        ended(member)

    def signal(self, member: Any, number: int) -> None:
        """Send a signal to a process."""
        member.send_signal(number)

    def has_ended(self, member: Any) -> bool:
        """Whether a process has ended."""
        return member.poll() is not None

    def supervise(self) -> list[int]:
        """Start what has ended by itself: the places."""
        found = [
            place
            for place, member in enumerate(self.members)
            if place not in self.busy and (not member or self.has_ended(member))
        ]
        for place in found:
            self.start(place)
        return found

    def stop(self, member: Any) -> None:
        """Ask a process to end."""
        member.send_signal(signal.SIGTERM)

    def stop_all(self) -> None:
        """Let all processes end in the way of a service: those that have not ended in time are killed."""
        for member in self.members:
            self.stop(member)
        for member in self.members:
            with suppress(subprocess.TimeoutExpired):
                member.wait(LIMIT)
            self.kill(member)

    # --- the end ----------------------------------------------------------------------------------------------------------

    prefix: str
    """Of the ids that are recovered at the end."""

    def settle(self) -> None:
        """End the processes, and recover what they have left."""
        self.stop_all()
        dualwrite.recover(self.direct, kafka=self.kafka, prefix=self.prefix).raise_for_problems()

    @abstractmethod
    def read_back(self) -> None:
        """Record what both sides have."""

    def judge(self) -> dict[str, Any]:
        """The summary of the history."""
        self.recorder.close()
        self.engine.dispose()
        return check_history.check(sorted(self.folder.glob("*.jsonl")))


class Forked(Kind):
    """Processes that run a module of the tests."""

    environment: ClassVar[dict[str, str]] = {}

    @abstractmethod
    def arguments(self) -> list[str]:
        """The module of a process, and its arguments; its number is `started`."""

    def start(self, place: int) -> Any:
        """One in ten has a wrong clock."""
        turned = self.chance.choice(CLOCKS) if self.chance.random() < TURNED else 0
        if turned:
            self.recorder.fault("a clock turned", f"{turned} h")
        module, *arguments = self.arguments()
        self.started += 1
        with (self.folder / f"process-{self.started}.log").open("wb") as log:
            self.members[place] = ForkedProcess(
                *(("endurance.turned", [str(turned), module, *arguments]) if turned else (module, arguments)),
                environment={**os.environ, "LEASE": str(LEASE), **self.environment},
                stdin=subprocess.PIPE,
                stdout=log.fileno(),
                stderr=log.fileno(),
            )
        return self.members[place]


class Writers(Forked):
    """Those that write the `events` of a scene."""

    def prepare(self) -> None:
        events = SqlEvents(self.direct)
        events.engine = self.engine
        events.create()
        self.scene = Scene(events, self.stage.direct)
        self.prefix = self.scene.transactional_id
        make_topic(self.stage.cluster, self.scene.topic, PARTITIONS)

    def running(self) -> AbstractContextManager[None]:
        return watched(self.recorder, self.kafka, self.scene.topic, of_events(self.scene))

    def read_back(self) -> None:
        self.recorder.final_rows(self.scene.rows())
        final_topics(self.recorder, self.kafka, self.scene.topic)


class Pool(Writers):
    """Callers of a pool; one unit in 50 fails after it has written."""

    name = "pool"
    callers: ClassVar[int] = 8
    environment: ClassVar[dict[str, str]] = {"FAILING": "50"}

    def arguments(self) -> list[str]:
        where = [self.url, self.stage.servers, self.prefix, self.scene.topic]
        first = self.started * self.callers * PER_CALLER
        return ["pool.soak_worker", *where, str(first), str(self.callers), str(self.folder)]

    def stop(self, member: Any) -> None:
        member.stdin.close()


class Asyncio(Pool):
    """The same with coroutines."""

    name = "asyncio"
    environment: ClassVar[dict[str, str]] = {**Pool.environment, "HANDLE": "aio"}


class MariaDB(Pool):
    """A pool on MariaDB."""

    name = "pool on MariaDB"
    database = "mariadb"


class Journal(Writers):
    """Journaled pools: few keys, each unit has seen its key's last row."""

    name = "journal"
    per_process: ClassVar[int] = 1_000_000

    def prepare(self) -> None:
        super().prepare()
        begin(self.scene)

    def arguments(self) -> list[str]:
        where = [self.url, self.stage.servers, self.prefix, self.scene.topic, "4", str(1 + self.started * self.per_process)]
        return ["journaled.hot_key_worker", *where, str(self.folder)]

    def stop(self, member: Any) -> None:
        member.stdin.close()

    def settle(self) -> None:
        """The pool that publishes what is left recovers all ids, too."""
        self.stop_all()
        publish_all(self.scene)
