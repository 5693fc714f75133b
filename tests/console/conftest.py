"""Scenes of the console."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from console.console_scene import ConsoleScene
from dualwrite.console import app, sections, shared_read, subject
from dualwrite.devcluster import DevCluster
from fixtures.broker import started


@pytest.fixture(scope="module")
def quiet_broker() -> Iterator[DevCluster]:
    """A broker on which nobody leaves transactions open."""
    with started() as cluster:
        yield cluster


@pytest.fixture
def quiet_scene(postgres_url: str, quiet_broker: DevCluster) -> Iterator[ConsoleScene]:
    made = ConsoleScene(postgres_url, quiet_broker)
    yield made
    made.close()


@pytest.fixture
def scene(postgres_url: str, broker: DevCluster) -> Iterator[ConsoleScene]:
    made = ConsoleScene(postgres_url, broker)
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not answer is given up after 2 seconds instead of 8, and asked again at once instead of after 40."""
    for module in (app, sections, subject):
        monkeypatch.setattr(module, "LIMIT_SECONDS", 2.0)
    monkeypatch.setattr(shared_read, "_PAUSE_FACTOR", 0)
