"""COMMIT with an unknown outcome: the block reports the outcome, or that it is in doubt, and both sides agree.

A table of cuts, on each database with a connection to lose; then what is in doubt, successors, and servers that are killed. The
record goes with the COMMIT (native, PostgreSQL) or before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import pytest

import dualwrite
from crash.cases import PRODUCERS
from crash.databases import Databases
from crash.proxied import CUTS, Proxied, through_a_proxy
from dualwrite import DualWriter, InDoubtTransactionError, Phase, StoreCommitFailedError
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from dualwrite.testing.postgres import PostgresServer
from dualwrite.testing.proxy import Link, When
from fixtures.mariadb_server import MariaDBServer
from fixtures.pace import done, happened, joined
from fixtures.tiers import thinned

pytestmark = pytest.mark.usefixtures("producer", "one_lane", "no_recovery_when_idle")

STORES = ("postgresql", "mariadb", "zookeeper")
"""Those with a connection that can break. An error of the disk at SQLite and RocksDB: tests/stores, tests/rocksdb."""

ENDS = ("cut before it arrives", "cut when it was answered")

mostly_native = pytest.mark.parametrize("producer", thinned(PRODUCERS, kept=["native"]), indirect=True)
"""The writer handles an outage of the database the same way, so librdkafka is left to `-m soak`."""
on_postgresql = pytest.mark.parametrize("database", ["postgresql"])
on_mariadb = pytest.mark.parametrize("database", ["mariadb"])
native = pytest.mark.parametrize("producer", ["native"], indirect=True)


@pytest.fixture
def proxied(databases: Databases, database: str, broker: DevCluster) -> Iterator[Proxied]:
    with through_a_proxy(databases, database, broker) as made:
        yield made


@pytest.fixture
def later() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Calls a function after half a second; the test ends after that call."""
    threads = []

    def after(call: Callable[[], object]) -> None:
        threads.append(threading.Timer(0.5, call))
        threads[-1].start()

    yield after
    for thread in threads:
        joined(thread)


# --- the connection is lost, and another one shows the outcome -----------------------------------------------------------


@pytest.mark.parametrize(
    ("producer", "database", "cut"),
    thinned(
        product(PRODUCERS, STORES, CUTS),
        kept=[
            *product(["native"], STORES, [*ENDS, "cut while it runs"]),
            *product(["librdkafka"], ["postgresql"], ["reset before it arrives", "reset when it was answered"]),
        ],
        quick=[*product(["native"], STORES, ENDS)],
    ),
    indirect=["producer"],
)
def test_the_connection_breaks_around_the_commit(proxied: Proxied, cut: str) -> None:
    when, action, committed = CUTS[cut]
    with proxied.connect() as writer:
        proxied.scene.event(writer, 1)
        with proxied.at_commit(when, action):
            told = proxied.reported(writer, 2)
        assert committed in (None, told)
        proxied.assert_told(writer, committed=told)


@contextmanager
def commits_held_back(proxied: Proxied) -> Iterator[Callable[[], object]]:
    """The next COMMIT waits until the function is called: for a lock that a deferred trigger needs, or as for a backup."""
    scene = proxied.scene
    hold, go_on = "FLUSH TABLES WITH READ LOCK", "UNLOCK TABLES"
    with scene.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        if scene.engine.dialect.name == "postgresql":
            hold, go_on = "SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock(42)"
            connection.exec_driver_sql(
                "CREATE OR REPLACE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.writer = "
                f"'{scene.transactional_id}' THEN PERFORM pg_advisory_xact_lock(42); END IF; RETURN NULL; END $$"
            )
            connection.exec_driver_sql(
                "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON events DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
                "EXECUTE FUNCTION wait()"
            )
        try:
            with failpoints.armed("before_db_commit", failpoints.only_at(1, lambda: connection.exec_driver_sql(hold))):
                yield lambda: connection.exec_driver_sql(go_on)
        finally:
            connection.exec_driver_sql(go_on)
            if scene.engine.dialect.name == "postgresql":
                connection.exec_driver_sql("DROP TRIGGER slow ON events")


