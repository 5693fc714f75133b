"""Django's migrations make the same tables as alembic's, in each way in which Django makes tables."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from django.conf import settings
from django.core.management import call_command
from django.db import connection

from django_project import settings as project
from django_project.processes import run_manage, with_database
from dualwrite import migration
from dualwrite.django.schema import current_revision
from dualwrite.testing.postgres import PostgresServer
from fixtures.mariadb_server import MariaDBServer

pytestmark = pytest.mark.slow
each_database = pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])
_numbers = count()


@pytest.fixture
def new_url(database: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes empty databases."""

    def made() -> str:
        name = f"schema_{os.getpid()}_{next(_numbers)}"
        if database == "sqlite":
            return f"sqlite:///{tmp_path / name}.db"
        server = PostgresServer if database == "postgresql" else MariaDBServer
        return str(request.getfixturevalue("server_of")(server).create_database(name))

    return made


def tables(url: str) -> dict[str, Any]:
    """Everything that the database says of dualwrite's tables."""
    engine = sa.create_engine(url)
    inspector = sa.inspect(engine)
    names = [name for name in inspector.get_table_names() if name.startswith(("kafka_", "dualwrite_"))]
    found = {
        name: (
            [{**each, "type": repr(each["type"])} for each in inspector.get_columns(name)],
            inspector.get_pk_constraint(name),
            inspector.get_indexes(name),
            inspector.get_table_options(name),
        )
        for name in names
    }
    with engine.connect() as connected:
        revision = connected.scalar(sa.text("SELECT version_num FROM kafka_transaction_state_version")) if found else None
    engine.dispose()
    return {**found, "revision": revision}


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with_database(monkeypatch, project.database(url))
    monkeypatch.setattr(settings, "DUALWRITE", project.dualwrite("shop", "127.0.0.1:1"))


@each_database
def test_migrate_makes_the_same_tables_as_alembic(new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    by_alembic, by_django = new_url(), new_url()
    migration.upgrade(by_alembic)
    use(monkeypatch, by_django)
    call_command("migrate", "dualwrite", verbosity=0)
    expected = tables(by_alembic)
    assert len(expected) == 14
    assert tables(by_django) == expected
    call_command("migrate", "dualwrite", "zero", verbosity=0)
    assert tables(by_django) == {"revision": None}
    call_command("migrate", "dualwrite", verbosity=0)
    assert tables(by_django) == expected
    migration.upgrade(by_django)  # has nothing to do
    assert tables(by_django) == expected
    connection.close()


@each_database
def test_tables_that_exist_are_accepted(new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = new_url()
    migration.upgrade(url)
    use(monkeypatch, url)
    call_command("migrate", "dualwrite", verbosity=0)
    assert current_revision(connection) == migration.newest()
    connection.close()


@pytest.mark.parametrize("database", ["mariadb"])
def test_a_migration_that_was_killed_on_mariadb(new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    by_alembic, url = new_url(), new_url()
    migration.upgrade(by_alembic)
    use(monkeypatch, url)
    call_command("migrate", "dualwrite", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE kafka_job_chunk")
        cursor.execute("DELETE FROM kafka_transaction_state_version")
        cursor.execute("DELETE FROM django_migrations WHERE app = 'dualwrite'")
    call_command("migrate", "dualwrite", verbosity=0)
    assert tables(url) == tables(by_alembic)
    connection.close()


@each_database
@pytest.mark.parametrize("options", [["--run-syncdb"], []])
def test_tables_without_migrations(new_url: Callable[[], str], options: list[str]) -> None:
    by_alembic, url = new_url(), new_url()
    migration.upgrade(by_alembic)
    run_manage(url, "migrate", *options, SHOP_WITHOUT_MIGRATIONS="1")
    assert tables(url) == tables(by_alembic)


def test_an_alias_without_dualwrite_gets_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'other.db'}"
    use(monkeypatch, url)
    monkeypatch.setattr(settings, "DUALWRITE", {})
    call_command("migrate", "dualwrite", verbosity=0)
    assert tables(url) == {"revision": None}
    monkeypatch.setattr(settings, "DUALWRITE", project.dualwrite("shop", "127.0.0.1:1"))
    call_command("migrate", "dualwrite", verbosity=0)  # has been applied, and the tables are made nevertheless
    assert tables(url)["revision"] == migration.newest()
    connection.close()


def test_makemigrations_and_sqlmigrate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, f"sqlite:///{tmp_path / 'empty.db'}")
    call_command("makemigrations", "dualwrite", check=True, dry_run=True)
    call_command("sqlmigrate", "dualwrite", "0001")
    script = capsys.readouterr().out
    assert "CREATE TABLE kafka_transaction_state (" in script
    assert script.count("CREATE TABLE") == 13
    connection.close()
