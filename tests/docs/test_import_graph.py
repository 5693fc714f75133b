"""The import graph of the package has no cycle, and the command that draws it would report one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "docs" / "import_graph.py"


def draw(*place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, *place], capture_output=True, text=True, check=False)


def test_the_package_has_no_import_cycle() -> None:
    done = draw()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("no cycle")
    assert done.stdout.lstrip().partition("  ")[2].startswith("__main__\n")


def test_an_import_cycle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "src" / "dualwrite"
    for name, imports in (("one", "import dualwrite.two.b"), ("two", "import dualwrite.one.a")):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
        (package / name / f"{'a' if name == 'one' else 'b'}.py").write_text(imports)
    (package / "__init__.py").touch()
    done = draw(tmp_path)
    assert done.returncode == 1
    assert "and a cycle: " in done.stdout
