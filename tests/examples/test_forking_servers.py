"""The services of gunicorn, Celery and Dramatiq on their real servers: processes are killed, every order is taken once."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dramatiq_postgres.schema
import psutil
import psycopg
import pytest
from celery import Celery
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import ProgrammingError

import dualwrite
from dualwrite import migration
from dualwrite.devcluster import DevCluster
from fixtures.pace import LIMIT, done, ended, until, until_recorded

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
Committed = Callable[[str], list[bytes | None]]


@pytest.fixture
def environment(broker: DevCluster, postgres_url: str) -> dict[str, str]:
    migration.upgrade(postgres_url)
    return {
        **os.environ,
        "DUALWRITE_DATABASE_URL": postgres_url,
        "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        "PYTHONWARNINGS": "ignore",
    }


def modules(place: Path, name: str, topic: str) -> None:
    """An example as a module in a folder of the test's own, with a topic of its own."""
    code = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").replace('TOPIC = "orders"', f"TOPIC = {topic!r}")
    (place / f"{name}.py").write_text(code, encoding="utf-8")


@contextmanager
def running(command: list[str], place: Path, environment: dict[str, str]) -> Iterator[psutil.Process]:
    with (place / "server.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=place, env=environment, stdout=log, stderr=log)
        try:
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            code = ended(process)
    assert code == 0, (place / "server.log").read_text()[-4000:]


def recovered(environment: dict[str, str]) -> None:
    report = dualwrite.recover(
        environment["DUALWRITE_DATABASE_URL"], kafka=environment["DUALWRITE_KAFKA_BOOTSTRAP_SERVERS"], prefix="shop."
    )
    assert not report.failed
    assert not report.unacknowledged


def rows(environment: dict[str, str]) -> dict[str, str]:
    engine = create_engine(environment["DUALWRITE_DATABASE_URL"], poolclass=NullPool)
    with engine.connect() as connection:
        return {row.id: row.item for row in connection.execute(text("SELECT id, item FROM orders"))}


def orders_in(messages: list[bytes | None]) -> list[tuple[str, str]]:
    return sorted((order["id"], order["item"]) for order in (json.loads(message or b"{}") for message in messages))


def test_gunicorn(environment: dict[str, str], new_name: Callable[[str], str], committed: Committed, tmp_path: Path) -> None:
    topic = new_name("topic")
    modules(tmp_path, "gunicorn_service", topic)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    wanted = {str(number): f"item {number}" for number in range(300)}

    def post(key: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
        try:
            connection.request("POST", "/orders", json.dumps({"id": key, "item": wanted[key]}))
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def taken(key: str) -> bool:
        return until(lambda: post(key) in (200, 201), f"order {key} is taken")

    command = ["gunicorn", "--bind", f"127.0.0.1:{port}", "--workers", "2", "--threads", "4", "gunicorn_service:create_app()"]
    with running(command, tmp_path, environment) as server, ThreadPoolExecutor(8) as clients:
        assert taken("0")
        taking = [clients.submit(taken, key) for key in wanted]
        for wait in taking[50], taking[150]:
            done(wait)
            with suppress(psutil.NoSuchProcess):
                server.children()[0].kill()
        assert all(each.result() for each in taking)
        assert post("0") == 200, "an order that is sent again"
    recovered(environment)
    assert rows(environment) == wanted
    assert orders_in(committed(topic)) == sorted(wanted.items())


@pytest.mark.parametrize(("orders", "fatal"), [(4, None), pytest.param(20, 9, marks=pytest.mark.soak)])
@pytest.mark.soak
def test_celery(
    environment: dict[str, str],
    new_name: Callable[[str], str],
    committed: Committed,
    tmp_path: Path,
    orders: int,
    fatal: int | None,
) -> None:
    topic = new_name("topic")
    modules(tmp_path, "celery_service", topic)
    queue, control = tmp_path / "queue", tmp_path / "control"
    queue.mkdir()
    control.mkdir()
    settings = {
        "broker_url": "filesystem://",
        "broker_transport_options": {
            "data_folder_in": str(queue),
            "data_folder_out": str(queue),
            "control_folder": str(control),
        },
        "task_ignore_result": True,
        "worker_lost_wait": 0.5,  # by default 10 s: until the task of a process that died is sent again
    }
    config = "".join(f"{name} = {value!r}\n" for name, value in settings.items())
    (tmp_path / "celeryconfig.py").write_text(config, encoding="utf-8")
    sender = Celery("sender", changes=settings)
    wanted = {str(number): f"item {number}" for number in range(orders)}
    for key, item in wanted.items():
        for _ in range(2):  # each is sent twice
            sender.send_task("celery_service.take_order", (key, item))
    environment = {
        **environment,
        "CELERY_CONFIG_MODULE": "celeryconfig",
        "DUALWRITE_TESTING": "1",
        "DUALWRITE_FAILPOINTS": f"before_kafka_commit#{fatal}=kill" if fatal else "",  # in each process of the worker
    }
    command = ["celery", "-A", "celery_service", "worker", "--concurrency", "2", "--loglevel", "INFO"]
    with running(command, tmp_path, environment):
        until_recorded(
            lambda: written(environment).items(), wanted.items(), lambda: (tmp_path / "server.log").read_text()[-4000:]
        )
        until(lambda: not any(queue.iterdir()), "every task was taken")
        time.sleep(0.1)
    assert (b"SIGKILL" in (tmp_path / "server.log").read_bytes()) == (fatal is not None)
    recovered(environment)
    assert rows(environment) == wanted
    assert orders_in(committed(topic)) == sorted(wanted.items())


BROKER = """\
import dramatiq, dramatiq_postgres
broker = dramatiq_postgres.PostgresBroker(url={url!r}, heartbeat_interval=0.2, heartbeat_ttl=2, maintenance_interval=0.2)
dramatiq.set_broker(broker)
"""


@pytest.mark.soak
def test_dramatiq(environment: dict[str, str], new_name: Callable[[str], str], committed: Committed, tmp_path: Path) -> None:
    """One of its processes dies, which ends all of them; those of the next start take what is left."""
    modules(tmp_path, "dramatiq_service", topic := new_name("topic"))
    url = environment["DUALWRITE_DATABASE_URL"].replace("+psycopg", "")
    (tmp_path / "shop_broker.py").write_text(BROKER.format(url=url), encoding="utf-8")
    with psycopg.connect(url) as connection:
        dramatiq_postgres.schema.init(connection.cursor())
    wanted = {str(number): f"item {number}" for number in range(8)}
    twice = list(wanted.items()) * 2
    send = f"import shop_broker, dramatiq_service\nfor order in {twice!r}: dramatiq_service.take_order.send(*order)"
    subprocess.run([sys.executable, "-c", send], cwd=tmp_path, env=environment, timeout=LIMIT, check=True)
    command = ["dramatiq", "shop_broker", "dramatiq_service", "--threads", "2", "--processes"]
    fatal = {**environment, "DUALWRITE_TESTING": "1", "DUALWRITE_FAILPOINTS": "before_kafka_commit#2=kill"}
    log = (tmp_path / "first.log").open("wb")
    with log, subprocess.Popen([sys.executable, "-m", *command, "2"], cwd=tmp_path, env=fatal, stdout=log, stderr=log) as first:
        assert ended(psutil.Process(first.pid)) != 0
    assert b"exited unexpectedly (code -9)" in (tmp_path / "first.log").read_bytes()
    with running([*command, "1"], tmp_path, environment), psycopg.connect(url, autocommit=True) as connection:
        until(lambda: is_drained(connection), lambda: (tmp_path / "server.log").read_text()[-4000:])
    recovered(environment)
    assert rows(environment) == wanted
    assert orders_in(committed(topic)) == sorted(wanted.items())


def is_drained(queue: psycopg.Connection[Any]) -> bool:
    """Whether each task has run."""
    return queue.execute("SELECT 1 FROM dramatiq.queue LIMIT 1").fetchone() is None


def written(environment: dict[str, str]) -> dict[str, str]:
    try:
        return rows(environment)
    except ProgrammingError:  # there is no table yet
        return {}
