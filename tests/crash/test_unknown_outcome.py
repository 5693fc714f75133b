"""COMMIT with an unknown outcome, and Kafka failing at the worst moments: the block reports the outcome, and both sides agree.

A proxy breaks the connection to PostgreSQL; servers are killed with SIGKILL.
"""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import pytest
import sqlalchemy as sa

import dualwrite
from crash.cases import PRODUCERS
from dualwrite import (
    DeliveryError,
    DualWriter,
    InDoubtTransactionError,
    Outcome,
    Phase,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    Timeouts,
    migration,
)
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, TcpProxy
from fixtures.broker import started
from fixtures.pace import LIMIT, done, happened, joined, limit
from fixtures.tiers import thinned
from writer.scene import Base, Scene

COMMIT = b"COMMIT\0"
Later = Callable[[float, Callable[[], object]], None]

pytestmark = pytest.mark.usefixtures("producer", "one_lane", "no_recovery_when_idle")

PREPARED = ["after_prepare", "before_db_commit", "before_kafka_commit"]

mostly_native = pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]), indirect=True)
"""The writer handles an outage of the database or of the whole broker the same way, so librdkafka is left to `-m soak`."""

each_cut = pytest.mark.parametrize(
    ("producer", "cut"),
    thinned(
        product(PRODUCERS, [Link.cut, Link.cut_with_reset]),
        kept=[("native", Link.cut), ("librdkafka", Link.cut_with_reset)],
        quick=[("native", Link.cut)],
    ),
    indirect=["producer"],
)
"""A connection that ends in either way; CI runs each with one producer."""


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server to kill; its data survive."""
    with PostgresServer() as server:
        migration.upgrade(server.url)
        engine = sa.create_engine(server.url)
        Base.metadata.create_all(engine)
        engine.dispose()
        yield server


@pytest.fixture
def later() -> Iterator[Later]:
    """Calls a function after some seconds; the test ends after that call."""
    threads = []

    def after(seconds: float, call: Callable[[], object]) -> None:
        thread = threading.Timer(seconds, call)
        threads.append(thread)
        thread.start()

    yield after
    for thread in threads:
        joined(thread)


class Proxied:
    """A scene whose writer connects through a proxy; the test's own checks bypass it."""

    def __init__(self, server: PostgresServer, proxy: TcpProxy, broker: DevCluster, timeouts: Timeouts | None = None) -> None:
        self.server = server
        self.proxy = proxy
        self.engine = sa.create_engine(server.url)
        self.scene = Scene(self.engine, broker.bootstrap_servers)
        if timeouts is not None:
            self.scene.timeouts = timeouts
        self.url = server.url_at(proxy.port)

    def connect(self) -> DualWriter:
        return self.scene.connect(self.url)

    def end_backend(self) -> None:
        """End the backend that executes the writer's COMMIT, and wait until it is gone and its locks are released."""
        query = sa.text(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE state = 'idle in transaction' AND application_name = 'dualwrite'"
        )
        with self.engine.connect() as connection:
            connection.execute(query)

    def lose_the_database(self, link: Link) -> None:
        """Cut this connection and refuse new ones, until the proxy accepts connections again."""
        self.proxy.refuse()
        link.cut()


@pytest.fixture
def proxied(own_server: PostgresServer, broker: DevCluster) -> Iterator[Proxied]:
    with TcpProxy("127.0.0.1", own_server.port) as proxy:
        made = Proxied(own_server, proxy, broker)
        yield made
        made.engine.dispose()


def assert_committed(scene: Scene, writer: DualWriter) -> None:
    """The block has succeeded: both sides have the transaction immediately, and the writer continues."""
    assert scene.agree() == [1, 2]
    assert writer.phase is Phase.READY
    scene.write(writer, 3)
    assert scene.agree() == [1, 2, 3]
    writer.close()
    scene.assert_resolved()


def assert_rolled_back(scene: Scene, writer: DualWriter, error: StoreCommitFailedError) -> None:
    """Neither side has it, the error says so, and the same transaction succeeds when it is run again."""
    assert error.retriable
    assert error.transactional_id == scene.transactional_id
    assert "rolled back" in str(error)
    assert isinstance(error.__cause__, StoreCommitUnknownError)
    assert scene.agree() == [1]
    assert writer.phase is Phase.READY
    scene.write(writer, 2)
    assert scene.agree() == [1, 2]
    writer.close()
    scene.assert_resolved()


