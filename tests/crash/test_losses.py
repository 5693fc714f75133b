"""The short form of `python -m crash.losses`, with each producer."""

from __future__ import annotations

import os

import pytest

from crash import losses
from crash.cases import PRODUCERS
from crash.databases import Databases
from dualwrite.devcluster import DevCluster

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("producer", PRODUCERS)
def test_what_writers_lose_at_random_steps_is_published_again(
    databases: Databases, prompt_broker: DevCluster, producer: str
) -> None:
    print(losses.run(databases, prompt_broker, producer, float(os.environ.get("DUALWRITE_LOAD_SECONDS", "30"))))  # noqa: T201  (pytest -s shows the numbers)
