"""A broker that throttles (KIP-219) answers: callers wait, the journal stays shut, and what takes too long names the quota."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka.protocol.metadata import MetadataRequest

import dualwrite
from dualwrite import DeliveryError, PoolOptions, Timeouts, Transaction
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster
from dualwrite.kafka.client.broker_connection import Connection, ConnectionThrottledError, about_the_cluster
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.migration import upgrade
from dualwrite.observability.outages import kafka_at
from dualwrite.observability.readings import current_readings
from fixtures.broker import make_topic, read_values
from fixtures.pace import LIMIT, limit
from fixtures.quotas import set_quota
from fixtures.wire_server import WireServer

NewName = Callable[[str], str]

LARGE = 20_000 * "x"


@pytest.fixture
def topic(broker: DevCluster, new_name: NewName) -> str:
    name = new_name("quota")
    make_topic(broker, name)
    return name


@pytest.fixture
def url(tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path}/x.db"
    upgrade(found)
    return found


def send(tx: Transaction, topic: str, value: str) -> Transaction:
    tx.send(topic, value)
    return tx


def limited(broker: DevCluster, client_id: str, bytes_per_second: float) -> dict[str, Any]:
    """Settings of a client whose messages may not have more bytes."""
    set_quota(broker, client_id, "producer_byte_rate", bytes_per_second)
    return {"bootstrap.servers": broker.bootstrap_servers, "client.id": client_id}


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_a_quota_holds_back_units_and_not_into_the_journal(
    broker: DevCluster, url: str, topic: str, caplog: pytest.LogCaptureFixture, producer: Any
) -> None:
    """Each unit takes longer than the 1.5 s without an answer after which messages go into the journal."""
    options = PoolOptions(when_kafka_is_down="journal", timeout=limit(120))
    kafka = limited(broker, topic, 5_000)
    with (
        caplog.at_level(logging.WARNING),
        dualwrite.create_pool(
            url, kafka=kafka, prefix=topic, producer=producer, options=options, timeouts=Timeouts(delivery=limit(60))
        ) as pool,
    ):
        outcomes = [pool.run(send, topic, f"{number}{LARGE}").outcome for number in range(4)]
    assert outcomes == ["published"] * 4
    assert [value[:1] for value in read_values(broker.bootstrap_servers, topic)] == [b"0", b"1", b"2", b"3"]
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("dualwrite.")]
    ours = [text for text in texts if broker.bootstrap_servers in text or topic in text]  # not what earlier tests have left
    assert not [text for text in ours if "does not answer" in text or "journal" in text]
    (told,) = (text for text in texts if "throttles" in text and topic in text)
    assert f"producer_byte_rate or request_percentage of client.id {topic!r}" in told
    assert max(reading.value for reading in current_readings() if reading.name == "kafka_throttled_seconds") > 0


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_what_a_quota_holds_back_for_too_long_says_so(broker: DevCluster, url: str, topic: str, producer: Any) -> None:
    """The first message uses up the quota for minutes. Its commit is not held back, and the next message is."""
    timeouts = Timeouts(kafka=LIMIT, delivery=limit(3))
    with dualwrite.connect(
        url,
        kafka=limited(broker, topic, 100),
        transactional_id=topic,
        producer=producer,
        timeouts=timeouts,
        when_kafka_is_down="journal",
    ) as writer:
        with writer.transaction() as tx:
            tx.send(topic, LARGE)
        assert tx.outcome == "published"
        with (
            pytest.raises(DeliveryError, match=f"(?s)by the quota producer_byte_rate .* of client.id '{topic}'") as raised,
            writer.transaction() as tx,
        ):
            tx.send(topic, "small")
    error = raised.value
    assert error.retriable
    assert 0 < error.throttled <= limit(3) + 1
    assert "journal" not in str(error)


@pytest.mark.slow
def test_a_quota_holds_back_all_connections_of_a_client(broker: DevCluster, url: str, topic: str) -> None:
    """A writer that is opened again, as the journal's drain is after an error, has a new connection, and the same quota."""
    kafka = limited(broker, topic, 100)
    with (
        dualwrite.connect(url, kafka=kafka, transactional_id=f"{topic}.1", producer="native") as first,
        first.transaction() as tx,
    ):
        tx.send(topic, LARGE)
    short = Timeouts(delivery=1)
    with (
        dualwrite.connect(url, kafka=kafka, transactional_id=f"{topic}.2", timeouts=short) as second,
        pytest.raises(DeliveryError, match="by the quota"),
        second.transaction() as tx,
    ):
        tx.send(topic, "small")
    other = {**kafka, "client.id": f"{topic}-other"}
    with (
        dualwrite.connect(url, kafka=other, transactional_id=f"{topic}.3", producer="native") as third,
        third.transaction() as tx,
    ):
        tx.send(topic, "of another client")
    assert tx.outcome == "published"


def test_a_connection_sends_nothing_while_a_quota_holds_it_back() -> None:
    """A wait that is too long for the caller is an error, before anything is sent, and the connection stays usable."""
    throttle_ms = iter([300, 0, 60_000])

    def metadata(request: Any) -> Any:
        answer = WireServer.default_handlers(server)[MetadataRequest](request)
        answer.throttle_time_ms = next(throttle_ms)
        return answer

    with WireServer({MetadataRequest: metadata}) as server:
        config = KafkaConfig.of({"bootstrap.servers": server.bootstrap_servers, "client.id": "throttled"})
        host, port = server.bootstrap_servers.split(":")
        connection = Connection(Address(host, int(port)), config)
        connection.call(about_the_cluster())
        began = time.monotonic()
        connection.call(about_the_cluster())
        assert time.monotonic() - began >= 0.3
        connection.call(about_the_cluster())
        seen = len(server.requests)
        with pytest.raises(ConnectionThrottledError, match="a quota holds back requests"):
            connection.call(about_the_cluster(), Deadline(0.1))
        assert len(server.requests) == seen
        assert connection.usable
        assert kafka_at(config.servers).throttling.quota == "request_percentage of client.id 'throttled'"
        connection.close()
