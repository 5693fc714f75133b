"""Tables that are missing, each by itself, and the clock by which leases end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from dualwrite import migration
from dualwrite.errors import StateTableMissingError
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.short import database_clock
from dualwrite.stores.sql.tables import lease_table


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    url = new_database(request.param)
    migration.upgrade(url)
    return url


def test_an_error_names_the_missing_table_and_the_command_that_creates_it(url: str) -> None:
    move = Move(None, Position("orders", 0, 1))
    with SqlStateStore.from_url(url) as store:
        for table in ("kafka_transaction_lease", "kafka_consumed_offset"):
            with store.engine.begin() as connection:
                connection.exec_driver_sql(f"DROP TABLE {table}")
        for table, call in (
            ("kafka_transaction_lease", store.check),
            ("kafka_transaction_lease", store.leases.entries),
            ("kafka_transaction_lease", lambda: store.leases.lease("shop", "tests", 1, seconds=5)),
            ("kafka_transaction_lease", lambda: store.leases.renew(["shop.1"], "tests", seconds=5)),
            ("kafka_transaction_lease", lambda: store.leases.release(["shop.1"], "tests")),
            ("kafka_consumed_offset", store.positions.prepare),
            ("kafka_consumed_offset", store.positions.groups),
            ("kafka_consumed_offset", lambda: store.positions.read("billing")),
            ("kafka_consumed_offset", lambda: store.positions.reset("billing", [move])),
            ("kafka_consumed_offset", lambda: store.positions.forget("billing")),
        ):
            with pytest.raises(StateTableMissingError, match=rf"{table} is missing(.|\n)*db upgrade"):
                call()


def test_leases_use_the_database_clock(url: str) -> None:
    with SqlStateStore.from_url(url) as store:
        store.leases.acquire(["shop.1"], "tests", seconds=100)
        with store.engine.connect() as connection:
            until = connection.scalar(sa.select(lease_table.c.leased_until))
            assert until is not None
            assert 0 < until.timestamp() - database_clock(connection) <= 100
            assert abs(time.time() - database_clock(connection)) < 60, "the database is on this machine"
