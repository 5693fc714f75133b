"""`pool.join`: the user's own session commits its rows and the messages together, on every driver."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import dualwrite
from crash.databases import Databases
from crash.proxied import CUTS, through_a_proxy
from crash.scene import Scene
from dualwrite import WriterPool
from dualwrite.devcluster import DevCluster
from dualwrite.stores.sql.joined_transaction import JoinedTransaction
from dualwrite.testing import failpoints
from fixtures.mysql_server import MYSQLD
from fixtures.pace import LIMIT
from joined.own_sessions import INSERT, SYNC, each, own_engine, row, send, skip_unless_installed, users_url
from pool.pool_scene import open_pool

drivers = pytest.mark.parametrize(("driver", "database"), each(SYNC))
on_postgresql = pytest.mark.parametrize(("driver", "database"), [("psycopg", "postgresql")])


@pytest.fixture
def producer() -> str:
    return "native"


@pytest.fixture
def pool(scene: Scene) -> Iterator[WriterPool[Any]]:
    with open_pool(scene) as pool:
        yield pool


@pytest.fixture
def engine(scene: Scene, driver: str) -> Iterator[sa.Engine]:
    with own_engine(scene, driver) as engine:
        yield engine


@drivers
def test_a_commit_commits_both_and_a_rollback_neither(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    with Session(engine) as session:
        tx = pool.join(session)
        session.execute(INSERT, row(scene, 1))
        send(tx, scene, 1)
        assert tx.outcome is None
        session.commit()
        assert tx.outcome == "published"
        assert tx.transactional_id in pool.transactional_ids
        assert scene.agree() == [1]
        tx = pool.join(session)
        session.execute(INSERT, row(scene, 2))
        send(tx, scene, 2)
        session.rollback()
        with pytest.raises(dualwrite.WriterClosedError):
            send(tx, scene, 3)
        tx = pool.join(session)
        session.execute(INSERT, row(scene, 4))
        send(tx, scene, 4)
    with Session(engine) as session, session.begin():
        session.execute(INSERT, row(scene, 5))
        send(pool.join(session), scene, 5)
    assert scene.agree() == [1, 5]


@on_postgresql
def test_the_first_transactions_of_an_engine_may_join_at_the_same_time(
    scene: Scene, engine: sa.Engine, pool: WriterPool[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one must not commit before its engine is listened to: its row would be there without its message."""
    listens, committed = threading.Event(), threading.Event()

    def slowly(*details: Any) -> None:
        if not listens.is_set():
            listens.set()
            committed.wait(1)
        listen(*details)

    def one(number: int, may_join: threading.Event | None = None) -> None:
        with Session(engine) as session:
            session.execute(INSERT, row(scene, number))
            assert may_join is None or may_join.wait(LIMIT)
            send(pool.join(session), scene, number)
            session.commit()

    with Session(engine) as session:
        pool.join(session)  # listens to sessions, but not to this engine's connections
    listen = sa.event.listen
    monkeypatch.setattr(sa.event, "listen", slowly)
    with ThreadPoolExecutor(1) as other:
        second = other.submit(one, 2, listens)
        second.add_done_callback(lambda _: committed.set())
        one(1)
        second.result(LIMIT)
    assert scene.agree() == [1, 2]


