"""The settings that decide whether an acknowledged commit is durable, read from real databases."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, event

from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer


def test_the_engine_of_a_store_makes_sqlite_commits_durable(sqlite_url: str) -> None:
    with SqlStateStore.from_url(sqlite_url) as store:
        assert store.durability() == {"synchronous": "full", "journal_mode": "wal"}


@pytest.mark.parametrize("level", ["off", "normal", "full", "extra"])
def test_an_engine_of_the_user_keeps_its_settings(tmp_path: Path, level: str) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'own.db'}")

    @event.listens_for(engine, "connect")
    def careless(connection: object, _record: object) -> None:
        connection.execute(f"PRAGMA synchronous = {level}")  # type: ignore[attr-defined]  # sqlite3's

    assert SqlStateStore(engine).durability() == {"synchronous": level, "journal_mode": "delete"}
    engine.dispose()


def test_durability_settings_of_a_default_postgresql(postgres_store: SqlStateStore) -> None:
    assert postgres_store.durability() == {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "synchronous_standby_names": "",
        "transaction_read_only": "off",
        "persistence": "p",
        "attached standbys": "0",
        "synchronous standbys": "0",
    }


def test_settings_of_a_connection_are_seen(postgres_url: str) -> None:
    options = "-csynchronous_commit=off%20-cdefault_transaction_read_only=on"
    with SqlStateStore.from_url(f"{postgres_url}?options={options}") as store:
        found = store.durability()
    assert (found["synchronous_commit"], found["transaction_read_only"]) == ("off", "on")


@pytest.mark.slow
def test_settings_of_the_server_are_seen() -> None:
    with (
        PostgresServer(settings={"fsync": "off", "full_page_writes": "off"}) as server,
        SqlStateStore.from_url(server.url) as store,
    ):
        found = store.durability()
    assert (found["fsync"], found["full_page_writes"]) == ("off", "off")
