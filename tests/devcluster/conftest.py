from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dualwrite.devcluster import DevCluster, cluster_names
from dualwrite.devcluster.locations import STATE_DIR_VARIABLE


@pytest.fixture(scope="session")
def cluster() -> Iterator[DevCluster]:
    """One broker for all tests that only talk to it, or leave it as they found it."""
    with DevCluster.temporary(nodes=1) as cluster:
        yield cluster


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of the test's own, whose clusters end with the test."""
    place = tmp_path / "state"
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(place))
    yield place
    for name in cluster_names():
        DevCluster(name).down(purge=True)