# --- the connection is lost ---------------------------------------------------------------------------------------------


@each_cut
def test_commit_never_arrives(proxied: Proxied, cut: Callable[[Link], None]) -> None:
    scene = proxied.scene
    with proxied.connect() as writer:
        scene.write(writer, 1)
        proxied.proxy.on_client_bytes(COMMIT, cut)
        with pytest.raises(StoreCommitFailedError) as caught:
            scene.write(writer, 2)
        assert_rolled_back(scene, writer, caught.value)


@each_cut
def test_the_answer_to_commit_is_lost(proxied: Proxied, cut: Callable[[Link], None]) -> None:
    scene = proxied.scene
    with proxied.connect() as writer:
        scene.write(writer, 1)
        proxied.proxy.on_client_bytes(COMMIT, cut, when="answered")
        scene.write(writer, 2)
        assert_committed(scene, writer)


@pytest.mark.slow
def test_the_connection_is_lost_while_commit_runs(proxied: Proxied) -> None:
    """A deferred trigger makes COMMIT slow. A plain read would say "not committed" and be wrong half a second later."""
    scene = proxied.scene
    with proxied.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE OR REPLACE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN IF NEW.writer = '{scene.transactional_id}' AND NEW.number = 2 "
            "THEN PERFORM pg_sleep(0.5); END IF; RETURN NULL; END $$"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON events DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
            "EXECUTE FUNCTION slowly()"
        )
    try:
        with proxied.connect() as writer:
            scene.write(writer, 1)
            proxied.proxy.on_client_bytes(COMMIT, Link.cut, when="after")
            began = time.monotonic()
            scene.write(writer, 2)
            assert time.monotonic() - began > 0.45
            assert_committed(scene, writer)
    finally:
        with proxied.engine.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER slow ON events")


@mostly_native
@pytest.mark.parametrize("answered", [False, True], ids=["no messages, lost", "no messages, committed"])
def test_the_outcome_of_a_transaction_without_messages_is_found(proxied: Proxied, answered: bool) -> None:
    """It has no prepared state; its number in the row shows the outcome."""
    scene = proxied.scene
    with proxied.connect() as writer:
        scene.write(writer, 1)
        proxied.proxy.on_client_bytes(COMMIT, Link.cut, when="answered" if answered else "before")
        if answered:
            with writer.transaction() as tx:
                scene.insert(tx, 2)
        else:
            with pytest.raises(StoreCommitFailedError), writer.transaction() as tx:
                scene.insert(tx, 2)
        assert scene.rows() == ([1, 2] if answered else [1])
        scene.write(writer, 3)
    assert scene.messages() == [1, 3]
    scene.assert_resolved()


@pytest.mark.slow
@mostly_native
@pytest.mark.parametrize("direction", ["server_to_client", "client_to_server"])
def test_a_silent_connection_that_ends(proxied: Proxied, later: Later, direction: str) -> None:
    """Nothing is decided while the connection is silent; once it is cut, the outcome is found over a new connection."""
    scene = proxied.scene

    def silence(link: Link) -> None:
        link.blackhole(direction)  # type: ignore[arg-type]  # one of its two
        later(0.5, link.cut)

    with proxied.connect() as writer:
        scene.write(writer, 1)
        proxied.proxy.on_client_bytes(COMMIT, silence)
        began = time.monotonic()
        if direction == "server_to_client":
            scene.write(writer, 2)
            assert time.monotonic() - began > 0.45
            assert_committed(scene, writer)
        else:
            with pytest.raises(StoreCommitFailedError) as caught:
                scene.write(writer, 2)
            assert time.monotonic() - began > 0.45
            assert_rolled_back(scene, writer, caught.value)


@mostly_native
@pytest.mark.slow
def test_a_silent_connection_that_resumes(proxied: Proxied, later: Later) -> None:
    scene = proxied.scene

    def silence(link: Link) -> None:
        link.blackhole()
        later(0.5, link.resume)

    with proxied.connect() as writer:
        scene.write(writer, 1)
        proxied.proxy.on_client_bytes(COMMIT, silence)
        scene.write(writer, 2)
        assert_committed(scene, writer)


