"""The settings that decide whether an acknowledged commit is durable, read from real databases."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, event

from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer


def test_a_store_with_an_engine_of_its_own_keeps_what_sqlite_acknowledged(sqlite_url: str) -> None:
    with SqlStateStore.from_url(sqlite_url) as store:
        assert store.durability() == {"synchronous": "full", "journal_mode": "wal"}


@pytest.mark.parametrize("level", ["off", "normal", "full", "extra"])
def test_an_engine_of_the_users_own_keeps_its_settings(tmp_path: Path, level: str) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'own.db'}")

    @event.listens_for(engine, "connect")
    def careless(connection: object, _record: object) -> None:
        connection.execute(f"PRAGMA synchronous = {level}")  # type: ignore[attr-defined]  # sqlite3's

    assert SqlStateStore(engine).durability() == {"synchronous": level, "journal_mode": "delete"}
    engine.dispose()


def test_postgresql_as_it_is_by_default(postgres_store: SqlStateStore) -> None:
    assert postgres_store.durability() == {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "synchronous_standby_names": "",
        "transaction_read_only": "off",
    }


def test_what_is_set_for_a_connection_is_seen(postgres_url: str) -> None:
    options = "-csynchronous_commit=off%20-cdefault_transaction_read_only=on"
    with SqlStateStore.from_url(f"{postgres_url}?options={options}") as store:
        found = store.durability()
    assert (found["synchronous_commit"], found["transaction_read_only"]) == ("off", "on")


def test_what_is_set_for_the_server_is_seen() -> None:
    with (
        PostgresServer(settings={"fsync": "off", "full_page_writes": "off"}) as server,
        SqlStateStore.from_url(server.url) as store,
    ):
        found = store.durability()
    assert (found["fsync"], found["full_page_writes"]) == ("off", "off")
