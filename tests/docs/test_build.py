"""The documentation builds, with warnings as errors and without a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import diagrams
import pytest

from fixtures.pace import limit
from fixtures.tiers import thinned

ROOT = Path(__file__).parents[2]

_LISTED = re.compile(r"\]\(_sources/(.+)\.txt\)$", re.MULTILINE)

BUILD = "import gc, sys; gc.set_threshold(50_000); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
"""`python -m sphinx`, with fewer collections of garbage, which take a third of its time: it makes many objects that stay."""


@pytest.mark.slow
@pytest.mark.parametrize("builder", thinned(["dummy", "html"], kept=["dummy"]))  # which resolves everything, and writes nothing
def test_the_documentation_builds_without_a_warning(tmp_path: Path, builder: str) -> None:
    command = [sys.executable, "-c", BUILD, "-q", "-W", "--keep-going", "-b", builder, "docs", str(tmp_path / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(240), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if builder == "html":
        assert "F1" in (tmp_path / "html" / "how-it-works" / "rules.html").read_text(encoding="utf-8")
        listed = _LISTED.findall((tmp_path / "html" / "llms.txt").read_text(encoding="utf-8"))
        pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
        assert sorted(listed) == sorted(pages)
        assert all((tmp_path / "html" / "_sources" / f"{page}.txt").is_file() for page in listed)
        text = (tmp_path / "html" / "llms-full.txt").read_text(encoding="utf-8")
        assert "# A pool of writers" in text  # a page as it was written
        assert "class dualwrite.WriterPool(" in text  # made of docstrings


@pytest.mark.soak
def test_no_link_to_another_site_is_broken(tmp_path: Path) -> None:
    """A site that can't be reached from here, as on a machine without the internet, proves nothing."""
    command = [sys.executable, "-c", BUILD, "-q", "-b", "linkcheck", "docs", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(240), check=False)
    links = [json.loads(line) for line in (tmp_path / "output.json").read_text(encoding="utf-8").splitlines()]
    unreachable = ("NameResolutionError", "ConnectTimeout", "NewConnectionError", "ProxyError")
    assert links
    broken = [link for link in links if link["status"] == "broken"]
    assert [link for link in broken if not any(word in link["info"] for word in unreachable)] == []


def test_each_diagram_has_its_drawing_and_no_drawing_is_left_over() -> None:
    assert not diagrams.missing(), "python tools/diagrams.py draws them"
    assert not diagrams.unused(), "python tools/diagrams.py removes them"
