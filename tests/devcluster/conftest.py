"""Fixtures of the tests of the development cluster: a running cluster, and a state directory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dualwrite.devcluster import DevCluster, cluster_names
from dualwrite.devcluster.locations import STATE_DIR_VARIABLE


@pytest.fixture(scope="session")
def cluster() -> Iterator[DevCluster]:
    """One broker for all tests that do not change it, or restore it."""
    with DevCluster.temporary(nodes=1) as cluster:
        yield cluster


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A separate state directory for the test; its clusters end with the test."""
    place = tmp_path / "state"
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(place))
    yield place
    for name in cluster_names():
        DevCluster(name).down(purge=True)
