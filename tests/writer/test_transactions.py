"""DualWriter as used by an application: what a block writes and sends becomes visible together, or not at all."""

# ruff: noqa: PT012  (a block of several statements is what is tested: the last one, or its end, must raise)

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from dualwrite import NestedTransactionError, Phase, Transaction, WriterClosedError
from dualwrite.errors import StoreError, UsageError
from dualwrite.testing import failpoints
from fixtures.tiers import thinned
from writer.cases import both_databases, both_producers, producers_and_databases
from writer.scene import Event, Scene


class TroubleError(Exception):
    """The user's own exception."""


# --- success ------------------------------------------------------------------------------------------------------------


@producers_and_databases
def test_a_block_becomes_visible_on_both_sides(scene: Scene) -> None:
    with scene.connect() as writer:
        assert writer.phase is Phase.READY
        scene.write(writer, 1, 2)
        with writer.transaction() as tx:
            scene.both(tx, 3)
            assert scene.rows() == [1, 2]
            assert len(scene.unfinished()) <= 1
        assert scene.agree() == [1, 2, 3]
        assert writer.phase is Phase.READY
    assert writer.phase is Phase.CLOSED
    scene.assert_resolved()


@both_producers
def test_a_message_arrives_as_it_was_sent(scene: Scene) -> None:
    with scene.connect() as writer, writer.transaction() as tx:
        tx.send(scene.topic, b"bytes", key=b"\x00\xff", headers={"a": "text", "b": b"\x00", "c": None}, partition=0)
        tx.send(scene.topic, "text ü", key="key", headers=[("twice", "1"), ("twice", "2")])
        tx.send(scene.topic, None, key="key")
        tx.send(scene.topic, b"", timestamp=1_700_000_000_123)
    bytes_, text, tombstone, empty = scene.raw_messages()
    assert (bytes_.value, bytes_.key, bytes_.partition) == (b"bytes", b"\x00\xff", 0)
    assert bytes_.headers == (("a", b"text"), ("b", b"\x00"), ("c", None))
    assert (text.value, text.key, text.headers) == ("text ü".encode(), b"key", (("twice", b"1"), ("twice", b"2")))
    assert (tombstone.value, tombstone.key) == (None, b"key")
    assert (empty.value, empty.key) == (b"", None)


@both_databases
def test_the_orm_session_writes_in_the_same_transaction(scene: Scene) -> None:
    with scene.connect() as writer:
        with writer.transaction() as tx:
            tx.session.add(Event(writer=scene.transactional_id, number=1))  # flushed when the block ends
            scene.insert(tx, 2)
            scene.send(tx, 1)
            scene.send(tx, 2)
        with pytest.raises(TroubleError), writer.transaction() as tx:
            tx.session.add(Event(writer=scene.transactional_id, number=3))
            tx.session.flush()
            assert tx.db.scalar(sa.select(sa.func.max(Event.number)).where(Event.writer == scene.transactional_id)) == 3
            scene.send(tx, 3)
            raise TroubleError
    assert scene.agree() == [1, 2]


@both_databases
def test_a_savepoint_may_be_rolled_back_in_the_block(scene: Scene) -> None:
    with scene.connect() as writer, writer.transaction() as tx:
        scene.both(tx, 1)
        with pytest.raises(sa.exc.IntegrityError), tx.db.begin_nested():
            scene.insert(tx, 1)
        scene.both(tx, 2)
    assert scene.agree() == [1, 2]


@producers_and_databases
def test_transactions_without_messages_or_without_rows(scene: Scene) -> None:
    with scene.connect() as writer:
        with writer.transaction():
            pass
        with writer.transaction() as tx:
            scene.insert(tx, 1)
        assert tx.state is None
        with writer.transaction() as tx:
            scene.send(tx, 1)
        assert tx.state is not None
        assert scene.agree() == [1]
        scene.write(writer, 2)
        with writer.transaction() as tx:
            scene.insert(tx, 3)
        with writer.transaction() as tx:
            scene.send(tx, 3)
    assert scene.agree() == [1, 2, 3]
    scene.assert_resolved()


