"""Describing producers and finding hanging transactions on real brokers, beside healthy transactions that are as old."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from apache_tool import transactions_tool
from confluent_kafka import Producer

from dualwrite.admin import HangingSearch, Reason, TransactionAdmin
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerError, ConfigurationError, UnknownTopicError
from dualwrite.kafka import probe
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.native.native_producer import NativeProducer
from fixtures.broker import TRUSTING, make_topic, started, wait_for_markers
from fixtures.pace import LIMIT, done, until
from fixtures.tiers import thinned
from fixtures.transactions import HOUR_MS, NewName, Transactions

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "transactions.md"
VERSIONS = ["4.2.2", "3.9.1"]
HANGING = {"unknown": Reason.UNKNOWN_PRODUCER, "elsewhere": Reason.WITHOUT_PARTITION, "fenced": Reason.OTHER_EPOCH}


@pytest.fixture(scope="module", params=thinned(VERSIONS, kept=VERSIONS[:1], quick=VERSIONS[:1]))
def trusting(request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """The only one, so that the search finds nothing but what these tests make."""
    with started(kafka_version=request.param, config=TRUSTING) as cluster:
        yield cluster


def name(kind: str) -> str:
    """The topic of a kind of transaction, and its id."""
    return f"hang.{kind}"


class Scene(Transactions):
    """Topics with one partition: healthy transactions and hanging ones, an hour old by the timestamps of their batches."""

    def __init__(self, cluster: DevCluster, coordinator: WireTransactionCoordinator) -> None:
        super().__init__(cluster, name)
        self.coordinator = coordinator
        self.two_phase = probe(self.servers).two_phase
        self.native: list[NativeProducer] = []

    def prepare(self, kind: str, timestamp: int) -> None:
        """A prepared transaction, under two-phase commit, whose timeout never comes."""
        make_topic(self.broker, name(kind))
        producer = NativeProducer(KafkaConfig.of(self.servers), name(kind), self.coordinator, two_phase=True)
        self.native.append(producer)
        producer.init_transactions(timeout=LIMIT)
        producer.begin_transaction()
        producer.send(name(kind), b"v", timestamp=timestamp)
        producer.prepare_transaction(timeout=LIMIT)

    def make_hang(self, kind: str, timestamp: int) -> None:
        """A batch that the coordinator knows nothing of."""
        make_topic(self.broker, name(kind))
        if kind == "unknown":
            self.hang(name(kind))
            return
        also = self.open(name(f"{kind}.also"), timestamp=timestamp)
        described = self.coordinator.describe(also)
        assert described is not None
        self.hang(name(kind), described.producer_id, described.epoch)
        if kind == "fenced":
            self.producers.pop()
            for _ in range(2):
                wait_for_markers(self.servers)
                assert self.coordinator.init_producer_id(also).name in ("NONE", "CONCURRENT_TRANSACTIONS")


def reasons(search: HangingSearch) -> dict[str, Reason]:
    return {found.opened.topic.removeprefix("hang."): found.reason for found in search.hanging}


@pytest.fixture(scope="module")
def scene(trusting: DevCluster) -> Iterator[Scene]:
    old = int(time.time() * 1000) - HOUR_MS
    with closing(WireTransactionCoordinator(KafkaConfig.of(trusting.bootstrap_servers), timeout=LIMIT)) as coordinator:
        made = Scene(trusting, coordinator)
        made.open(name("open"), timestamp=old)
        made.open(name("recent"), timestamp=old + HOUR_MS)
        if made.two_phase:
            made.prepare("prepared", old)
        for kind in HANGING:
            made.make_hang(kind, old)
        wait_for_markers(made.servers)
        yield made
        for producer in made.native:
            producer.close()
        made.producers.clear()


# --- find-hanging ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("trusting", VERSIONS, indirect=True)
def test_exactly_the_hanging_transactions_are_found(scene: Scene, admin: TransactionAdmin) -> None:
    search = admin.find_hanging()
    assert reasons(search) == HANGING
    assert search.complete
    assert search.limit_ms == 20 * 60_000
    assert search.open == len([*HANGING, *scene.producers, *scene.native])
    by_topic = {found.opened.topic: found for found in search.hanging}
    unknown, elsewhere = by_topic[name("unknown")], by_topic[name("elsewhere")]
    assert (unknown.transactional_id, unknown.opened.producer.producer_id) == (None, 4_000_000)
    assert unknown.opened.producer.transaction_start_offset == 0
    assert (elsewhere.transactional_id, elsewhere.coordinator) == (name("elsewhere.also"), 1)
    assert elsewhere.description is not None
    assert elsewhere.description.partitions == {(name("elsewhere.also"), 0)}


@pytest.mark.slow
def test_an_old_transaction_alone_does_not_hang(scene: Scene, admin: TransactionAdmin) -> None:
    assert reasons(admin.find_hanging(max_transaction_timeout=0)) == HANGING
    assert admin.find_hanging(max_transaction_timeout=2 * HOUR_MS / 1000).hanging == ()


@pytest.mark.slow
def test_transactions_that_come_and_go_during_the_search_do_not_hang(
    scene: Scene, admin: TransactionAdmin, new_name: NewName
) -> None:
    topic, stop = new_name("busy"), threading.Event()
    make_topic(scene.broker, topic)

    def write(name: str) -> None:
        producer = Producer({"bootstrap.servers": scene.servers, "transactional.id": name, "linger.ms": 0})
        producer.init_transactions(LIMIT)
        while not stop.is_set():
            producer.begin_transaction()
            producer.produce(topic, b"v")
            assert producer.flush(LIMIT) == 0
            producer.commit_transaction(LIMIT)

    with ThreadPoolExecutor() as threads:
        writers = [threads.submit(write, new_name("id")) for _ in range(3)]
        try:
            until(lambda: admin.find_hanging(topic=topic).open, "a transaction is open")
            searches = [admin.find_hanging(topic=topic, max_transaction_timeout=0) for _ in range(10)]
        finally:
            stop.set()
        for writer in writers:
            done(writer)
    assert all(search.hanging == () and search.complete for search in searches)


@pytest.mark.slow
def test_the_search_can_be_narrowed(scene: Scene, admin: TransactionAdmin) -> None:
    search = admin.find_hanging(topic=name("unknown"), partitions=[0], broker=1)
    assert (reasons(search), search.searched) == ({"unknown": Reason.UNKNOWN_PRODUCER}, 1)
    assert admin.find_hanging(topic=name("open")).hanging == ()
    with pytest.raises(ConfigurationError, match="without a topic"):
        admin.find_hanging(partitions=[0])


# --- describe-producers ----------------------------------------------------------------------------------------------------


def test_the_producers_of_a_partition(scene: Scene, admin: TransactionAdmin) -> None:
    (found,) = admin.describe_producers(name("open"))
    (producer,) = found.producers
    described = scene.coordinator.describe(name("open"))
    assert described is not None
    assert (found.partition, found.broker, found.problem) == (0, 1, None)
    assert (producer.producer_id, producer.epoch) == (described.producer_id, described.epoch)
    assert (producer.transaction_start_offset, producer.last_sequence) == (0, 0)
    assert producer.last_timestamp_ms is not None
    assert HOUR_MS <= (producer.age_ms(int(time.time() * 1000)) or 0) < 2 * HOUR_MS


def test_missing_partitions_and_brokers(scene: Scene, admin: TransactionAdmin, new_name: NewName) -> None:
    def problem(topic: str, **what: Any) -> BaseException | None:
        (found,) = admin.describe_producers(topic, **what)
        return found.problem

    assert isinstance(problem(new_name("missing")), UnknownTopicError)
    assert isinstance(problem(name("open"), partitions=[5]), UnknownTopicError)
    nobody = problem(name("open"), partitions=[0], broker=9)
    assert isinstance(nobody, BrokerError)
    assert "Broker 9 has no replica" in str(nobody)


# --- Apache's own tool ------------------------------------------------------------------------------------------------------


def documented_columns() -> set[str]:
    """Apache's columns that the page compares with ours."""
    table = PAGE.read_text(encoding="utf-8").partition("| column of Apache's tool |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


@pytest.mark.soak  # in CI: its view of producers and hanging transactions
def test_apaches_tool_lists_and_describes_the_same(scene: Scene, admin: TransactionAdmin) -> None:
    listed = {
        (row["TransactionalId"], int(row["Coordinator"]), int(row["ProducerId"]), row["TransactionState"])
        for row in transactions_tool(scene.servers, "list")
    }
    assert listed == {(one.transactional_id, one.coordinator, one.producer_id, one.state) for one in admin.list()}
    (row,) = transactions_tool(scene.servers, "describe", "--transactional-id", name("open"))
    assert row.keys() <= documented_columns()
    (found,) = admin.describe([name("open")])
    assert found.description is not None
    assert (int(row["CoordinatorId"]), row["TransactionState"]) == (found.coordinator, found.description.status.value)
    assert (int(row["ProducerId"]), int(row["ProducerEpoch"])) == (found.description.producer_id, found.description.epoch)
    assert int(row["TransactionTimeoutMs"]) == found.description.timeout_ms
    assert int(row["CurrentTransactionStartTimeMs"]) == found.description.start_time_ms
    assert row["TopicPartitions"] == f"{name('open')}-0"


@pytest.mark.soak  # in CI: what hangs, told by what the tests did
def test_apaches_tool_finds_the_same_producers_and_hanging_transactions(scene: Scene, admin: TransactionAdmin) -> None:
    rows = transactions_tool(scene.servers, "describe-producers", "--topic", name("open"), "--partition", "0")
    assert {heading for row in rows for heading in row} <= documented_columns()
    (found,) = admin.describe_producers(name("open"))
    assert [(int(row["ProducerId"]), int(row["ProducerEpoch"]), int(row["LastTimestamp"])) for row in rows] == [
        (one.producer_id, one.epoch, one.last_timestamp_ms) for one in found.producers
    ]
    assert [row["CurrentTransactionStartOffset"] for row in rows] == ["0"]
    rows = transactions_tool(scene.servers, "find-hanging", "--broker-id", "1")
    assert {heading for row in rows for heading in row} <= documented_columns() | {"Topic", "Partition"}
    assert {(row["Topic"], int(row["ProducerId"]), int(row["ProducerEpoch"]), int(row["StartOffset"])) for row in rows} == {
        (one.topic, one.producer.producer_id, one.producer.epoch, one.producer.transaction_start_offset)
        for one in (hanging.opened for hanging in admin.find_hanging().hanging)
    }
