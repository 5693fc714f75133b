"""Our tables in a schema of the user's choice; tables of the same names elsewhere are not touched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

import psycopg
import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from store_scene import STATE, commit

import dualwrite
from dualwrite import Transaction, migration
from dualwrite.cli import main
from dualwrite.errors import ClaimTimeoutError, ConfigurationError, NotResolvedError, StateTableMissingError
from dualwrite.jobs.job_tables import metadata
from dualwrite.spark.chunks import ChunkMarker, ChunkMarkers
from dualwrite.state import ProducerKind
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import VERSION_TABLE_NAME, state_table
from fixtures.pace import LIMIT

SCHEMA = 'own "Schema"'
_NEW = "DROP SCHEMA IF EXISTS own CASCADE; CREATE SCHEMA own"
TABLES = {*metadata.tables, VERSION_TABLE_NAME}


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database with our tables in its default schema, and another, empty schema."""
    url: str = request.getfixturevalue("postgres_url" if request.param == "postgresql" else "mariadb_url")
    engine = sa.create_engine(url)
    name = engine.dialect.identifier_preparer.quote_identifier(SCHEMA)
    drop = f"DROP SCHEMA IF EXISTS {name}{' CASCADE' if request.param == 'postgresql' else ''}"
    with engine.begin() as connection:
        connection.exec_driver_sql(drop)
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    yield url
    with engine.begin() as connection:
        connection.exec_driver_sql(drop)
    engine.dispose()


@pytest.fixture
def store(url: str) -> Iterator[SqlStateStore]:
    migration.upgrade(url, schema=SCHEMA)
    with SqlStateStore.from_url(url, schema=SCHEMA, lock_timeout=LIMIT) as made:
        yield made


def tables_in(url: str, schema: str | None) -> set[str]:
    engine = sa.create_engine(url)
    try:
        return set(sa.inspect(engine).get_table_names(schema=schema))
    finally:
        engine.dispose()


def use_everything(store: SqlStateStore) -> None:
    """Call every method of a store, on a separate row."""
    store.check()
    assert store.durability()
    claim = store.claim("id", "tests", timeout=LIMIT)
    claim = store.claim("id", "tests", timeout=LIMIT, expected_fence=claim.fence)
    generation = store.acquire_generation(claim, ProducerKind.NATIVE)
    transaction = store.begin(claim)
    position, marker = Position("topic", 0, 5), ChunkMarker(0, 10, "digest")
    store.positions.move(transaction, "group", [Move(None, position)])
    markers, whole = ChunkMarkers(store), cast("Transaction", transaction)  # which has `session`, as it has
    markers.write(whole, "job", 0, marker)
    assert markers.read(whole, "job", 0) == {0: marker}
    transaction.record(STATE, generation=generation, transaction_number=1)
    transaction.commit()
    assert store.read_claimed(claim).prepared_state == STATE
    assert store.positions.read("group")[position.key].offset == 5
    store.positions.reset("group", [Move(position, replace(position, offset=7))])
    assert (store.positions.groups(), store.positions.forget("group"), markers.forget("job")) == (["group"], 1, 1)
    with pytest.raises(NotResolvedError):
        store.forget("id")
    lost = LostTransaction(LostKind.LOST, STATE, generation, datetime(2026, 1, 1, tzinfo=UTC))
    store.record_resolution(claim, Resolution(clear_state=True, lost=lost, resolved_generation=generation))
    assert store.list() == ["id"]
    assert [entry.state for entry in store.acknowledge("id")] == [STATE]
    store.forget("id")
    assert store.list() == []
    assert store.leases.lease("shop", "tests", 2, seconds=600) == ["shop.1", "shop.2"]
    assert store.leases.renew(["shop.1"], "tests", seconds=600) == {"shop.1"}
    store.leases.release(["shop.1", "shop.2"], "tests")
    assert store.leases.entries() == []


def test_a_store_in_a_schema_does_not_touch_the_same_tables_elsewhere(url: str, store: SqlStateStore) -> None:
    use_everything(store)
    row = store.read("id")
    assert row is not None
    assert row.forgotten
    with SqlStateStore.from_url(url) as elsewhere:
        assert elsewhere.read("id") is None
        use_everything(elsewhere)
    assert store.read("id") == row


