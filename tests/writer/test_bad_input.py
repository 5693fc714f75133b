"""Bad input: each kind has its own clear error, and nothing is lost on either side."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import dualwrite
from dualwrite import (
    BrokerUnavailableError,
    ClaimTimeoutError,
    ConfigurationError,
    DualWriter,
    InvalidMessageError,
    InvalidTransactionalIdError,
    MessageTooLargeError,
    Phase,
    StateTableMissingError,
    StoredStateError,
    StoreUnavailableError,
    Timeouts,
    TransactionTimeoutRefusedError,
    UnknownTopicError,
    migration,
)
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from fixtures.broker import make_topic, started
from writer.cases import LIBRDKAFKA, both_producers, mostly_native, producers_and_databases
from writer.scene import Base, Scene

SHORT = Timeouts(claim=0.7, kafka=0.7, delivery=2)


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def topicless() -> Iterator[DevCluster]:
    """A broker that does not create topics automatically and accepts only small messages."""
    with started(config={"auto.create.topics.enable": "false", "message.max.bytes": "20000"}) as cluster:
        yield cluster


@pytest.fixture
def live(scene: Scene) -> Iterator[DualWriter]:
    """A writer that owns the scene's id and has written 1."""
    with scene.connect() as writer:
        scene.write(writer, 1)
        yield writer


# --- addresses ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@producers_and_databases
def test_kafka_is_unreachable_or_never_answers(scene: Scene, live: DualWriter, nobody: str, silent: str) -> None:
    limits = {"socket.connection.setup.timeout.ms": 1000, "socket.timeout.ms": 1000}
    for address in (nobody, silent):
        before = scene.state_row()
        with pytest.raises(BrokerUnavailableError) as caught:
            scene.connect(kafka={"bootstrap.servers": address, **limits}, timeouts=SHORT)
        for text in (address, "bootstrap.servers", "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS"):
            assert text in str(caught.value)
        assert scene.state_row() == before
    scene.write(live, 2)
    assert scene.agree() == [1, 2]
    assert scene.checked_out() == 0


def test_the_database_is_unreachable(scene: Scene, nobody: str) -> None:
    for url, named in (
        (f"postgresql+psycopg://somebody:secret@{nobody}/shop", (nobody, "shop", scene.transactional_id)),
        ("sqlite:////nowhere/at/all.db", ("/nowhere/at/all.db",)),
    ):
        with pytest.raises(StoreUnavailableError) as caught:
            scene.connect(url, timeouts=SHORT)
        for text in ("DUALWRITE_DATABASE_URL", *named):
            assert text in str(caught.value)
        assert "secret" not in str(caught.value)
        assert caught.value.retriable


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"database": "oracle://x"}, "postgresql+psycopg://"),
    ({"database": "mysql+oracle://x"}, "mysql+pymysql://"),
    ({"database": "not a url"}, "sqlite:////"),
    ({"database": object()}, "RocksDBStore(rdict)"),
    ({"database": "sqlite://"}, "sqlite:////"),
    ({"kafka": {"bootstrap.servers": ""}}, "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS"),
    ({"kafka": {"bootstrap.servers": "host:port"}}, "host:port"),
    ({"kafka": {"acks": 1}}, "acks is 1; transactions require 'all'"),
    ({"kafka": {"enable.idempotence": False}}, "enable.idempotence is False"),
    ({"kafka": {"transactional.id": "mine"}}, "pass it to dualwrite as transactional_id"),
    ({"kafka": {"transaction.timeout.ms": 10}}, "must be at least 1000"),
    ({"kafka": {"no.such.property": 1}}, "no.such.property"),
    ({"kafka": {"linger.ms": "soon"}}, "queue.buffering.max.ms"),  # librdkafka's alias of bootstrap.servers
    ({"producer": "best"}, "one of auto, native, librdkafka"),
    *(({"two_phase": wrong}, "two") for wrong in ("yes", 1, "true")),
    ({"on_lost": "ignore"}, "on_lost is 'ignore'"),
    ({"transactional_id": ""}, "1 to 255 characters"),
    ({"transactional_id": "x" * 256}, "256 characters; 255 is the limit"),
    ({"transactional_id": "orders#1"}, "'#'"),
    ({"transactional_id": "orders~1"}, "'~'"),
    ({"transactional_id": "a\nb"}, "control characters"),
    ({"transactional_id": 7}, "not 7"),
]


@mostly_native
def test_an_invalid_setting(scene: Scene) -> None:
    with scene.connect() as live:
        scene.write(live, 1)
        before = scene.state_row()
        for arguments, named in BAD_SETTINGS:
            kind = InvalidTransactionalIdError if "transactional_id" in arguments else ConfigurationError
            with pytest.raises(kind) as caught:
                scene.connect(**arguments)
            assert named in str(caught.value)
            assert scene.state_row() == before, arguments
        scene.write(live, 2)
    assert scene.agree() == [1, 2]
    assert scene.checked_out() == 0


