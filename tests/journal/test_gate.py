"""The gate: a unit that has sent its messages to Kafka commits only if the gate is as it has read it, at each isolation level.

No broker is needed: the transactions are the store's, and the steps at Kafka are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from dualwrite import JournalLimits, JournalSwitchedError, StoreCommitFailedError, migration
from dualwrite.state import PreparedTxnState
from dualwrite.stores.journal import JournalEntry, is_open
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_journal import SqlJournal, close_gate, has_entries, lock_gate
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.testing.postgres import PostgresServer
from fixtures.mariadb_server import MariaDBServer
from fixtures.pace import LIMIT, done

PREFIX = "shop"
STATE = PreparedTxnState(7, 1)
ENTRIES = [JournalEntry("orders", b"k", b"v", None, None, 1)]
SERVERS = {"postgresql": PostgresServer, "mariadb": MariaDBServer}
LEVELS = {
    "postgresql": ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"),
    "mariadb": ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"),
    "sqlite": ("SERIALIZABLE",),
}
CASES = [(database, level) for database, levels in LEVELS.items() for level in levels]
WITHOUT_SQLITE = [case for case in CASES if case[0] != "sqlite"]
CHANGES = [case for case in WITHOUT_SQLITE if case != ("mariadb", "SERIALIZABLE")]
"""Where the gate can change during a transaction; otherwise the reading locks it."""
SEES_CHANGES = [case for case in CHANGES if case[1] == "READ COMMITTED" or case[0] == "mariadb"]
SNAPSHOTS = [case for case in CHANGES if case not in SEES_CHANGES]


class GateScene:
    """A store with a gate, and a claim of an id."""

    def __init__(self, store: SqlStateStore) -> None:
        self.store = store
        assert isinstance(store.journal, SqlJournal)
        self.journal = store.journal
        self.journal.prepare(PREFIX)
        self.claims = 0

    def begin(self, *, at_once: bool = True) -> SqlStoreTransaction:
        """A transaction of an id of its own."""
        self.claims += 1
        claim = self.store.claim(f"{PREFIX}.{self.claims}", "test", timeout=LIMIT)
        return self.journal.begin(claim, PREFIX, at_once=at_once)

    @property
    def epoch(self) -> int:
        return self.journal.gates(PREFIX, counts=False)[0].epoch

    def close(self) -> None:
        """Close the gate, without a look at the journal."""
        with self.store.short_transactions.begin(LIMIT) as connection:
            epoch = lock_gate(connection, PREFIX)
            assert epoch is not None
            assert close_gate(connection, PREFIX, epoch, "test")


@pytest.fixture
def scene(database: str, level: str, server_of: Any, tmp_path: Path) -> Iterator[GateScene]:
    url = (
        f"sqlite:///{tmp_path}/gate.db"
        if database == "sqlite"
        else server_of(SERVERS[database]).create_database(f"gate_{uuid4().hex[:8]}")
    )
    engine = sa.create_engine(url, isolation_level=level)
    store = SqlStateStore(engine)
    migration.upgrade(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE notes (note integer)"))
    with closing(store):
        yield GateScene(store)
    engine.dispose()


def record(transaction: SqlStoreTransaction, *, merged: bool) -> None:
    """As a direct unit that has sent messages, and commit."""
    write = transaction.record_at_commit if merged else transaction.record
    write(STATE, generation=1, transaction_number=1)
    transaction.commit()


@pytest.mark.parametrize(("database", "level"), CASES)
@pytest.mark.parametrize("merged", [False, True])
def test_a_unit_commits_if_the_gate_is_as_it_was(scene: GateScene, merged: bool) -> None:
    transaction = scene.begin(at_once=not merged)
    transaction.handle.execute(sa.text("INSERT INTO notes VALUES (1)"))
    assert transaction.epoch == 0
    record(transaction, merged=merged)
    assert scene.journal.open(PREFIX, "test", JournalLimits())
    assert not scene.journal.open(PREFIX, "test", JournalLimits())
    transaction = scene.begin(at_once=not merged)
    transaction.handle.execute(sa.text("INSERT INTO notes VALUES (2)"))
    assert is_open(transaction.epoch)
    transaction.write_journal(ENTRIES, 1)
    transaction.commit()
    (status,) = scene.journal.gates(PREFIX, counts=True)
    assert (status.is_open, status.entries, status.size) == (True, 1, 2)
    row = scene.store.read(f"{PREFIX}.2")
    assert row is not None
    assert (row.transaction_number, row.prepared_state) == (1, None)


@pytest.mark.parametrize(("database", "level"), SEES_CHANGES)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("is_closed_again", [False, True])
def test_a_unit_does_not_commit_after_the_gate_was_opened(scene: GateScene, merged: bool, is_closed_again: bool) -> None:
    transaction = scene.begin(at_once=not merged)
    transaction.handle.execute(sa.text("INSERT INTO notes VALUES (1)"))
    with ThreadPoolExecutor() as threads:
        assert done(threads.submit(scene.journal.open, PREFIX, "test", JournalLimits()))
        if is_closed_again:
            done(threads.submit(scene.close))
        with pytest.raises(JournalSwitchedError) as caught:
            record(transaction, merged=merged)
    assert caught.value.retriable
    assert caught.value.epoch == (2 if is_closed_again else 1)
    transaction.rollback()
    row = scene.store.read(f"{PREFIX}.1")
    assert row is not None
    assert row.prepared_state is None


@pytest.mark.parametrize(("database", "level"), SNAPSHOTS)
def test_a_snapshot_from_before_the_opening_sees_nothing_of_the_journal(scene: GateScene) -> None:
    """It may commit: it can't have seen what was written after the gate was opened, and a change of that is a conflict."""
    transaction = scene.begin()
    assert transaction.handle.scalar(sa.text("SELECT count(*) FROM notes")) == 0
    scene.journal.open(PREFIX, "test", JournalLimits())
    journaled = scene.begin()
    journaled.handle.execute(sa.text("INSERT INTO notes VALUES (1)"))
    journaled.write_journal(ENTRIES, 1)
    journaled.commit()
    assert transaction.handle.scalar(sa.text("SELECT count(*) FROM notes")) == 0
    record(transaction, merged=False)


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES * 2])
@pytest.mark.parametrize(("database", "level"), WITHOUT_SQLITE)
def test_the_gate_closes_only_after_those_who_write_into_the_journal(scene: GateScene, entries: list[JournalEntry]) -> None:
    scene.journal.open(PREFIX, "test", JournalLimits())
    transaction = scene.begin()
    transaction.handle.execute(sa.text("INSERT INTO notes VALUES (1)"))
    transaction.write_journal(entries, 1)
    with ThreadPoolExecutor() as threads:
        closing_gate = threads.submit(scene.close)
        with pytest.raises(TimeoutError):
            closing_gate.result(0.3)
        transaction.commit()
        done(closing_gate)
    assert scene.epoch == 2


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES * 2])
@pytest.mark.parametrize(("database", "level"), CHANGES)
def test_nothing_is_written_into_the_journal_of_a_closed_gate(scene: GateScene, entries: list[JournalEntry]) -> None:
    scene.journal.open(PREFIX, "test", JournalLimits())
    transaction = scene.begin()
    transaction.handle.execute(sa.text("INSERT INTO notes VALUES (1)"))
    with ThreadPoolExecutor() as threads:
        done(threads.submit(scene.close))
    with pytest.raises(StoreCommitFailedError) as caught:  # JournalSwitchedError, or the conflict of a snapshot
        transaction.write_journal(entries, 1)
    assert caught.value.retriable
    transaction.rollback()
    assert not scene.store.short_transactions.query(lambda connection: has_entries(connection, PREFIX), "a test")


@pytest.mark.parametrize(("database", "level"), [("postgresql", "READ COMMITTED"), ("mariadb", "REPEATABLE READ")])
def test_a_journaled_unit_keeps_the_prepared_state_of_an_earlier_one(scene: GateScene) -> None:
    """That one may be in doubt at Kafka: recovery must still find it in the row."""
    claim = scene.store.claim(f"{PREFIX}.1", "test", timeout=LIMIT)
    direct = scene.journal.begin(claim, PREFIX, at_once=True)
    record(direct, merged=False)
    scene.journal.open(PREFIX, "test", JournalLimits())
    journaled = scene.journal.begin(claim, PREFIX, at_once=True)
    journaled.handle.execute(sa.text("INSERT INTO notes VALUES (1)"))
    journaled.write_journal(ENTRIES, 2)
    journaled.commit()
    row = scene.store.read(f"{PREFIX}.1")
    assert row is not None
    assert (row.prepared_state, row.prepared_generation, row.transaction_number) == (STATE, 1, 2)
