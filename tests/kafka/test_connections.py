"""Connections to a real broker: how many there are, and what happens to an idle, expired or inherited (fork) one."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import sqlalchemy as sa
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest

import dualwrite
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster, Security
from dualwrite.errors import UnsupportedBrokerError, UsageError
from dualwrite.kafka.client import broker_connection
from dualwrite.kafka.client.broker_connection import ConnectionLostError, open_socket
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.connecting import ConnectionAttempt
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.native import retry_policy
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.migration import upgrade
from fixtures.broker import USERS, make_topic, read_values, started
from fixtures.logins import LOGIN
from fixtures.pace import LIMIT, limit, until
from fixtures.wire_server import WireServer

NewName = Callable[[str], str]
NewProducer = Callable[..., NativeProducer]

SESSION_SECONDS: Final = limit(3)
IDLE_SECONDS: Final = limit(2)  # longer than a broker's heartbeat interval


@pytest.fixture(scope="module")
def strict_host() -> Iterator[DevCluster]:
    """A broker that requires a new login every few seconds (KIP-368), and closes idle connections sooner than usual."""
    settings = {
        "connections.max.reauth.ms": str(round(SESSION_SECONDS * 1000)),
        "connections.max.idle.ms": str(round(IDLE_SECONDS * 1000)),
    }
    with started(security=Security(USERS), config=settings) as cluster:
        yield cluster


@pytest.fixture
def new_producer(strict_host: DevCluster, new_name: NewName) -> Iterator[NewProducer]:
    """Creates producers on `strict_host`, ready to begin; closes them."""
    with ExitStack() as opened:

        def new(protocol: str = "PLAINTEXT", **settings: Any) -> NativeProducer:
            servers = strict_host.bootstrap_servers if protocol == "PLAINTEXT" else strict_host.listeners[protocol]
            given = {"bootstrap.servers": servers, "security.protocol": protocol, **settings}
            producer = NativeProducer(KafkaConfig.of(given), new_name("id"), two_phase=True)
            opened.callback(producer.close)
            producer.init_transactions(timeout=LIMIT)
            return producer

        yield new


def connections_to(servers: str) -> dict[int, str]:
    """Our connections to a node: the local port of each, and its state."""
    port = int(servers.rsplit(":", 1)[1])
    found = psutil.Process().net_connections(kind="tcp")
    return {c.laddr.port: c.status for c in found if c.raddr and c.raddr.port == port}


def established(servers: str) -> set[int]:
    return {port for port, status in connections_to(servers).items() if status == psutil.CONN_ESTABLISHED}


def commit_one(producer: NativeProducer, topic: str, value: bytes) -> None:
    producer.begin_transaction()
    producer.send(topic, value)
    producer.commit_transaction(timeout=LIMIT)


def warm_topic(cluster: DevCluster, topic: str) -> None:
    """Create a topic and write a message: a new topic's leader may refuse messages for a moment, so that they are retried."""
    make_topic(cluster, topic)
    producer = NativeProducer(KafkaConfig.of(cluster.bootstrap_servers), f"warm-{topic}", two_phase=True)
    producer.init_transactions(timeout=LIMIT)
    commit_one(producer, topic, b"warm")
    producer.close()


def values(cluster: DevCluster, topic: str) -> list[bytes | None]:
    """What was committed after the message of `warm_topic`."""
    warm, *found = read_values(cluster.bootstrap_servers, topic)
    assert warm == b"warm"
    return found


# --- how many ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_writer_has_one_connection_to_a_broker_for_all_its_lanes_and_its_coordinator(
    broker: DevCluster, new_name: NewName, tmp_path: Path
) -> None:
    topic, before = new_name("topic"), established(broker.bootstrap_servers)
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'events.db'}")
    upgrade(engine)
    with dualwrite.connect(
        engine, kafka=broker.bootstrap_servers, transactional_id=new_name("id"), producer="native"
    ) as writer:
        for number in range(7):
            with writer.transaction() as tx:
                tx.send(topic, str(number))
                assert len(established(broker.bootstrap_servers) - before) == 1
        with pytest.raises(LookupError), writer.transaction() as tx:  # noqa: PT012  (what the block begins with is undone)
            tx.send(topic, "rolled back")
            raise LookupError
        with writer.transaction() as tx:
            tx.send(topic, "last")
        assert len(established(broker.bootstrap_servers) - before) == 1
    assert established(broker.bootstrap_servers) <= before
    engine.dispose()
    assert read_values(broker.bootstrap_servers, topic) == [*(b"%d" % n for n in range(7)), b"last"]


