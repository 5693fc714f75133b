"""A time limit covers everything that a call waits for: name lookup, connecting, TLS, login, the coordinator, the answer.

In these tests every other limit is ten minutes: if the call's limit is not passed down, the test runs into pytest's timeout.
A call that waits a few seconds longer than it may is found by `kept`, which looks at the limit of each single wait.
The servers are fakes, since no real broker stops exactly at the point that a test is about.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from kafka.protocol.admin import DescribeConfigsRequest, DescribeTransactionsRequest, DescribeTransactionsResponse
from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest, FindCoordinatorResponse, MetadataRequest
from kafka.protocol.metadata import MetadataResponse as Metadata
from kafka.protocol.producer import EndTxnRequest, EndTxnResponse, ProduceRequest
from kafka.protocol.sasl import SaslHandshakeRequest

import dualwrite
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError, DeliveryError
from dualwrite.kafka.base import ProducerFactory
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.connecting import ConnectionAttempt
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.kafka.inspect import probe
from dualwrite.kafka.librdkafka.librdkafka_producer import LibrdkafkaProducer
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.kafka.native.sender import Sender
from dualwrite.migration import upgrade
from dualwrite.recipe.ownership import Ownership, Parties
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.recovery.resolve import resolve_id
from dualwrite.settings import Timeouts
from dualwrite.state import ProducerKind
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT as PATIENCE
from fixtures.pace import joined
from fixtures.wire_server import HANG_UP, NODE_ID, WireServer

LIMIT = 0.2
TEN_MINUTES = {"socket.timeout.ms": 600_000, "socket.connection.setup.timeout.ms": 600_000}
LOGIN = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "u",
    "sasl.password": "p",
}
LOADING, CONCURRENT_TRANSACTIONS = 14, 51
BLACK_HOLE = 2
"""The node whose address drops packets."""


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port that drops packets: its accept queue is full, so the system ignores new connections."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield int(listener.getsockname()[1])


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end of the test; for handlers that don't answer before it."""
    event = threading.Event()
    yield event
    event.set()


@contextmanager
def kept(seconds: float = LIMIT) -> Iterator[None]:
    """For one call: no wait is given more than the limit, and no deadline ends after the first one, which is the call's own.

    This measures what the waits are given, not how long they take, which depends on the machine.
    """
    thread = threading.get_ident()
    waits: list[float] = []
    ends: list[float] = []
    made = Deadline.__init__

    def make(self: Deadline, *arguments: Any) -> None:
        made(self, *arguments)
        if threading.get_ident() == thread:
            ends.append(self._at)

    def recorded(wait: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any) -> Any:
            if threading.get_ident() == thread:
                waits.append(float("inf") if arguments[-1] is None else arguments[-1])
            return wait(*arguments)

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deadline, "__init__", make)
        patch.setattr(socket.socket, "settimeout", recorded(socket.socket.settimeout))
        patch.setattr(selectors.DefaultSelector, "select", recorded(selectors.DefaultSelector.select))
        patch.setattr(time, "sleep", recorded(time.sleep))
        patch.setattr(ConnectionAttempt, "wait", recorded(ConnectionAttempt.wait))
        yield
    assert ends
    assert max(ends) == ends[0], f"a deadline ended {max(ends) - ends[0]:.1f} s after the call's"
    assert max(waits, default=0) <= seconds, f"waits of {waits}"


def config_of(port: int, **more: Any) -> KafkaConfig:
    return KafkaConfig.of({"bootstrap.servers": f"127.0.0.1:{port}", **TEN_MINUTES, **more})


def describe_in_vain(port: int, **more: Any) -> None:
    """Both with an existing deadline and with a limit for this call only; the error states the limit."""
    for own, given in ((LIMIT, None), (600.0, LIMIT)):
        coordinator = WireTransactionCoordinator(config_of(port, **more), timeout=own)
        try:
            with kept(), pytest.raises(BrokerUnavailableError, match=r"within 0\.2 s|can be reached"):
                coordinator.describe("orders", timeout=given)
        finally:
            coordinator.close()


def test_a_host_that_drops_packets_is_not_waited_for_beyond_the_limit(black_hole: int) -> None:
    describe_in_vain(black_hole)


def test_a_name_server_is_not_waited_for_beyond_the_limit(released: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_arguments: Any, **_more: Any) -> Any:
        asked.set()
        released.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    describe_in_vain(9092, **{"bootstrap.servers": "kafka.example:9092"})
    assert asked.is_set()


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"])
def test_a_server_that_never_answers_is_not_waited_for_beyond_the_limit(silent_server: int, protocol: str) -> None:
    describe_in_vain(silent_server, **{**LOGIN, "security.protocol": protocol})


