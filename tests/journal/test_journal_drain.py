"""Draining a journal: batches, the last ones while nobody can write, a drainer that was replaced, and a batch that was lost."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from crash.databases import Databases
from dualwrite import FencedError, LostTransactionError
from dualwrite.devcluster import DevCluster
from dualwrite.errors import HostClockError, StoreError
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.relay.drain import Drain, Turn
from dualwrite.relay.journal_drain import JournalDrain, JournalSource
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.stores.journal import JournalEntry
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_journal import lock_gate
from dualwrite.testing import failpoints
from dualwrite.transactional_id import drainer_id
from fixtures.host_clock import HOUR, clock_ahead
from journal.journal_scene import DrainScene, message


@pytest.fixture
def at(databases: Databases, broker: DevCluster, database: str, producer: str) -> Iterator[DrainScene]:
    del producer
    scene = databases.scene(database, broker)
    engine = sa.create_engine(scene.url)
    yield DrainScene(scene, SqlStateStore(engine))
    engine.dispose()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])
def test_all_entries_are_published_in_order_and_the_gate_closes(at: DrainScene) -> None:
    at.write(*range(5))
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        while not drain.turn().is_last:
            pass
        assert drain.turn().is_last
    assert (at.gate.is_open, at.gate.entries) == (False, 0)
    assert at.published == [message(number) for number in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgresql"])
def test_all_that_is_left_behind_a_closed_gate_is_published(at: DrainScene) -> None:
    """After batches of 100 and 200, fewer than 500 are left, and it is tried to close the gate; the next batch has 400."""
    at.write(*range(790))
    with at.store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE dualwrite_journal_gate SET epoch = epoch + 1"))
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        while not drain.turn().is_last:
            pass
    assert at.published == [message(number) for number in range(790)]


def test_entries_of_a_host_whose_clock_was_ahead_are_published_in_order(at: DrainScene) -> None:
    """With the present time, as that of their host was wrong; on such a host they wait, and only an own time is refused."""
    later = int((time.time() + 2 * HOUR) * 1000)
    at.write(0)
    at.write_entries(*(entry_of(at, number, later) for number in (1, 2)))
    at.write_entries(entry_of(at, 3, later, has_own_time=True), entry_of(at, 4, later))
    at.write(5)
    with at.connect() as writer:
        with clock_ahead(2.5), pytest.raises(HostClockError, match="2:30:00 ahead"):
            JournalDrain(writer, at.prefix, "test").turn()
        drain = JournalDrain(writer, at.prefix, "test")
        while not drain.turn().is_last:
            pass
    published = at.published
    assert [number for number, *_ in published] == [0, 1, 2, 4, 5]
    assert all(when <= time.time() * 1000 for *_, when in published)
    (letter,) = DeadLetters(at.store, drainer_id(at.prefix)).oldest()
    assert letter.row["message_value"] == b"3"


def entry_of(at: DrainScene, number: int, sent_at_ms: int, *, has_own_time: bool = False) -> JournalEntry:
    return JournalEntry(at.scene.topic, b"k", b"%d" % number, None, None, sent_at_ms, has_own_time)


def test_a_message_that_the_producer_itself_refuses_is_a_dead_letter(at: DrainScene) -> None:
    at.write(1)
    at.write_entries(JournalEntry(at.scene.topic, b"k", bytes(2_000_000), None, None, 1))
    at.write(2)
    at.drain()
    assert at.published == [message(1), message(2)]
    (letter,) = DeadLetters(at.store, drainer_id(at.prefix)).oldest()
    assert len(letter.row["message_value"]) == 2_000_000


def test_the_gate_stays_open_while_the_journal_has_entries(at: DrainScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that come after the last look, but before nobody can write any more."""
    monkeypatch.setattr("dualwrite.relay.journal_drain._LOCK_SECONDS", 5.0)
    real = Drain.turn
    turns = 0

    def turn(drain: Drain) -> Turn:
        nonlocal turns
        turns += 1
        done = real(drain)
        if turns == 1:
            at.write(7)
        return done

    monkeypatch.setattr(Drain, "turn", turn)
    at.drain()
    assert at.gate.entries == 0
    assert at.published == [message(7)]