def test_statements_of_the_user_are_not_changed(store: SqlStateStore) -> None:
    """Also one that reads our table elsewhere, even by our own Table."""
    claim = store.claim("id", "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    counts = [sa.select(sa.func.count()).select_from(table) for table in (sa.table(state_table.name), state_table)]
    found = [scalar(count) for scalar in (transaction.handle.scalar, transaction.session.scalar) for count in counts]
    found += [transaction.handle.execute(count).scalar() for count in counts]
    commit(transaction)
    assert found == [0] * 6
    assert store.read_claimed(claim).prepared_state == STATE


@pytest.mark.soak
def test_statements_built_for_one_call_are_not_kept(store: SqlStateStore) -> None:
    claim = store.claim("id", "tests", timeout=LIMIT)

    def updates_after(calls: int) -> int:
        for _ in range(calls):
            store.record_resolution(claim, Resolution(clear_state=True))
        gc.collect()
        return sum(type(found) is sa.Update for found in gc.get_objects())

    before = updates_after(200)  # as many are kept as may be
    assert updates_after(200) < before + 50


def test_migrations_go_up_and_down_in_a_schema(url: str) -> None:
    before = tables_in(url, None)
    for _ in range(2):
        migration.upgrade(url, schema=SCHEMA)
    assert migration.current(url, schema=SCHEMA) == migration.newest()
    assert tables_in(url, SCHEMA) == TABLES
    migration.downgrade(url, "base", schema=SCHEMA)
    assert tables_in(url, SCHEMA) == {VERSION_TABLE_NAME}
    assert tables_in(url, None) == before


def test_the_script_creates_the_tables_in_the_schema(url: str) -> None:
    script = migration.sql(url, schema=SCHEMA)
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in filter(str.strip, script.split(";")):
            connection.exec_driver_sql(statement.replace("%", "%%"))
    assert tables_in(url, SCHEMA) == TABLES
    with SqlStateStore.from_url(url, schema=SCHEMA) as store:
        use_everything(store)


@pytest.mark.slow
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_row_that_is_locked_in_a_schema_names_its_holder(store: SqlStateStore) -> None:
    claim = store.claim("id", "tests", timeout=LIMIT)
    transaction = store.begin(claim)
    transaction.record(STATE, generation=0, transaction_number=1)
    with pytest.raises(ClaimTimeoutError) as caught:
        store.claim("id", "another", timeout=1)
    assert caught.value.facts["blocker_pid"] is not None
    transaction.rollback()


def test_missing_tables_are_reported_with_the_command_that_creates_them_there(url: str) -> None:
    command = r"""upgrade --url \S+ --schema 'own "Schema"'"""
    with store_from_url(url, schema=SCHEMA) as store, pytest.raises(StateTableMissingError, match=command):
        store.check()


def test_the_command_line_and_the_environment_name_a_schema(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", raising=False)
    assert main(["db", "upgrade", "--url", url, "--schema", SCHEMA]) == 0
    assert tables_in(url, SCHEMA) == TABLES
    with SqlStateStore.from_url(url, schema=SCHEMA) as store:
        store.acquire_generation(store.claim("in-the-schema", "tests", timeout=LIMIT), ProducerKind.NATIVE)
    assert main(["status", "--url", url, "--schema", SCHEMA]) == 0
    assert "in-the-schema" in capsys.readouterr().out
    monkeypatch.setenv("DUALWRITE_SCHEMA", SCHEMA)
    assert main(["status", "--url", url]) == 0
    assert "in-the-schema" in capsys.readouterr().out
    assert main(["forget", "--url", url, "--id", "in-the-schema", "--yes"]) == 1
    assert "can't be forgotten" in capsys.readouterr().err


def test_psycopg_connections_of_the_user_with_the_state_tables_in_a_schema(postgres_url: str) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(_NEW)
        migration.upgrade(postgres_url, schema="own")
        with SqlStateStore.from_psycopg(connection, schema="own") as store:
            use_everything(store)
        with SqlStateStore.from_url(postgres_url) as elsewhere:
            assert elsewhere.read("id") is None


def test_a_chain_of_the_user_creates_the_tables_in_a_schema_and_continues_there(postgres_url: str) -> None:
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.exec_driver_sql(_NEW)
        with Operations.context(MigrationContext.configure(connection)) as op:
            migration.upgrade_state_table(op, migration.newest(), schema="own")
            op.create_table("users", sa.Column("id", sa.Integer))
    assert tables_in(postgres_url, "own") == TABLES
    assert "users" in tables_in(postgres_url, None)
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)) as op:
        migration.downgrade_state_table(op, "base", from_revision=migration.newest(), schema="own")
    assert tables_in(postgres_url, "own") == {VERSION_TABLE_NAME}
    assert tables_in(postgres_url, None) >= TABLES
    engine.dispose()


def test_a_missing_schema_is_named(postgres_url: str) -> None:
    with pytest.raises(ConfigurationError, match="CREATE SCHEMA nowhere"):
        migration.upgrade(postgres_url, schema="nowhere")


def test_a_database_without_schemas_refuses_one(sqlite_url: str) -> None:
    for call in (
        lambda: SqlStateStore.from_url(sqlite_url, schema="own"),
        lambda: SqlStateStore(sa.create_engine(sqlite_url), schema="own"),
        lambda: migration.upgrade(sqlite_url, schema="own"),
        lambda: migration.sql(sqlite_url, schema="own"),
        lambda: dualwrite.connect(sqlite_url, kafka="127.0.0.1:1", transactional_id="id", schema="own"),
        lambda: store_from_url("rocksdb:////nowhere", schema="own"),
    ):
        with pytest.raises(ConfigurationError, match="schema is 'own'"):
            call()