@pytest.mark.parametrize("request_class", [ApiVersionsRequest, FindCoordinatorRequest, DescribeTransactionsRequest])
def test_a_request_that_is_never_answered_is_not_waited_for_beyond_the_limit(
    released: threading.Event, request_class: type
) -> None:
    with WireServer({request_class: lambda _: released.wait() and HANG_UP}) as server, _released_at_the_end(released):
        describe_in_vain(server.port)


def test_a_login_that_is_never_answered_is_not_waited_for_beyond_the_limit(released: threading.Event) -> None:
    handlers = {SaslHandshakeRequest: lambda _: released.wait() and HANG_UP}
    with WireServer(handlers) as server, _released_at_the_end(released):
        describe_in_vain(server.port, **LOGIN)


def test_a_coordinator_that_keeps_loading_is_not_asked_beyond_the_limit() -> None:
    def loading(request: Any) -> Any:
        coordinator = FindCoordinatorResponse.Coordinator
        nowhere = {"node_id": -1, "host": "", "port": -1, "error_code": LOADING}
        return FindCoordinatorResponse(
            **nowhere, coordinators=[coordinator(key=k, **nowhere) for k in request.coordinator_keys]
        )

    with WireServer({FindCoordinatorRequest: loading}) as server:
        describe_in_vain(server.port)


def test_an_answer_that_comes_byte_by_byte_is_not_read_beyond_the_limit() -> None:
    """Each byte arrives within the limit, the whole answer does not."""
    with _Trickle() as port:
        describe_in_vain(port)


def test_a_transaction_that_does_not_end_is_not_waited_for_beyond_the_limit() -> None:
    ended = lambda _: EndTxnResponse(error_code=CONCURRENT_TRANSACTIONS, producer_id=-1, producer_epoch=-1)  # noqa: E731
    with WireServer({EndTxnRequest: ended}) as server:
        coordinator = WireTransactionCoordinator(config_of(server.port), timeout=600)
        with kept(), pytest.raises(BrokerUnavailableError, match=r"within 0\.2 s"):
            coordinator.end_transaction("orders", producer_id=1, epoch=0, commit=True, timeout=LIMIT)
        coordinator.close()


@pytest.mark.parametrize("ask", ["knows_end_by_epoch", "list_transactions", "transaction_max_timeout_ms", "probe"])
def test_every_request_keeps_to_its_limit(black_hole: int, ask: str) -> None:
    coordinator = WireTransactionCoordinator(config_of(black_hole), timeout=LIMIT)
    asks: dict[str, Callable[[], Any]] = {
        "knows_end_by_epoch": coordinator.knows_end_by_epoch,
        "list_transactions": coordinator.list_transactions,
        "transaction_max_timeout_ms": coordinator.transaction_max_timeout_ms,
        "probe": lambda: probe(config_of(black_hole), timeout=LIMIT),
    }
    with kept(), pytest.raises(BrokerUnavailableError, match=f"127.0.0.1:{black_hole}"):
        asks[ask]()
    coordinator.close()


@pytest.mark.slow
def test_another_threads_call_counts_against_the_limit(black_hole: int) -> None:
    coordinator = WireTransactionCoordinator(config_of(black_hole), timeout=5)

    def ask() -> None:
        with suppress(BrokerUnavailableError):
            coordinator.describe("first")

    asking = threading.Thread(target=ask)
    asking.start()
    while coordinator._client._lock.acquire(blocking=False):
        coordinator._client._lock.release()
    with kept(), pytest.raises(BrokerUnavailableError, match="another thread"):
        coordinator.describe("second", timeout=LIMIT)
    coordinator.close()
    joined(asking)


@pytest.mark.slow
def test_a_server_that_drops_packets_does_not_prevent_requests_to_others(broker: DevCluster, black_hole: int) -> None:
    servers = f"127.0.0.1:{black_hole},{broker.bootstrap_servers}"
    config = KafkaConfig.of({"bootstrap.servers": servers, **TEN_MINUTES})
    coordinator = WireTransactionCoordinator(config, timeout=PATIENCE)
    assert coordinator.describe("no-such-id") is None
    coordinator.close()


# --- opening and recovery ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStateStore]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'rows.db'}")
    upgrade(engine)
    yield SqlStateStore(engine)
    engine.dispose()


def test_recovery_keeps_to_its_own_limit_for_any_limit_of_the_coordinator(black_hole: int, store: SqlStateStore) -> None:
    claim = store.claim("orders", "test", timeout=LIMIT)
    store.acquire_generation(claim, ProducerKind.NATIVE)
    coordinator = WireTransactionCoordinator(config_of(black_hole), timeout=600)
    with kept():
        report = Recoverer(store, coordinator, timeouts=Timeouts(kafka=LIMIT)).recover(["orders"])
    assert isinstance(report.ids[0].error, BrokerUnavailableError)
    coordinator.close()