@drivers
def test_a_connection_is_joined_as_well(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    with engine.connect() as connection:
        for number in range(3):
            connection.execute(INSERT, row(scene, number))
            send(pool.join(connection), scene, number)
            connection.commit()
        connection.execute(INSERT, row(scene, 7))
        send(pool.join(connection), scene, 7)
        connection.rollback()
        with connection.begin():
            send(pool.join(connection), scene, 8)
            connection.execute(INSERT, row(scene, 8))
    assert scene.agree() == [0, 1, 2, 8]


@on_postgresql
def test_a_transaction_has_one_unit(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    with Session(engine) as session:
        first = pool.join(session)
        send(first, scene, 1)
        session.execute(INSERT, row(scene, 1))
        send(pool.join(session), scene, 2)
        send(pool.join(session.connection()), scene, 3)
        session.execute(INSERT, row(scene, 2))
        session.execute(INSERT, row(scene, 3))
        session.commit()
    assert scene.agree() == [1, 2, 3]


@on_postgresql
def test_messages_without_a_row_are_sent_too(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    with Session(engine) as session:
        send(pool.join(session), scene, 1)
        session.commit()
    assert scene.messages() == [1]


@on_postgresql
def test_a_savepoint_that_is_rolled_back_takes_its_messages_with_it(
    scene: Scene, engine: sa.Engine, pool: WriterPool[Any]
) -> None:
    with Session(engine) as session, session.begin():
        tx = pool.join(session)
        send(tx, scene, 1)
        session.execute(INSERT, row(scene, 1))
        outer = session.begin_nested()
        send(tx, scene, 2)
        with session.begin_nested():
            session.execute(INSERT, row(scene, 3))
            send(tx, scene, 3)
        outer.rollback()
        with session.begin_nested():
            send(tx, scene, 4)
            session.execute(INSERT, row(scene, 4))
    with engine.begin() as connection:
        inner = connection.begin_nested()
        tx = pool.join(connection)
        send(tx, scene, 5)
        inner.rollback()
        send(tx, scene, 6)
        connection.execute(INSERT, row(scene, 6))
    assert scene.agree() == [1, 4, 6]


@drivers
def test_a_refused_message_rolls_back_the_rows(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    with Session(engine) as session:
        session.execute(INSERT, row(scene, 1))
        pool.join(session).send(scene.topic, b"x" * 1_100_000)
        with pytest.raises(dualwrite.MessageTooLargeError):
            session.commit()
    with Session(engine) as session:  # on the same connection: what was refused must not be in its transaction
        session.execute(INSERT, row(scene, 2))
        session.commit()
    assert scene.events.numbers(scene.transactional_id) == [2]
    assert scene.messages() == []


@on_postgresql
def test_a_session_that_is_forgotten_leaves_nothing(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    session = Session(engine)
    session.execute(INSERT, row(scene, 1))
    tx = pool.join(session)
    send(tx, scene, 1)
    del session
    gc.collect()
    assert tx.db is None
    with Session(engine) as session:
        session.commit()
    assert scene.agree() == []


@on_postgresql
def test_a_scoped_session_and_an_outer_transaction(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    scoped = scoped_session(sessionmaker(engine))
    send(pool.join(scoped), scene, 1)
    scoped.execute(INSERT, row(scene, 1))
    scoped.commit()
    scoped.remove()
    with engine.connect() as connection, connection.begin() as outer:
        with Session(connection) as session:
            session.execute(INSERT, row(scene, 2))
            send(pool.join(session), scene, 2)
            session.commit()  # not the outer one
        assert scene.agree() == [1]
        outer.commit()
    assert scene.agree() == [1, 2]


@on_postgresql
def test_what_can_not_be_joined(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    def refused(target: Any, why: str) -> None:
        with pytest.raises(dualwrite.UsageError, match=why):
            pool.join(target)

    refused(engine, "can't be joined")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        refused(connection, "AUTOCOMMIT")
    with Session(engine, twophase=True) as session:
        refused(session, "twophase")
    with engine.connect() as connection:
        pool.join(connection)
        with open_pool(scene) as other, pytest.raises(dualwrite.UsageError, match="Another pool"):
            other.join(connection)
    second = sa.create_engine(engine.url)
    with Session() as session:
        session.connection(bind_arguments={"bind": engine})
        session.connection(bind_arguments={"bind": second})
        refused(session, "several connections")
    with Session() as session:
        session.connection(bind_arguments={"bind": engine})
        pool.join(session)
        with pytest.raises(dualwrite.UsageError, match="several connections"):
            session.connection(bind_arguments={"bind": second})
    second.dispose()


@drivers
def test_a_pool_is_made_from_the_engine_of_the_sessions(scene: Scene, engine: sa.Engine) -> None:
    """Its own connections have another driver, if a store can't use that of the sessions."""
    with open_pool(scene, engine) as pool, Session(engine) as session:
        session.execute(INSERT, row(scene, 1))
        send(pool.join(session), scene, 1)
        session.commit()
    assert scene.agree() == [1]
    assert engine.pool.status()  # it is still the user's


@drivers
@pytest.mark.parametrize("has_committed", [True, False])
def test_an_unknown_outcome_of_the_commit_is_read_from_the_row(
    scene: Scene, engine: sa.Engine, pool: WriterPool[Any], monkeypatch: pytest.MonkeyPatch, has_committed: bool
) -> None:
    """The answer to COMMIT is lost, or COMMIT itself; the connection is closed."""

    send_commit = JoinedTransaction._send_commit

    def lost(transaction: JoinedTransaction) -> None:
        if has_committed:
            send_commit(transaction)
        raise transaction._errors.commit_unknown(OSError("the connection is lost"))

    with Session(engine) as session:
        tx = pool.join(session)
        session.execute(INSERT, row(scene, 1))
        send(tx, scene, 1)
        monkeypatch.setattr(JoinedTransaction, "_send_commit", lost)
        with pytest.raises(dualwrite.AfterCommitError if has_committed else dualwrite.StoreCommitFailedError):
            session.commit()
        monkeypatch.undo()
        session.rollback()
        session.execute(INSERT, row(scene, 2))
        send(pool.join(session), scene, 2)
        session.commit()
    assert scene.agree() == ([1, 2] if has_committed else [2])


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["cut before it arrives", "cut when it was answered"])
@pytest.mark.parametrize(
    ("driver", "database"),
    [("psycopg", "postgresql"), ("psycopg2", "postgresql"), ("pymysql", "mariadb"), ("mysqldb", "mariadb")],
)
def test_a_connection_that_breaks_at_commit(
    databases: Databases, broker: DevCluster, driver: str, database: str, cut: str
) -> None:
    """Whatever error the driver raises for it, the row is read."""
    skip_unless_installed(driver)
    when, action, has_committed = CUTS[cut]
    with through_a_proxy(databases, database, broker) as proxied, open_pool(proxied.scene) as pool:
        scene, engine = proxied.scene, sa.create_engine(users_url(proxied.url, driver))
        with Session(engine) as session:
            tx = pool.join(session)
            session.execute(INSERT, row(scene, 1))
            send(tx, scene, 1)
            proxied.proxy.on_client_bytes(b"COMMIT", action, when=when)
            with pytest.raises(dualwrite.AfterCommitError if has_committed else dualwrite.StoreCommitFailedError):
                session.commit()
            session.rollback()
            session.execute(INSERT, row(scene, 2))
            send(pool.join(session), scene, 2)
            session.commit()
        engine.dispose()
        assert scene.agree() == ([1, 2] if has_committed else [2])


@pytest.mark.parametrize(("driver", "database"), [("psycopg", "postgresql"), ("pysqlite", "sqlite")])
def test_after_a_recovery_of_its_ids_the_pool_goes_on(scene: Scene, engine: sa.Engine, pool: WriterPool[Any]) -> None:
    """Each writer finds it out in a commit; on SQLite it claims its id after another one, which had locked the database."""
    report = dualwrite.recover(scene.events.database, kafka=scene.settings, prefix=scene.transactional_id)
    assert not report.failed
    done = []
    for number in range(8):
        with Session(engine) as session:
            session.execute(INSERT, row(scene, number))
            send(pool.join(session), scene, number)
            try:
                session.commit()
            except (dualwrite.FencedError, dualwrite.StoreCommitFailedError):
                continue
        done.append(number)
    assert done == list(range(4 if engine.dialect.name == "sqlite" else 2, 8))
    assert scene.agree() == done


@pytest.mark.parametrize(
    ("driver", "database", "isolation"),
    [
        ("psycopg", "postgresql", "REPEATABLE READ"),
        ("psycopg2", "postgresql", "REPEATABLE READ"),
        ("psycopg", "postgresql", "READ COMMITTED"),
        ("pymysql", "mariadb", "REPEATABLE READ"),
        ("mysqldb", "mariadb", "REPEATABLE READ"),
    ],
)
def test_a_transaction_that_is_older_than_a_claim_sends_nothing(
    scene: Scene, driver: str, pool: WriterPool[Any], isolation: Any
) -> None:
    """Rule F2: what it reads may be older, too."""
    with own_engine(scene, driver, isolation_level=isolation) as engine, Session(engine) as session:
        session.execute(INSERT, row(scene, 1))
        session.execute(sa.text("SELECT count(*) FROM kafka_transaction_state")).all()
        assert not dualwrite.recover(scene.events.database, kafka=scene.settings, prefix=scene.transactional_id).failed
        send(pool.join(session), scene, 1)
        sent = mock.Mock()
        with failpoints.armed("after_send", sent), pytest.raises((dualwrite.FencedError, dualwrite.StoreCommitFailedError)):
            session.commit()
        assert not sent.called
    assert scene.agree() == []


@on_postgresql
def test_a_commit_that_does_not_begin_leaves_no_open_transaction(scene: Scene, driver: str) -> None:
    """SQLAlchemy gives the connection back to its pool as it is; and many only close their sessions after an error."""
    with own_engine(scene, driver, pool_size=1, max_overflow=0) as engine:
        with Session(engine) as session:
            session.execute(INSERT, row(scene, 1))
            with open_pool(scene) as pool:
                send(pool.join(session), scene, 1)
            with pytest.raises(dualwrite.WriterClosedError):
                session.commit()
        with Session(engine) as session:
            session.execute(INSERT, row(scene, 2))
            session.commit()
    assert scene.events.numbers(scene.transactional_id) == [2]
    assert scene.messages() == []


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "READ COMMITTED"])
@pytest.mark.parametrize(("driver", "database"), [("pymysql", "mariadb"), ("mysqldb", "mariadb")])
def test_a_snapshot_that_is_older_than_the_writers_last_transaction(
    scene: Scene, driver: str, pool: WriterPool[Any], isolation: Any
) -> None:
    """From MariaDB 11.6 on, such a row can't be locked by default; MySQL has no such setting."""
    on = {"init_command": "SET SESSION innodb_snapshot_isolation=ON"} if MYSQLD is None else {}
    with own_engine(scene, driver, isolation_level=isolation, connect_args=on) as engine:
        sessions = [Session(engine) for _ in range(10)]  # more than the rows of the two writers and their lanes
        for number, session in enumerate(sessions):
            session.execute(sa.text("SELECT * FROM kafka_transaction_state")).all()
            session.execute(INSERT, row(scene, number))
            send(pool.join(session), scene, number)
        for session in sessions:
            session.commit()
            session.close()
    assert scene.agree() == list(range(10))
