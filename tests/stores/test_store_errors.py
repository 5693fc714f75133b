"""The errors of SQL stores: missing tables and servers, URLs, drivers, privileges."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from store_scene import ID, assert_nothing_is_checked_out

from dualwrite.errors import (
    ConfigurationError,
    MissingDependencyError,
    StateTableMissingError,
    StoreUnavailableError,
)
from dualwrite.stores.base import Claim
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing.postgres import PostgresServer
from fixtures.pace import LIMIT
from fixtures.store_calls import every_call
from fixtures.tables import table

EVERY_CALL = every_call(ID)


@table("call", EVERY_CALL)
def test_a_missing_table(store: SqlStateStore, call: str) -> None:
    with store.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS kafka_transaction_state"))
    with pytest.raises(StateTableMissingError, match="is missing") as caught:
        EVERY_CALL[call](store)
    assert f"dualwrite db upgrade --url {store.engine.url}" in caught.value.next_step
    assert_nothing_is_checked_out(store)


@table("call", sorted(set(EVERY_CALL) - {"list"}))
def test_a_table_of_an_older_release(store: SqlStateStore, claim: Claim, call: str) -> None:
    with store.engine.begin() as connection:
        there = {column["name"] for column in sa.inspect(connection).get_columns("kafka_transaction_state")}
        for column in {"claim_token", "lost", "owner"} & there:
            connection.execute(sa.text(f"ALTER TABLE kafka_transaction_state DROP COLUMN {column}"))
    with pytest.raises(StateTableMissingError, match="is older than"):
        EVERY_CALL[call](store)
    assert_nothing_is_checked_out(store)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql", "mariadb+pymysql"])
@table("call", EVERY_CALL)
def test_an_unreachable_server(driver: str, call: str) -> None:
    with SqlStateStore.from_url(f"{driver}://me:s3cret@127.0.0.1:1/db", connect_timeout=2) as store:
        with pytest.raises(StoreUnavailableError) as caught:
            EVERY_CALL[call](store)
        text = str(pickle.loads(pickle.dumps(caught.value)))
        assert f"{driver}://me:***@127.0.0.1:1/db" in text
        assert "--url" in text
        assert "DUALWRITE_DATABASE_URL" in text
        assert "s3cret" not in text
        assert caught.value.retriable
        assert_nothing_is_checked_out(store)


def test_a_database_that_does_not_exist_is_not_retried(postgres_server: PostgresServer) -> None:
    with (
        SqlStateStore.from_url(postgres_server.url_at(postgres_server.port, "nowhere")) as store,
        pytest.raises(StoreUnavailableError, match="refused"),
    ):
        store.claim(ID, "tests", timeout=LIMIT)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with (
        SqlStateStore.from_url(f"sqlite:///{tmp_path}/nowhere/test.db") as store,
        pytest.raises(StoreUnavailableError, match=r"unable to open(.|\n)*check that its folder exists"),
    ):
        store.claim(ID, "tests", timeout=LIMIT)


def test_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "test.db").write_text("no database" * 1000)
    with SqlStateStore.from_url(f"sqlite:///{tmp_path}/test.db") as store, pytest.raises(StoreUnavailableError, match="NOTADB"):
        store.check()


# --- addresses ------------------------------------------------------------------------------------------------------------


@table(
    ("url", "shown"),
    [
        ("postgresql://me:s3cret@db/x", "postgresql+psycopg://me:***@db/x"),
        ("postgresql+psycopg://me@db:5433/x?sslmode=require", "postgresql+psycopg://me@db:5433/x?sslmode=require"),
        ("postgresql://db/x?user=me&password=s3cret", "postgresql+psycopg://db/x?user=me"),
        ("mysql://me:s3cret@db/x", "mysql+pymysql://me:***@db/x"),
        ("mariadb://me@db/x?passwd=s3cret&ssl_key_password=s3cret", "mariadb+pymysql://me@db/x"),
        ("sqlite:////tmp/x.db", "sqlite+pysqlite:////tmp/x.db"),
        ("mysql+mysqldb://me:s3cret@db/x", "mysql+pymysql://me:***@db/x"),
        (
            "mysql+mysqldb://me@db/x?ssl_mode=DISABLED&charset=utf8mb4",
            "mysql+pymysql://me@db/x?charset=utf8mb4&ssl_disabled=true",
        ),
        ("mariadb+mysqldb://me@db/x?ssl_mode=REQUIRED&compress=1", "mariadb+pymysql://me@db/x?ssl_verify_cert=false"),
        ("mysql+mysqldb://db/x?ssl_mode=verify_identity", "mysql+pymysql://db/x?ssl_verify_identity=true"),
        ("mysql+mysqldb://db/x?ssl_mode=VERIFY_CA&ssl_ca=ca", "mysql+pymysql://db/x?ssl_ca=ca&ssl_check_hostname=false"),
        ("mysql+mysqldb://db/x?ssl_mode=VERIFY_IDENTITY&ssl_ca=ca", "mysql+pymysql://db/x?ssl_ca=ca"),
        ("mysql+aiomysql://me:s3cret@db/x?echo=true", "mysql+pymysql://me:***@db/x"),
        ("mariadb+asyncmy://me@db/x?stmt_cache_size=10&unix_socket=s", "mariadb+pymysql://me@db/x?unix_socket=s"),
        ("postgresql+psycopg2://me:s3cret@db/x", "postgresql+psycopg://me:***@db/x"),
        (
            "postgresql+asyncpg://me:s3cret@db/x?ssl=require&timeout=5&statement_cache_size=0",
            "postgresql+psycopg://me:***@db/x?connect_timeout=5&sslmode=require",
        ),
        ("sqlite+aiosqlite:////tmp/x.db", "sqlite+pysqlite:////tmp/x.db"),
    ],
)
def test_the_description_hides_passwords(url: str, shown: str) -> None:
    with store_from_url(url) as store:
        assert store.description == shown


@table(
    "url",
    [
        "",
        "orders.db",
        "mariadb+mariadbconnector://me:s3cret@db/x",
        "mysql+pymysql://me:s3cret@db",
        "oracle://me:s3cret@db/x",
        "postgresql+pg8000://me:s3cret@db/x",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory&uri=true",
        "postgresql://me:s3cret@db:port/x",
    ],
)
def test_urls_of_unknown_stores(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        store_from_url(url)
    assert caught.value.next_step
    assert "s3cret" not in str(caught.value)


@table(
    ("url", "options", "expected"),
    [
        ("sqlite://", {}, r"(?s)SingletonThreadPool .*use a file"),
        ("sqlite:///:memory:", {"poolclass": sa.StaticPool}, r"(?s)StaticPool .*use a file, .*and no poolclass"),
        ("sqlite:///file:x?mode=memory&uri=true", {"poolclass": sa.StaticPool}, r"(?s)StaticPool .*use a file"),
        (
            "sqlite:////tmp/shop.db",
            {"poolclass": sa.StaticPool},
            r"(?s)StaticPool .*Next step: create .* without poolclass=StaticPool",
        ),
        (
            "postgresql+psycopg://db/shop",
            {"poolclass": sa.StaticPool},
            r"Next step: create the engine without poolclass=StaticPool",
        ),
    ],
)
def test_an_engine_with_one_connection_for_all_threads(url: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        SqlStateStore(sa.create_engine(url, **options))


@pytest.mark.parametrize(
    ("url", "package", "ours", "extra"),
    [
        ("postgresql://me:s3cret@db/x", "psycopg", ["postgresql"], "postgres"),
        ("mysql://me:s3cret@db/x", "pymysql", ["mysql"], "mysql"),
        ("mariadb://me:s3cret@db/x", "pymysql", ["mysql"], "mysql"),
    ],
)
def test_a_missing_driver_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str, ours: list[str], extra: str
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith((f"{package}.", f"{package}_"))]:
        monkeypatch.delitem(sys.modules, name)
    for module in ours:
        monkeypatch.delitem(sys.modules, f"dualwrite.stores.sql.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError) as caught:
        store_from_url(url)
    assert f'pip install "dualwrite[{extra}]"' in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_engines_made_by_the_store_are_durable(sqlite_url: str) -> None:
    with SqlStateStore.from_url(sqlite_url, lock_timeout=2.5, pool_size=2) as store, store.engine.connect() as connection:
        settings = [connection.scalar(sa.text(f"PRAGMA {name}")) for name in ("journal_mode", "synchronous", "busy_timeout")]
        assert settings == ["wal", 2, 2500]


def test_an_engine_with_another_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sa.create_engine("postgresql+psycopg://db/x")
    monkeypatch.setattr(engine.dialect, "driver", "psycopg2")
    with pytest.raises(ConfigurationError, match="psycopg2"):
        SqlStateStore(engine)
