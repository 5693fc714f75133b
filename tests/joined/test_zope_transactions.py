"""`pool.join` with zope.sqlalchemy: the messages commit when Zope's transaction commits the session, in `tpc_vote`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
import transaction
import zope.sqlalchemy
from sqlalchemy.orm import Session, sessionmaker

import dualwrite
from crash.scene import Scene
from dualwrite import WriterPool
from dualwrite.testing import failpoints
from joined.own_sessions import INSERT, own_engine, row, send
from pool.pool_scene import open_pool

on_postgresql = pytest.mark.parametrize("database", ["postgresql"])


@pytest.fixture
def producer() -> str:
    return "native"


class Request:
    """What a Pyramid application has in a request: a transaction manager of its own, and a session that is registered there."""

    def __init__(self, engine: sa.Engine, pool: WriterPool[Any], scene: Scene) -> None:
        self.tm = transaction.TransactionManager(explicit=True)
        self._factory = sessionmaker(engine)
        self.events = zope.sqlalchemy.register(self._factory, transaction_manager=self.tm)
        self._pool, self._scene = pool, scene

    def write(self, number: int) -> Any:
        session = self._factory()
        session.execute(INSERT, row(self._scene, number))
        return self.send(session, number)

    def send(self, session: Session, number: int) -> Any:
        self.events.mark_changed(session)
        tx = self._pool.join(session)
        send(tx, self._scene, number)
        return tx


@pytest.fixture
def request_(scene: Scene) -> Iterator[Request]:
    with open_pool(scene) as pool, own_engine(scene, "psycopg") as engine:
        yield Request(engine, pool, scene)


class Other:
    """Another resource of the transaction, such as a mail: it votes, and notes how it ended."""

    def __init__(self, tm: Any, key: str, *, fails: bool = False) -> None:
        self.transaction_manager = tm
        self.calls: list[str] = []
        self._key, self._fails = key, fails
        tm.get().join(self)

    def sortKey(self) -> str:  # noqa: N802  (the name that Zope calls)
        return self._key

    def tpc_vote(self, _: object) -> None:
        self.calls.append("vote")
        if self._fails:
            raise ValueError("no vote")

    def __getattr__(self, name: str) -> Callable[[object], None]:
        if name not in ("tpc_begin", "commit", "abort", "tpc_finish", "tpc_abort"):
            raise AttributeError(name)
        return lambda _: self.calls.append(name)


@on_postgresql
def test_both_commit_when_zope_commits(scene: Scene, request_: Request) -> None:
    tm = request_.tm
    with tm:
        mail, tx = Other(tm, "mail"), request_.write(1)
    assert (tx.outcome, mail.calls[-1]) == ("published", "tpc_finish")
    tm.begin()
    request_.write(2)
    tm.abort()
    tm.begin()
    Other(tm, "mail", fails=True)
    request_.write(3)
    with pytest.raises(ValueError, match="no vote"):
        tm.commit()
    tm.abort()
    assert scene.agree() == [1]


@on_postgresql
def test_a_commit_that_fails_aborts_zopes_transaction(scene: Scene, request_: Request) -> None:
    tm = request_.tm
    tm.begin()
    mail = Other(tm, "mail")
    request_.write(1)
    fails = failpoints.armed("before_db_commit", failpoints.raises(dualwrite.DeliveryError("No.")))
    with fails, pytest.raises(dualwrite.DeliveryError):
        tm.commit()
    assert (mail.calls[-1], "tpc_finish" in mail.calls) == ("tpc_abort", False)
    tm.abort()  # as pyramid_tm does after an error
    with tm:
        request_.write(2)
    assert scene.agree() == [2]


@on_postgresql
def test_a_savepoint_of_zope_that_is_rolled_back_takes_its_messages_with_it(scene: Scene, request_: Request) -> None:
    tm = request_.tm
    with tm:
        session = request_._factory()
        for number in (1, 2, 3):
            savepoint = tm.savepoint()
            session.execute(INSERT, row(scene, number))
            request_.send(session, number)
            if number == 2:
                savepoint.rollback()
    assert scene.agree() == [1, 3]


@on_postgresql
def test_messages_alone_need_a_session_that_is_marked(scene: Scene, request_: Request) -> None:
    tm = request_.tm
    with tm:
        tx = request_.send(request_._factory(), 1)
    assert tx.outcome == "published"
    with tm:
        session = request_._factory()
        session.execute(sa.text("SELECT 1"))
        tx = request_._pool.join(session)
        send(tx, scene, 2)
    assert tx.outcome is None, "zope.sqlalchemy closes a session that has only read: nothing is committed"
    assert scene.messages() == [1]
