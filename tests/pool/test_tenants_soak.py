"""A service with row-level security on pools, whose processes are killed at random: no row under the wrong tenant.

    pytest -m soak tests/pool/test_tenants_soak.py -s

prints how many units ran, and what they found. In the second test most units declare their tenants, and share commits. The
others switch off what keeps the units apart, and find wrong rows.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

import dualwrite
from crash.databases import Databases
from crash.scene import Scene, Worker
from crash.worker import timeouts
from dualwrite.devcluster import DevCluster
from dualwrite.testing.topics import read_committed
from fixtures.broker import make_topic
from fixtures.pace import LIMIT
from fixtures.producing import producing
from pool.soak_scene import Run
from pool.tenants_worker import PER_CALLER, SCHEMA, tenant_of

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("producer")]

HANDLES = ("core", "psycopg", "aio", "processor")
CALLERS = 64
"""In each process; all processes share the prefix."""
FROM_SOURCE = 2_000_000_000
"""The first number that a processor gets."""


class Service:
    """Processes with each kind of handle, which are killed and replaced.

    Args:
        scene: Its database has the tables and the role of the service.
        environment: Of the processes.
    """

    def __init__(self, scene: Scene, **environment: str) -> None:
        self.url = sa.make_url(scene.url).set(username="app").render_as_string(hide_password=False)
        self.runs: list[Run] = []
        self._scene = scene
        self._environment = environment
        self._running: dict[str, Run] = {}

    def start(self, handle: str) -> None:
        """Start a process, or replace the one that was killed."""
        scene, first = self._scene, len(self.runs) * CALLERS * PER_CALLER
        arguments = [self.url, scene.bootstrap, scene.transactional_id, scene.topic, str(first), str(CALLERS)]
        environment = {"HANDLE": handle, "SOURCE": source_of(scene), **self._environment}
        self._running[handle] = Run(Worker(arguments, module="pool.tenants_worker", **environment))
        self.runs.append(self._running[handle])

    def kill(self, handle: str) -> None:
        self._running.pop(handle).kill()

    def wait_for_more(self, handle: str, units: int) -> None:
        self._running[handle].wait_for_more(units)

    @property
    def told(self) -> int:
        """How many units are known to be committed."""
        for run in self._running.values():
            run.read()
        return sum(len(run.told) for run in self.runs)

    @property
    def wrong(self) -> list[str]:
        return [line for run in self.runs for line in run.wrong]


def source_of(scene: Scene) -> str:
    return f"source-{scene.transactional_id}"


@pytest.fixture
def tenants(databases: Databases, broker: DevCluster) -> Scene:
    """The database of a service with row-level security, and messages for its processor."""
    scene = databases.scene("postgresql", broker)
    with scene.engine.begin() as connection:
        for statement in SCHEMA:
            connection.exec_driver_sql(statement.replace("%", "%%"))
    make_topic(broker, scene.topic)
    make_topic(broker, source_of(scene))
    return scene


def run(scene: Scene, units: int, handles: tuple[str, ...], **environment: str) -> tuple[Service, Counter[str], str]:
    """Run units in processes that are killed at random; returns the wrong rows of each kind too, and a line of figures."""
    chance, began, kills = random.Random(units), time.monotonic(), 0
    service = Service(scene, **environment)
    for handle in handles:
        service.start(handle)
    while service.told < units:
        handle = chance.choice(handles)
        writing = "core" if handle == "processor" else handle
        service.wait_for_more(writing, chance.randint(1, units // 12))
        service.kill(handle)
        kills += 1
        service.start(handle)
    for handle in handles:
        service.kill(handle)
    wrong = wrong_rows(scene)
    line = (
        f"{service.told} units, {sum(wrong.values())} rows with a wrong tenant {dict(wrong)}, {len(service.wrong)} units that "
        f"saw another's; {kills + len(handles)} kills, {time.monotonic() - began:.0f} s"
    )
    return service, wrong, line


def wrong_rows(scene: Scene) -> Counter[str]:
    with scene.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT number, meant, tenant, by_trigger FROM orders").all()
    return Counter(f"{row[1]} is {row[2:]}" for row in rows if set(row[1:]) != {tenant_of(row[0])})


def both_sides(scene: Scene) -> set[int]:
    """The units that both sides have, each once, with a row for each tenant's."""
    with scene.engine.connect() as connection:
        visits = set(connection.scalars(sa.text("SELECT number FROM visits")))
        orders = set(connection.scalars(sa.text("SELECT number FROM orders")))
    sent = [int(message.value or b"-1") for message in read_committed(scene.settings, scene.topic, timeout=LIMIT)]
    assert len(sent) == len(set(sent)), "something was sent twice"
    assert visits == set(sent), (
        f"only in the database {sorted(visits - set(sent))[:20]}, in Kafka {sorted(set(sent) - visits)[:20]}"
    )
    assert orders == {number for number in visits if tenant_of(number) is not None}
    return visits


def test_no_row_is_under_the_wrong_tenant(tenants: Scene) -> None:
    with producing(tenants.bootstrap) as send:
        for number in range(FROM_SOURCE, FROM_SOURCE + 1_000):
            send(source_of(tenants), str(number))
    found = verified(tenants, *run(tenants, 10_000, HANDLES))
    assert any(number >= FROM_SOURCE for number in found), "the processor did nothing"


def test_nor_if_units_declare_their_tenants(tenants: Scene) -> None:
    verified(tenants, *run(tenants, 10_000, ("core", "psycopg", "aio"), DECLARED="1"))


def verified(tenants: Scene, service: Service, wrong: Counter[str], line: str) -> set[int]:
    """The units that both sides have, which are those that their callers were told of."""
    print(line)  # noqa: T201  (pytest -s)
    assert not wrong
    assert not service.wrong
    report = dualwrite.recover(tenants.url, kafka=tenants.settings, prefix=tenants.transactional_id, timeouts=timeouts())
    assert not report.failed
    assert not report.unacknowledged
    found = both_sides(tenants)
    told = {number for each in service.runs for number in each.told}
    assert told <= found, f"told as committed, but not there: {sorted(told - found)[:20]}"
    there = {number for each in service.runs for number in each.reported_failed} & found
    assert not there, f"told as not committed, but there: {sorted(there)[:20]}"
    errors: Any = sum((each.errors for each in service.runs), Counter[str]())
    print(f"{len(found)} units on both sides, {len(told)} told; errors: {dict(errors)}")  # noqa: T201  (pytest -s)
    return found


def test_it_finds_wrong_rows_if_settings_are_not_looked_for(tenants: Scene) -> None:
    service, wrong, line = run(tenants, 2_000, ("core", "psycopg"), NO_WATCH="1")
    print(line)  # noqa: T201  (pytest -s)
    assert wrong or service.wrong


def test_it_finds_wrong_rows_if_settings_are_not_reset(tenants: Scene) -> None:
    service, wrong, line = run(tenants, 2_000, ("core", "psycopg"), DECLARED="1", NO_RESET="1")
    print(line)  # noqa: T201  (pytest -s)
    assert wrong or service.wrong
