"""The results of the probe on all kinds of brokers; it leaves nothing behind on any of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import grimp
import pytest
from confluent_kafka import Producer
from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse
from kafka.protocol.producer import InitProducerIdRequest

import dualwrite
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster
from dualwrite.diagnosis.examination import two_phase_by_broker
from dualwrite.errors import (
    BrokerAuthorizationError,
    DualWriteError,
    TwoPhaseCommitRefusedError,
)
from dualwrite.kafka import PROBE_ID, BrokerCapabilities, TwoPhaseObstacle, choose, probe
from dualwrite.kafka.client import messages_generated
from dualwrite.kafka.client.brokers import Network
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.inspect import TWO_PHASE_SETTING, to_coordinator
from dualwrite.kafka.native.native_producer import NativeProducer, ProducerState
from dualwrite.recovery.report import Outcome
from dualwrite.settings import ProducerName, Settings, Timeouts
from dualwrite.state import ProducerKind, TransactionStatus
from dualwrite.testing import failpoints
from fixtures.acls import Names, Operation, Resource, grant
from fixtures.broker import make_topic, read_topic, started
from fixtures.capabilities import EVERYTHING
from fixtures.logins import login_as
from fixtures.pace import LIMIT, until
from fixtures.tables import table
from fixtures.wire_server import WireServer, init_producer_id_answer

Coordinators = Callable[..., WireTransactionCoordinator]
NewName = Callable[[str], str]
TIMEOUTS = Timeouts(claim=LIMIT, kafka=LIMIT, delivery=LIMIT)


def known(found: BrokerCapabilities) -> BrokerCapabilities:
    """The capabilities without the cluster id, which differs for each cluster."""
    assert found.cluster_id
    return replace(found, cluster_id="")


UNSUPPORTED_VERSION, FORBIDDEN, CONCURRENT_TRANSACTIONS, PRODUCER_FENCED, INVALID_REQUEST = 35, 53, 51, 90, 42


def assert_nothing_left(coordinator: WireTransactionCoordinator, transactional_id: str = PROBE_ID) -> None:
    assert coordinator.describe(transactional_id) is None
    assert transactional_id not in {listed.kafka_transactional_id for listed in coordinator.list_transactions()}


# --- brokers by their settings ----------------------------------------------------------------------------------------


def test_two_phase_commit_is_detected_and_nothing_is_left_behind(
    broker: DevCluster, coordinator: WireTransactionCoordinator, new_name: NewName
) -> None:
    name = new_name("id")  # doctor registers the one that a probe uses by default
    for _ in range(3):
        assert known(probe(broker.bootstrap_servers, transactional_id=name)) == EVERYTHING
    assert EVERYTHING.native
    assert_nothing_left(coordinator, name)


def test_an_id_in_use_is_not_changed(
    broker: DevCluster, coordinator: WireTransactionCoordinator, ongoing: Callable[..., Producer], new_name: NewName
) -> None:
    name = new_name("id")
    producer = ongoing(name, new_name("topic"))
    before = coordinator.describe(name)
    assert before is not None
    assert before.status is TransactionStatus.ONGOING
    assert known(probe(broker.bootstrap_servers, transactional_id=name)) == EVERYTHING
    assert coordinator.describe(name) == before
    producer.commit_transaction(LIMIT)


def test_transaction_version_1_has_no_native_producer(
    broker_v4: DevCluster, coordinator_v4: WireTransactionCoordinator
) -> None:
    found = probe(broker_v4.bootstrap_servers)
    assert found.transaction_version == 1
    assert found.end_txn_v5
    assert not found.native
    assert_nothing_left(coordinator_v4)


@pytest.fixture(scope="module")
def switched_off() -> Iterator[DevCluster]:
    with started(config={"transaction.two.phase.commit.enable": "false", "transaction.max.timeout.ms": "120000"}) as cluster:
        yield cluster


@pytest.mark.soak
def test_a_broker_with_two_phase_commit_switched_off(switched_off: DevCluster, new_coordinator: Coordinators) -> None:
    found = probe(switched_off.bootstrap_servers)
    assert found.native
    assert found.init_producer_id_v6
    assert not found.two_phase
    assert found.two_phase_obstacle is TwoPhaseObstacle.SWITCHED_OFF
    assert found.two_phase_setting is False
    assert not found.keep_prepared_txn
    assert found.transaction_max_timeout_ms == 120_000
    assert_nothing_left(new_coordinator(switched_off.bootstrap_servers))


@pytest.mark.parametrize(("fixture", "code"), [("broker", 0), ("switched_off", FORBIDDEN)])
def test_the_probe_finds_what_a_producer_gets(
    request: pytest.FixtureRequest, new_name: NewName, fixture: str, code: int
) -> None:
    servers = request.getfixturevalue(fixture).bootstrap_servers
    name = new_name("id")
    asked = messages_generated.InitProducerIdRequest(
        version=6, transactional_id=name, transaction_timeout_ms=1, enable2_pc=True
    )
    with closing(Network(KafkaConfig.of(servers))) as network:
        answer = to_coordinator(network, name, lambda coordinator, limit: coordinator.call(asked, limit), Deadline(LIMIT))
    assert answer.error_code == code
    assert probe(servers).two_phase is (code == 0)


@pytest.mark.parametrize("keep", [False, True])
def test_a_broker_without_two_phase_commit_is_reported_with_the_settings_to_change(
    switched_off: DevCluster, new_name: NewName, keep: bool
) -> None:
    producer = NativeProducer(KafkaConfig.of(switched_off.bootstrap_servers), new_name("id"), two_phase=True)
    for take in (
        lambda: producer.init_transactions(keep_prepared_txn=keep, timeout=LIMIT),
        lambda: producer.create(timeout=LIMIT),
    ):
        with pytest.raises(TwoPhaseCommitRefusedError, match=r"transaction\.two\.phase\.commit\.enable=true"):
            take()
    assert producer.state is ProducerState.UNINITIALIZED
    producer.close()


@pytest.mark.soak
def test_the_probe_waits_for_a_broker_that_is_starting(switched_off: DevCluster) -> None:
    before = probe(switched_off.bootstrap_servers)
    switched_off.kill(1)
    switched_off.start(1, wait=False)
    assert probe(switched_off.bootstrap_servers, timeout=LIMIT) == before


@pytest.mark.soak
def test_a_broker_with_unstable_versions_off(new_coordinator: Coordinators) -> None:
    with started(config={"unstable.api.versions.enable": "false"}) as cluster:
        found = probe(cluster.bootstrap_servers)
        assert_nothing_left(new_coordinator(cluster.bootstrap_servers))
    assert found.native
    assert not found.init_producer_id_v6
    assert (found.two_phase, found.two_phase_obstacle) == (False, TwoPhaseObstacle.UNSTABLE_VERSIONS_OFF)
    assert found.two_phase_setting is True


@pytest.mark.slow
def test_a_broker_before_4_0(new_coordinator: Coordinators) -> None:
    with started(kafka_version="3.9.1") as cluster:
        found = probe(cluster.bootstrap_servers)
        assert_nothing_left(new_coordinator(cluster.bootstrap_servers))
    assert known(found) == BrokerCapabilities(
        brokers=1,
        transaction_version=0,
        end_txn_v5=False,
        init_producer_id_v6=False,
        produce_v12=False,
        two_phase=False,
        two_phase_obstacle=TwoPhaseObstacle.BROKER_TOO_OLD,
        two_phase_setting=None,
        keep_prepared_txn=False,
        transaction_max_timeout_ms=900_000,
        metadata_version=21,
        metadata_level=21,
        checks_markers=False,
    )
    assert not found.native


# --- ACLs -------------------------------------------------------------------------------------------------------------


def probe_until(
    settings: dict[str, str], name: str, done: Callable[[BrokerCapabilities | BrokerAuthorizationError], bool]
) -> Any:
    """Probe until `done` accepts the result: the broker applies a new ACL a moment later."""

    def look() -> BrokerCapabilities | BrokerAuthorizationError | None:
        found: BrokerCapabilities | BrokerAuthorizationError
        try:
            found = probe(settings, transactional_id=name)
        except BrokerAuthorizationError as error:
            found = error
        return found if done(found) else None

    return until(look, "what was granted", pause=0.05)


@pytest.mark.slow
def test_each_missing_acl_is_distinguished(guarded: DevCluster, new_coordinator: Coordinators) -> None:
    name, settings = "orders#probe", login_as(guarded, "writer")

    def grant_orders(operation: Operation) -> None:
        grant(guarded, "writer", operation, Resource.TRANSACTIONAL_ID, "orders", Names.PREFIXED)

    with pytest.raises(BrokerAuthorizationError, match="grant the principal Write on this") as caught:
        probe(settings, transactional_id=name)
    assert caught.value.transactional_id == name

    grant_orders(Operation.DESCRIBE)
    refused = probe_until(settings, name, lambda found: "EndTxn" in str(found))
    assert isinstance(refused, BrokerAuthorizationError)
    assert refused.name == "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"

    grant_orders(Operation.WRITE)
    blind = probe_until(settings, name, lambda found: isinstance(found, BrokerCapabilities))
    assert blind.native
    assert (blind.two_phase, blind.two_phase_obstacle) == (False, TwoPhaseObstacle.OFF_OR_FORBIDDEN)
    assert (blind.two_phase_setting, blind.transaction_max_timeout_ms) == (None, None)

    grant(guarded, "writer", Operation.DESCRIBE_CONFIGS, Resource.CLUSTER, "kafka-cluster")
    seeing = probe_until(settings, name, lambda found: found.two_phase_setting is not None)
    assert (seeing.two_phase, seeing.two_phase_obstacle) == (False, TwoPhaseObstacle.FORBIDDEN)

    grant_orders(Operation.TWO_PHASE_COMMIT)
    assert known(probe_until(settings, name, lambda found: found.two_phase)) == EVERYTHING
    with pytest.raises(BrokerAuthorizationError):
        probe(settings)  # its ACLs are for ids that start with "orders"
    for used in (name, PROBE_ID):
        assert_nothing_left(new_coordinator(guarded.bootstrap_servers), used)


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_the_rights_of_the_guide_are_enough_for_a_writer_with_lanes(
    guarded: DevCluster, sqlite_url: str, new_name: NewName, producer: ProducerName
) -> None:
    """docs/guides/ids-and-kubernetes.md: the ids of all lanes, with the store's id, begin with the transactional id."""

    def take_over() -> None:
        report = dualwrite.recover(sqlite_url, kafka=settings, ids=[name], timeouts=TIMEOUTS)
        found.extend(one.outcome for one in report)

    found: list[Outcome] = []
    prefix, topic = new_name("shop"), new_name("topic")
    make_topic(guarded, topic)
    settings = login_as(guarded, "writer")
    rights = [Operation.WRITE, Operation.DESCRIBE, *([Operation.TWO_PHASE_COMMIT] if producer == "native" else [])]
    for operation in rights:
        grant(guarded, "writer", operation, Resource.TRANSACTIONAL_ID, prefix, Names.PREFIXED)
    for operation in (Operation.WRITE, Operation.READ):
        grant(guarded, "writer", operation, Resource.TOPIC, topic)
    name = f"{prefix}-0"
    is_two_phase = producer == "native"
    probe_until(settings, name, lambda found: isinstance(found, BrokerCapabilities) and found.two_phase == is_two_phase)
    writer = dualwrite.connect(sqlite_url, kafka=settings, transactional_id=name, producer=producer, lanes=3, timeouts=TIMEOUTS)
    with writer:
        for number in range(6):
            with writer.transaction() as tx:
                tx.send(topic, str(number))
        rows = [row for one in writer.store.list() if (row := writer.store.read(one)) is not None]
        kafka_ids = {row.kafka_id(row.generation) for row in rows}
        assert len(kafka_ids) == 3
        assert all(kafka_id.startswith(name) and f"#{row.store_id}." in kafka_id for kafka_id in kafka_ids for row in rows)
        with failpoints.armed("before_kafka_commit", take_over), suppress(DualWriteError), writer.transaction() as tx:
            tx.send(topic, "6")
    assert Counter(found) == {Outcome.COMMITTED: 1, Outcome.ALREADY_COMMITTED: 2}
    assert sorted(int(one.value() or b"") for one in read_topic(guarded.bootstrap_servers, topic)) == list(range(7))


