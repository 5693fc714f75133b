"""A group that fails as a whole: its units run again, apart from each other where that is needed; ids are recovered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import dualwrite
from crash.scene import Scene
from crash.worker import timeouts
from dualwrite import Transaction
from dualwrite.errors import (
    AfterCommitError,
    BrokerAuthorizationError,
    BrokerError,
    DeliveryError,
    FencedError,
    MessageRefusedError,
    MessageTooLargeError,
    StoreCommitFailedError,
    TransactionTimeoutError,
)
from dualwrite.kafka import NativeProducer
from dualwrite.kafka.base import Message
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.dialect import driver_connection  # by a way that nobody sees
from dualwrite.testing import failpoints
from fixtures.open_transactions import abort_ongoing
from fixtures.pace import LIMIT
from pool.pool_scene import both, both_producers, grouped, open_pool


class StoreWithoutLeases(SqlStateStore):
    """As a store of a third party: pools use fixed ids."""

    @property
    def leases(self) -> None:
        return None


def test_a_commit_that_fails_because_of_one_unit(scene: Scene) -> None:
    """A deferred constraint is checked at the COMMIT of all: both sides are rolled back, and the units run one by one."""
    table = f"strict_{scene.transactional_id.replace('-', '_')}"
    with scene.engine.begin() as connection:
        connection.execute(sa.text(f"CREATE TABLE {table} (id int, CONSTRAINT once UNIQUE (id) DEFERRABLE INITIALLY DEFERRED)"))

    def strict(tx: Transaction, number: int, row: int) -> int:
        tx.db.execute(sa.text(f"INSERT INTO {table} VALUES (:row)"), {"row": row})
        return both(tx, scene, number)

    with open_pool(scene) as pool:
        futures = grouped(pool, *(partial(strict, number=number, row=row) for number, row in ((1, 7), (2, 7), (3, 8))))
        assert [futures[0].result(), futures[2].result()] == [1, 3]
        with pytest.raises(StoreCommitFailedError, match="once"):
            futures[1].result()
    assert scene.agree() == [1, 3]


def test_the_error_of_a_group_is_no_context_of_what_its_units_raise_alone(scene: Scene) -> None:
    """A processor takes it for their cause: after a conflict of the group it would not count a bad message."""
    runs: list[int] = []

    def unit(tx: Transaction, number: int) -> None:
        runs.append(number)
        both(tx, scene, number)
        if len(runs) > 2:
            raise KeyError(number)

    def conflict() -> None:
        if runs:
            raise StoreCommitFailedError("a conflict")

    with open_pool(scene) as pool, failpoints.armed("after_prepare", conflict):
        futures = grouped(pool, *(partial(unit, number=number) for number in (1, 2)))
        errors = [future.exception() for future in futures]
    assert runs == [1, 2, 1, 2]
    assert [(type(error), error and error.__context__) for error in errors] == [(KeyError, None)] * 2
    assert scene.agree() == []


def test_a_topic_that_one_unit_may_not_write_to(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's broker has no ACLs: a mock refuses the topic."""
    send = NativeProducer.send_messages

    def refuse(producer: NativeProducer, messages: Iterable[Message]) -> None:
        given = list(messages)
        if any(message.topic == "forbidden" for message in given):
            raise BrokerAuthorizationError("TOPIC_AUTHORIZATION_FAILED")
        send(producer, given)

    monkeypatch.setattr(NativeProducer, "send_messages", refuse)

    def forbidden(tx: Transaction) -> None:
        tx.send("forbidden", b"x")

    with open_pool(scene) as pool:
        futures = grouped(pool, partial(both, scene=scene, number=1), forbidden, partial(both, scene=scene, number=3))
        assert [futures[0].result(), futures[2].result()] == [1, 3]
        with pytest.raises(BrokerAuthorizationError):
            futures[1].result()
    assert scene.agree() == [1, 3]


@pytest.mark.parametrize("size", [1, 3])
def test_a_failing_listener_of_the_commit_changes_no_result(scene: Scene, caplog: pytest.LogCaptureFixture, size: int) -> None:
    """Even if its error looks like one of the commit: every unit runs once, and every caller gets its result."""
    runs: list[int] = []

    def fail(_: Session) -> None:
        raise StoreCommitFailedError("of another pool", transactional_id="another")

    def unit(tx: Transaction, number: int) -> int:
        runs.append(number)
        tx.session.execute(sa.text("SELECT 1"))
        return both(tx, scene, number)

    maker = sessionmaker()
    sa.event.listen(maker, "after_commit", fail)
    with open_pool(scene, session=maker) as pool:
        futures = grouped(pool, *(partial(unit, number=number) for number in range(size)))
        assert [future.result() for future in futures] == runs == list(range(size))
        with pytest.raises(AfterCommitError, match="another pool"), pool.transaction() as tx:
            unit(tx, size)
    assert "has committed" in caplog.text
    assert scene.agree() == list(range(size + 1))


def _too_late(kind: type[BrokerError]) -> BrokerError:
    """What a producer raises if a partition does not answer, also if the transaction's time is over by then."""
    error = kind("The transaction is too old." if kind is TransactionTimeoutError else "Messages were not acknowledged.")
    error.__cause__ = DeliveryError("Messages were not acknowledged.") if kind is TransactionTimeoutError else None
    return error