# --- functions ----------------------------------------------------------------------------------------------------------


@both_databases
def test_a_decorated_function_runs_in_a_transaction(scene: Scene) -> None:
    with scene.connect() as writer:

        @writer.transactional
        def save(tx: Transaction, number: int, *, fail: bool = False) -> str:
            """Save."""
            scene.both(tx, number)
            if fail:
                raise TroubleError
            return f"saved {number}"

        assert save(1) == "saved 1"
        assert (save.__name__, save.__doc__) == ("save", "Save.")
        with pytest.raises(TroubleError):
            save(2, fail=True)
        assert save(3) == "saved 3"
    assert scene.agree() == [1, 3]


def test_a_decorated_function_that_only_returns_a_coroutine_or_a_generator_is_refused(scene: Scene) -> None:
    """It would commit what it has written, without what it has not run yet."""
    runs: list[int] = []

    async def coroutine(tx: Transaction) -> None:
        runs.append(1)

    async def async_generator(tx: Transaction) -> AsyncIterator[int]:
        runs.append(1)
        yield 1

    def generator(tx: Transaction) -> Iterator[int]:
        runs.append(1)
        yield 1

    def wrapped(tx: Transaction) -> Iterator[int]:
        scene.both(tx, 1)
        return generator(tx)

    kinds: dict[Any, str] = {
        coroutine: "coroutine",
        async_generator: "async generator",
        generator: "generator",
        wrapped: "generator",
    }
    with scene.connect() as writer:
        for function, kind in kinds.items():
            with pytest.raises(UsageError, match=rf"(?s){function.__name__} returned an? {kind}.*Next step"):
                writer.transactional(attempts=3)(function)()
        scene.write(writer, 2)
    assert runs == []
    assert scene.agree() == [2]


@pytest.mark.parametrize("fails_at", thinned(["statement", "record", "commit"], quick=["commit"]))
def test_a_serialization_failure_is_retried(new_scene: Callable[..., Scene], fails_at: str) -> None:
    """SERIALIZABLE: the block and another transaction each read what the other changes."""
    scene = new_scene("postgresql", engine_options={"isolation_level": "SERIALIZABLE"})
    runs = []
    count = sa.select(sa.func.count()).select_from(Event).where(Event.writer == scene.transactional_id)
    with scene.connect() as writer, scene.engine.connect() as other:

        @writer.transactional(attempts=3)
        def save(tx: Transaction) -> None:
            runs.append(tx)
            assert tx.db.scalar(count) == len(runs) - 1
            scene.send(tx, 1)
            if len(runs) == 1:
                other.execute(count)
                other.execute(sa.insert(Event).values(writer=scene.transactional_id, number=2))
            if fails_at == "statement":
                other.commit()
            scene.insert(tx, 1)
            if fails_at == "record":
                other.commit()

        with failpoints.armed("after_record", other.commit):
            save()
        assert len(runs) == 2
        with writer.transaction() as tx:  # the other transaction's row has no message
            scene.send(tx, 2)
    assert scene.agree() == [1, 2]
    scene.assert_resolved()


def test_an_error_that_is_not_retriable_is_not_retried(scene: Scene) -> None:
    runs = []
    with scene.connect() as writer:

        @writer.transactional(attempts=3)
        def save(tx: Transaction) -> None:
            runs.append(tx)
            scene.both(tx, 1)
            raise TroubleError

        with pytest.raises(TroubleError):
            save()
        with pytest.raises(UsageError, match="attempts must be at least 1, not 0"):
            writer.transactional(attempts=0)(lambda tx: scene.both(tx, 1))
        scene.write(writer, 2)
    assert len(runs) == 1
    assert scene.agree() == [2]


def test_after_the_last_attempt_its_error_is_raised(scene: Scene) -> None:
    """A deferred constraint fails at every COMMIT."""
    runs = []
    with scene.engine.begin() as connection:
        connection.execute(
            sa.text("CREATE TABLE IF NOT EXISTS once (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"),
        )
    with scene.connect() as writer:

        @writer.transactional(attempts=2)
        def save(tx: Transaction) -> None:
            runs.append(tx)
            scene.both(tx, 1)
            tx.db.execute(sa.text("INSERT INTO once VALUES (1), (1)"))

        with pytest.raises(StoreError, match="did not commit") as caught:
            save()
        assert caught.value.transactional_id == scene.transactional_id
        scene.write(writer, 2)
    assert len(runs) == 2
    assert scene.agree() == [2]