@pytest.mark.parametrize(
    ("obstacle", "two_phase", "level"),
    [
        (TwoPhaseObstacle.FORBIDDEN, None, logging.WARNING),
        (TwoPhaseObstacle.FORBIDDEN, False, logging.INFO),
        (TwoPhaseObstacle.OFF_OR_FORBIDDEN, None, logging.INFO),
        (TwoPhaseObstacle.SWITCHED_OFF, None, logging.INFO),
    ],
)
def test_a_writer_warns_if_only_a_missing_acl_prevents_two_phase_commit(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    obstacle: TwoPhaseObstacle,
    two_phase: bool | None,
    level: int,
) -> None:
    found = replace(EVERYTHING, two_phase=False, two_phase_obstacle=obstacle)
    monkeypatch.setattr(choose, "probe", lambda *_, **__: found)
    config, settings = KafkaConfig.of("127.0.0.1:1"), Settings(transactional_id="orders", two_phase=two_phase)
    with caplog.at_level(logging.INFO, choose.__name__), closing(WireTransactionCoordinator(config)) as coordinator:
        assert choose.choose_producer(config, coordinator, settings).kind is ProducerKind.NATIVE
    (record,) = [record for record in caplog.records if record.name == choose.__name__]
    assert record.levelno == level
    assert (obstacle.value in record.getMessage()) == (two_phase is None)