def test_all_generations_of_an_id_share_one_limit(store: SqlStateStore) -> None:
    """Each of them ends too late: the limit is over before the second one is described."""
    ended = lambda _: EndTxnResponse(error_code=CONCURRENT_TRANSACTIONS, producer_id=-1, producer_epoch=-1)  # noqa: E731
    with WireServer({EndTxnRequest: ended, DescribeTransactionsRequest: ongoing}) as server:
        claim = store.claim("orders", "test", timeout=LIMIT)
        for _ in range(3):
            store.acquire_generation(claim, ProducerKind.NATIVE)
        coordinator = WireTransactionCoordinator(config_of(server.port), timeout=600)
        with kept(), pytest.raises(BrokerUnavailableError, match=r"within 0\.2 s"):
            resolve_id(store, coordinator, claim, timeout=LIMIT)
        coordinator.close()
        described = {r.transactional_ids[0] for r in server.received(DescribeTransactionsRequest)}
        assert len(described) <= 1  # none, if the limit was over before


def ongoing(request: Any) -> Any:
    """Every id has an ongoing transaction."""
    found = DescribeTransactionsResponse.TransactionState
    facts = {"transaction_timeout_ms": 1, "transaction_start_time_ms": 1, "producer_id": 1, "producer_epoch": 0, "topics": []}
    return DescribeTransactionsResponse(
        transaction_states=[
            found(error_code=0, transactional_id=name, transaction_state="Ongoing", **facts)
            for name in request.transactional_ids
        ]
    )


@pytest.mark.parametrize("producer", ["native", "librdkafka"])
def test_connect_keeps_to_its_limit_if_nothing_answers(black_hole: int, store: SqlStateStore, producer: Any) -> None:
    settings = {"bootstrap.servers": f"127.0.0.1:{black_hole}", "socket.connection.setup.timeout.ms": 600_000}
    with kept(), pytest.raises(BrokerUnavailableError, match=f"127.0.0.1:{black_hole}"):
        dualwrite.connect(store, kafka=settings, transactional_id="orders", producer=producer, timeouts=Timeouts(kafka=LIMIT))
    assert store.read("orders") is None


@pytest.mark.parametrize("kind", [ProducerKind.NATIVE, ProducerKind.LIBRDKAFKA])
def test_taking_over_keeps_to_its_limit_if_the_longest_timeout_is_unknown(
    released: threading.Event, store: SqlStateStore, kind: ProducerKind
) -> None:
    """`transaction.max.timeout.ms`, which the producer takes if the user sets none."""
    told = {DescribeConfigsRequest: lambda _: released.wait() and HANG_UP}
    if kind is ProducerKind.NATIVE:
        told[DescribeTransactionsRequest] = ongoing  # otherwise it is only registered
    with WireServer(told) as server, _released_at_the_end(released):
        config = config_of(server.port)
        coordinator = WireTransactionCoordinator(config, timeout=600)
        make = NativeProducer if kind is ProducerKind.NATIVE else LibrdkafkaProducer
        factory = ProducerFactory(kind, lambda kafka_id: make(config, kafka_id, coordinator))
        store.acquire_generation(store.claim("orders", "test", timeout=PATIENCE), kind)
        own = Ownership(Parties(store, coordinator, factory, Timeouts(kafka=LIMIT)), "orders")
        own.adopt(store.claim("orders", "test", timeout=PATIENCE))
        with kept(), pytest.raises(BrokerUnavailableError, match=r"within 0\.2 s"):
            own.start()
        coordinator.close()


# --- inside a transaction ------------------------------------------------------------------------------------------------


def led_by(server: WireServer, black_hole: int, leaders: list[int]) -> Callable[[Any], Any]:
    """Metadata in which every topic has one partition per leader: the server, or a node at the black hole."""

    def metadata(request: Any) -> Any:
        answer = server.metadata(request)
        answer.brokers = [
            *answer.brokers,
            Metadata.MetadataResponseBroker(node_id=BLACK_HOLE, host="127.0.0.1", port=black_hole),
        ]
        found = Metadata.MetadataResponseTopic
        answer.topics = [
            found(
                error_code=0,
                name=asked.name,
                partitions=[
                    found.MetadataResponsePartition(
                        error_code=0, partition_index=i, leader_id=leader, replica_nodes=[], isr_nodes=[], offline_replicas=[]
                    )
                    for i, leader in enumerate(leaders)
                ],
            )
            for asked in request.topics or ()
        ]
        return answer

    return metadata