# --- the user's exception -----------------------------------------------------------------------------------------------


@both_producers
def test_an_exception_of_the_user_is_passed_through_unchanged(scene: Scene) -> None:
    kinds = [TroubleError, ValueError, StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt]
    with scene.connect() as writer:
        for number, kind in enumerate(kinds):
            scene.write(writer, number)
            error = kind("mine")
            with pytest.raises(kind) as caught, writer.transaction() as tx:
                scene.both(tx, 100 + number)
                raise error
            assert caught.value is error
            assert (error.__cause__, error.__context__, getattr(error, "__notes__", [])) == (None, None, [])
            assert writer.phase is Phase.READY
        scene.write(writer, 99)
    assert scene.agree() == [*range(len(kinds)), 99]
    scene.assert_resolved()


@producers_and_databases
def test_an_exception_of_the_database_in_the_block_rolls_back_both(scene: Scene) -> None:
    with scene.connect() as writer:
        scene.write(writer, 1)
        with pytest.raises(sa.exc.IntegrityError), writer.transaction() as tx:
            scene.send(tx, 2)
            scene.insert(tx, 1)
        with pytest.raises(sa.exc.IntegrityError), writer.transaction() as tx:
            scene.send(tx, 2)
            tx.session.add(Event(writer=scene.transactional_id, number=1))
            tx.session.flush()
        with pytest.raises(sa.exc.IntegrityError), writer.transaction() as tx:
            scene.send(tx, 2)
            tx.session.add(Event(writer=scene.transactional_id, number=1))  # flushed when the block ends
        scene.write(writer, 3)
    assert scene.agree() == [1, 3]
    scene.assert_resolved()


def test_an_error_of_postgresql_that_the_block_swallowed_still_rolls_back_both(scene: Scene) -> None:
    with scene.connect() as writer:
        with pytest.raises(StoreError, match="earlier statement") as caught, writer.transaction() as tx:
            scene.both(tx, 1)
            with pytest.raises(sa.exc.ProgrammingError):
                tx.db.execute(sa.text("SELECT * FROM nowhere"))
        assert not caught.value.retriable
        scene.write(writer, 2)
    assert scene.agree() == [2]


# --- the handle after its block -----------------------------------------------------------------------------------------


def test_a_handle_is_refused_after_its_block(scene: Scene) -> None:
    with scene.connect() as writer:
        with writer.transaction() as tx:
            scene.both(tx, 1)
            connection, session = tx.db, tx.session
        for use in (
            lambda: tx.db,
            lambda: tx.session,
            lambda: scene.send(tx, 2),
            lambda: tx.send_offsets(None),
            lambda: connection.execute(sa.select(Event)),
            lambda: session.add(Event(writer=scene.transactional_id, number=2)),
        ):
            with pytest.raises(WriterClosedError, match="ended"):
                use()
        with pytest.raises(TroubleError), writer.transaction() as failed:
            raise TroubleError
        with pytest.raises(WriterClosedError, match="ended"):
            scene.send(failed, 2)
        scene.write(writer, 3)
    assert scene.agree() == [1, 3]


@both_databases
def test_a_nested_transaction_is_refused_and_the_outer_one_continues(scene: Scene) -> None:
    with scene.connect() as writer:
        with writer.transaction() as tx:
            scene.both(tx, 1)
            with pytest.raises(NestedTransactionError, match="begin_nested") as caught, writer.transaction():
                pass
            assert caught.value.transactional_id == scene.transactional_id
            scene.both(tx, 2)
        with pytest.raises(NestedTransactionError), writer.transaction() as tx:
            scene.both(tx, 3)
            with writer.transaction():
                pass
        scene.write(writer, 4)
    assert scene.agree() == [1, 2, 4]