@both_producers
def test_the_broker_refuses_the_transaction_timeout(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
    with pytest.raises(TransactionTimeoutRefusedError) as caught:
        scene.connect(kafka={"transaction.timeout.ms": 900_001}, two_phase=False)
    assert "transaction.max.timeout.ms" in str(caught.value)
    with scene.connect() as writer:
        scene.write(writer, 2)
    assert scene.agree() == [1, 2]


@both_producers
def test_a_timeout_together_with_two_phase_commit(scene: Scene, producer: str) -> None:
    """With KIP-939 no transaction times out, so the setting is rejected, before anything is claimed."""
    with scene.connect() as live:
        scene.write(live, 1)
        if producer == "native":
            with pytest.raises(ConfigurationError, match="KIP-939"):
                scene.connect(kafka={"transaction.timeout.ms": 60_000})
        with pytest.raises(ConfigurationError, match="two"):
            scene.connect(kafka={"transaction.timeout.ms": 60_000}, two_phase=True)
        scene.write(live, 2)
    assert scene.agree() == [1, 2]


def test_missing_settings_are_named(monkeypatch: pytest.MonkeyPatch, sqlite_scene: Scene) -> None:
    for name in ("DATABASE_URL", "KAFKA_BOOTSTRAP_SERVERS", "TRANSACTIONAL_ID"):
        monkeypatch.delenv(f"DUALWRITE_{name}", raising=False)
    with pytest.raises(ConfigurationError, match="DUALWRITE_TRANSACTIONAL_ID"):
        dualwrite.connect()
    with pytest.raises(ConfigurationError, match="DUALWRITE_KAFKA_BOOTSTRAP_SERVERS"):
        dualwrite.connect(transactional_id="x")
    with pytest.raises(ConfigurationError, match="DUALWRITE_DATABASE_URL"):
        dualwrite.connect(transactional_id="x", kafka="localhost:9092")


def test_when_a_block_ends_has_two_values() -> None:
    given: dict[str, Any] = {"acknowledge": "soon"}
    with pytest.raises(ConfigurationError, match=r"(?s)acknowledge is 'soon'.*visible, journaled"):
        dualwrite.connect("sqlite:///none.db", kafka="localhost:9092", transactional_id="x", **given)


# --- ids ----------------------------------------------------------------------------------------------------------------


@mostly_native
def test_the_longest_id_works(postgres_scene: Scene) -> None:
    scene = postgres_scene.with_new_id()
    topic = scene.topic
    scene.transactional_id = scene.transactional_id.ljust(80, "ü")  # the column of the user's table
    longest = scene.transactional_id.ljust(255, "x")
    with scene.connect(transactional_id=longest) as writer, writer.transaction() as tx:
        scene.insert(tx, 1)
        tx.send(topic, "1")
    assert scene.rows() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("producer", [LIBRDKAFKA])  # under two-phase commit the row is locked only in the COMMIT itself
def test_an_id_is_locked(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)

        def claim_meanwhile() -> None:
            with pytest.raises(ClaimTimeoutError) as caught:
                scene.connect(timeouts=SHORT)
            for text in (scene.transactional_id, "PostgreSQL backend pid", "pg_terminate_backend"):
                assert text in str(caught.value)

        with failpoints.armed("after_record", claim_meanwhile):
            scene.write(writer, 2)
    assert scene.agree() == [1, 2]


# --- the table ----------------------------------------------------------------------------------------------------------


def test_the_table_is_missing(sqlite_scene: Scene, tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    engine = sa.create_engine(url)
    Base.metadata.create_all(engine)
    with pytest.raises(StateTableMissingError) as caught:
        sqlite_scene.connect(engine)
    for text in ("kafka_transaction_state", f"dualwrite db upgrade --url {url}", sqlite_scene.transactional_id):
        assert text in str(caught.value)
    engine.dispose()


@producers_and_databases
def test_a_stored_state_does_not_parse(scene: Scene) -> None:
    """A prepared transaction stays prepared: only the row shows whether it must be committed."""
    writer = scene.connect()
    scene.write(writer, 1)
    with (
        failpoints.armed("before_kafka_commit", failpoints.raises(KeyboardInterrupt())),
        failpoints.armed("recover_after_claim", failpoints.raises(KeyboardInterrupt())),
    ):
        with pytest.raises(KeyboardInterrupt):
            scene.write(writer, 2)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    (prepared,) = scene.unfinished()
    set_state = sa.text("UPDATE kafka_transaction_state SET prepared_transaction_state = :s WHERE transactional_id = :id")
    text = str(scene.state_row().prepared_state)
    for broken in ("4711", "1:2:3", "-1:0", f" {text}", "99999999999999999999:1"):
        with scene.engine.begin() as connection:
            connection.execute(set_state, {"s": broken, "id": scene.transactional_id})
        with pytest.raises(StoredStateError) as caught:
            scene.connect()
        for named in (scene.transactional_id, repr(broken)):
            assert named in str(caught.value)
        assert caught.value.text == broken
        report = scene.recover()
        assert isinstance(report.ids[0].error, StoredStateError)
        assert scene.unfinished() == [prepared]
    with scene.engine.begin() as connection:
        connection.execute(set_state, {"s": text, "id": scene.transactional_id})
    with scene.connect() as writer:
        assert scene.agree() == [1, 2]
        scene.write(writer, 3)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


# --- messages -----------------------------------------------------------------------------------------------------------

BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"value": 7}, "A message's value must be bytes, str or None, not int"),
    ({"value": {"a": 1}}, "json.dumps"),
    ({"value": b"", "key": 7}, "A message's key must be bytes, str or None, not int"),
    ({"value": b"", "headers": {"a": 7}}, "header 'a'"),
    ({"value": b"", "headers": {7: "a"}}, "header's name"),
    ({"value": b"", "headers": "abc"}, "headers must be a mapping"),
    ({"value": b"", "partition": -1}, "partition must be an int from 0"),
    ({"value": b"", "partition": "0"}, "partition must be an int from 0"),
    ({"value": b"", "timestamp": -5}, "timestamp"),
    ({"value": b"", "timestamp": 1.5}, "timestamp"),
    ({"value": b"", "topic": ""}, "Invalid topic name"),
    ({"value": b"", "topic": "a b"}, "Invalid topic name"),
    ({"value": b"", "topic": None}, "A topic must be a str"),
]


