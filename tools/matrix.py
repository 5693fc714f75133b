"""Runs the core of the crash tests (`tests/crash/core.py`) on each version of brokers, databases and Python; not in CI.

    python tools/matrix.py                          # all, about two minutes for each version
    python tools/matrix.py --only PostgreSQL MySQL  # adds to the results, or replaces those of the same versions
    python tools/evidence.py                        # writes the page of the results

Each version runs in a process of its own, with a time limit. Brokers, PostgreSQL and MariaDB are downloaded; `mysqld` is the
program that DUALWRITE_TEST_MYSQL names; uv finds the interpreters, and makes an environment for each. What can't be had is
skipped, and the results say why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evidence import RESULTS, of_today
from wheels import program

ROOT: Final = Path(__file__).resolve().parents[1]

KAFKA: Final = "4.2.2"
BROKER, KFAKE, POSTGRESQL, MARIADB, MYSQL, PYTHON = "Apache Kafka", "kfake as Kafka", "PostgreSQL", "MariaDB", "MySQL", "Python"
VERSIONS: Final = {
    BROKER: ("3.0.2", "3.4.1", "3.9.1", "4.0.1", "4.1.2", "4.2.2", "4.3.1", "4.4.0"),
    KFAKE: ("3.0", "3.9", "4.0", "4.2"),
    POSTGRESQL: ("13.23.0", "14.24.0", "15.19.0", "16.15.0", "17.11.0", "18.6.0"),  # as the artifacts are numbered
    MARIADB: ("10.11.5", "11.4.5"),
    MYSQL: ("of DUALWRITE_TEST_MYSQL",),
    PYTHON: ("3.11", "3.12", "3.13", "3.14"),
}
_ENVIRONMENT: Final = (
    "dualwrite[cli,compression,dev,mysql,postgres,rocksdb,testing,zookeeper]",
    "hypothesis",
    "kafka-python",
    "trustme",
)
_SKIPPED: Final = ("MissingDependencyError", "Skipped", "AssertionError: DUALWRITE_TEST_MYSQL", "No interpreter found")
"""What the last lines of a process have if something was missing."""


@dataclass(frozen=True)
class Cell:
    """One version of one subject."""

    subject: str
    version: str

    @property
    def arguments(self) -> list[str]:
        """What `crash.core` gets: the broker, the database and its release."""
        if self.subject in (BROKER, KFAKE):
            return [("kfake:" if self.subject == KFAKE else "") + self.version, "postgresql", ""]
        if self.subject == POSTGRESQL:
            return [KAFKA, "postgresql", self.version]
        if self.subject in (MARIADB, MYSQL):
            return [KAFKA, "mariadb", self.version if self.subject == MARIADB else "mysql"]
        return [KAFKA, "postgresql", ""]

    def run(self, folder: Path, limit: float) -> dict[str, Any]:
        """Run it, and return its row of the results. Its output is in a file of the folder."""
        row: dict[str, Any] = {"subject": self.subject, "version": self.version}
        log = folder / f"{self.subject} {self.version}.log".replace(" ", "-")
        began = time.monotonic()
        with log.open("w") as errors:
            try:
                done = subprocess.run(  # noqa: S603  (our own program)
                    [self.python(folder, errors), "-m", "crash.core", *self.arguments],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    check=True,
                    timeout=limit,
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "DUALWRITE_TESTING": "1"},
                )
            except subprocess.TimeoutExpired:
                passed = log.read_text(errors="replace").count("passed: ")  # a line for each step
                return {**row, "steps": passed, "result": f"unfinished: the other steps did not fit into {limit:g} s"}
            except subprocess.CalledProcessError:
                last = log.read_text(errors="replace").strip()[-2000:]
                result = "skipped" if any(word in last for word in _SKIPPED) else "failed"
                return {**row, "result": f"{result}: {last.splitlines()[-1][:300] if last else 'no output'}"}
        found = json.loads(done.stdout.splitlines()[-1])
        failed = found.pop("failed")
        result = f"failed: {json.dumps(failed)}" if failed else "passed"
        return {**row, **found, "seconds": round(time.monotonic() - began), "result": result}

    def python(self, folder: Path, errors: Any) -> str:
        """The interpreter, with what the core needs; ours, if it is not about Python."""
        if self.subject != PYTHON or sys.version.startswith(f"{self.version}."):
            return sys.executable
        python = folder / f"python-{self.version}" / "bin" / "python"
        install = ("pip", "install", "--quiet", "--python", python, "--constraints", ROOT / "constraints.txt")
        for command in (
            ("venv", "--quiet", "--clear", "--python", self.version, python.parents[1]),
            (*install, f"{_ENVIRONMENT[0]} @ {ROOT.as_uri()}", *_ENVIRONMENT[1:]),
        ):
            subprocess.run([program("uv"), *command], stdout=errors, stderr=errors, check=True)  # noqa: S603  (as above)
        return str(python)


def result_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The file's content, as `tools/evidence.py` reads it."""
    ran = [row for row in rows if "steps" in row]
    return {
        **of_today("matrix", "python tools/matrix.py"),
        "versions": {},  # each row has its own
        "operations": sum(row["steps"] for row in ran),
        "faults": {"a step at which a process was killed": sum(row["steps"] for row in ran)},
        "anomalies": {"failed": sum(row["result"].startswith("failed") for row in rows)},
        "rows": list(rows),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells, and write the results after each of them; 1 if one has failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--only", nargs="+", metavar="SUBJECT", choices=VERSIONS, default=list(VERSIONS), help=", ".join(VERSIONS)
    )
    parser.add_argument("--version", nargs="+", default=[], help="only these versions")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a version (900)")
    parser.add_argument("--results", type=Path, default=RESULTS / "matrix.json", help="the file of the results")
    parser.add_argument("--folder", type=Path, help="keeps the output of each, and the environments, here")
    chosen = parser.parse_args(arguments)
    found: dict[Cell, dict[str, Any]] = {}
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    every = [Cell(subject, version) for subject, versions in VERSIONS.items() for version in versions]
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder.resolve() if chosen.folder else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for cell in every:
            if cell.subject in chosen.only and (not chosen.version or cell.version in chosen.version):
                row = cell.run(folder, chosen.limit)
                print(json.dumps(row), flush=True)  # noqa: T201  (a script that prints)
                # read once more: another run may have written
                known = json.loads(chosen.results.read_text())["rows"] if chosen.results.exists() else []
                found = {**{Cell(each["subject"], each["version"]): each for each in known}, cell: row}
                rows = [found[each] for each in every if each in found]
                chosen.results.write_text(json.dumps(result_of(rows), indent=1) + "\n", encoding="utf-8")
    return int(any(row["result"].startswith("failed") for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