@pytest.mark.slow
@mostly_native
def test_the_database_is_unreachable_and_returns(own_server: PostgresServer, broker: DevCluster) -> None:
    """In doubt: the outcome is not guessed, nothing is open twice, and the next transaction resolves it."""
    with TcpProxy("127.0.0.1", own_server.port) as proxy:
        proxied = Proxied(own_server, proxy, broker, Timeouts(claim=0.5, kafka=LIMIT, delivery=LIMIT))
        scene = proxied.scene

        with proxied.connect() as writer:
            scene.write(writer, 1)
            proxy.on_client_bytes(COMMIT, proxied.lose_the_database, when="answered")
            with pytest.raises(InDoubtTransactionError) as caught:
                scene.write(writer, 2)
            assert caught.value.database_committed is None
            assert caught.value.state == str(scene.state_row().prepared_state)
            assert not caught.value.retriable
            assert "The transaction stays prepared" in str(caught.value)
            assert writer.phase is Phase.IN_DOUBT
            assert len(scene.unfinished()) == 1
            proxy.refuse(refusing=False)
            scene.write(writer, 3)
            assert scene.agree() == [1, 2, 3]
        scene.assert_resolved()
        proxied.engine.dispose()


@mostly_native
@pytest.mark.slow
def test_a_writer_in_doubt_that_closes_resolves_first(own_server: PostgresServer, broker: DevCluster) -> None:
    with TcpProxy("127.0.0.1", own_server.port) as proxy:
        proxied = Proxied(own_server, proxy, broker, Timeouts(claim=0.5, kafka=LIMIT, delivery=LIMIT))
        scene = proxied.scene

        for number, when in ((1, "answered"), (2, "before")):
            writer = proxied.connect()
            proxy.on_client_bytes(COMMIT, proxied.lose_the_database, when=when)  # type: ignore[arg-type]  # both are
            with pytest.raises(InDoubtTransactionError):
                scene.write(writer, number)
            proxy.refuse(refusing=False)
            writer.close()
            scene.assert_resolved()
            assert scene.agree() == [1]

        writer = proxied.connect()
        proxy.on_client_bytes(COMMIT, proxied.lose_the_database, when="answered")
        with pytest.raises(InDoubtTransactionError):
            scene.write(writer, 3)
        with pytest.raises(InDoubtTransactionError, match="could not be resolved"):
            writer.close()
        assert writer.phase is Phase.CLOSED
        assert len(scene.unfinished()) == 1
        assert [o.outcome for o in scene.recover()] == [Outcome.COMMITTED]
        assert scene.agree() == [1, 3]
        scene.assert_resolved()
        proxied.engine.dispose()


@pytest.mark.slow
@mostly_native
@pytest.mark.parametrize("closes", [False, True], ids=["goes on", "closes"])
def test_a_writer_whose_own_claim_got_no_answer_is_not_fenced_by_it(
    own_server: PostgresServer, broker: DevCluster, closes: bool
) -> None:
    """The claim that resolves an unknown COMMIT is in the row, but its answer is lost, and the database stays unreachable."""
    with TcpProxy("127.0.0.1", own_server.port) as proxy:
        proxied = Proxied(own_server, proxy, broker, Timeouts(claim=0.5, kafka=LIMIT, delivery=LIMIT))
        scene = proxied.scene

        def lose_the_claim(link: Link) -> None:
            proxy.on_client_bytes(COMMIT, proxied.lose_the_database, when="answered")
            link.cut()

        with proxied.connect() as writer:
            scene.write(writer, 1)
            proxy.on_client_bytes(COMMIT, lose_the_claim, when="answered")
            with pytest.raises(InDoubtTransactionError):
                scene.write(writer, 2)
            assert scene.state_row().fence == 2, "the claim has succeeded"
            assert len(scene.unfinished()) == 1
            proxy.refuse(refusing=False)
            if not closes:
                scene.write(writer, 3)
        assert scene.agree() == ([1, 2] if closes else [1, 2, 3])
        scene.assert_resolved()
        proxied.engine.dispose()


