"""Every producer passes the suite, on a broker that creates topics automatically and on one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from producer_scene import CASES, ProducerScene

from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from fixtures.tiers import thinned


@pytest.fixture(params=thinned(CASES, quick=["native two-phase"]))
def scene(
    request: pytest.FixtureRequest, broker: DevCluster, coordinator: WireTransactionCoordinator
) -> Iterator[ProducerScene]:
    with ExitStack() as opened:
        yield ProducerScene(CASES[request.param], broker, coordinator, opened)


@pytest.fixture(params=thinned(CASES, kept=["librdkafka", "native two-phase"], quick=()))
def strict_scene(
    request: pytest.FixtureRequest, strict_broker: DevCluster, new_coordinator: Callable[..., WireTransactionCoordinator]
) -> Iterator[ProducerScene]:
    with ExitStack() as opened:
        yield ProducerScene(CASES[request.param], strict_broker, new_coordinator(strict_broker.bootstrap_servers), opened)
