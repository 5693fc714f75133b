"""Scenes of the console."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from console.console_scene import ConsoleScene
from dualwrite.devcluster import DevCluster


@pytest.fixture
def scene(postgres_url: str, broker: DevCluster) -> Iterator[ConsoleScene]:
    made = ConsoleScene(postgres_url, broker)
    yield made
    made.close()