# --- a successor claims between the lost COMMIT and the writer's claim: rule F8 -----------------------------------------


@pytest.mark.slow
def test_a_successor_came_before_commit_arrived(proxied: Proxied) -> None:
    """The writer can't know: in doubt, never "rolled back", and the successor's transactions are its own."""
    scene = proxied.scene
    with ExitStack() as successors, proxied.connect() as writer:
        found: list[DualWriter] = []

        def succeed(link: Link) -> None:
            link.blackhole("server_to_client")  # the backend's last message would inform the writer too early
            proxied.end_backend()
            successor = successors.enter_context(scene.connect())
            scene.write(successor, 10)
            found.append(successor)
            link.cut()

        scene.write(writer, 1)
        proxied.proxy.on_client_bytes(COMMIT, succeed)
        with pytest.raises(InDoubtTransactionError) as caught:
            scene.write(writer, 2)
        (successor,) = found
        assert caught.value.database_committed is None
        assert "rolled back" not in str(caught.value)
        assert "another writer or recoverer has claimed the id since" in str(caught.value)
        assert [o.outcome for o in successor.recovery_report] == [Outcome.ABORTED]
        assert scene.agree() == [1, 10]
        with pytest.raises(dualwrite.FencedError):
            scene.write(writer, 3)
        scene.write(successor, 11)
        assert scene.agree() == [1, 10, 11]
    scene.assert_resolved()


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "inside a transaction"])
def test_a_successor_came_after_commit_was_processed(proxied: Proxied, producer: str, busy: bool) -> None:
    """The successor's commit of Kafka proves the commit of the database: the block succeeds, and the writer is fenced.

    Not with the native producer: its successor continues with the same Kafka id, which no longer shows the outcome.
    """
    scene = proxied.scene
    with ExitStack() as successors, proxied.connect() as writer:
        inside = ExitStack()

        def succeed(link: Link) -> None:
            successor = successors.enter_context(scene.connect())
            assert [o.outcome for o in successor.recovery_report] == [Outcome.COMMITTED]
            scene.write(successor, 10)
            if busy:
                successors.enter_context(inside)
                tx = inside.enter_context(successor.transaction())
                scene.both(tx, 11)
                scene.wait_until_unfinished()
            link.cut()

        scene.write(writer, 1)
        proxied.proxy.on_client_bytes(COMMIT, succeed, when="answered")
        if producer == "native":
            with pytest.raises(InDoubtTransactionError) as caught:
                scene.write(writer, 2)
            assert caught.value.database_committed is None
        else:
            scene.write(writer, 2)
        assert writer.phase is Phase.FENCED
        assert len(scene.unfinished()) == (1 if busy else 0)
        with pytest.raises(dualwrite.FencedError):
            scene.write(writer, 3)
        inside.close()
        assert scene.agree() == ([1, 2, 10, 11] if busy else [1, 2, 10])
    scene.assert_resolved()


@mostly_native
def test_a_transaction_without_messages_is_never_reported_rolled_back_if_there_is_a_successor(proxied: Proxied) -> None:
    """It has left nothing at Kafka that could prove it: in doubt."""
    scene = proxied.scene
    with proxied.connect() as writer:

        def succeed(link: Link) -> None:
            with scene.connect() as successor:
                scene.write(successor, 10)
            link.cut()

        scene.write(writer, 1)
        proxied.proxy.on_client_bytes(COMMIT, succeed, when="answered")
        with pytest.raises(InDoubtTransactionError), writer.transaction() as tx:
            scene.insert(tx, 2)
    assert (scene.rows(), scene.messages()) == ([1, 2, 10], [1, 10])


# --- the database server dies -------------------------------------------------------------------------------------------


