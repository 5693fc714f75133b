"""Draining a journal: batches, the last ones while nobody can write, a drainer that was replaced, and a batch that was lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

import dualwrite
from crash.databases import Databases
from crash.scene import Scene
from dualwrite import DualWriter, FencedError, LostTransactionError
from dualwrite.devcluster import DevCluster
from dualwrite.outbox.journal_drain import JournalDrain, drainer_id
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.stores.journal import GateStatus, JournalEntry
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.journal_store import SqlJournal
from dualwrite.stores.sql.sql_journal import insert_entries
from dualwrite.testing import failpoints
from fixtures.broker import read_topic


class DrainScene:
    """A store with an open journal, and a topic."""

    def __init__(self, scene: Scene, store: SqlStateStore) -> None:
        self.scene = scene
        self.store = store
        self.prefix = scene.transactional_id
        assert isinstance(store.journal, SqlJournal)
        self.journal = store.journal
        self.journal.prepare(self.prefix)
        self.journal.open(self.prefix, "test")

    def write(self, *numbers: int) -> None:
        """Entries, each in the journal with headers and a time."""
        entries = [
            JournalEntry(self.scene.topic, b"k", str(n).encode(), '[["h", "dg=="]]', None, 1_700_000_000_000 + n)
            for n in numbers
        ]
        self.store.short_transactions.run(lambda connection: insert_entries(connection, self.prefix, entries), "a test")

    def connect(self, **changes: Any) -> DualWriter[Any]:
        return dualwrite.connect(
            self.store, kafka=self.scene.settings, transactional_id=drainer_id(self.prefix), lanes=1, **changes
        )

    @property
    def gate(self) -> GateStatus:
        return self.journal.gates(self.prefix, counts=True)[0]

    @property
    def published(self) -> list[tuple[int, bytes | None, int]]:
        """Value, header and time of each message."""
        found = read_topic(self.scene.bootstrap, self.scene.topic)
        return [(int(each.value() or b""), dict(each.headers() or []).get("h"), each.timestamp()[1]) for each in found]


@pytest.fixture
def at(databases: Databases, broker: DevCluster, database: str, producer: str) -> Iterator[DrainScene]:
    del producer
    scene = databases.scene(database, broker)
    engine = sa.create_engine(scene.url)
    yield DrainScene(scene, SqlStateStore(engine))
    engine.dispose()


def message(number: int) -> tuple[int, bytes, int]:
    return number, b"v", 1_700_000_000_000 + number


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
