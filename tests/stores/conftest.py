"""Fixtures of the store tests: new databases, and the first claim of the id on each kind of store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from store_scene import first_claim

from dualwrite.stores.base import Claim
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from fixtures.mariadb_server import MariaDBServer

_SERVERS = {"postgresql": "postgres_server", "mariadb": "mariadb_server"}


@pytest.fixture
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Creates a database of a kind, without our tables, and returns its URL."""

    def new(kind: str) -> str:
        name = f"new_{uuid4().hex}"
        if kind == "sqlite":
            return f"sqlite:///{tmp_path / name}.db"
        server: PostgresServer | MariaDBServer = request.getfixturevalue(_SERVERS[kind])
        return server.create_database(name)

    return new


@pytest.fixture
def claim(store: SqlStateStore) -> Claim:
    return first_claim(store)


@pytest.fixture
def postgres_claim(postgres_store: SqlStateStore) -> Claim:
    return first_claim(postgres_store)


@pytest.fixture
def mariadb_claim(mariadb_store: SqlStateStore) -> Claim:
    return first_claim(mariadb_store)