@mostly_native
@pytest.mark.slow
@pytest.mark.parametrize("when", ["answered", "before"])
def test_the_server_is_killed_in_commit_and_restarts_while_the_writer_resolves(
    proxied: Proxied, writer_thread: ThreadPoolExecutor, when: str
) -> None:
    scene = proxied.scene
    crashed = threading.Event()

    def crash(link: Link) -> None:
        proxied.server.kill()
        link.cut()
        crashed.set()

    with proxied.connect() as writer:
        scene.write(writer, 1)
        proxied.engine.dispose()
        proxied.proxy.on_client_bytes(COMMIT, crash, when=when)  # type: ignore[arg-type]  # both are
        writing = writer_thread.submit(scene.write, writer, 2)
        happened(crashed)
        time.sleep(0.7)
        assert not writing.done()
        proxied.server.start()
        error = writing.exception(LIMIT)
        if when == "answered":
            assert error is None
            assert_committed(scene, writer)
        else:
            assert isinstance(error, StoreCommitFailedError)
            assert_rolled_back(scene, writer, error)


@mostly_native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "resolved_by"),
    thinned(
        product(["before", "answered"], ["next transaction", "recovery"]),
        kept=[("before", "next transaction"), ("answered", "recovery")],
    ),
)
def test_the_server_is_down_beyond_the_claim_timeout(
    own_server: PostgresServer, broker: DevCluster, when: str, resolved_by: str
) -> None:
    with TcpProxy("127.0.0.1", own_server.port) as proxy:
        proxied = Proxied(own_server, proxy, broker, Timeouts(claim=1, kafka=LIMIT, delivery=LIMIT))
        scene = proxied.scene

        def crash(link: Link) -> None:
            own_server.kill()
            link.cut()

        writer = proxied.connect()
        scene.write(writer, 1)
        proxied.engine.dispose()
        proxy.on_client_bytes(COMMIT, crash, when=when)  # type: ignore[arg-type]  # both are
        try:
            with pytest.raises(InDoubtTransactionError) as caught:
                scene.write(writer, 2)
        finally:
            own_server.start()
        assert caught.value.database_committed is None
        left = [1, 2] if when == "answered" else [1]
        assert len(scene.unfinished()) == 1
        if resolved_by == "recovery":
            outcome = Outcome.COMMITTED if when == "answered" else Outcome.ABORTED
            assert [o.outcome for o in scene.recover()] == [outcome]
            assert scene.agree() == left
            with pytest.raises(dualwrite.FencedError):
                scene.write(writer, 3)
            writer.reopen()
        scene.write(writer, 3)
        assert scene.agree() == [*left, 3]
        writer.close()
        scene.assert_resolved()
        proxied.engine.dispose()


# --- the broker dies ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_broker() -> Iterator[DevCluster]:
    """A broker to kill."""
    with started() as cluster:
        yield cluster


@pytest.fixture
def frail(own_server: PostgresServer, own_broker: DevCluster) -> Iterator[Scene]:
    """A scene on a broker to kill."""
    engine = sa.create_engine(own_server.url)
    yield Scene(engine, own_broker.bootstrap_servers, timeouts=Timeouts(claim=LIMIT, kafka=LIMIT, delivery=LIMIT))
    engine.dispose()


def wait_for_marker(scene: Scene) -> None:
    """Wait until the first transaction is also complete at Kafka.

    A broker that is killed before that may never write its marker: when it starts it treats the partition as deleted ("likely
    deleted already", measured with Kafka 4.3.1; docs/how-it-works/rules.md, rule FB).
    """
    assert scene.agree() == [1]


def start_again(broker: DevCluster, scene: Scene) -> None:
    """Start the killed broker, and wait until it has served another writer: a process that has just started is slow."""
    broker.start(1)
    another = scene.with_new_id()
    with another.connect() as writer:
        another.write(writer, 1)


@pytest.mark.soak  # in CI: it stays down, or restarts after prepare
@mostly_native
def test_the_broker_is_killed_before_prepare_and_restarts(
    frail: Scene, own_broker: DevCluster, writer_thread: ThreadPoolExecutor
) -> None:
    scene = frail
    crashed = threading.Event()

    def write(writer: DualWriter) -> None:
        with writer.transaction() as tx:
            scene.both(tx, 2)
            own_broker.kill(1)
            scene.both(tx, 3)
            crashed.set()

    with scene.connect() as writer:
        scene.write(writer, 1)
        wait_for_marker(scene)
        writing = writer_thread.submit(write, writer)
        happened(crashed)
        time.sleep(0.5)
        own_broker.start(1)
        done(writing)
        assert scene.agree() == [1, 2, 3]
        scene.write(writer, 4)
    assert scene.agree() == [1, 2, 3, 4]
    scene.assert_resolved()


