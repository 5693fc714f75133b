"""The examples run, on a real broker and SQLite, and recover what a crash left."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Insert, create_engine, text
from sqlalchemy.exc import OperationalError

import dualwrite
from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql.joined_transaction import JoinedTransaction
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT, until

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def url(broker: DevCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    made = f"sqlite:///{tmp_path}/shop.db"
    migration.upgrade(made)
    monkeypatch.setenv("DUALWRITE_DATABASE_URL", made)
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    return made


def load(name: str, topic: str) -> ModuleType:
    """An example as a module, with a topic of the test's own."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks the annotations up there
    spec.loader.exec_module(module)
    module.TOPIC = topic
    return module


def items(url: str) -> list[str]:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = [row.item for row in connection.execute(text("SELECT item FROM orders ORDER BY id"))]
    engine.dispose()
    return found


# --- plain ------------------------------------------------------------------------------------------------------------


def plain(topic: str, instance: int, instances: int, lines: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import plain_service; plain_service.TOPIC = {topic!r}\n"
        f"sys.argv = ['plain_service', '--instance', '{instance}', '--instances', '{instances}']\n"
        "sys.exit(plain_service.main())"
    )
    environment = {**os.environ, "DUALWRITE_FAILPOINTS": failpoint}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.slow
def test_the_plain_service_takes_each_order_once(
    url: str, new_name: Callable[[str], str], committed: Callable[[str], list[bytes | None]]
) -> None:
    topic = new_name("topic")
    done = plain(topic, 0, 1, "1 lamp\n2 chair\n1 lamp\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ready", "1 taken", "2 taken", "1 already exists"]
    assert items(url) == ["lamp", "chair"]
    assert committed(topic) == [b'{"id": "1", "item": "lamp"}', b'{"id": "2", "item": "chair"}']


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failpoint", "taken"),
    [("before_kafka_commit#2=exit", True), ("before_db_commit#2=exit", False)],
)
def test_the_plain_service_recovers_itself_after_a_crash(
    url: str, new_name: Callable[[str], str], committed: Callable[[str], list[bytes | None]], failpoint: str, taken: bool
) -> None:
    topic = new_name("topic")
    crashed = plain(topic, 0, 1, "1 lamp\n2 chair\n", failpoint)
    assert (crashed.returncode, crashed.stdout) == (70, "ready\n1 taken\n"), crashed.stderr
    again = plain(topic, 0, 1, "2 chair\n")
    assert again.stdout.splitlines() == ["ready", "2 already exists" if taken else "2 taken"]
    assert items(url) == ["lamp", "chair"]
    assert committed(topic) == [b'{"id": "1", "item": "lamp"}', b'{"id": "2", "item": "chair"}']


@pytest.mark.slow
def test_the_plain_service_recovers_dead_instances_but_not_live_ones(
    url: str, new_name: Callable[[str], str], committed: Callable[[str], list[bytes | None]]
) -> None:
    topic = new_name("topic")
    assert plain(topic, 7, 8, "1 lamp\n", "after_db_commit=exit").returncode == 70
    with dualwrite.connect(transactional_id="shop-1") as sibling:
        started = plain(topic, 0, 2, "")
        assert started.returncode == 0, started.stderr
        assert "shop-7, generation 1: COMMITTED" in started.stderr
        assert committed(topic) == [b'{"id": "1", "item": "lamp"}']
        with sibling.transaction() as tx:
            tx.send(topic, b"not fenced")


# --- FastAPI ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fastapi_service", "fastapi_async_service", "fastapi_own_session"])
def shop(
    url: str, new_name: Callable[[str], str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TestClient, str]]:
    """A client of the running service, and its topic."""
    topic = new_name("topic")
    if request.param == "fastapi_own_session":
        monkeypatch.setenv("DUALWRITE_DATABASE_URL", url.replace("sqlite", "sqlite+aiosqlite"))
    module = load(request.param, topic)
    with TestClient(module.app) as client:
        yield client, topic


def order(number: int) -> dict[str, object]:
    return {"id": f"{number:03}", "item": f"item {number}", "quantity": 1}


def test_an_order_is_a_row_and_an_event(
    shop: tuple[TestClient, str], url: str, committed: Callable[[str], list[bytes | None]]
) -> None:
    client, topic = shop
    answer = client.post("/orders", json=order(1))
    assert (answer.status_code, answer.json()) == (201, order(1))
    assert client.get("/orders/001").json() == order(1)
    assert [json.loads(value or b"") for value in committed(topic)] == [order(1)]


def test_probes_of_a_running_service(shop: tuple[TestClient, str]) -> None:
    client, _ = shop
    assert client.get("/health/live").status_code == 200
    answer = until(lambda: found if (found := client.get("/health/ready")).status_code == 200 else None)
    assert answer.json()["ready"] is True
    assert answer.json()["kafka"]["ok"] is True


def test_an_order_that_cannot_be_written_sends_nothing(
    shop: tuple[TestClient, str], url: str, committed: Callable[[str], list[bytes | None]]
) -> None:
    client, topic = shop
    assert client.post("/orders", json=order(1)).status_code == 201
    assert client.post("/orders", json=order(1)).status_code == 409
    assert client.post("/orders", json={"id": "2"}).status_code == 422
    assert client.get("/orders/002").status_code == 404
    assert len(committed(topic)) == 1


