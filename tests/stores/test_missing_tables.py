"""Tables that are missing, each by itself, and the clock by which leases end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from dualwrite import migration
from dualwrite.errors import StateTableMissingError
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.rights import BASIC
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


@pytest.mark.parametrize("kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)])
def test_tables_in_another_schema_are_found_before_new_ones_are_advised(kind: str, new_database: Callable[[str], str]) -> None:
    owner = sa.make_url(new_database(kind))
    user = "'clerk'@'127.0.0.1'" if kind == "mariadb" else "clerk"
    url = owner.set(username="clerk").render_as_string(hide_password=False)
    engine = sa.create_engine(owner)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA kept_here")
        connection.exec_driver_sql(f"CREATE USER {user}")
        if kind == "mariadb":  # otherwise the user would not see it
            connection.exec_driver_sql(f"GRANT ALL ON {owner.database}.* TO {user}")
    try:
        with SqlStateStore.from_url(url) as store, pytest.raises(StateTableMissingError) as nowhere:
            store.check()
        assert str(nowhere.value.next_step).startswith("run `dualwrite db upgrade")
        migration.upgrade(owner, schema="kept_here")
        with engine.begin() as connection:
            for statement in migration.grants(
                owner, "clerk@127.0.0.1" if kind == "mariadb" else "clerk", BASIC, schema="kept_here"
            ):
                connection.exec_driver_sql(statement)
        for schema in (None, str(owner.database) if kind == "mariadb" else "public"):
            with SqlStateStore.from_url(url, schema=schema) as store, pytest.raises(StateTableMissingError) as raised:
                store.check()
            assert "is missing in " in raised.value.what
            assert "'kept_here'" in raised.value.what
            assert str(raised.value.next_step).startswith("pass schema='kept_here' (commands: --schema;")
        with SqlStateStore.from_url(url, schema="kept_here") as store:
            store.check()
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA kept_here" + (" CASCADE" if kind == "postgresql" else ""))
            connection.exec_driver_sql(f"DROP USER {user}")
        engine.dispose()


def test_leases_use_the_database_clock(url: str) -> None:
    with SqlStateStore.from_url(url) as store:
        store.leases.acquire(["shop.1"], "tests", seconds=100)
        with store.engine.connect() as connection:
            until = connection.scalar(sa.select(lease_table.c.leased_until))
            assert until is not None
            assert 0 < until.timestamp() - database_clock(connection) <= 100
            assert abs(time.time() - database_clock(connection)) < 60, "the database is on this machine"


def test_a_lease_is_shortened_after_the_clock_has_gone_back(url: str) -> None:
    with SqlStateStore.from_url(url) as store:
        store.leases.acquire(["shop.1"], "gone", seconds=0.1)
        with store.engine.begin() as connection:
            until = lease_table.c.leased_until
            later = (connection.scalar(sa.select(until)) or datetime.now(UTC)) + timedelta(hours=1)
            connection.execute(lease_table.update().values(leased_until=later))
        (lease,) = store.leases.entries()
        assert (lease.is_impossible, lease.has_ended) == (True, True)
        assert store.leases.acquire(["shop.1"], "next", seconds=60) == frozenset(), "a living owner can't renew in time"
        time.sleep(0.2)
        assert store.leases.acquire(["shop.1"], "next", seconds=60) == {"shop.1"}