@pytest.fixture
def new_producer() -> Iterator[Callable[..., NativeProducer]]:
    """Creates producers in a transaction, for a server, with ten minutes for each connection and answer."""
    with ExitStack() as opened:

        def new(server: WireServer, *, delivery_timeout: float = 600.0, **more: Any) -> NativeProducer:
            config = config_of(server.port, **{"retry.backoff.ms": 1, **more})
            producer = NativeProducer(config, "orders", two_phase=True, delivery_timeout=delivery_timeout)
            opened.callback(producer.close)
            producer.init_transactions(timeout=PATIENCE)
            producer.begin_transaction()
            return producer

        yield new


def test_send_and_prepare_keep_to_their_limits_with_a_leader_that_drops_packets(
    black_hole: int, new_producer: Callable[..., NativeProducer]
) -> None:
    with WireServer() as server:
        server._handlers[MetadataRequest] = led_by(server, black_hole, [BLACK_HOLE])
        producer = new_producer(server, delivery_timeout=LIMIT)
        with kept():
            producer.send("topic", b"v")
        with kept(), pytest.raises(DeliveryError, match=r"within 0\.2 s"):
            producer.prepare_transaction(timeout=LIMIT)


@pytest.mark.parametrize("keys", [None, [b"%d" % number for number in range(2000)]])
def test_many_messages_to_a_leader_that_drops_packets_share_one_limit(
    black_hole: int, new_producer: Callable[..., NativeProducer], monkeypatch: pytest.MonkeyPatch, keys: list[bytes] | None
) -> None:
    """Every full batch waits for the leader, in what the batches before have left of the limit; then the buffer is full."""
    left: list[float] = []
    push = Sender.push

    def recorded(self: Sender, deadline: Deadline) -> None:
        left.append(deadline.left)
        push(self, deadline)

    monkeypatch.setattr(Sender, "push", recorded)
    with WireServer() as server:
        server._handlers[MetadataRequest] = led_by(server, black_hole, [BLACK_HOLE])
        producer = new_producer(server, delivery_timeout=LIMIT, **{"batch.size": 10_000, "queue.buffering.max.kbytes": 1000})
        with pytest.raises(DeliveryError, match=r"stayed full within 0\.2 s"):
            producer.send_many("topic", [bytes(1000)] * 2000, keys=keys)
    assert len(left) > 1
    assert left == sorted(left, reverse=True)
    assert left[-1] < LIMIT / 2


@pytest.mark.slow
def test_a_leader_that_drops_packets_does_not_block_other_partitions(
    black_hole: int, new_producer: Callable[..., NativeProducer]
) -> None:
    with WireServer() as server:
        server._handlers[MetadataRequest] = led_by(server, black_hole, [NODE_ID, BLACK_HOLE])
        producer = new_producer(server)
        for value in (b"first", b"second"):
            producer.send("topic", value, partition=1)
            producer.send("topic", value, partition=0)
        with kept(5), pytest.raises(DeliveryError, match="not acknowledged"):
            producer.prepare_transaction(timeout=5)
        stored = [p.records for r in server.received(ProduceRequest) for t in r.topic_data for p in t.partition_data]
        assert b"first" in b"".join(map(bytes, stored))
        assert b"second" in b"".join(map(bytes, stored))


@pytest.mark.slow
def test_prepare_of_librdkafka_keeps_to_its_limit_with_a_coordinator_that_drops_packets(
    broker: DevCluster, black_hole: int, new_name: Callable[[str], str]
) -> None:
    """The messages are stored, but whether the transaction is ours can't be checked."""
    config = KafkaConfig.of({"bootstrap.servers": broker.bootstrap_servers, "transaction.timeout.ms": 60_000})
    coordinator = WireTransactionCoordinator(config_of(black_hole), timeout=600)
    producer = LibrdkafkaProducer(config, new_name("id"), coordinator)
    producer.init_transactions(timeout=PATIENCE)
    producer.begin_transaction()
    producer.send(new_name("topic"), b"v")
    with kept(3), pytest.raises((BrokerUnavailableError, DeliveryError), match="within"):
        producer.prepare_transaction(timeout=3)
    producer.close()
    coordinator.close()


# --- fake servers ----------------------------------------------------------------------------------------------------------


class _released_at_the_end:  # noqa: N801  (read as a phrase)
    """Releases the handlers before the server's context manager waits for them."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._event.set()


class _Trickle:
    """Announces an answer of a thousand bytes to each client, and sends one byte every few milliseconds."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> int:
        self._threads[0].start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._send, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _send(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.sendall(struct.pack(">ii", 1000, 1))
                while not self._stopped.wait(0.01):
                    connection.sendall(b"\0")
            except OSError:
                return
