"""The short form of `python -m crash.load`: four writers for some seconds on each database, with kills."""

from __future__ import annotations

import os

import pytest

from crash import load
from crash.databases import DATABASES, Databases
from dualwrite.devcluster import DevCluster

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("native")]


@pytest.mark.parametrize("database", DATABASES)
def test_writers_under_load_with_random_kills(databases: Databases, broker: DevCluster, database: str) -> None:
    tally = load.run(databases, broker, database, float(os.environ.get("DUALWRITE_LOAD_SECONDS", "15")))
    assert tally.kills
    assert tally.transactions > tally.kills
    print(tally)  # noqa: T201  (pytest -s shows the numbers)
