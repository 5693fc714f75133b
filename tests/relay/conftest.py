"""Scenes of relays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from relay_scene import RelayScene

from dualwrite.devcluster import DevCluster


@pytest.fixture
def scene(database_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[RelayScene]:
    """An outbox on each kind of database."""
    yield from _scene(database_url, broker, new_name)


@pytest.fixture
def on_sqlite(sqlite_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[RelayScene]:
    """An outbox on SQLite, for what no database is special in."""
    yield from _scene(sqlite_url, broker, new_name)


@pytest.fixture
def on_postgres(postgres_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[RelayScene]:
    """An outbox on PostgreSQL."""
    yield from _scene(postgres_url, broker, new_name)


def _scene(url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[RelayScene]:
    made = RelayScene(url, broker, new_name)
    yield made
    made.engine.dispose()
