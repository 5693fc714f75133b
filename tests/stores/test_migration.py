"""Migrations of the state tables, by functions and by `dualwrite db`."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from store_scene import ID
from typer.testing import CliRunner

from dualwrite import migration
from dualwrite.cli import db
from dualwrite.errors import ConfigurationError, StateTableMissingError, StoreError, StoreUnavailableError
from dualwrite.jobs.job_tables import metadata
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import VERSION_TABLE_NAME
from fixtures.fork_server import TESTS, ForkedProcess
from fixtures.pace import LIMIT, ended

TABLES = {*metadata.tables, VERSION_TABLE_NAME}


@pytest.fixture
def empty_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    return new_database(request.param)


LATER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "0002", "0001", None, None

def upgrade():
    op.add_column("kafka_transaction_state", sa.Column("later", sa.Integer))

def downgrade():
    \"\"\"Drop what came later.\"\"\"
    op.drop_column("kafka_transaction_state", "later")
"""


@pytest.fixture
def two_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release with a second revision, which there is none of yet."""
    folder = tmp_path / "scripts"
    shutil.copytree(migration.scripts_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "0002_later.py").write_text(LATER)
    monkeypatch.setattr(migration, "scripts_folder", lambda: folder)


each = pytest.mark.parametrize("empty_url", ["sqlite", "postgresql", "mariadb"], indirect=True)


def tables(url: str) -> set[str]:
    engine = sa.create_engine(url)
    try:
        return set(sa.inspect(engine).get_table_names())
    finally:
        engine.dispose()


@each
def test_upgrade_and_downgrade(empty_url: str) -> None:
    assert migration.current(empty_url) is None
    with SqlStateStore.from_url(empty_url) as store, pytest.raises(StateTableMissingError):
        store.check()
    for _ in range(2):
        migration.upgrade(empty_url)
        assert migration.current(empty_url) == migration.newest()
        assert tables(empty_url) == TABLES
    with SqlStateStore.from_url(empty_url) as store:
        store.check()
        assert store.claim(ID, "tests", timeout=LIMIT).fence == 1
    migration.downgrade(empty_url, "base")
    assert migration.current(empty_url) is None
    assert tables(empty_url) == {"kafka_transaction_state_version"}
    migration.upgrade(empty_url)


@each
def test_migrations_create_what_the_code_expects(empty_url: str) -> None:
    migration.upgrade(empty_url)
    engine = sa.create_engine(empty_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "version_table": "kafka_transaction_state_version"}
        )
        assert compare_metadata(context, metadata) == []
    engine.dispose()


@each
def test_an_engine_of_the_user(empty_url: str) -> None:
    engine = sa.create_engine(empty_url)
    migration.upgrade(engine)
    assert migration.current(engine) == migration.newest()
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT 1")) == 1
    migration.downgrade(engine, "base")
    engine.dispose()


@each
def test_upgrades_at_once(empty_url: str) -> None:
    program = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from dualwrite import migration\n"
        f"with ThreadPoolExecutor(2) as t: list(t.map(migration.upgrade, [{empty_url!r}] * 2))"
    )
    processes = [ForkedProcess("forked_code", [program], folder=TESTS / "unit") for _ in range(3)]
    assert [ended(process) for process in processes] == [0, 0, 0]
    assert migration.current(empty_url) == migration.newest()


@pytest.mark.parametrize("empty_url", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("given", ["a URL", "an engine"])
@pytest.mark.usefixtures("two_revisions")
def test_an_upgrade_waits_for_a_lock_only_for_so_long(empty_url: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it waits, all writers wait behind it."""
    monkeypatch.setattr(migration, "_LOCK_TIMEOUT", 1.0)
    migration.upgrade(empty_url, "0001")
    engine = sa.create_engine(empty_url)
    with engine.connect() as reader:
        reader.execute(sa.text("SELECT * FROM kafka_transaction_state")).all()
        with pytest.raises(StoreError, match=r"(?i)lock"):
            migration.upgrade(empty_url if given == "a URL" else engine)
    migration.upgrade(engine)
    assert migration.current(engine) == migration.newest()
    with engine.connect() as connection:
        limits = "SHOW lock_timeout" if connection.dialect.name == "postgresql" else "SELECT @@lock_wait_timeout"
        assert connection.scalar(sa.text(limits)) not in (1, "1s", "30s")
    engine.dispose()


def test_the_sql_script_runs_unchanged(tmp_path: Path, new_database: Callable[[str], str]) -> None:
    path = tmp_path / "by_hand.db"
    script = migration.sql("sqlite://")
    assert "CREATE TABLE kafka_transaction_state (" in script
    subprocess.run(
        [sys.executable, "-c", f"import sqlite3; sqlite3.connect({str(path)!r}).executescript({script!r})"], check=True
    )
    assert migration.current(f"sqlite:///{path}") == migration.newest()
    url = new_database("postgresql")
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as server:
        server.exec_driver_sql(migration.sql("postgresql://nobody:s3cret@nowhere/x"))
    engine.dispose()
    assert migration.current(url) == migration.newest()


