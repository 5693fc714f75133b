"""Only the writer ends the transaction: every other way raises in the block, and the block can continue."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from dualwrite import FencedError, Phase, Transaction, TransactionControlError, UsageError
from writer.cases import both_databases, native_on_postgresql, producers_and_databases
from writer.scene import Event, Scene

CALLS: dict[str, Callable[[Transaction], object]] = {
    "db.commit": lambda tx: tx.db.commit(),
    "db.rollback": lambda tx: tx.db.rollback(),
    "db.close": lambda tx: tx.db.close(),
    "db.begin": lambda tx: tx.db.begin(),
    "db.invalidate": lambda tx: tx.db.invalidate(),
    "db.get_transaction.commit": lambda tx: tx.db.get_transaction().commit(),
    "db.get_transaction.rollback": lambda tx: tx.db.get_transaction().rollback(),
    "with db": lambda tx: tx.db.__enter__(),
    "session.commit": lambda tx: tx.session.commit(),
    "session.rollback": lambda tx: tx.session.rollback(),
    "session.close": lambda tx: tx.session.close(),
    "with session": lambda tx: tx.session.__enter__(),
    "COMMIT": lambda tx: tx.db.execute(sa.text("COMMIT")),
    "rollback": lambda tx: tx.db.exec_driver_sql("  /* now */ rollback;"),
    "session COMMIT": lambda tx: tx.session.execute(sa.text("COMMIT")),
    "BEGIN": lambda tx: tx.db.execute(sa.text("BEGIN")),
}


@both_databases
def test_calls_that_would_end_the_transaction_are_refused_and_nothing_is_lost(scene: Scene) -> None:
    with scene.connect() as writer:
        with writer.transaction() as tx:
            scene.both(tx, 1)
            tx.session.add(Event(writer=scene.transactional_id, number=2))
            for name, call in CALLS.items():
                with pytest.raises(TransactionControlError) as caught:
                    call(tx)
                assert caught.value.transactional_id == scene.transactional_id, name
                assert "leave the block to commit" in str(caught.value), name
            scene.send(tx, 2)
            scene.both(tx, 3)
        assert scene.agree() == [1, 2, 3]
        for number, call in enumerate(CALLS.values()):
            with pytest.raises(TransactionControlError), writer.transaction() as tx:
                scene.both(tx, 100 + number)
                call(tx)
        scene.write(writer, 4)
    assert scene.agree() == [1, 2, 3, 4]
    scene.assert_resolved()


@native_on_postgresql
def test_a_rollback_that_bypasses_the_writer_is_found(scene: Scene) -> None:
    with scene.connect() as writer:
        with pytest.raises(TransactionControlError, match="transaction itself"), writer.transaction() as tx:
            scene.both(tx, 1)
            tx.db.connection.dbapi_connection.rollback()
        with pytest.raises(TransactionControlError, match="transaction itself"), writer.transaction() as tx:
            scene.both(tx, 2)
            tx.db.connection.dbapi_connection.rollback()
            scene.insert(tx, 2)
        scene.write(writer, 3)
    assert scene.agree() == [3]
    scene.assert_resolved()


@producers_and_databases
def test_a_commit_that_bypasses_the_writer_is_reported(scene: Scene) -> None:
    """Here the promise can no longer be kept; the error says what may have happened, and no message is published."""
    with scene.connect() as writer:
        with pytest.raises(TransactionControlError, match="WITHOUT its messages"), writer.transaction() as tx:
            scene.both(tx, 1)
            tx.db.connection.dbapi_connection.commit()
        assert (scene.rows(), scene.messages()) == ([1], [])
        scene.write(writer, 2)
    assert (scene.rows(), scene.messages()) == ([1, 2], [2])


def test_a_writer_is_not_closed_reopened_or_opened_in_its_own_block(scene: Scene) -> None:
    with scene.connect() as writer:
        with writer.transaction() as tx:
            scene.both(tx, 1)
            for call in (writer.close, writer.reopen, writer.open):
                with pytest.raises(UsageError, match="inside a transaction of the same writer") as caught:
                    call()
                assert "leave the block first" in str(caught.value)
                assert "savepoint" not in str(caught.value)
            scene.both(tx, 2)
        assert writer.phase is Phase.READY
    assert scene.agree() == [1, 2]


def test_a_fenced_error_of_another_id_raised_by_the_block_is_passed_through(scene: Scene) -> None:
    """A block may use another writer, whose error must not stop this one."""
    with scene.connect() as writer:
        error = FencedError("another id", transactional_id="another")
        with pytest.raises(FencedError) as caught, writer.transaction() as tx:
            scene.both(tx, 1)
            raise error
        assert caught.value is error
        assert writer.phase is Phase.READY
        scene.write(writer, 2)
    assert scene.agree() == [2]
