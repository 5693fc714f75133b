"""Our table as part of a user's own alembic project: real projects, real `alembic` commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic_command import Project, made
from store_scene import ID
from typer.testing import CliRunner

from dualwrite import migration
from dualwrite.cli import db, main
from dualwrite.errors import ConfigurationError, StateTableMissingError
from dualwrite.jobs.job_tables import metadata
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.tables import VERSION_TABLE_NAME
from fixtures.pace import LIMIT
from fixtures.tiers import thinned

OURS = {*metadata.tables, VERSION_TABLE_NAME}
NEWEST = migration.newest()

REVISION = """
from alembic import op
import sqlalchemy as sa
from dualwrite.migration import downgrade_state_table, upgrade_state_table

revision = {revision!r}
down_revision = {down!r}

def upgrade():
    {upgrade}

def downgrade():
    {downgrade}
"""


class Chain(Project):
    """A project with the user's own revisions."""

    def revision(self, revision: str, down: str | None, upgrade: str, downgrade: str) -> None:
        text = REVISION.format(revision=revision, down=down, upgrade=upgrade, downgrade=downgrade)
        (self.folder / "migrations" / "versions" / f"{revision}.py").write_text(text)

    def tables(self) -> set[str]:
        engine = sa.create_engine(self.url)
        try:
            return set(sa.inspect(engine).get_table_names())
        finally:
            engine.dispose()


def make_project(folder: Path, url: str) -> Chain:
    """Three revisions: the user's table, ours, and one more of the user."""
    project = made(Chain(folder, url))
    create = 'op.create_table("orders", sa.Column("id", sa.Integer, primary_key=True))'
    project.revision("a", None, create, 'op.drop_table("orders")')
    project.revision(
        "b",
        "a",
        f'upgrade_state_table(op, "{NEWEST}"); op.add_column("orders", sa.Column("item", sa.String(9)))',
        f'op.drop_column("orders", "item"); downgrade_state_table(op, "base", from_revision="{NEWEST}")',
    )
    project.revision("c", "b", 'op.add_column("orders", sa.Column("price", sa.Integer))', 'op.drop_column("orders", "price")')
    return project


@pytest.fixture(params=thinned(["sqlite", "postgresql", "mariadb"], quick=["sqlite"]))
def project(request: pytest.FixtureRequest, new_database: Callable[[str], str], tmp_path: Path) -> Chain:
    return make_project(tmp_path / "project", new_database(request.param))


def assert_it_works(url: str) -> None:
    with SqlStateStore.from_url(url) as store:
        store.check()
        store.claim(ID, "tests", timeout=LIMIT)


def test_upgrade_and_downgrade_in_the_migrations_of_the_user(project: Chain) -> None:
    project.alembic("upgrade", "head")
    assert project.tables() == OURS | {"orders", "alembic_version"}
    assert migration.current(project.url) == NEWEST
    assert_it_works(project.url)
    project.alembic("downgrade", "a")
    with SqlStateStore.from_url(project.url) as store, pytest.raises(StateTableMissingError, match="missing"):
        store.check()
    project.alembic("upgrade", "head")
    project.alembic("downgrade", "base")
    assert migration.current(project.url) is None
    assert project.tables() == {"alembic_version", "kafka_transaction_state_version"}
    project.alembic("upgrade", "head")
    assert_it_works(project.url)


def test_the_db_commands_see_what_the_chain_has_done(project: Chain) -> None:
    project.alembic("upgrade", "b")
    invoke = CliRunner().invoke
    assert invoke(db.app, ["current", "--url", project.url]).output == f"{NEWEST} (newest: {NEWEST})\n"
    assert invoke(db.app, ["upgrade", "--url", project.url]).output == f"Already at revision {NEWEST}.\n"
    project.alembic("upgrade", "head")
    assert "c (head)" in project.alembic("current").stdout
    assert_it_works(project.url)


def test_a_chain_that_runs_after_dualwrite_db_upgrade(project: Chain) -> None:
    migration.upgrade(project.url)
    project.alembic("upgrade", "b")
    project.alembic("upgrade", "head")
    assert_it_works(project.url)
    migration.downgrade(project.url, "base")
    project.alembic("downgrade", "a")  # what is already gone is not dropped again
    assert migration.current(project.url) is None


def test_a_failed_migration_leaves_no_table_of_dualwrite(project: Chain) -> None:
    project.revision("d", "a", 'upgrade_state_table(op, "0001"); op.execute("SELECT * FROM nowhere")', "pass")
    failed = project.alembic("upgrade", "d", check=False)
    assert failed.returncode != 0
    assert "nowhere" in failed.stderr
    if project.url.startswith("postgresql"):  # the others commit at DDL, in any alembic project
        assert project.tables() <= {"orders", "alembic_version"}


def test_offline_sql_from_the_first_revision(project: Chain) -> None:
    script = project.alembic("upgrade", "head", "--sql").stdout
    made = re.findall(r"^CREATE TABLE (?:IF NOT EXISTS )?((?:kafka|dualwrite)_\w+) \(", script, re.MULTILINE)
    assert sorted(made) == sorted(OURS)
    run_script(project.url, script)
    assert migration.current(project.url) == NEWEST
    assert "c (head)" in project.alembic("current").stdout
    assert_it_works(project.url)
    script = project.alembic("downgrade", "head:a", "--sql").stdout
    run_script(project.url, script)
    assert migration.current(project.url) is None
    assert "kafka_transaction_state" not in project.tables()


def run_script(url: str, script: str) -> None:
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        raw = connection.connection.dbapi_connection
        assert raw is not None
        if url.startswith("sqlite"):
            raw.executescript(script)  # type: ignore[attr-defined]  # sqlite3's
        elif url.startswith("postgresql"):
            raw.execute(script)  # type: ignore[attr-defined]  # psycopg's
        else:
            for statement in filter(str.strip, script.split(";\n")):
                connection.exec_driver_sql(statement)
    engine.dispose()


@pytest.mark.parametrize("revision", ["head", "+1", "9999"])
def test_a_revision_unknown_to_dualwrite(project: Chain, revision: str) -> None:
    project.revision("d", "a", f"upgrade_state_table(op, {revision!r})", "pass")
    failed = project.alembic("upgrade", "d", check=False)
    assert failed.returncode != 0
    assert "ConfigurationError" in failed.stderr
    assert migration.newest() in failed.stderr


# --- stores without a table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["rocksdb:////data/db", "zookeeper://one:2181,two:2181/chroot"])
def test_nothing_to_migrate(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("upgrade", "current"):
        assert main(["db", command, "--url", url]) == 0
        assert "Nothing to migrate" in capsys.readouterr().out
    for command in (["sql"], ["downgrade", "--revision", "base"]):
        assert main(["db", *command, "--url", url]) == 1
        assert "Nothing to migrate" in capsys.readouterr().err


def test_a_url_of_an_unknown_store_is_an_error() -> None:
    for command in (["upgrade"], ["current"], ["sql"]):
        result = CliRunner().invoke(db.app, [*command, "--url", "postgres://me@here/db"])
        assert isinstance(result.exception, ConfigurationError), result.output