def test_an_unknown_revision(sqlite_url: str) -> None:
    for call in (migration.upgrade, migration.downgrade, migration.undone_by, migration.sql):
        with pytest.raises(ConfigurationError, match="nonsense"):
            call(sqlite_url, "nonsense")
        with pytest.raises(ConfigurationError, match="revision is empty"):
            call(sqlite_url, "")


@pytest.mark.usefixtures("two_revisions")
@pytest.mark.parametrize("at", ["base", "0001"])
def test_a_downgrade_to_a_newer_revision(sqlite_url: str, at: str) -> None:
    migration.downgrade(sqlite_url, at)
    for call in (migration.downgrade, migration.undone_by):
        with pytest.raises(ConfigurationError, match="0002 is not a valid downgrade target"):
            call(sqlite_url, "0002")
    assert migration.undone_by(sqlite_url, at) == {}


@each
@pytest.mark.usefixtures("two_revisions")
def test_the_steps_of_a_chain_of_the_user(empty_url: str) -> None:
    """Steps that have run, in the chain or by `dualwrite db upgrade`, are skipped; a script has those after `from_revision`."""
    engine = sa.create_engine(empty_url)

    def run(step: Callable[..., None], *arguments: str, **options: str) -> str | None:
        with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)) as op:
            step(op, *arguments, **options)
        return migration.current(empty_url)

    assert run(migration.upgrade_state_table, "0001") == "0001"
    assert run(migration.upgrade_state_table, "0002", from_revision="0001") == "0002"
    assert run(migration.upgrade_state_table, "0001") == "0002", "an upgrade never downgrades"
    assert run(migration.downgrade_state_table, "0001", from_revision="0002") == "0001"
    migration.upgrade(empty_url)
    assert run(migration.upgrade_state_table, "0002", from_revision="0001") == "0002"
    assert run(migration.downgrade_state_table, "base", from_revision="0001") is None
    script = io.StringIO()
    offline = MigrationContext.configure(dialect=engine.dialect, opts={"as_sql": True, "output_buffer": script})
    with Operations.context(offline) as op:
        migration.upgrade_state_table(op, "0002", from_revision="0001")
    assert "later" in script.getvalue()
    assert "CREATE TABLE" not in script.getvalue()
    engine.dispose()


def test_an_unreachable_database_server() -> None:
    with pytest.raises(StoreUnavailableError, match="upgrading") as caught:
        migration.upgrade("postgresql://me:s3cret@127.0.0.1:1/db")
    assert "s3cret" not in str(caught.value)


def test_the_db_command(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'cli.db'}"
    run = CliRunner().invoke

    def output(*arguments: str, **options: str) -> str:
        result = run(db.app, list(arguments), env={"DUALWRITE_DATABASE_URL": url}, **options)
        assert result.exit_code == 0, result.output
        return result.output

    assert output("current") == "none (newest: 0001)\n"
    assert output("upgrade") == "Upgraded from nothing to 0001.\n"
    assert output("upgrade", "--url", url) == "Already at revision 0001.\n"
    assert output("current", "--url", url) == "0001 (newest: 0001)\n"
    assert "CREATE TABLE" in output("sql")
    assert output("downgrade", "--revision", "0001") == "Already at revision 0001.\n"
    assert "dropped" in output("downgrade", "--revision", "base", "--yes")
    assert run(db.app, ["current"], env={"DUALWRITE_DATABASE_URL": ""}).exit_code == 2
    result = run(db.app, ["downgrade", "--url", url, "--revision", "0005"])
    assert isinstance(result.exception, ConfigurationError), "which the command line prints without a traceback"


@pytest.mark.usefixtures("two_revisions")
@pytest.mark.parametrize(("revision", "undone"), [("base", 2), ("-2", 2), ("0001-1", 2), ("0001", 1), ("-1", 1)], ids=str)
def test_downgrade_asks_and_names_what_it_drops(sqlite_url: str, revision: str, undone: int) -> None:
    migration.upgrade(sqlite_url)
    arguments = ["downgrade", "--url", sqlite_url, "--revision", revision]
    refused = CliRunner().invoke(db.app, arguments)
    assert refused.exit_code == 2
    assert "0002: Drop what came later." in refused.output
    assert ("0001: Drop every table" in refused.output) == (undone == 2)
    assert refused.output.count(": Drop") == undone
    assert migration.current(sqlite_url) == "0002"
    assert CliRunner().invoke(db.app, [*arguments, "--yes"]).exit_code == 0
    assert migration.current(sqlite_url) == (None if undone == 2 else "0001")