def test_concurrent_orders_all_arrive(
    shop: tuple[TestClient, str], url: str, committed: Callable[[str], list[bytes | None]]
) -> None:
    client, topic = shop
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: client.post("/orders", json=order(number)), range(40)))
    assert [answer.status_code for answer in answers] == [201] * 40
    assert sorted(json.loads(value or b"")["id"] for value in committed(topic)) == [f"{number:03}" for number in range(40)]
    assert len(items(url)) == 40


def test_a_failed_order_is_answered_and_the_service_continues(
    shop: tuple[TestClient, str], committed: Callable[[str], list[bytes | None]]
) -> None:
    client, topic = shop
    with failpoints.armed("before_db_commit", failpoints.raises(dualwrite.DeliveryError("No."))):
        answer = client.post("/orders", json=order(1))
    assert (answer.status_code, answer.json()) == (503, {"detail": "No.", "in_doubt": False})
    assert client.get("/orders/001").status_code == 404
    assert client.post("/orders", json=order(1)).status_code == 201
    assert len(committed(topic)) == 1


@pytest.mark.parametrize("shop", ["fastapi_service", "fastapi_async_service"], indirect=True)
@pytest.mark.parametrize(("code", "status"), [(sqlite3.SQLITE_FULL, 503), (sqlite3.SQLITE_ERROR, 500)])
def test_the_database_error_of_a_statement_is_answered(
    shop: tuple[TestClient, str], monkeypatch: pytest.MonkeyPatch, code: int, status: int
) -> None:
    client, _ = shop

    def fail(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("from the database")
        error.sqlite_errorcode = code
        raise OperationalError("INSERT", {}, error)

    monkeypatch.setattr(Insert, "values", fail)
    answer = client.post("/orders", json=order(1))
    assert (answer.status_code, answer.json()["in_doubt"]) == (status, False)
    monkeypatch.undo()
    assert client.post("/orders", json=order(1)).status_code == 201


@pytest.mark.parametrize("kind", ["InDoubtTransactionError", "LostTransactionError", "UnverifiedTransactionError"])
def test_an_order_that_may_be_there_is_in_doubt(shop: tuple[TestClient, str], kind: str) -> None:
    client, _ = shop
    with failpoints.armed("before_db_commit", failpoints.raises(getattr(dualwrite, kind)("Who knows?"))):
        answer = client.post("/orders", json=order(1))
    assert (answer.status_code, answer.json()) == (503, {"detail": "Who knows?", "in_doubt": True})


@pytest.mark.parametrize("shop", ["fastapi_own_session"], indirect=True)
def test_an_order_whose_commit_was_not_answered_is_in_doubt(
    shop: tuple[TestClient, str], monkeypatch: pytest.MonkeyPatch, committed: Callable[[str], list[bytes | None]]
) -> None:
    """It has committed, and its session has lost the connection. Found by a soak run."""
    client, topic = shop
    send_commit = JoinedTransaction._send_commit

    def lost(transaction: JoinedTransaction) -> None:
        send_commit(transaction)
        raise transaction._errors.commit_unknown(OSError("the connection is lost"))

    monkeypatch.setattr(JoinedTransaction, "_send_commit", lost)
    answer = client.post("/orders", json=order(1))
    monkeypatch.undo()
    assert (answer.status_code, answer.json()["in_doubt"]) == (503, True)
    assert client.get("/orders/001").json() == order(1)
    assert len(committed(topic)) == 1
    assert client.post("/orders", json=order(1)).status_code == 409


def test_a_writer_whose_id_was_recovered_reopens_it(shop: tuple[TestClient, str], url: str) -> None:
    client, _ = shop
    report = dualwrite.recover(prefix="shop.")
    assert {report.transactional_id.partition("~")[0] for report in report.ids} == {f"shop.{number}" for number in (1, 2)}
    codes = [client.post("/orders", json=order(number)).status_code for number in range(12)]
    assert codes[4:] == [201] * 8
    assert set(codes[:4]) <= {201, 500, 503}


@pytest.mark.slow
def test_the_service_resolves_its_transactions_and_closes_its_writers(
    url: str, new_name: Callable[[str], str], committed: Callable[[str], list[bytes | None]]
) -> None:
    topic = new_name("topic")
    module = load("fastapi_service", topic)
    crash = (
        "import dualwrite; writer = dualwrite.connect(transactional_id='shop.1')\n"
        f"with writer.transaction() as tx: tx.send({topic!r}, 'left')"
    )
    environment = {**os.environ, "DUALWRITE_FAILPOINTS": "after_db_commit=exit"}
    command = [sys.executable, "-W", "ignore", "-c", crash]
    assert subprocess.run(command, env=environment, timeout=LIMIT, check=False).returncode == failpoints.EXIT_CODE
    with TestClient(module.app):
        assert committed(topic) == [b"left"]
    with dualwrite.open_recoverer() as recoverer:
        assert recoverer.pending() == ()
