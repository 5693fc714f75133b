"""Rows of revision 0003, without the ids of cluster and store."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from store_scene import ID

from dualwrite import migration
from dualwrite.errors import StateTableMissingError
from dualwrite.producer_kind import ProducerKind
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.clock import database_clock
from dualwrite.stores.sql.table import lease_table
from fixtures.older import assert_still_usable
from fixtures.pace import LIMIT

OLDER = (
    "INSERT INTO kafka_transaction_state (transactional_id, fence, generation, prepared_transaction_state, "
    "prepared_generation, settled_generation, transaction_number, lost, owner, claim_token, updated_at, forgotten, "
    f"generation_kind) VALUES ('{ID}', 7, 3, '4711:3', 3, 2, 5, '[]', 'writer host:1', 't', '2026-11-21 10:00:00', false, "
    "'native-2pc')"
)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def older_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """A database of revision 0003 with one row."""
    url = new_database(request.param)
    migration.upgrade(url, "0003")
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(OLDER)
    engine.dispose()
    return url


def test_a_row_of_an_older_release_is_read_and_updated(older_url: str) -> None:
    with SqlStateStore.from_url(older_url) as store, pytest.raises(StateTableMissingError, match="db upgrade"):
        store.check()
    migration.upgrade(older_url)
    with SqlStateStore.from_url(older_url) as store:
        store.check()
        claim = assert_still_usable(store, ID)
    migration.downgrade(older_url, "0003")
    migration.upgrade(older_url)
    with SqlStateStore.from_url(older_url) as store:
        assert store.read_claimed(claim).fence == claim.fence


def test_copies_are_detected_after_an_upgrade(older_url: str) -> None:
    migration.upgrade(older_url)
    with SqlStateStore.from_url(older_url) as store, SqlStateStore.from_url(older_url) as other:
        assert store.marks() == other.marks()
        assert store.marks() or not store.detects_copies
        store.acquire_generation(store.claim(ID, "tests", timeout=LIMIT), ProducerKind.NATIVE)
        identity = store.identity()
        assert identity is not None
        assert identity.marks == store.marks()
        other.check_original()


def test_a_killed_upgrade_to_0005_can_be_finished(new_database: Callable[[str], str]) -> None:
    """DDL commits at once there: some columns may exist before the version is updated, in upgrades and downgrades."""
    url = new_database("mariadb")
    migration.upgrade(url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE kafka_transaction_state DROP COLUMN named_from")
        connection.exec_driver_sql("DROP TABLE kafka_transaction_store")
        connection.exec_driver_sql("UPDATE kafka_transaction_state_version SET version_num = '0004'")
    migration.upgrade(url)
    with SqlStateStore.from_url(url) as store:
        store.check()
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE kafka_transaction_state DROP COLUMN named_from")
        connection.exec_driver_sql("DROP TABLE kafka_transaction_store")
    migration.downgrade(url, "0004")
    migration.upgrade(url)
    with SqlStateStore.from_url(url) as store:
        store.check()
    engine.dispose()


@pytest.mark.parametrize(
    ("revision", "before", "table"),
    [("0006", "0005", "kafka_transaction_lease"), ("0007", "0006", "kafka_consumed_offset")],
)
def test_a_killed_upgrade_can_be_finished(new_database: Callable[[str], str], revision: str, before: str, table: str) -> None:
    url = new_database("mariadb")
    migration.upgrade(url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE kafka_transaction_state_version SET version_num = '{before}'")
    migration.upgrade(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP TABLE {table}")
    migration.downgrade(url, before)
    migration.upgrade(url)
    with SqlStateStore.from_url(url) as store:
        store.check()
    engine.dispose()


def test_leases_need_the_newest_revision(older_url: str) -> None:
    """Their errors name the missing table, and the command that creates it."""
    migration.upgrade(older_url, "0005")
    with SqlStateStore.from_url(older_url) as store:
        for call in (
            store.check,
            store.leases.entries,
            lambda: store.leases.lease("shop", "tests", 1, seconds=5),
            lambda: store.leases.renew(["shop.1"], "tests", seconds=5),
            lambda: store.leases.release(["shop.1"], "tests"),
        ):
            with pytest.raises(StateTableMissingError, match=r"kafka_transaction_lease is missing(.|\n)*db upgrade"):
                call()


def test_positions_need_the_newest_revision(older_url: str) -> None:
    migration.upgrade(older_url, "0006")
    with SqlStateStore.from_url(older_url) as store:
        store.check()
        move = Move(None, Position("orders", 0, 1))
        for call in (
            store.positions.prepare,
            store.positions.groups,
            lambda: store.positions.read("billing"),
            lambda: store.positions.reset("billing", [move]),
            lambda: store.positions.forget("billing"),
        ):
            with pytest.raises(StateTableMissingError, match=r"kafka_consumed_offset(.|\n)*db upgrade"):
                call()


def test_leases_use_the_database_clock(older_url: str) -> None:
    migration.upgrade(older_url)
    with SqlStateStore.from_url(older_url) as store:
        store.leases.acquire(["shop.1"], "tests", seconds=100)
        with store.engine.connect() as connection:
            until = connection.scalar(sa.select(lease_table.c.leased_until))
            assert until is not None
            assert 0 < until.timestamp() - database_clock(connection) <= 100
            assert abs(time.time() - database_clock(connection)) < 60, "the database is on this machine"