def test_an_abort_does_not_wait_for_requests_in_flight_on_a_shared_connection(broker: DevCluster, new_name: NewName) -> None:
    """A request left unanswered by one lane is neither attributed to another lane nor repeated by it."""
    coordinator = WireTransactionCoordinator(KafkaConfig.of(broker.bootstrap_servers), timeout=LIMIT)
    config, topic = KafkaConfig.of(broker.bootstrap_servers), new_name("topic")
    warm_topic(broker, topic)
    lanes = [NativeProducer(config, new_name("id"), coordinator, two_phase=True, network=coordinator.network) for _ in range(2)]
    for lane in lanes:
        lane.init_transactions(timeout=LIMIT)
    for number in range(5):
        one, other = lanes
        one.begin_transaction()
        for _ in range(20):
            one.send(topic, bytes(900_000))
        one.abort_transaction(timeout=LIMIT)
        commit_one(other, topic, b"%d" % number)
        lanes.reverse()
    for lane in lanes:
        lane.close()
    coordinator.close()
    assert values(broker, topic) == [b"%d" % n for n in range(5)]


def test_a_connection_found_broken_by_another_call_loses_no_message_of_a_lane_with_requests_in_flight(
    broker: DevCluster, new_name: NewName
) -> None:
    """Batches in flight are retried, in order, on the connection that the other call has opened."""
    config, topic = KafkaConfig.of({"bootstrap.servers": broker.bootstrap_servers, "retry.backoff.ms": 1}), new_name("topic")
    coordinator = WireTransactionCoordinator(config, timeout=LIMIT)
    make_topic(broker, topic)
    lane = NativeProducer(config, new_name("id"), coordinator, two_phase=True, network=coordinator.network)
    lane.init_transactions(timeout=LIMIT)
    sent = []
    for number in range(10):
        lane.begin_transaction()
        for part in range(4):
            sent.append(b"%d.%d" % (number, part))
            lane.send(topic, sent[-1], partition=0)
            lane._accumulator.push(Deadline.after(LIMIT))
        for connection in coordinator.network._connections.values():
            connection._socket.shutdown(socket.SHUT_RDWR if number % 2 else socket.SHUT_WR)
        assert coordinator.describe("no-such-id") is None
        sent.append(b"%d.end" % number)
        lane.send(topic, sent[-1], partition=0)
        lane.commit_transaction(timeout=LIMIT)
    lane.close()
    coordinator.close()
    assert read_values(broker.bootstrap_servers, topic) == sent


def test_closing_a_lane_keeps_the_connection_of_the_others(broker: DevCluster, new_name: NewName) -> None:
    coordinator = WireTransactionCoordinator(KafkaConfig.of(broker.bootstrap_servers), timeout=LIMIT)
    config, topic = KafkaConfig.of(broker.bootstrap_servers), new_name("topic")
    warm_topic(broker, topic)
    one, other = (NativeProducer(config, new_name("id"), coordinator, network=coordinator.network) for _ in range(2))
    for lane in (one, other):
        lane.init_transactions(timeout=LIMIT)
        commit_one(lane, topic, b"v")
    (before,) = [id(c) for c in coordinator.network._connections.values()]
    one.close()
    commit_one(other, topic, b"v")
    assert [id(c) for c in coordinator.network._connections.values()] == [before]
    other.close()
    coordinator.close()
    assert values(broker, topic) == [b"v"] * 3


# --- idle, expired, broken -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_connection_closed_by_the_broker_is_noticed_before_anything_is_sent(
    strict_host: DevCluster, new_producer: NewProducer, new_name: NewName, caplog: pytest.LogCaptureFixture
) -> None:
    """`connections.max.idle.ms`. The sender meets no broken connection, so nothing is retried."""
    producer, topic, servers = new_producer(), new_name("topic"), strict_host.bootstrap_servers
    warm_topic(strict_host, topic)
    commit_one(producer, topic, b"before")
    before = connections_to(servers)
    until(lambda: not established(servers) & set(before), "the broker closes what nobody uses")
    with caplog.at_level(logging.DEBUG, logger="dualwrite.kafka"):
        commit_one(producer, topic, b"after")
    assert servers not in caplog.text  # a broken connection would be logged with its address
    assert values(strict_host, topic) == [b"before", b"after"]


