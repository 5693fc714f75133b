"""Fixtures for the Kafka-side tests: coordinators, and transactions of a plain client."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Producer
from producer_cases import CASES, LIBRDKAFKA, NATIVE, ON_3_9, WITH_VERSION_1

from dualwrite.admin import TransactionAdmin
from dualwrite.devcluster import DevCluster, Security
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.native.native_producer import NativeProducer
from fixtures.acls import AUTHORIZED
from fixtures.broker import USERS, started
from fixtures.open_transactions import left_open
from fixtures.pace import LIMIT
from fixtures.tiers import thinned
from fixtures.transactions import Transactions

Opener = Callable[..., Producer]


@pytest.fixture(scope="session")
def coordinator(broker: DevCluster) -> Iterator[WireTransactionCoordinator]:
    made = WireTransactionCoordinator(KafkaConfig.of(broker.bootstrap_servers), timeout=LIMIT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def coordinator_v4(broker_v4: DevCluster) -> Iterator[WireTransactionCoordinator]:
    made = WireTransactionCoordinator(KafkaConfig.of(broker_v4.bootstrap_servers), timeout=LIMIT)
    yield made
    made.close()


@pytest.fixture
def trusting(trusting_broker: DevCluster) -> DevCluster:
    """A broker on which transactions can be made to hang; a module may have one of another release."""
    return trusting_broker


@pytest.fixture
def servers(trusting: DevCluster) -> str:
    return trusting.bootstrap_servers


@pytest.fixture
def scene(trusting: DevCluster, new_name: Callable[[str], str]) -> Iterator[Transactions]:
    """Transactions on that broker."""
    made = Transactions(trusting, new_name)
    yield made
    made.producers.clear()


@pytest.fixture
def admin(servers: str) -> Iterator[TransactionAdmin]:
    with TransactionAdmin(servers, timeout=LIMIT) as made:
        yield made


@pytest.fixture
def topic(trusting: DevCluster, new_name: Callable[[str], str]) -> str:
    return Transactions(trusting, new_name).topic()


@pytest.fixture(scope="module")
def guarded_config() -> dict[str, str]:
    """More settings of the broker `guarded`; a module may have its own."""
    return {}


@pytest.fixture(scope="module")
def guarded(guarded_config: dict[str, str]) -> Iterator[DevCluster]:
    """A broker with ACLs: clients of the plain listener may do everything, the users `writer` and `reader` nothing yet."""
    with started(security=Security(USERS), config={**AUTHORIZED, **guarded_config}) as cluster:
        yield cluster


@pytest.fixture
def new_coordinator() -> Iterator[Callable[..., WireTransactionCoordinator]]:
    """Creates coordinators with the test's own settings; closes them."""
    with ExitStack() as opened:

        def new(config: KafkaConfig | str, *, timeout: float = 20) -> WireTransactionCoordinator:
            made = WireTransactionCoordinator(KafkaConfig.of(config), timeout=timeout)
            opened.callback(made.close)
            return made

        yield new


@pytest.fixture
def new_native(
    broker: DevCluster, coordinator: WireTransactionCoordinator, new_name: Callable[[str], str]
) -> Iterator[Callable[..., NativeProducer]]:
    """Creates producers on `broker`, not initialised, with additional Kafka settings; closes them."""
    with ExitStack() as opened:

        def new(kafka_id: str | None = None, *, two_phase: bool = False, **settings: Any) -> NativeProducer:
            given = {name.replace("_", "."): value for name, value in settings.items()}
            config = KafkaConfig.of({"bootstrap.servers": broker.bootstrap_servers, **given})
            producer = NativeProducer(config, kafka_id or new_name("id"), coordinator, two_phase=two_phase)
            opened.callback(producer.close)
            return producer

        yield new


@pytest.fixture
def ongoing(broker: DevCluster) -> Opener:
    """Begins a transaction on `broker` for a transactional id and a topic, with one message, and leaves it open."""
    return partial(left_open, broker.bootstrap_servers)


@pytest.fixture
def ongoing_v4(broker_v4: DevCluster) -> Opener:
    """The same on `broker_v4`."""
    return partial(left_open, broker_v4.bootstrap_servers)


@pytest.fixture
def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


@pytest.fixture(params=thinned(CASES, kept=[NATIVE, LIBRDKAFKA], quick=[NATIVE, LIBRDKAFKA]))
def case(request: pytest.FixtureRequest) -> str:
    """The producer, and the broker if it is not the usual one."""
    found: str = request.param
    return found


@pytest.fixture
def cluster(case: str, request: pytest.FixtureRequest) -> DevCluster:
    found: DevCluster = request.getfixturevalue({ON_3_9: "broker_3_9", WITH_VERSION_1: "broker_v4"}.get(case, "broker"))
    return found