@pytest.mark.parametrize(
    ("two_phase", "kind"),
    [(None, ProducerKind.NATIVE_TWO_PHASE), (True, ProducerKind.NATIVE_TWO_PHASE), (False, ProducerKind.LIBRDKAFKA)],
)
def test_without_two_phase_commit_the_metadata_version_of_4_0_means_librdkafka(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, two_phase: bool | None, kind: ProducerKind
) -> None:
    monkeypatch.setattr(choose, "probe", lambda *_, **__: replace(EVERYTHING, metadata_level=25))
    config, settings = KafkaConfig.of("127.0.0.1:1"), Settings(transactional_id="orders", two_phase=two_phase)
    with closing(WireTransactionCoordinator(config)) as coordinator:
        assert choose.choose_producer(config, coordinator, settings).kind is kind
    assert ("KAFKA-19367" in caplog.text) == (kind is ProducerKind.LIBRDKAFKA)


# --- answers that no released broker gives ----------------------------------------------------------------------------


def probed(by_two_phase: dict[bool, int], **server: Any) -> tuple[BrokerCapabilities, list[Any]]:
    """Probe a server whose answer to InitProducerId depends on `enable2Pc`; also returns the requests it received."""

    def answer(request: Any) -> Any:
        return init_producer_id_answer(error_code=by_two_phase[request.enable2_pc])

    with WireServer({InitProducerIdRequest: answer}, **server) as running:
        return probe(running.bootstrap_servers), running.received(InitProducerIdRequest)


