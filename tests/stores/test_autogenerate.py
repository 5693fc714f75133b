"""`alembic revision --autogenerate` in a user's project leaves our tables alone, without the user doing anything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import alembic
import pytest
import sqlalchemy as sa
from alembic_command import Project, made

import dualwrite_alembic
from dualwrite import migration
from dualwrite.jobs.job_tables import metadata
from dualwrite.stores.sql.tables import VERSION_TABLE_NAME
from fixtures.tiers import thinned

MODELS = """
import sqlalchemy as sa
metadata = sa.MetaData()
orders = sa.Table("orders", metadata, sa.Column("id", sa.Integer, primary_key=True))
"""
ALEMBIC = tuple(int(part) for part in alembic.__version__.split(".")[:2])


class Modelled(Project):
    """A user's project with models, whose database has our table."""

    def configure(self, options: str, imports: str = "") -> None:
        """More arguments for `context.configure`, in env.py as `alembic init` wrote it."""
        path = self.folder / "migrations" / "env.py"
        text = path.read_text().replace("target_metadata = None", f"{imports}\nfrom models import metadata as target_metadata")
        text = text.replace("target_metadata=target_metadata", f"target_metadata=target_metadata{options and ', '}{options}")
        path.write_text(text)

    def proposed(self) -> str:
        """The code that autogenerate writes into upgrade() and downgrade()."""
        self.alembic("revision", "--autogenerate", "-m", "found", "--rev-id", "found")
        (script,) = (self.folder / "migrations" / "versions").glob("found_*.py")
        text = script.read_text()
        script.unlink()
        return text[text.index("def upgrade") :]


@pytest.fixture(params=thinned(["sqlite", "postgresql", "mariadb"], quick=["sqlite"]))
def project(request: pytest.FixtureRequest, new_database: Callable[[str], str], tmp_path: Path) -> Modelled:
    url = new_database(request.param)
    migration.upgrade(url)
    project = made(Modelled(tmp_path / "project", url))
    (project.folder / "models.py").write_text(MODELS)
    return project


def execute(url: str, *statements: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def test_the_names_are_those_of_the_store() -> None:
    assert {*metadata.tables, VERSION_TABLE_NAME} == dualwrite_alembic.TABLES


def test_the_entry_point_is_installed_under_a_name_that_alembic_loads_by_default() -> None:
    (found,) = [entry for entry in entry_points(group="alembic.plugins") if entry.value == "dualwrite_alembic"]
    assert found.name == "alembic.autogenerate.dualwrite"


needs_plugins = pytest.mark.skipif(ALEMBIC < (1, 18), reason="alembic has plugins from 1.18 on")


@needs_plugins
@pytest.mark.parametrize("options", ["", "include_schemas=True", "compare_type=True, render_as_batch=True"])
def test_autogenerate_proposes_tables_of_the_user_but_none_of_dualwrite(project: Modelled, options: str) -> None:
    execute(project.url, "CREATE TABLE left_over (id integer)", "CREATE INDEX left_index ON left_over (id)")
    if "schemas" in options and project.url.startswith("postgresql"):
        execute(project.url, "CREATE SCHEMA app", "CREATE TABLE app.kafka_transaction_state (id integer)")
    project.configure(options)
    proposed = project.proposed()
    assert "create_table('orders'" in proposed
    assert "drop_table('left_over'" in proposed
    assert "left_index" in proposed
    assert "kafka_transaction_state" not in proposed


@needs_plugins
def test_autogenerate_ignores_an_index_on_a_table_of_dualwrite(project: Modelled) -> None:
    execute(project.url, "CREATE INDEX mine ON kafka_transaction_state (owner)")
    project.configure("")
    assert "mine" not in project.proposed()


@needs_plugins
def test_alembic_check_finds_nothing(project: Modelled) -> None:
    execute(project.url, "CREATE TABLE orders (id integer NOT NULL PRIMARY KEY)")
    project.configure("")
    assert "No new upgrade operations detected" in project.alembic("check").stdout


@needs_plugins
def test_a_table_of_the_user_with_that_name_is_compared_as_usual(project: Modelled) -> None:
    """A user who has our table in their own metadata wants to have it compared."""
    (project.folder / "models.py").write_text(
        f'{MODELS}\nsa.Table("kafka_transaction_state", metadata, sa.Column("transactional_id", sa.String(255)))\n'
    )
    project.configure("")
    assert "drop_column('kafka_transaction_state', 'fence')" in project.proposed()


def test_manual_set_up_for_an_alembic_without_plugins(project: Modelled) -> None:
    exclude = 'autogenerate_plugins=["alembic.autogenerate.*", "~alembic.autogenerate.dualwrite"]' if ALEMBIC >= (1, 18) else ""
    env = project.folder / "migrations" / "env.py"
    as_made = env.read_text()
    project.configure(exclude)
    assert "drop_table('kafka_transaction_state')" in project.proposed()
    env.write_text(as_made)
    project.configure(
        f"{exclude}{exclude and ', '}include_object=include_object", "from dualwrite_alembic import include_object"
    )
    proposed = project.proposed()
    assert "create_table('orders'" in proposed
    assert "kafka_transaction_state" not in proposed


def test_the_plugin_imports_nothing_from_dualwrite(tmp_path: Path) -> None:
    program = "import sys, alembic.command; sys.exit(any(name.split('.')[0] == 'dualwrite' for name in sys.modules))"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
