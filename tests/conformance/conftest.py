"""The scenes for the conformance suite of stores: a fixture for each database. The tests share the SQL databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from rocksdb_conformance import RocksDBScene
from sql_conformance import ServerScene, SqliteScene
from zookeeper_conformance import ZooKeeperScene

from dualwrite import migration
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import TcpProxy
from dualwrite.testing.stores import StoreScene
from fixtures.mariadb_server import MariaDBServer
from fixtures.zookeeper_server import ZooKeeperServer

NAME = "conformance"


def upgraded(url: str) -> str:
    migration.upgrade(url)
    return url


@pytest.fixture(scope="session")
def conformance_sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    return upgraded(f"sqlite:///{tmp_path_factory.mktemp(NAME) / 'test.db'}")


@pytest.fixture
def sqlite_scene(conformance_sqlite: str) -> Iterator[StoreScene]:
    with SqliteScene(conformance_sqlite) as scene:
        yield scene


@pytest.fixture(scope="session")
def conformance_postgresql(postgres_server: PostgresServer) -> str:
    return upgraded(postgres_server.create_database(NAME))


@pytest.fixture
def postgresql_scene(
    postgres_server: PostgresServer, conformance_postgresql: str, postgres_proxy: TcpProxy
) -> Iterator[StoreScene]:
    through = postgres_server.url_at(postgres_proxy.port, NAME)
    with ServerScene(conformance_postgresql, through, postgres_proxy, b"COMMIT\0") as scene:
        yield scene


@pytest.fixture(scope="session")
def conformance_mariadb(mariadb_server: MariaDBServer) -> str:
    return upgraded(mariadb_server.create_database(NAME))


@pytest.fixture
def mariadb_scene(mariadb_server: MariaDBServer, conformance_mariadb: str, mariadb_proxy: TcpProxy) -> Iterator[StoreScene]:
    through = mariadb_server.url_at(mariadb_proxy.port, NAME)
    with ServerScene(conformance_mariadb, through, mariadb_proxy, b"\x03COMMIT") as scene:
        yield scene


@pytest.fixture
def rocksdb_scene(tmp_path: Path) -> Iterator[StoreScene]:
    with RocksDBScene(tmp_path / "rocksdb") as scene:
        yield scene


@pytest.fixture
def zookeeper_scene(zookeeper_server: ZooKeeperServer) -> Iterator[StoreScene]:
    server = zookeeper_server
    with TcpProxy("127.0.0.1", server.port) as proxy, ZooKeeperScene(server, f"/{uuid4().hex}", proxy) as scene:
        yield scene
