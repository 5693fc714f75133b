"""What the journal's tests do: pools with a journal, waiting until it is empty; and a journal without a pool."""

from __future__ import annotations

from typing import Any

import dualwrite
from crash.scene import Scene
from dualwrite import DualWriter, JournalLimits, PoolOptions, WriterPool
from dualwrite.relay.journal_drain import JournalDrain
from dualwrite.stores.journal import GateStatus, JournalEntry
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_journal import SqlJournal, insert_entries
from dualwrite.transactional_id import drainer_id
from fixtures.broker import read_topic
from fixtures.pace import LIMIT, until
from pool.pool_scene import open_pool


def journal_pool(scene: Scene, **changes: Any) -> WriterPool[Any]:
    """A pool whose messages go into the journal while Kafka is down."""
    options = PoolOptions(timeout=LIMIT, when_kafka_is_down="journal", **changes.pop("pool_options", {}))
    return open_pool(scene, options=options, **changes)


def gate_of(pool: WriterPool[Any], scene: Scene) -> GateStatus:
    """The gate of the scene's prefix, with the number of entries."""
    journal = pool.store.journal
    assert journal is not None
    (status,) = journal.gates(scene.transactional_id, counts=True)
    return status


def until_closed(pool: WriterPool[Any], scene: Scene) -> None:
    """Wait until the journal is empty and its gate is closed."""
    until(lambda: not gate_of(pool, scene).is_open, "the journal's gate closed")


class DrainScene:
    """A store with an open journal, and a topic."""

    def __init__(self, scene: Scene, store: SqlStateStore) -> None:
        self.scene = scene
        self.store = store
        self.prefix = scene.transactional_id
        assert isinstance(store.journal, SqlJournal)
        self.journal = store.journal
        self.journal.prepare(self.prefix)
        self.journal.open(self.prefix, "test", JournalLimits())

    def write(self, *numbers: int) -> None:
        """Entries, each in the journal with headers and a time."""
        entries = [
            JournalEntry(self.scene.topic, b"k", str(n).encode(), '[["h", "dg=="]]', None, 1_700_000_000_000 + n, True)
            for n in numbers
        ]
        self.write_entries(*entries)

    def write_entries(self, *entries: JournalEntry) -> None:
        self.store.short_transactions.run(lambda connection: insert_entries(connection, self.prefix, entries), "a test")

    def write_entry(self, value: bytes, partition: int | None = None) -> None:
        """One entry."""
        entry = JournalEntry(self.scene.topic, None, value, None, partition, 1_700_000_000_000, has_own_time=True)
        self.store.short_transactions.run(lambda connection: insert_entries(connection, self.prefix, [entry]), "a test")

    def connect(self, **changes: Any) -> DualWriter[Any]:
        return dualwrite.connect(
            self.store, kafka=self.scene.settings, transactional_id=drainer_id(self.prefix), lanes=1, **changes
        )

    def drain(self) -> None:
        """Publish the journal, and close its gate."""
        with self.connect() as writer:
            drain = JournalDrain(writer, self.prefix, "test")
            while not drain.turn().is_last:
                pass

    @property
    def gate(self) -> GateStatus:
        return self.journal.gates(self.prefix, counts=True)[0]

    @property
    def published(self) -> list[tuple[int, bytes | None, int]]:
        """Value, header and time of each message."""
        found = read_topic(self.scene.bootstrap, self.scene.topic)
        return [(int(each.value() or b""), dict(each.headers() or []).get("h"), each.timestamp()[1]) for each in found]


def message(number: int) -> tuple[int, bytes, int]:
    """The message of an entry of `DrainScene.write`: value, header and time."""
    return number, b"v", 1_700_000_000_000 + number
