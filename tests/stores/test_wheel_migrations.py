"""The migrations inside the wheel: built, installed apart from the checkout, and run by the installed command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Installation:
    """The wheel in a separate virtual environment that can also use this one's packages."""

    wheel: Path
    environment: Path

    @property
    def packages(self) -> Path:
        (found,) = self.environment.glob("lib/python*/site-packages")
        return found

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Run a program of the environment, outside of the checkout."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DUALWRITE"))}
        ran = subprocess.run(
            [self.environment / "bin" / program, *arguments],
            cwd=self.environment,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def db(self, command: str, url: str, *arguments: str) -> str:
        return self.run("dualwrite", "db", command, "--url", url, *arguments)


def built(folder: Path, **variables: str) -> Path:
    """The wheel."""
    source = folder / "source"
    source.mkdir()
    # a copy: others may be building as well
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src", "migrations"):
        path = ROOT / name
        copy = source / name
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("__pycache__")) if path.is_dir() else shutil.copy(path, copy)
    command = [*PIP, "wheel", str(source), "--no-deps", "-w", str(folder)]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, **variables})
    shutil.rmtree(source)
    (wheel,) = folder.glob("dualwrite-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("wheel")
    wheel = built(folder)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    made = Installation(wheel, environment)
    (made.packages / "beside.pth").write_text(str(Path(sqlalchemy.__file__).parents[1]))
    python = str(environment / "bin" / "python")
    subprocess.run([*PIP, "--python", python, "install", "--no-deps", "--force-reinstall", str(wheel)], check=True, cwd=folder)
    return made


def test_the_wheel_contains_all_migrations(installed: Installation) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    scripts = {f"dualwrite/_migrations/versions/{path.name}" for path in (ROOT / "migrations/versions").glob("*.py")}
    assert scripts | {"dualwrite/_migrations/env.py", "dualwrite/py.typed", "dualwrite_alembic/__init__.py"} <= names
    assert not {name for name in names if name.startswith(("tests", "migrations", "benchmarks", "examples"))}


def index_page(wheel: Path) -> str:
    """What a package index shows."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()


def test_the_page_of_a_package_index_has_no_link_that_leads_nowhere(installed: Installation) -> None:
    page = index_page(installed.wheel)
    assert "Description-Content-Type: text/markdown" in page
    assert "A pool serves all threads" in page
    assert not re.findall(r"\]\((?!https?:).*?\)", page)
    assert "Project-URL" not in page


@pytest.mark.soak
def test_the_page_of_a_package_index_leads_to_the_repository(tmp_path: Path) -> None:
    page = index_page(built(tmp_path, DUALWRITE_REPOSITORY_URL="https://repository.invalid/"))
    assert "Project-URL: Repository, https://repository.invalid\n" in page
    assert "A [pool](https://repository.invalid/blob/HEAD/docs/guides/pool.md) serves all threads" in page
    assert not re.findall(r"\]\((?!https?:).*?\)", page)


def test_migrations_run_from_the_installed_package(installed: Installation) -> None:
    program = "import dualwrite, dualwrite_alembic; from dualwrite import migration; print(migration.scripts_folder())"
    assert installed.run("python", "-c", program).strip() == str(installed.packages / "dualwrite" / "_migrations")
