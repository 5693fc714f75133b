"""Every store of dualwrite passes the conformance suite, on a real database; in the quick tier, a store of each kind."""

from __future__ import annotations

import pytest

from dualwrite.testing.stores import StoreConformance, StoreScene


class TestSqlite(StoreConformance):
    @pytest.fixture
    def scene(self, sqlite_scene: StoreScene) -> StoreScene:
        return sqlite_scene


class TestPostgresql(StoreConformance):
    @pytest.fixture
    def scene(self, postgresql_scene: StoreScene) -> StoreScene:
        return postgresql_scene


@pytest.mark.slow
class TestMariaDB(StoreConformance):
    @pytest.fixture
    def scene(self, mariadb_scene: StoreScene) -> StoreScene:
        return mariadb_scene


class TestRocksDB(StoreConformance):
    @pytest.fixture
    def scene(self, rocksdb_scene: StoreScene) -> StoreScene:
        return rocksdb_scene


@pytest.mark.slow
class TestZooKeeper(StoreConformance):
    @pytest.fixture
    def scene(self, zookeeper_scene: StoreScene) -> StoreScene:
        return zookeeper_scene