def test_nobody_waits_at_the_gate_while_there_is_much_to_publish(at: DrainScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batches are small, however many entries there are: that one was small does not mean that few are left."""
    at.write(*range(1200))
    left: list[int] = []

    def lock(connection: sa.Connection, prefix: str) -> int | None:
        left.append(at.gate.entries or 0)
        return lock_gate(connection, prefix)

    monkeypatch.setattr("dualwrite.relay.journal_drain.lock_gate", lock)
    at.drain()
    assert left
    assert max(left) < 500
    assert at.published == [message(number) for number in range(1200)]


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_messages_that_kafka_refuses_hold_nothing_up(at: DrainScene) -> None:
    """They are found on all databases alike, whatever keeps others from writing meanwhile."""
    for number in range(5):
        at.write(number)
        at.write_entry(b"", partition=99)
    at.drain()
    assert (at.gate.is_open, at.gate.entries) == (False, 0)
    assert at.published == [message(number) for number in range(5)]
    assert DeadLetters(at.store, drainer_id(at.prefix)).count() == 5


def test_no_more_of_a_journal_is_read_than_fits_into_a_batch(at: DrainScene) -> None:
    for _ in range(100):
        at.write_entry(b" " * 400_000)
    tracemalloc.start()
    at.drain()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert at.gate.entries == 0
    assert peak < 20_000_000  # the journal has 40 MB


def test_a_drainer_that_was_replaced_does_not_close_the_gate(at: DrainScene) -> None:
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        at.write(1)
        with at.connect(), pytest.raises(FencedError):
            drain.turn()
    assert (at.gate.is_open, at.gate.entries) == (True, 1)


def failing() -> None:
    """What a failpoint does."""
    raise RuntimeError("dies")


@pytest.mark.parametrize("point", ["after_prepare", "before_db_commit", "after_db_commit"])
def test_a_drainer_that_fails_in_a_batch_publishes_it_once(at: DrainScene, point: str) -> None:
    at.write(1, 2)
    die = failpoints.only_at(1, failing)
    with pytest.raises(RuntimeError, match="dies"), at.connect() as writer, failpoints.armed(point, die):
        JournalDrain(writer, at.prefix, "test").turn()
    at.drain()
    assert not at.gate.is_open
    assert at.published == [message(1), message(2)]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_entries_that_somebody_else_deletes_are_not_published(at: DrainScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the batch was read, and before it is removed."""
    at.write(1, 2, 3)
    read = JournalSource.read

    def read_then_delete(source: JournalSource, connection: sa.Connection, most: int, size: int) -> Any:
        found = read(source, connection, most, size)
        with at.store.engine.begin() as other:
            other.execute(sa.text("DELETE FROM dualwrite_journal WHERE id = :id"), {"id": found[0][1].id})
        monkeypatch.undo()
        return found

    monkeypatch.setattr(JournalSource, "read", read_then_delete)
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test", keeps_open=True)
        with pytest.raises(StoreError, match="3 journal entries were to be deleted, and 2 were"):
            drain.turn()
        assert drain.turn().published == 2
    assert at.published == [message(1), message(3)]


def test_nothing_is_published_while_an_earlier_batch_is_lost(at: DrainScene) -> None:
    at.write(1)
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        lost = LostTransaction(LostKind.LOST, PreparedTxnState(1, 1), 1, datetime.now(UTC))
        claim = at.store.read(drainer_id(at.prefix))
        assert claim is not None
        at.store.record_resolution(claim.claim, Resolution(lost=lost))
        with pytest.raises(LostTransactionError):
            drain.turn()
    assert (at.gate.is_open, at.gate.entries) == (True, 1)
    assert at.published == []
