"""A broker for tests that kill members of consumer groups, and databases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dualwrite.devcluster import DevCluster
from fixtures.broker import started

BRISK = {
    "group.min.session.timeout.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": "2000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "300",
}
"""A dead member's partitions are given to others soon, in both protocols."""


@pytest.fixture(scope="session")
def brisk() -> Iterator[DevCluster]:
    with started(config=BRISK) as cluster:
        yield cluster