@pytest.mark.parametrize("code", [0, PRODUCER_FENCED, CONCURRENT_TRANSACTIONS])
def test_keep_prepared_txn_is_probed_with_a_request_that_changes_no_known_id(code: int) -> None:
    found, (request,) = probed({True: code})
    assert found.two_phase
    assert found.two_phase_obstacle is None
    assert found.keep_prepared_txn
    assert request.API_VERSION == 6
    assert request.transactional_id == PROBE_ID
    assert request.enable2_pc
    assert request.keep_prepared_txn
    assert (request.producer_id, request.producer_epoch) == (2**63 - 2, 0)


def test_keep_prepared_txn_without_two_phase_commit() -> None:
    found, requests = probed({True: FORBIDDEN, False: 0})
    assert (found.two_phase, found.two_phase_obstacle) == (False, TwoPhaseObstacle.OFF_OR_FORBIDDEN)
    assert found.keep_prepared_txn
    assert [request.keep_prepared_txn for request in requests] == [True, True]


def test_an_unknown_answer_means_no_support() -> None:
    found, _ = probed({True: INVALID_REQUEST})
    assert (found.two_phase, found.two_phase_obstacle) == (False, TwoPhaseObstacle.UNKNOWN)
    assert not found.keep_prepared_txn


def test_a_missing_version_with_hidden_settings_has_two_possible_reasons() -> None:
    found, requests = probed({}, versions={InitProducerIdRequest: (0, 5)})
    assert requests == []
    assert found.two_phase_obstacle is TwoPhaseObstacle.NO_INIT_PRODUCER_ID_V6


# --- imports ----------------------------------------------------------------------------------------------------------


def test_the_probe_needs_no_librdkafka() -> None:
    graph = grimp.build_graph("dualwrite", include_external_packages=True)
    assert graph.find_shortest_chain("dualwrite.kafka.inspect", "confluent_kafka") is None


@table(
    ("setting", "version", "expected"),
    [("true", 6, True), ("false", 6, False), (None, 6, None), ("true", 5, False), (None, 5, False)],
)
def test_whether_a_broker_has_two_phase_commit(setting: str | None, version: int, expected: bool | None) -> None:
    result = DescribeConfigsResponse.DescribeConfigsResult

    def described(request: Any) -> Any:
        (asked,) = request.resources
        values = {} if setting is None else {TWO_PHASE_SETTING: setting}
        configs = [result.DescribeConfigsResourceResult(name=name, value=value) for name, value in values.items()]
        return DescribeConfigsResponse(
            results=[
                result(error_code=0, resource_type=asked.resource_type, resource_name=asked.resource_name, configs=configs)
            ]
        )

    with WireServer({DescribeConfigsRequest: described}, versions={InitProducerIdRequest: (0, version)}) as server:
        found = two_phase_by_broker(KafkaConfig.of(server.bootstrap_servers), timeout=LIMIT)
    assert found == {1: expected}
