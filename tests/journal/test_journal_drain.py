"""Draining a journal: batches, the last ones while nobody can write, a drainer that was replaced, and a batch that was lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from crash.databases import Databases
from dualwrite import FencedError, LostTransactionError
from dualwrite.devcluster import DevCluster
from dualwrite.outbox.journal_drain import JournalDrain, drainer_id
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_journal import lock_gate
from dualwrite.testing import failpoints
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
        while drain.step():
            pass
        assert not drain.step()
    assert (at.gate.is_open, at.gate.entries) == (False, 0)
    assert at.published == [message(number) for number in range(5)]


def test_the_gate_stays_open_while_the_journal_has_entries(at: DrainScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that come after the last look, but before nobody can write any more."""
    monkeypatch.setattr("dualwrite.outbox.journal_drain._LOCK_LIMIT", 5.0)
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        real = drain._drain.turn
        turns = 0

        def turn() -> Any:
            nonlocal turns
            turns += 1
            done = real()
            if turns == 1:
                at.write(7)
            return done

        monkeypatch.setattr(drain._drain, "turn", turn)
        while drain.step():
            pass
    assert at.gate.entries == 0
    assert at.published == [message(7)]


def test_nobody_waits_at_the_gate_while_there_is_much_to_publish(at: DrainScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batches are small, however many entries there are: that one was small does not mean that few are left."""
    at.write(*range(1200))
    left: list[int] = []

    def lock(connection: sa.Connection, prefix: str) -> int | None:
        left.append(at.gate.entries or 0)
        return lock_gate(connection, prefix)

    monkeypatch.setattr("dualwrite.outbox.journal_drain.lock_gate", lock)
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        while drain.step():
            pass
    assert left
    assert max(left) < 500
    assert at.published == [message(number) for number in range(1200)]


def test_a_drainer_that_was_replaced_does_not_close_the_gate(at: DrainScene) -> None:
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        at.write(1)
        with at.connect(), pytest.raises(FencedError):
            drain.step()
    assert (at.gate.is_open, at.gate.entries) == (True, 1)


def failing() -> None:
    """What a failpoint does."""
    raise RuntimeError("dies")


@pytest.mark.parametrize("point", ["after_prepare", "before_db_commit", "after_db_commit"])
def test_a_drainer_that_fails_in_a_batch_publishes_it_once(at: DrainScene, point: str) -> None:
    at.write(1, 2)
    die = failpoints.only_at(1, failing)
    with pytest.raises(RuntimeError, match="dies"), at.connect() as writer, failpoints.armed(point, die):
        JournalDrain(writer, at.prefix, "test").step()
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        while drain.step():
            pass
    assert not at.gate.is_open
    assert at.published == [message(1), message(2)]


def test_nothing_is_published_while_an_earlier_batch_is_lost(at: DrainScene) -> None:
    at.write(1)
    with at.connect() as writer:
        drain = JournalDrain(writer, at.prefix, "test")
        lost = LostTransaction(LostKind.LOST, PreparedTxnState(1, 1), 1, datetime.now(UTC))
        claim = at.store.read(drainer_id(at.prefix))
        assert claim is not None
        at.store.record_resolution(claim.claim, Resolution(lost=lost))
        with pytest.raises(LostTransactionError):
            drain.step()
    assert (at.gate.is_open, at.gate.entries) == (True, 1)
    assert at.published == []
