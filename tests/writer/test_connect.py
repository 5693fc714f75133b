"""What `connect` accepts and what it leaves open: settings from the environment, engines, stores."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from kazoo.client import KazooClient

import dualwrite
from dualwrite import failpoints
from dualwrite.opening import open_recoverer
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.zookeeper import ZooKeeperStore
from fixtures.pace import LIMIT
from fixtures.zookeeper_client import zookeeper_client
from fixtures.zookeeper_server import ZooKeeperServer
from writer.scene import Scene


def test_an_address_alone_keeps_the_other_kafka_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the environment's other settings it would connect with PLAINTEXT and without a login."""
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", "elsewhere:1")
    monkeypatch.setenv("DUALWRITE_KAFKA_SECURITY_PROTOCOL", "SASL_PLAINTEXT")
    monkeypatch.setenv("DUALWRITE_KAFKA_SASL_MECHANISM", "NONE-SUCH")
    with pytest.raises(dualwrite.ConfigurationError, match="NONE-SUCH"):
        dualwrite.connect("sqlite:///none.db", kafka="127.0.0.1:1", transactional_id="id")
    monkeypatch.setenv("DUALWRITE_KAFKA_SASL_MECHANISM", "PLAIN")
    monkeypatch.setenv("DUALWRITE_KAFKA_SASL_USERNAME", "me")
    monkeypatch.setenv("DUALWRITE_KAFKA_SASL_PASSWORD", "s3cret")
    for open_one in (open_recoverer, dualwrite.open_recoverer):
        with open_one("sqlite:///none.db", kafka="127.0.0.1:1") as recoverer:
            config = recoverer._coordinator.network.config
            assert (config.servers, config.protocol, config.sasl.username) == ("127.0.0.1:1", "SASL_PLAINTEXT", "me")
    with dualwrite.open_recoverer("sqlite:///none.db", kafka={"bootstrap.servers": "127.0.0.1:1"}) as recoverer:
        assert recoverer._coordinator.network.config.protocol == "PLAINTEXT"  # a dict replaces all settings


@pytest.fixture
def users_zookeeper_client(zookeeper_server: ZooKeeperServer) -> Iterator[KazooClient]:
    with zookeeper_client(zookeeper_server.hosts) as client:
        yield client


@pytest.fixture(params=["sql", "rocksdb", "zookeeper"])
def users_store(request: pytest.FixtureRequest, sqlite_scene: Scene, tmp_path: Any) -> TxnStateStore:
    make: dict[str, Callable[[], TxnStateStore]] = {
        "sql": lambda: SqlStateStore(sqlite_scene.engine),
        "rocksdb": lambda: RocksDBStore(str(tmp_path / "rocks")),
        "zookeeper": lambda: ZooKeeperStore(request.getfixturevalue("users_zookeeper_client")),
    }
    store = make[request.param]()
    request.addfinalizer(store.close)  # noqa: PT021  (the store is made by a parameter)
    return store


def test_two_writers_on_one_store_of_the_user(sqlite_scene: Scene, users_store: TxnStateStore) -> None:
    first, second = sqlite_scene.with_new_id(), sqlite_scene.with_new_id()
    with first.connect(users_store) as staying:
        with second.connect(users_store) as leaving, leaving.transaction() as tx:
            tx.send(second.topic, "1")
        with staying.transaction() as tx:
            tx.send(first.topic, "1")
        dualwrite.recover(users_store, kafka=first.servers, ids=[second.transactional_id], timeouts=first.timeouts)
        with staying.transaction() as tx:
            tx.send(first.topic, "2")
    assert (first.messages(), second.messages()) == ([1, 2], [1])
    assert users_store.list() != []


def test_an_engine_of_the_user_stays_open(sqlite_scene: Scene) -> None:
    disposed: list[sa.Engine] = []
    sa.event.listen(sqlite_scene.engine, "engine_disposed", disposed.append)
    with sqlite_scene.connect() as writer:
        sqlite_scene.write(writer, 1)
    sqlite_scene.recover()
    assert disposed == []


def test_a_writer_that_opens_warns_of_failpoints_that_are_ignored(
    sqlite_scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite_scene.connect() as writer:
        sqlite_scene.write(writer, 1)
    assert "DUALWRITE_FAILPOINTS" not in caplog.text
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, "after_begin=kill")
    with sqlite_scene.connect() as writer:
        sqlite_scene.write(writer, 2)
    assert "DUALWRITE_FAILPOINTS is set and ignored" in caplog.text


WRITES = """
import json, sys
import dualwrite
from sqlalchemy import text
url, servers, name, topic = sys.argv[1:]
with dualwrite.connect(url, kafka=servers, transactional_id=name, producer="native") as writer, writer.transaction() as tx:
    tx.db.execute(text("SELECT 1"))
    tx.send(topic, "1")
print(json.dumps(sorted(sys.modules)))
"""
NOT_NEEDED = {
    "kafka",
    "confluent_kafka",
    "alembic",
    "sqlalchemy.orm",
    "dualwrite.jobs",
    "dualwrite.migration",
    "pymysql",
    "kazoo",
}
"""Must not be loaded."""


@pytest.mark.slow
def test_a_writer_with_the_native_producer_on_postgresql_loads_only_what_it_uses(scene: Scene) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WRITES, scene.url, scene.servers, scene.transactional_id, scene.topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert not NOT_NEEDED & set(json.loads(done.stdout))
    assert scene.messages() == [1]
