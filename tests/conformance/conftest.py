"""The scenes for the conformance suite of stores: a fixture for each database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from rocksdb_conformance import RocksDBScene
from sql_conformance import ServerScene, SqliteScene
from zookeeper_conformance import ZooKeeperScene

from dualwrite.testing.mariadb import MariaDBServer
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import TcpProxy
from dualwrite.testing.stores import StoreScene
from dualwrite.testing.zookeeper import ZooKeeperServer


@pytest.fixture
def sqlite_scene(sqlite_url: str) -> Iterator[StoreScene]:
    with SqliteScene(sqlite_url) as scene:
        yield scene


@pytest.fixture
def postgresql_scene(postgres_server: PostgresServer, postgres_url: str, postgres_proxy: TcpProxy) -> Iterator[StoreScene]:
    through = postgres_server.url_at(postgres_proxy.port, postgres_url.rpartition("/")[2])
    with ServerScene(postgres_url, through, postgres_proxy, b"COMMIT\0") as scene:
        yield scene


@pytest.fixture
def mariadb_scene(mariadb_server: MariaDBServer, mariadb_url: str, mariadb_proxy: TcpProxy) -> Iterator[StoreScene]:
    through = mariadb_server.url_at(mariadb_proxy.port, sa.make_url(mariadb_url).database)
    with ServerScene(mariadb_url, through, mariadb_proxy, b"\x03COMMIT") as scene:
        yield scene


@pytest.fixture
def rocksdb_scene(tmp_path: Path) -> Iterator[StoreScene]:
    with RocksDBScene(tmp_path / "rocksdb") as scene:
        yield scene


@pytest.fixture(scope="module")
def conformance_zookeeper() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def zookeeper_scene(conformance_zookeeper: ZooKeeperServer) -> Iterator[StoreScene]:
    server = conformance_zookeeper
    with TcpProxy("127.0.0.1", server.port) as proxy, ZooKeeperScene(server, f"/{uuid4().hex}", proxy) as scene:
        yield scene
