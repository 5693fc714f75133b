"""`tx.session` is made like the user's own sessions, and its events fire when what they announce has happened."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.orm.exc import DetachedInstanceError

from dualwrite import ConfigurationError, StoreCommitFailedError, Transaction
from dualwrite.errors import AfterCommitError, FencedError
from dualwrite.stores.rocksdb import RocksDBStore
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints
from writer.cases import both_databases
from writer.scene import Event, Scene

EVENTS = ("before_commit", "after_commit", "after_rollback")


class Users(Session):
    """A user's Session class with a method of its own, and with a choice of engines that must not leave the transaction."""

    def event(self, writer: str, number: int) -> Event:
        found = Event(writer=writer, number=number)
        self.add(found)
        return found

    def get_bind(self, *_: Any, **__: Any) -> sa.Engine:  # type: ignore[override]  # what is tested
        pytest.fail("asked for an engine")


FACTORIES: dict[str, Callable[[sa.Engine], Any]] = {
    "sessionmaker": lambda engine: sessionmaker(engine, class_=Users, expire_on_commit=False),
    "scoped_session": lambda engine: scoped_session(sessionmaker(engine, class_=Users, expire_on_commit=False)),
    "class": lambda _: Users,
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_the_session_class_of_the_user_is_used(scene: Scene, factory: str) -> None:
    with scene.connect(session=FACTORIES[factory](scene.engine)) as writer, writer.transaction() as tx:
        tx.session.event(scene.transactional_id, 1)
        assert tx.session.scalars(sa.select(Event.number).where(Event.writer == scene.transactional_id)).all() == [1]
        scene.send(tx, 1)
    assert scene.agree() == [1]


def test_expire_on_commit_of_the_user_is_kept(scene: Scene) -> None:
    for expires, number in ((False, 1), (True, 2), (None, 3)):
        maker = None if expires is None else sessionmaker(scene.engine, expire_on_commit=expires)
        with scene.connect(session=maker) as writer, writer.transaction() as tx:
            event = Event(writer=scene.transactional_id, number=number)
            tx.session.add(event)
            scene.send(tx, number)
        if expires:
            with pytest.raises(DetachedInstanceError):
                _ = event.number
        else:
            assert event.number == number
    assert scene.agree() == [1, 2, 3]


@both_databases
def test_session_events_are_sent_after_the_facts(scene: Scene) -> None:
    maker = sessionmaker(scene.engine)
    heard: list[tuple[str, list[int]]] = []  # with the rows that others see at that time
    blocks: list[Transaction] = []

    def hear(name: str) -> None:
        sa.event.listen(maker, name, lambda _session: heard.append((name, scene.rows())))

    for name in EVENTS:
        hear(name)

    @sa.event.listens_for(maker, "before_commit")
    def publish(session: Session) -> None:
        scene.send(blocks[-1], 1)  # the writer still accepts messages, and the session accepts rows
        session.add(Event(writer=scene.transactional_id, number=1))

    with scene.connect(session=maker) as writer:
        with writer.transaction() as tx:
            blocks.append(tx)
            _ = tx.session
        assert heard == [("before_commit", []), ("after_commit", [1])]
        heard.clear()
        sa.event.remove(maker, "before_commit", publish)
        with pytest.raises(KeyError), writer.transaction() as tx:
            tx.session.add(Event(writer=scene.transactional_id, number=2))
            raise KeyError
        assert heard == [("after_rollback", [1])]
        heard.clear()
        late = failpoints.armed("before_db_commit", failpoints.raises(KeyError()))
        with late, pytest.raises(KeyError), writer.transaction() as tx:
            tx.session.add(Event(writer=scene.transactional_id, number=3))
        assert heard == [("before_commit", [1]), ("after_rollback", [1])]
        heard.clear()
        with writer.transaction() as tx:  # without a session there are no events
            scene.both(tx, 4)
        assert heard == []
    assert scene.agree() == [1, 4]


def test_after_commit_is_not_sent_if_the_database_refuses_the_commit(postgres_scene: Scene) -> None:
    scene, heard = postgres_scene, []
    maker = sessionmaker(scene.engine)
    for name in EVENTS:
        sa.event.listen(maker, name, lambda _session, name=name: heard.append(name))
    with scene.connect(session=maker) as writer:
        with pytest.raises(StoreCommitFailedError), writer.transaction() as tx:
            tx.session.execute(sa.text("CREATE TEMPORARY TABLE late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
            tx.session.execute(sa.text("INSERT INTO late VALUES (1), (1)"))
        assert heard == ["before_commit", "after_rollback"]
    scene.assert_resolved()


def test_an_error_of_a_listener_before_the_commit_rolls_back_both_sides(scene: Scene) -> None:
    maker = sessionmaker(scene.engine)
    sa.event.listen(maker, "before_commit", lambda _session: 1 / 0)
    with scene.connect(session=maker) as writer:
        with pytest.raises(ZeroDivisionError), writer.transaction() as tx:
            scene.both(tx, 1)
            tx.session.add(Event(writer=scene.transactional_id, number=2))
        scene.write(writer, 3)
    assert scene.agree() == [3]


@both_databases
@pytest.mark.parametrize(
    "kind", [ZeroDivisionError, StoreCommitFailedError, FencedError, sa.exc.OperationalError, KeyboardInterrupt]
)
def test_an_error_of_a_listener_after_the_commit_rolls_back_nothing(scene: Scene, kind: type[BaseException]) -> None:
    """Neither if it looks like an error of the commit, such as that of another writer or database that the listener uses."""
    errors: dict[type[BaseException], BaseException] = {
        StoreCommitFailedError: StoreCommitFailedError("another one", transactional_id="another"),
        FencedError: FencedError("the same id elsewhere", transactional_id=scene.transactional_id),
        sa.exc.OperationalError: sa.exc.OperationalError("UPDATE", {}, Exception("deadlock")),
    }
    error, runs = errors.get(kind) or kind(), 0
    maker = sessionmaker(scene.engine)

    def fail(_session: Session) -> None:
        if runs == 1:
            raise error

    sa.event.listen(maker, "after_commit", fail)
    with scene.connect(session=maker) as writer:

        @writer.transactional(attempts=3)
        def write(tx: Transaction, number: int) -> None:
            nonlocal runs
            runs += 1
            scene.send(tx, number)
            tx.session.add(Event(writer=scene.transactional_id, number=number))

        with pytest.raises(AfterCommitError if isinstance(error, Exception) else kind) as caught:
            write(1)
        if isinstance(error, Exception):
            assert caught.value.__cause__ is error
            assert type(error).__name__ in str(caught.value)
        else:
            assert "committed on both sides" in " ".join(caught.value.__notes__)
        write(2)
    assert runs == 2
    assert scene.agree() == [1, 2]


def test_session_options_that_leave_the_transaction_are_refused(scene: Scene, tmp_path: Any) -> None:
    for wrong in (sessionmaker(twophase=True), sessionmaker(binds={Event: scene.engine}), "a text", sessionmaker()()):
        with pytest.raises(ConfigurationError):
            scene.connect(session=wrong)
    with pytest.raises(ConfigurationError, match="not a SQL database"):
        scene.connect(f"rocksdb:///{tmp_path}/rocks", session=sessionmaker())
    with RocksDBStore(str(tmp_path / "rocks")) as store, pytest.raises(ConfigurationError, match="combined with a store"):
        scene.connect(store, session=sessionmaker())
    with pytest.raises(ConfigurationError):
        SqlStateStore(scene.engine, session=3)  # type: ignore[arg-type]  # what is tested
