"""Fixtures of the job tests: a job on each kind of database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from job_scene import JobScene, MakeScene

from dualwrite.devcluster import DevCluster


@pytest.fixture
def make_scene(broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[MakeScene]:
    """Creates a job on a database."""
    with ExitStack() as scenes:

        def make(url: str, **settings: Any) -> JobScene:
            made = JobScene(url, broker.bootstrap_servers, new_name("job"), **settings)
            scenes.callback(made.close)
            return made

        yield make


@pytest.fixture
def scene(make_scene: MakeScene, database_url: str) -> JobScene:
    """A job on each kind of database."""
    return make_scene(database_url)


@pytest.fixture
def mariadb_scene(make_scene: MakeScene, mariadb_url: str) -> JobScene:
    """A job on MariaDB."""
    return make_scene(mariadb_url)


@pytest.fixture
def postgres_scene(make_scene: MakeScene, postgres_url: str) -> JobScene:
    """A job on PostgreSQL."""
    return make_scene(postgres_url)