@mostly_native
@pytest.mark.slow
def test_the_broker_is_killed_before_prepare_and_stays_down(frail: Scene, own_broker: DevCluster) -> None:
    scene = frail
    with scene.connect() as patient:
        scene.write(patient, 1)
    wait_for_marker(scene)
    writer = scene.connect(timeouts=Timeouts(claim=LIMIT, kafka=limit(2), delivery=limit(2)))
    with pytest.raises(DeliveryError) as caught, writer.transaction() as tx:
        scene.both(tx, 2)
        own_broker.kill(1)
        scene.send(tx, 3)
        scene.insert(tx, 3)
    assert caught.value.retriable
    assert scene.rows() == [1]
    with pytest.raises(dualwrite.BrokerUnavailableError):
        scene.write(writer, 4)
    assert scene.rows() == [1]
    start_again(own_broker, scene)
    scene.write(writer, 5)
    assert scene.agree() == [1, 5]
    writer.close()
    scene.assert_resolved()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("producer", "point"),
    thinned(
        product(PRODUCERS, PREPARED),
        kept=[("native", "after_prepare")],
    ),
    indirect=["producer"],
)
def test_the_broker_is_killed_after_prepare_and_restarts(frail: Scene, own_broker: DevCluster, point: str) -> None:
    scene = frail

    def crash() -> None:
        own_broker.kill(1)
        own_broker.start(1)

    with scene.connect() as writer:
        scene.write(writer, 1)
        with failpoints.armed(point, failpoints.only_at(1, crash)):
            scene.write(writer, 2)
        assert scene.agree() == [1, 2]
        assert writer.phase is Phase.READY
        scene.write(writer, 3)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


@mostly_native
@pytest.mark.slow
def test_the_broker_is_down_between_the_two_commits_beyond_the_time_limit(frail: Scene, own_broker: DevCluster) -> None:
    scene = frail
    with scene.connect() as patient:
        scene.write(patient, 1)
    writer = scene.connect(timeouts=Timeouts(claim=LIMIT, kafka=limit(2), delivery=LIMIT))
    with (
        failpoints.armed("before_kafka_commit", lambda: own_broker.kill(1)),
        pytest.raises(InDoubtTransactionError) as caught,
    ):
        scene.write(writer, 2)
    assert caught.value.database_committed is True
    assert "The database committed" in str(caught.value)
    assert caught.value.state == str(scene.state_row().prepared_state)
    assert writer.phase is Phase.IN_DOUBT
    assert scene.rows() == [1, 2]
    with pytest.raises(dualwrite.BrokerUnavailableError):
        scene.write(writer, 3)
    assert writer.phase is Phase.IN_DOUBT
    start_again(own_broker, scene)
    scene.write(writer, 4)
    assert scene.agree() == [1, 2, 4]
    writer.close()
    scene.assert_resolved()


@pytest.mark.soak  # each of the two alone: see above
def test_database_and_broker_are_down_between_the_two_commits(own_server: PostgresServer, own_broker: DevCluster) -> None:
    """In doubt, with the known fact: the database has committed."""
    with TcpProxy("127.0.0.1", own_server.port) as proxy:
        proxied = Proxied(own_server, proxy, own_broker, Timeouts(claim=1, kafka=3, delivery=LIMIT))
        scene = proxied.scene

        def crash() -> None:
            own_broker.kill(1)
            proxy.refuse()
            proxy.cut()

        writer = proxied.connect()
        scene.write(writer, 1)
        with failpoints.armed("before_kafka_commit", crash), pytest.raises(InDoubtTransactionError) as caught:
            scene.write(writer, 2)
        assert caught.value.database_committed is True
        with pytest.raises(InDoubtTransactionError, match="could not be resolved"):
            writer.close()
        proxy.refuse(refusing=False)
        own_broker.start(1)
        scene.timeouts = replace(scene.timeouts, kafka=LIMIT)
        assert [o.outcome for o in scene.recover()] == [Outcome.COMMITTED]
        assert scene.agree() == [1, 2]
        scene.assert_resolved()
        proxied.engine.dispose()
