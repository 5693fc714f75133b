"""What is uploaded: the wheel, built and installed apart from the checkout, its files, metadata and migrations."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import files, version
from itertools import chain
from pathlib import Path

import bill_of_materials
import pytest
import release_check
import sqlalchemy
import wheels

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
    alone = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "NOTICE")
    for name in (*alone, "licenses", "tools", "src", "migrations"):
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


def test_the_wheel_has_the_tracked_files_of_the_packages_and_nothing_else(installed: Installation) -> None:
    assert list(release_check.wrong_in_wheel(installed.wheel, ROOT)) == []
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    assert {"dualwrite/py.typed", "dualwrite/_migrations/versions/0001_tables.py", "dualwrite_alembic/__init__.py"} <= names


def test_a_file_too_many_and_one_that_is_missing_are_named(installed: Installation, tmp_path: Path) -> None:
    wheel = tmp_path / installed.wheel.name
    with zipfile.ZipFile(installed.wheel) as before, zipfile.ZipFile(wheel, "w") as after:
        for name in before.namelist():
            if name not in {"dualwrite/py.typed", "dualwrite-0.1.0.dist-info/licenses/NOTICE"}:
                after.writestr(name, before.read(name))
        after.writestr("tests/conftest.py", "")
        after.writestr("dualwrite/console/static/vendor/new.min.js", "")
    assert list(release_check.wrong_in_wheel(wheel, ROOT)) == [
        "the wheel has dualwrite/console/static/vendor/new.min.js, which is not in the repository",
        "the wheel has tests/conftest.py, which is not in the repository",
        "the wheel lacks dualwrite/py.typed",
    ]
    assert list(release_check.wrong_in_metadata(wheel)) == [
        "the wheel lacks NOTICE",
        "the bill of materials lacks dualwrite/console/static/vendor/new.min.js",
    ]


def test_metadata_licences_and_bill_of_materials_agree(installed: Installation) -> None:
    assert list(release_check.wrong_in_metadata(installed.wheel)) == []


def test_the_bill_names_the_version_of_kafka_python_that_the_messages_are_from() -> None:
    assert bill_of_materials.MESSAGES.version == version("kafka-python")


def test_the_licence_of_mypycs_runtime_is_that_of_the_pinned_mypy() -> None:
    (licence,) = (file for file in files("mypy") or () if file.match("licenses/LICENSE"))
    assert (ROOT / "licenses/mypyc-runtime.LICENSE").read_text() == licence.read_text()


def test_each_extra_has_commands_that_show_what_it_is_for() -> None:
    assert set(release_check.EXTRAS) == {"", *PROJECT["optional-dependencies"]}


def test_the_extra_all_names_all_others() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(everything.removeprefix("dualwrite[").removesuffix("]").split(",")) == set(extras) - {"all"}


def test_compiled_wheels_are_for_the_versions_of_python_that_the_metadata_names() -> None:
    assert wheels.versions() == ["3.11", "3.12", "3.13", "3.14"]


@pytest.mark.soak
def test_the_checks_of_a_release_pass(tmp_path: Path) -> None:
    """As CONTRIBUTING says, with the tools in an environment of their own."""
    tools = tmp_path / "tools"
    python = tools / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    for arguments in (["--upgrade", "pip"], ["--group", "release"]):
        subprocess.run([python, *PIP[1:], "install", "-c", "constraints.txt", *arguments], cwd=ROOT, check=True)
    done = subprocess.run([python, "tools/release_check.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(release_check.EXTRAS)


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
    assert "Project-URL: Source, https://repository.invalid\n" in page
    assert "Project-URL: Changelog, https://repository.invalid/blob/HEAD/CHANGELOG.md\n" in page
    assert "A [pool](https://repository.invalid/blob/HEAD/docs/guides/pool.md) serves all threads" in page
    assert not re.findall(r"\]\((?!https?:).*?\)", page)


def test_migrations_run_from_the_installed_package(installed: Installation) -> None:
    program = "import dualwrite, dualwrite_alembic; from dualwrite import migration; print(migration.scripts_folder())"
    assert installed.run("python", "-c", program).strip() == str(installed.packages / "dualwrite" / "_migrations")


def test_the_support_matrix_has_the_versions_of_the_metadata_and_of_ci() -> None:
    page = (ROOT / "docs/versions.md").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
    lowest = dict(re.findall(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", " ".join([*PROJECT["dependencies"], *extras])))
    rows = re.findall(r"^\| ([\w-]+) \| (.+) \| CI: (\S+?)\.?(?: Lowest: (\S+))? \|$", page, re.MULTILINE)
    assert len(rows) >= 9
    for name, supported, in_ci, at_least in rows:
        package = name.lower()
        if package in pinned:
            assert in_ci == pinned[package], name
            assert supported.startswith(lowest[package]), name
            assert not at_least or at_least.startswith(lowest[package]), name
