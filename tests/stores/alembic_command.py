"""The command `alembic` in a process that is forked with everything imported: runs differ only in the project."""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import TypeVar

import alembic.autogenerate
import alembic.command
import alembic.config
import alembic.script

from fixtures.fork_server import ForkedProcess
from fixtures.pace import ended

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Project:
    """A user's alembic project, as `alembic init` creates it, on this database."""

    folder: Path
    url: str

    def alembic(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run_alembic(self.folder, *arguments, check=check)


def run_alembic(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command in the folder."""
    with (
        chdir(folder),
        ForkedProcess("alembic_command", arguments, folder=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = process.stdout.read(), process.stderr.read()
        ran = subprocess.CompletedProcess(list(arguments), ended(process), output, errors)
    assert not check or ran.returncode == 0, ran.stdout + ran.stderr
    return ran


P = TypeVar("P", bound=Project)


def made(project: P) -> P:
    """The project, with its folder."""
    copytree(_initialised().name, project.folder)
    settings = project.folder / "alembic.ini"
    settings.write_text(settings.read_text().replace("driver://user:pass@localhost/dbname", project.url.replace("%", "%%")))
    return project


@cache
def _initialised() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="dualwrite-alembic-")
    run_alembic(Path(folder.name), "init", "migrations")
    return folder


def main() -> None:
    alembic.config.main(prog="alembic")
