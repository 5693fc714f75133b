"""The documentation builds, with warnings as errors and without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import diagrams
import pytest

from fixtures.pace import limit
from fixtures.tiers import thinned

ROOT = Path(__file__).parents[2]

BUILD = "import gc, sys; gc.set_threshold(50_000); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
"""`python -m sphinx`, with fewer collections of garbage, which take a third of its time: it makes many objects that stay."""


@pytest.mark.slow
@pytest.mark.parametrize("builder", thinned(["dummy", "html"], kept=["dummy"]))  # which resolves everything, and writes nothing
def test_the_documentation_builds_without_a_warning(tmp_path: Path, builder: str) -> None:
    command = [sys.executable, "-c", BUILD, "-q", "-W", "--keep-going", "-b", builder, "docs", str(tmp_path / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(240), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert builder == "dummy" or "F1" in (tmp_path / "html" / "how-it-works" / "rules.html").read_text(encoding="utf-8")


def test_each_diagram_has_its_drawing_and_no_drawing_is_left_over() -> None:
    assert not diagrams.missing(), "python tools/diagrams.py draws them"
    assert not diagrams.unused(), "python tools/diagrams.py removes them"
