"""A Sphinx extension: a `mermaid` block becomes the drawing that `tools/diagrams.py` has made of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from diagrams import FOLDER, key_of


class Drawing(SphinxDirective):
    """The drawing of a Mermaid diagram."""

    has_content: ClassVar[bool] = True

    def run(self) -> list[nodes.Node]:
        """An image; a warning if the diagram has changed since it was drawn."""
        name = f"{key_of(chr(10).join(self.content))}.svg"
        if not (FOLDER / name).exists():
            text = "this diagram is not drawn: run python tools/diagrams.py"
            return [self.state_machine.reporter.warning(text, line=self.lineno)]
        return [
            nodes.image(uri=f"/{FOLDER.name}/{name}", alt="a diagram; its text is in the page's source", classes=["diagram"])
        ]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("mermaid", Drawing)
    return {"parallel_read_safe": True, "version": "1"}
