from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from job_scene import JobScene

from dualwrite.devcluster import DevCluster


@pytest.fixture
def scene(database_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[JobScene]:
    """A job on each kind of database."""
    made = JobScene(database_url, broker.bootstrap_servers, new_name("job"))
    yield made
    made.close()


@pytest.fixture
def mariadb_scene(mariadb_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[JobScene]:
    """A job on MariaDB."""
    made = JobScene(mariadb_url, broker.bootstrap_servers, new_name("job"))
    yield made
    made.close()


@pytest.fixture
def postgres_scene(postgres_url: str, broker: DevCluster, new_name: Callable[[str], str]) -> Iterator[JobScene]:
    """A job on PostgreSQL."""
    made = JobScene(postgres_url, broker.bootstrap_servers, new_name("job"))
    yield made
    made.close()