@pytest.mark.slow
@native
@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_the_connection_is_lost_while_commit_runs(proxied: Proxied, later: Any) -> None:
    """A plain read would say "not committed" and be wrong half a second later: the next claim waits for the COMMIT."""
    scene = proxied.scene
    numbers = []
    with proxied.connect() as writer:
        scene.event(writer, 1)
        with commits_held_back(proxied) as go_on:

            def cut(link: Link) -> None:
                link.cut()
                numbers.append(scene.row().transaction_number)
                later(go_on)

            began = time.monotonic()
            with proxied.at_commit("after", cut):
                assert proxied.reported(writer, 2)
            assert time.monotonic() - began > 0.45
        assert numbers == [1]
        proxied.assert_told(writer, committed=True)


@mostly_native
@on_postgresql
@pytest.mark.parametrize("cut", ENDS)
def test_the_outcome_of_a_transaction_without_messages_is_found(proxied: Proxied, cut: str) -> None:
    """It has no prepared state; its number in the row shows the outcome."""
    scene, (when, action, committed) = proxied.scene, CUTS[cut]
    with proxied.connect() as writer:
        scene.event(writer, 1)
        with ExitStack() as told, proxied.at_commit(when, action):
            if not committed:
                told.enter_context(pytest.raises(StoreCommitFailedError))
            with writer.transaction() as tx:
                scene.events.write(tx.db, scene.transactional_id, 2)
        assert scene.rows() == ([1, 2] if committed else [1])
        scene.event(writer, 3)
    assert scene.messages() == [1, 3]
    scene.assert_resolved()


@pytest.mark.slow
@mostly_native
@pytest.mark.parametrize(
    ("database", "silent", "then", "committed"),
    [
        ("postgresql", "server_to_client", Link.cut, True),
        ("postgresql", "client_to_server", Link.cut, False),
        ("postgresql", None, Link.resume, True),
        ("mariadb", "server_to_client", None, True),  # until a time limit of the driver or the session ends the wait
        ("zookeeper", "server_to_client", None, True),
        ("zookeeper", "client_to_server", None, False),
    ],
)
def test_a_silent_connection(
    proxied: Proxied, later: Any, silent: Any, then: Callable[[Link], None] | None, committed: bool
) -> None:
    """Nothing is decided while the connection is silent; once it has ended, the outcome is found over a new connection."""

    def silence(link: Link) -> None:
        link.blackhole(silent)
        if then is not None:
            later(lambda: then(link))

    with proxied.connect() as writer:
        proxied.scene.event(writer, 1)
        began = time.monotonic()
        with proxied.at_commit("before", silence):
            assert proxied.reported(writer, 2) is committed
        assert time.monotonic() - began > 0.45
        proxied.assert_told(writer, committed=committed)


# --- in doubt ------------------------------------------------------------------------------------------------------------


def by_the_next_transaction(proxied: Proxied, writer: DualWriter, left: list[int]) -> None:
    proxied.come_back()
    proxied.scene.event(writer, 3)
    assert proxied.scene.agree() == [*left, 3]


def by_closing(proxied: Proxied, writer: DualWriter, left: list[int]) -> None:
    proxied.come_back()
    writer.close()
    assert proxied.scene.agree() == left


def by_recovery(proxied: Proxied, writer: DualWriter, left: list[int]) -> None:
    assert proxied.scene.recover()["outcomes"] == ["COMMITTED" if 2 in left else "ABORTED"]
    assert proxied.scene.agree() == left
    proxied.come_back()
    with pytest.raises(dualwrite.FencedError):
        proxied.scene.event(writer, 3)
    writer.reopen()
    by_the_next_transaction(proxied, writer, left)