@pytest.mark.slow
def test_a_session_is_renewed_on_its_connection_with_requests_in_flight(
    strict_host: DevCluster, new_producer: NewProducer, new_name: NewName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KIP-368: when a session is renewed no connection is replaced, unless the machine stands still for longer than the
    client's margin: a request then arrives when its session is over.
    """
    monkeypatch.setattr(retry_policy, "_LIMIT", LIMIT)  # a check of the markers that takes longer costs the connection
    login = {"sasl.mechanism": "SCRAM-SHA-512", **LOGIN}
    producer, topic = new_producer("SASL_PLAINTEXT", **login), new_name("topic")
    warm_topic(strict_host, topic)
    commit_one(producer, topic, b"0")
    numbers = itertools.count(1)

    def keeps_its_connections() -> bool:
        before, longest, sent = established(listener), 0.0, 0.0
        began = time.monotonic()
        while (now := time.monotonic()) < began + 1.5 * SESSION_SECONDS:
            longest, sent = max(longest, now - (sent or now)), now
            producer.begin_transaction()
            for number in itertools.islice(numbers, 50):
                producer.send(topic, b"%d" % number, partition=0)
                producer._accumulator.push(Deadline.after(LIMIT))  # several requests in flight at once
            producer.commit_transaction(timeout=LIMIT)
        after = established(listener)
        assert after == before or longest > SESSION_SECONDS / 10, f"connections were replaced: {before}, {after}"
        return after == before

    listener = strict_host.listeners["SASL_PLAINTEXT"]
    until(keeps_its_connections, "a machine that does not stand still for a tenth of a session")
    assert values(strict_host, topic) == [b"%d" % n for n in range(next(numbers))]


def test_a_connection_uses_tcp_keepalive_unless_switched_off() -> None:
    """As for databases: a peer that vanished is detected after a minute, not after two hours."""
    with WireServer() as server:
        for setting, expected in (({}, 1), ({"socket.keepalive.enable": "false"}, 0)):
            config = KafkaConfig.of({"bootstrap.servers": server.bootstrap_servers, **setting})
            coordinator = WireTransactionCoordinator(config)
            coordinator.describe("x")
            (connection,) = coordinator.network._connections.values()
            plug = connection._socket
            assert bool(plug.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) is bool(expected)
            if expected and hasattr(socket, "TCP_KEEPIDLE"):
                assert plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            coordinator.close()


def test_a_connection_whose_opening_fails_in_its_last_step_is_closed() -> None:
    """Here no version of Metadata is known to both sides. A broker that responds just before the time limit is the same case.

    With a broker that was paused, 312 of 2,400 connections were left open until the garbage collection.
    """
    with WireServer(versions={MetadataRequest: (99, 99)}) as server:
        opening = ConnectionAttempt(Address("127.0.0.1", server.port), KafkaConfig.of(server.bootstrap_servers))
        until(lambda: opening.wait(0.1))
        assert isinstance(opening.error, UnsupportedBrokerError)
        assert "Metadata v99 to v99" in str(opening.error)
        assert not established(server.bootstrap_servers)


def test_a_broker_that_requires_a_rebootstrap_at_once_is_a_lost_connection() -> None:
    """KIP-1102, in answer to a client that has not said which broker it wants. No real broker does this."""
    with WireServer({ApiVersionsRequest: lambda _: ApiVersionsResponse(error_code=129, api_keys=[])}) as server:
        opening = ConnectionAttempt(Address("127.0.0.1", server.port), KafkaConfig.of(server.bootstrap_servers))
        until(lambda: opening.wait(0.1))
        assert isinstance(opening.error, ConnectionLostError)
        assert "REBOOTSTRAP_REQUIRED" in str(opening.error)
        assert not established(server.bootstrap_servers)


# --- addresses that can't be connected to --------------------------------------------------------------------------------


def test_an_address_of_a_family_that_the_system_lacks_is_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """A name with an IPv4 address that refuses connections, and an IPv6 address, on a system without IPv6."""
    new_socket = socket.socket

    def without_ipv6(family: int, *arguments: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return new_socket(family, *arguments)

    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", free_port)),
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", free_port, 0, 0)),
    ]
    monkeypatch.setattr(broker_connection.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(broker_connection.socket, "socket", without_ipv6)
    for last in ("Address family not supported", "refused"):
        with pytest.raises(ConnectionLostError, match=last):
            open_socket(Address("broker", 9092), KafkaConfig.of("broker:9092"), Deadline.after(LIMIT))
        found.reverse()


def test_a_host_that_is_no_valid_name_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLostError, match=r"broker\.\.example:9092: can't connect"):
        open_socket(Address("broker..example", 9092), KafkaConfig.of("broker..example:9092"), Deadline.after(LIMIT))


# --- a fork ----------------------------------------------------------------------------------------------------------------


forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def in_child(run: Callable[[], str]) -> str:
    """The result of `run` in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, run().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


@forks
def test_a_producer_is_refused_in_a_forked_child_and_works_in_its_parent(
    broker: DevCluster, new_native: NewProducer, new_name: NewName
) -> None:
    """The child has the other ends of the parent's connections, and the parent's epoch and sequences."""
    producer, topic = new_native(), new_name("topic")
    producer.init_transactions(timeout=LIMIT)
    producer.begin_transaction()
    producer.send(topic, b"parent")

    def use() -> str:
        refused = []
        for call in (
            lambda: producer.send(topic, b"child"),
            lambda: producer.send_many(topic, [b"child"]),
            lambda: producer.commit_transaction(timeout=1),
            lambda: producer.abort_transaction(timeout=1),
        ):
            try:
                call()
            except UsageError as error:
                refused.append("survive a fork" in str(error))
        producer.close()
        return str(refused)

    assert in_child(use) == str([True] * 4)
    producer.send(topic, b"parent")
    producer.commit_transaction(timeout=LIMIT)
    assert read_values(broker.bootstrap_servers, topic) == [b"parent", b"parent"]


@forks
def test_a_coordinator_opens_new_connections_in_a_forked_child(broker: DevCluster) -> None:
    coordinator = WireTransactionCoordinator(KafkaConfig.of(broker.bootstrap_servers), timeout=LIMIT)
    assert coordinator.describe("no-such-id") is None
    assert in_child(lambda: str(coordinator.describe("no-such-id"))) == "None"
    assert coordinator.describe("no-such-id") is None
    coordinator.close()