@pytest.mark.parametrize(
    ("kind", "alone"), [(DeliveryError, [1]), (TransactionTimeoutError, [1]), (MessageRefusedError, [1, 2, 3])]
)
def test_units_do_not_wait_one_after_another_for_a_partition_that_does_not_answer(
    scene: Scene, kind: type[BrokerError], alone: list[int]
) -> None:
    """One unit tries it alone, since the others may write to other partitions; a refused message is that of one unit."""
    runs: list[int] = []

    def unit(tx: Transaction, number: int) -> None:
        runs.append(number)
        both(tx, scene, number)

    def not_stored() -> None:
        if runs:
            raise _too_late(kind)

    with open_pool(scene, size=1) as pool:
        with failpoints.armed("after_prepare", not_stored):
            futures = grouped(pool, *(partial(unit, number=number) for number in (1, 2, 3)))
        assert [type(future.exception()) for future in futures] == [kind] * 3
        assert runs == [1, 2, 3, *alone]
        assert pool.run(both, scene, 4) == 4
    assert scene.agree() == [4]


@both_producers
@pytest.mark.parametrize("topic", ["no such topic", "events"])
def test_a_message_that_cannot_be_sent_is_raised_to_its_caller(scene: Scene, topic: str) -> None:
    def bad(tx: Transaction) -> None:
        both(tx, scene, 2)
        tx.send(scene.topic if topic == "events" else topic, b"x" * 1_100_000)

    with open_pool(scene) as pool:
        futures = grouped(pool, partial(both, scene=scene, number=1), bad, partial(both, scene=scene, number=3))
        assert [futures[0].result(), futures[2].result()] == [1, 3]
        expected = MessageTooLargeError if topic == "events" else dualwrite.InvalidMessageError
        with pytest.raises(expected):
            futures[1].result()
    assert scene.agree() == [1, 3]


def test_units_do_not_rerun_after_one_has_ended_the_transaction(scene: Scene) -> None:
    """What they wrote is committed without messages: running them again would write it twice."""
    runs: list[int] = []

    def counted(tx: Transaction, number: int) -> None:
        runs.append(number)
        both(tx, scene, number)

    def ends(tx: Transaction) -> None:
        counted(tx, 2)
        driver_connection(tx.db).commit()

    with open_pool(scene) as pool:
        futures = grouped(pool, partial(counted, number=1), ends, partial(counted, number=3))
        for future in futures:
            with pytest.raises(dualwrite.TransactionControlError, match="WITHOUT its messages"):
                future.result()
    assert runs in ([1, 2], [1, 2, 3])
    assert scene.messages() == []


def test_callers_share_no_exception(scene: Scene) -> None:
    """Each raises its own copy: a traceback is a property of the exception."""
    with (
        StoreWithoutLeases.from_url(scene.url) as store,
        dualwrite.create_pool(store, kafka=scene.settings, prefix=scene.transactional_id, size=1, timeouts=timeouts()) as pool,
    ):
        with dualwrite.connect(scene.engine, kafka=scene.settings, transactional_id=f"{scene.transactional_id}.1"):
            errors = [pool.submit(both, scene, number).exception(LIMIT) for number in range(5)]
        assert len({id(error) for error in errors}) == 5
        assert all(isinstance(error, FencedError) for error in errors)
        assert "a prefix of its own" in str(errors[-1])
        assert pool.size == 0
    assert scene.agree() == []


@pytest.mark.slow
def test_a_smaller_pool_with_fixed_ids_recovers_those_of_a_larger_one(scene: Scene) -> None:
    left = f"{scene.transactional_id}.4"
    crashed = dataclasses.replace(scene, transactional_id=left)
    process = crashed.write(1, 1, "after_db_commit=kill")
    process.killed()
    with (
        StoreWithoutLeases.from_url(scene.url) as store,
        dualwrite.create_pool(store, kafka=scene.settings, prefix=scene.transactional_id, timeouts=timeouts()) as pool,
    ):
        assert crashed.messages() == [1]
        assert pool.transactional_ids == (f"{scene.transactional_id}.1", f"{scene.transactional_id}.2")
        pool.resize(3)
        assert pool.run(both, scene, 2) == 2
        pool.resize(1)
        assert pool.run(both, scene, 3) == 3
    assert scene.agree() == [2, 3]
    with dualwrite.open_recoverer(scene.events.database, kafka=scene.settings) as recoverer:
        assert recoverer.pending(prefix=scene.transactional_id) == ()


@pytest.mark.parametrize("producer", ["native", "librdkafka"], indirect=True)
@pytest.mark.slow
def test_units_whose_commit_comes_too_late_are_published_again(scene: Scene) -> None:
    late = failpoints.only_at(1, lambda: abort_ongoing(scene.bootstrap, scene.transactional_id))
    with open_pool(scene) as pool:
        with failpoints.armed("before_kafka_commit", late):
            units = grouped(pool, *(partial(both, scene=scene, number=number) for number in range(1, 5)))
        assert [unit.result(LIMIT) for unit in units] == [1, 2, 3, 4]
        assert scene.agree() == [1, 2, 3, 4]