def by_recovery_after_it_closed(proxied: Proxied, writer: DualWriter, left: list[int]) -> None:
    with pytest.raises(InDoubtTransactionError, match="could not be resolved"):
        writer.close()
    assert writer.phase is Phase.CLOSED
    assert proxied.scene.recover()["outcomes"] == ["COMMITTED" if 2 in left else "ABORTED"]
    assert proxied.scene.agree() == left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("producer", "database", "cut", "resolved"),
    thinned(
        product(PRODUCERS, STORES, ENDS, [by_the_next_transaction, by_closing, by_recovery, by_recovery_after_it_closed]),
        kept=[
            ("native", "postgresql", "cut when it was answered", by_the_next_transaction),
            ("native", "postgresql", "cut before it arrives", by_closing),
            ("native", "postgresql", "cut when it was answered", by_recovery),
            ("native", "mariadb", "cut before it arrives", by_the_next_transaction),
            ("native", "mariadb", "cut when it was answered", by_recovery_after_it_closed),
            ("native", "zookeeper", "cut when it was answered", by_recovery_after_it_closed),
        ],
    ),
    indirect=["producer"],
)
def test_an_unreachable_database_leaves_the_transaction_in_doubt(
    proxied: Proxied, cut: str, resolved: Callable[[Proxied, DualWriter, list[int]], None]
) -> None:
    """The outcome is not guessed, and nothing is open twice; what comes next resolves it."""
    scene, (when, _, committed) = proxied.scene, CUTS[cut]
    writer = proxied.connect(claim=1)
    scene.event(writer, 1)
    with proxied.at_commit(when, proxied.go_away), pytest.raises(InDoubtTransactionError) as caught:
        scene.event(writer, 2)
    assert caught.value.database_committed is None
    assert not caught.value.retriable
    assert "The transaction stays prepared" in str(caught.value)
    assert writer.phase is Phase.IN_DOUBT
    assert len(scene.unfinished()) == 1
    if committed:
        assert caught.value.state == str(scene.row().prepared_state)
    resolved(proxied, writer, [1, 2] if committed else [1])
    writer.close()
    scene.assert_resolved()


@pytest.mark.slow
@native
@on_mariadb
def test_the_commit_never_arrives_at_mariadb_on_a_connection_that_stays(proxied: Proxied) -> None:
    """The server keeps the transaction open and may still commit it, so it stays in doubt until that connection has ended."""
    scene = proxied.scene
    with proxied.connect(claim=1) as writer:
        scene.event(writer, 1)
        with (
            proxied.at_commit("before", lambda link: link.blackhole("client_to_server")),
            pytest.raises(InDoubtTransactionError, match="stayed locked for 1 s"),
        ):
            scene.event(writer, 2)
        proxied.proxy.cut()
        scene.event(writer, 3)
    assert scene.agree() == [1, 3]


@pytest.mark.slow
@mostly_native
@on_postgresql
@pytest.mark.parametrize("closes", [False, True], ids=["goes on", "closes"])
def test_a_writer_whose_own_claim_got_no_answer_is_not_fenced_by_it(proxied: Proxied, closes: bool) -> None:
    """The claim that resolves an unknown COMMIT is in the row, but its answer is lost, and the database stays unreachable."""
    scene = proxied.scene

    def lose_the_claim(link: Link) -> None:
        proxied.proxy.on_client_bytes(proxied.commit, proxied.go_away, when="answered")
        link.cut()

    with proxied.connect(claim=1) as writer:
        scene.event(writer, 1)
        with proxied.at_commit("answered", lose_the_claim), pytest.raises(InDoubtTransactionError):
            scene.event(writer, 2)
        assert scene.row().fence == 2, "the claim has succeeded"
        assert len(scene.unfinished()) == 1
        proxied.come_back()
        if not closes:
            scene.event(writer, 3)
    assert scene.agree() == ([1, 2] if closes else [1, 2, 3])
    scene.assert_resolved()


# --- a successor claims between the lost COMMIT and the writer's claim: rule F8 -----------------------------------------