BAD_SERIES: list[dict[str, Any]] = [  # of a text each character would be a message, of a dict each name
    {"values": "lamp"},
    {"values": b"lamp"},
    {"values": {"a": 1}},
    {"values": ["a", "b"], "keys": "kl"},
]


@both_producers
def test_a_message_is_refused_and_the_block_may_continue(scene: Scene) -> None:
    with scene.connect() as writer:
        with writer.transaction() as tx:
            scene.both(tx, 1)
            for message, named in BAD_MESSAGES:
                with pytest.raises(InvalidMessageError) as caught:
                    tx.send(**{"topic": scene.topic, **message})
                assert named in str(caught.value)
            for many in BAD_SERIES:
                with pytest.raises(InvalidMessageError, match="send_many must be a list"):
                    tx.send_many(scene.topic, **many)
            scene.both(tx, 2)
        for message, _ in BAD_MESSAGES:
            with pytest.raises(InvalidMessageError), writer.transaction() as tx:
                scene.both(tx, 3)
                tx.send(**{"topic": scene.topic, **message})
        scene.write(writer, 4)
    assert scene.agree() == [1, 2, 4]
    scene.assert_resolved()


@pytest.mark.slow
@producers_and_databases
def test_the_broker_or_the_producer_refuses_a_message(
    new_scene: Callable[..., Scene], database: str, topicless: DevCluster
) -> None:
    scene = new_scene(database, topicless.bootstrap_servers)
    make_topic(topicless, scene.topic)
    refused: list[tuple[dict[str, Any], type[Exception], set[str]]] = [
        ({"topic": "no-such-topic"}, UnknownTopicError, {"no-such-topic", "auto.create.topics.enable"}),
        ({"partition": 99}, UnknownTopicError, {scene.topic}),
        ({"value": b"x" * 1_100_000}, MessageTooLargeError, {"message.max.bytes", scene.topic}),
        ({"value": b"x" * 30_000}, MessageTooLargeError, {"max.message.bytes"}),
    ]
    with scene.connect() as writer:
        for number, (message, kind, named) in enumerate(refused):
            with pytest.raises(kind) as caught, writer.transaction() as tx:
                scene.both(tx, 99)
                tx.send(**{"topic": scene.topic, "value": "99", **message})
            assert all(name in str(caught.value) for name in named)
            scene.write(writer, number)
    assert scene.agree() == [*range(len(refused))]
    scene.assert_resolved()


# --- tables and topics dropped while a writer is open -------------------------------------------------------------------


def test_the_table_disappears_under_an_open_writer(sqlite_scene: Scene, tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/dropped.db"
    migration.upgrade(url)
    engine = sa.create_engine(url)
    Base.metadata.create_all(engine)
    scene = Scene(engine, sqlite_scene.servers)
    writer = scene.connect()
    scene.write(writer, 1)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE kafka_transaction_state RENAME TO moved"))
    with pytest.raises(StateTableMissingError):
        scene.write(writer, 2)
    assert writer.phase is Phase.READY
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE moved RENAME TO kafka_transaction_state"))
    scene.write(writer, 3)
    writer.close()
    assert scene.agree() == [1, 3]
    scene.assert_resolved()
    engine.dispose()


@mostly_native
def test_no_thread_is_left_behind(sqlite_scene: Scene, nobody: str) -> None:
    """A failed opening leaves no Python threads running; librdkafka's threads are its own."""
    before = set(threading.enumerate())
    for _ in range(3):
        with pytest.raises(BrokerUnavailableError):
            sqlite_scene.connect(kafka={"bootstrap.servers": nobody}, timeouts=Timeouts(claim=1, kafka=0.2, delivery=1))
    assert set(threading.enumerate()) - before == set()
