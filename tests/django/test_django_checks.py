"""System checks, and the setting DUALWRITE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connection

import dualwrite
import dualwrite.django
from crash.scene import Scene
from django_project import settings as project
from django_project.processes import with_database
from dualwrite.django.checks import check_databases, check_settings
from dualwrite.django.configuration import configuration, database_url

VALID = {"PREFIX": "shop", "KAFKA": "127.0.0.1:9092"}


def found(monkeypatch: pytest.MonkeyPatch, given: Any) -> list[tuple[str, str]]:
    monkeypatch.setattr(settings, "DUALWRITE", given)
    return [(each.id, f"{each.msg} {each.hint}") for each in check_settings()]


@pytest.mark.parametrize(
    ("given", "number", "text"),
    [
        (None, "E001", "missing"),
        ({}, "E001", "missing"),
        ({"other": VALID}, "E002", "DATABASES does not have"),
        ({"default": {"KAFKA": "127.0.0.1:9092"}}, "E003", "has no PREFIX"),
        ({"default": {**VALID, "PREFIX": "a#b"}}, "E003", "#"),
        ({"default": {"PREFIX": "shop"}}, "E003", "No Kafka servers"),
        ({"default": {**VALID, "PREFX": "shop"}}, "E003", "'PREFIX' is"),
        ({"default": {**VALID, "OPTIONS": {"sizes": 2}}}, "E003", "'size' is"),
        ({"default": {**VALID, "OPTIONS": {"group_units": 0}}}, "E003", "group_units"),
        ({"default": {**VALID, "TIMEOUTS": {"delivery": -1}}}, "E003", "delivery"),
        ({"default": {**VALID, "TIMEOUTS": 3}}, "E003", "have 3"),
        ({"default": 3}, "E003", "have 3"),
    ],
)
def test_a_wrong_setting(given: Any, number: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ((identity, message),) = found(monkeypatch, given)
    assert identity == f"dualwrite.{number}"
    assert text in message


@pytest.mark.parametrize(
    ("database", "number", "text"),
    [
        ({"ENGINE": "django.db.backends.dummy", "NAME": "x"}, "E003", "can't use the database"),
        ({"ENGINE": "django.db.backends.sqlite3", "NAME": "x", "ATOMIC_REQUESTS": True}, "W001", "non_atomic_requests"),
    ],
)
def test_a_wrong_database(database: dict[str, Any], number: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_database(monkeypatch, database)
    ((identity, message),) = found(monkeypatch, {"default": VALID})
    assert identity == f"dualwrite.{number}"
    assert text in message


def test_what_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    with_database(monkeypatch, {"ENGINE": "django.db.backends.sqlite3", "NAME": "x"})
    assert found(monkeypatch, {"default": {**VALID, "KAFKA": {"bootstrap.servers": "a:1"}, "OPTIONS": {"size": 3}}}) == []
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", "b:1")
    assert found(monkeypatch, {"default": {"PREFIX": "shop"}}) == []
    assert configuration("default").settings.kafka["bootstrap.servers"] == "b:1"


def test_the_tables(shop: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_databases(databases=["default"])) == []
    assert list(check_databases(databases=None)) == []
    with connection.cursor() as cursor:
        cursor.execute("UPDATE kafka_transaction_state_version SET version_num = '0000'")
    (behind,) = check_databases(databases=["default"])
    assert (behind.id, "revision 0000" in behind.msg) == ("dualwrite.W002", True)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE kafka_transaction_state_version SET version_num = '0001'")
    call_command("check", database=["default"], fail_level="WARNING")
    with_database(monkeypatch, project.database("postgresql+psycopg://nobody@127.0.0.1:1/x"))
    (gone,) = check_databases(databases=["default"])
    assert gone.id == "dualwrite.E004"
    del shop


URLS: list[tuple[Mapping[str, Any], str]] = [
    (
        {"ENGINE": "postgresql", "NAME": "shop", "USER": "a@b", "PASSWORD": "p:/@?", "HOST": "db", "PORT": 5433},
        "postgresql+psycopg://a%40b:p%3A%2F%40%3F@db:5433/shop",
    ),
    (
        {"ENGINE": "postgresql", "NAME": "shop", "HOST": "/run/pg", "OPTIONS": {"sslmode": "require", "isolation_level": 4}},
        "postgresql+psycopg:///shop?host=%2Frun%2Fpg&sslmode=require",
    ),
    (
        {"ENGINE": "postgresql", "NAME": "", "OPTIONS": {"service": "shop", "assume_role": "app", "pool": True}},
        "postgresql+psycopg://?options=-c+role%3Dapp&service=shop",
    ),
    (
        {"ENGINE": "mysql", "NAME": "shop", "HOST": "/run/my", "OPTIONS": {"ssl": {"ca": "/ca"}, "init_command": "SELECT 1"}},
        "mysql+pymysql:///shop?ssl_ca=%2Fca&unix_socket=%2Frun%2Fmy",
    ),
    (
        {"ENGINE": "mysql", "NAME": "shop", "HOST": "db", "OPTIONS": {"ssl_mode": "REQUIRED", "charset": "utf8mb4"}},
        "mysql+pymysql://db/shop?charset=utf8mb4&ssl_verify_cert=false",
    ),
    ({"ENGINE": "sqlite3", "NAME": "/data/shop.db"}, "sqlite:////data/shop.db"),
]


@pytest.mark.parametrize(("given", "url"), URLS, ids=[url for _, url in URLS])
def test_the_url_of_a_database(given: Mapping[str, Any], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_database(monkeypatch, {**given, "ENGINE": f"django.db.backends.{given['ENGINE']}"})
    assert database_url("default") == url


@pytest.mark.parametrize("name", [":memory:", "file:memorydb_default?mode=memory&cache=shared"])
def test_a_database_in_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests with TestCase may use it, so `manage.py test`, which runs the checks, must not fail."""
    with_database(monkeypatch, {"ENGINE": "django.db.backends.sqlite3", "NAME": name})
    assert found(monkeypatch, {"default": VALID}) == []
    with pytest.raises(dualwrite.ConfigurationError, match="memory"):
        dualwrite.django.pool()


def test_a_pool_of_an_alias_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DUALWRITE", {"default": VALID})
    with pytest.raises(dualwrite.ConfigurationError, match="'default'"):
        dualwrite.django.pool("orders")