@pytest.mark.slow
@on_postgresql
def test_a_successor_came_before_commit_arrived(proxied: Proxied) -> None:
    """The writer can't know: in doubt, never "rolled back", and the successor's transactions are its own."""
    scene = proxied.scene
    with ExitStack() as successors, proxied.connect() as writer:
        found: list[DualWriter] = []

        def succeed(link: Link) -> None:
            link.blackhole("server_to_client")  # the backend's last message would inform the writer too early
            proxied.end_backend()
            found.append(successors.enter_context(scene.connect()))
            scene.event(found[0], 10)
            link.cut()

        scene.event(writer, 1)
        with proxied.at_commit("before", succeed), pytest.raises(InDoubtTransactionError) as caught:
            scene.event(writer, 2)
        (successor,) = found
        assert caught.value.database_committed is None
        assert "rolled back" not in str(caught.value)
        assert "another writer or recoverer has claimed the id since" in str(caught.value)
        assert [o.outcome.value for o in successor.recovery_report] == ["ABORTED"]
        assert scene.agree() == [1, 10]
        with pytest.raises(dualwrite.FencedError):
            scene.event(writer, 3)
        scene.event(successor, 11)
        assert scene.agree() == [1, 10, 11]
    scene.assert_resolved()


@pytest.mark.slow
@on_postgresql
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
            assert [o.outcome.value for o in successor.recovery_report] == ["COMMITTED"]
            scene.event(successor, 10)
            if busy:
                successors.enter_context(inside)
                tx = inside.enter_context(successor.transaction())
                scene.events.write(tx.db, scene.transactional_id, 11)
                tx.send(scene.topic, "11")
                scene.wait_until_unfinished()
            link.cut()

        scene.event(writer, 1)
        with proxied.at_commit("answered", succeed):
            if producer == "native":
                with pytest.raises(InDoubtTransactionError) as caught:
                    scene.event(writer, 2)
                assert caught.value.database_committed is None
            else:
                scene.event(writer, 2)
        assert writer.phase is Phase.FENCED
        assert len(scene.unfinished()) == (1 if busy else 0)
        with pytest.raises(dualwrite.FencedError):
            scene.event(writer, 3)
        inside.close()
        assert scene.agree() == ([1, 2, 10, 11] if busy else [1, 2, 10])
    scene.assert_resolved()


@mostly_native
@on_postgresql
def test_a_transaction_without_messages_is_never_reported_rolled_back_if_there_is_a_successor(proxied: Proxied) -> None:
    """It has left nothing at Kafka that could prove it: in doubt."""
    scene = proxied.scene

    def succeed(link: Link) -> None:
        scene.write_here(10)
        link.cut()

    with proxied.connect() as writer:
        scene.event(writer, 1)
        with (
            proxied.at_commit("answered", succeed),
            pytest.raises(InDoubtTransactionError),
            writer.transaction() as tx,
        ):
            scene.events.write(tx.db, scene.transactional_id, 2)
    assert (scene.rows(), scene.messages()) == ([1, 2, 10], [1, 10])


# --- the database server dies -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Servers to kill, whose data survive, by kind; `databases` makes scenes on them."""
    kinds = {PostgresServer: "postgresql", MariaDBServer: "mariadb"}
    servers: dict[str, Any] = {}
    with ExitStack() as running:

        def started(kind: type[Any]) -> Any:
            return servers.setdefault(kinds[kind], running.enter_context(kind()))

        servers["databases"] = running.enter_context(Databases(tmp_path_factory.mktemp("killable"), started))
        yield servers


@mostly_native
@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
@pytest.mark.parametrize("when", ["answered", "before"])
def test_the_server_is_killed_in_commit_and_restarts_while_the_writer_resolves(
    killable: dict[str, Any], broker: DevCluster, writer_thread: ThreadPoolExecutor, database: str, when: When
) -> None:
    with through_a_proxy(killable["databases"], database, broker) as proxied, proxied.connect() as writer:
        server, crashed = killable[database], threading.Event()

        def crash(link: Link) -> None:
            server.kill()
            link.cut()
            crashed.set()

        proxied.scene.event(writer, 1)
        proxied.scene.engine.dispose()
        with proxied.at_commit(when, crash):
            writing = writer_thread.submit(proxied.reported, writer, 2)
            happened(crashed)
        time.sleep(0.7)
        assert not writing.done()
        server.start()
        assert done(writing) is (when == "answered")
        proxied.assert_told(writer, committed=when == "answered")
